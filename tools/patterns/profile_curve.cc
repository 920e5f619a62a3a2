// SPDX-License-Identifier: MIT
#include "tools/patterns/profile_curve.h"

#include <algorithm>

namespace tools {

std::optional<double> time_at(const std::vector<ProfilePoint>& points, int64_t kv_len) {
  const auto is_shorter = [](const ProfilePoint& point, int64_t len) { return point.kv_len < len; };
  const auto above = std::lower_bound(points.begin(), points.end(), kv_len, is_shorter);
  if (above == points.end()) return std::nullopt;
  if (above->kv_len == kv_len) return above->ns;
  if (above == points.begin()) return std::nullopt;
  const ProfilePoint& below = *(above - 1);
  const double share = static_cast<double>(kv_len - below.kv_len) / static_cast<double>(above->kv_len - below.kv_len);
  return below.ns + share * (above->ns - below.ns);
}

}  // namespace tools
