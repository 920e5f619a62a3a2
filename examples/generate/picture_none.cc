// SPDX-License-Identifier: MIT
// Stands in where there is no Cairo.
#include "picture.h"

namespace generate {

bool have_pictures() { return false; }
Failure draw_kept(const KeptPicture&, const std::string& path) { return {path + ": this build has no Cairo to draw with"}; }
Failure draw_curve(const CurvePicture&, const std::string& path) {
  return {path + ": this build has no Cairo to draw with"};
}

}  // namespace generate
