// SPDX-License-Identifier: MIT
// "Did you mean": finds the name closest to a mistyped one. Uses only the standard library, as all programs include it.
#ifndef EXAMPLES_GENERATE_NEAREST_NAME_H_
#define EXAMPLES_GENERATE_NEAREST_NAME_H_

#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

namespace generate {

// Returns the least number of letters to add, remove, replace or swap with a neighbour to turn `from` into `to`.
inline size_t edit_distance(std::string_view from, std::string_view to) {
  std::vector<size_t> before(to.size() + 1), row(to.size() + 1), next(to.size() + 1);
  for (size_t j = 0; j <= to.size(); ++j) row[j] = j;
  for (size_t i = 1; i <= from.size(); ++i) {
    next[0] = i;
    for (size_t j = 1; j <= to.size(); ++j) {
      next[j] = std::min({row[j] + 1, next[j - 1] + 1, row[j - 1] + (from[i - 1] != to[j - 1])});
      if (i > 1 && j > 1 && from[i - 1] == to[j - 2] && from[i - 2] == to[j - 1])
        next[j] = std::min(next[j], before[j - 2] + 1);
    }
    before.swap(row);
    row.swap(next);
  }
  return row[to.size()];
}

// Returns the nearest name. Empty if more than a third of the letters differ and neither name begins with the other.
inline std::string nearest_name(std::string_view given, const std::vector<std::string>& names) {
  constexpr size_t kLongest = 64;                              // a longer word is no typing error
  const size_t n_shared = given.substr(0, 2) == "--" ? 4 : 2;  // shared letters that count as a common beginning
  std::string nearest;
  size_t least = kLongest;
  for (const std::string& name : names) {
    if (given.size() > kLongest) break;
    size_t distance = edit_distance(given, name);
    const size_t shorter = std::min(given.size(), name.size());
    const bool begins = shorter >= n_shared && given.substr(0, shorter) == std::string_view(name).substr(0, shorter);
    if (begins) distance = 1;
    if (distance > std::max<size_t>(1, std::max(given.size(), name.size()) / 3) || distance >= least) continue;
    least = distance;
    nearest = name;
  }
  return nearest;
}

// Returns " (did you mean --kv-len?)", or "" if no name is near.
inline std::string did_you_mean(std::string_view given, const std::vector<std::string>& names) {
  const std::string name = nearest_name(given, names);
  return name.empty() ? "" : " (did you mean " + name + "?)";
}

}  // namespace generate

#endif  // EXAMPLES_GENERATE_NEAREST_NAME_H_
