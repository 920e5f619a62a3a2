// SPDX-License-Identifier: MIT
// Interpolates the times of one pattern by length.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace tools {

struct ProfilePoint {
  int64_t kv_len;
  double ns;
};

// `points` is ordered by kv_len, and each kv_len occurs once. Between two points the time is linear in kv_len. Returns
// nothing if kv_len lies outside the points: times of longer or shorter sequences are not extrapolated.
std::optional<double> time_at(const std::vector<ProfilePoint>& points, int64_t kv_len);

}  // namespace tools
