// SPDX-License-Identifier: MIT
// Times of one pattern by length, and the time between two of them.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace tools {

struct ProfilePoint {
  int64_t kv_len;
  double ns;
};

// The points are ordered by kv_len, each of which is there once. Between two points the time is linear in kv_len. Nothing
// where kv_len lies outside the points: the time of a longer or a shorter sequence is not guessed.
std::optional<double> time_at(const std::vector<ProfilePoint>& points, int64_t kv_len);

}  // namespace tools
