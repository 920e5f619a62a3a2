// SPDX-License-Identifier: MIT
// Replaces the pictures in builds without Cairo.
#include "picture.h"

namespace generate {

bool have_pictures() { return false; }
Failure draw_kept(const KeptPicture&, const std::string& path) { return {path + ": this build has no Cairo to draw with"}; }
Failure draw_curve(const CurvePicture&, const std::string& path) {
  return {path + ": this build has no Cairo to draw with"};
}

}  // namespace generate
