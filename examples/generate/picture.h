// SPDX-License-Identifier: MIT
// The pictures of tandem-demo, as PNG files. Without Cairo there are none, and have_pictures() returns false.
#ifndef EXAMPLES_GENERATE_PICTURE_H_
#define EXAMPLES_GENERATE_PICTURE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "failure.h"

namespace generate {

bool have_pictures();

// The keys that each KV head kept: x is the position, with one band per layer and KV head.
struct KeptPicture {
  struct Band {
    int64_t layer_idx, kv_head_idx;
    std::vector<int64_t> kept;  // token indices, ascending, sinks and window included
  };
  struct Mark {
    std::string name;
    int64_t first, n_tokens;
    bool asked;  // the fact that the question asked for
  };
  std::string subtitle;
  int64_t n_tokens, sink_tokens, window_tokens;
  std::vector<Mark> marks;
  std::vector<Band> bands;
};
Failure draw_kept(const KeptPicture& picture, const std::string& path);

// Bits per byte over KV bytes read, one line per window.
struct CurvePicture {
  struct Point {
    double window_percent, beta, share, bits_per_byte;
  };
  std::string subtitle;
  double dense_bits_per_byte;
  std::vector<Point> points;  // grouped by window
};
Failure draw_curve(const CurvePicture& picture, const std::string& path);

}  // namespace generate

#endif  // EXAMPLES_GENERATE_PICTURE_H_
