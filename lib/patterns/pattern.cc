// SPDX-License-Identifier: MIT
#include "lib/patterns/pattern.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <numeric>

namespace tandem {

uint32_t known_pattern_kinds() {
  uint32_t kinds = 0;
  for (const Pattern* pattern : pattern_table()) kinds |= pattern->kind;
  return kinds;
}

void BlockKeys::clear(int64_t begin) {
  newest_begin_ = begin;
  named_.assign(static_cast<size_t>((pattern_units(begin) + 63) / 64), 0);
}

void BlockKeys::add(int64_t begin, int64_t end) {
  begin = std::max<int64_t>(begin, 0) / kPatternUnit;
  end = std::min(pattern_units(end), std::ssize(named_) * 64);
  for (int64_t unit = begin; unit < end;) {
    const int64_t n = std::min(end - unit, 64 - unit % 64);
    const uint64_t bits = n == 64 ? ~uint64_t{0} : (uint64_t{1} << n) - 1;
    named_[static_cast<size_t>(unit / 64)] |= bits << unit % 64;
    unit += n;
  }
}

void BlockKeys::add_newest(int64_t begin) { newest_begin_ = std::clamp<int64_t>(begin, 0, newest_begin_); }

void BlockKeys::append_units(std::vector<int32_t>* units) const {
  const int64_t end = pattern_units(newest_begin_);
  for (int64_t word = 0; word * 64 < end; ++word)
    for (uint64_t left = named_[static_cast<size_t>(word)]; left != 0; left &= left - 1) {
      const int64_t unit = word * 64 + std::countr_zero(left);
      if (unit < end) units->push_back(static_cast<int32_t>(unit));
    }
}

std::vector<int32_t> find_largest(std::span<const float> scores, int64_t n) {
  std::vector<int32_t> places(scores.size());
  std::iota(places.begin(), places.end(), 0);
  const auto score = [&](int32_t i) {
    const float x = scores[static_cast<size_t>(i)];
    return std::isnan(x) ? -INFINITY : x;
  };
  const auto is_before = [&](int32_t a, int32_t b) { return score(a) > score(b) || (score(a) == score(b) && a < b); };
  if (n < std::ssize(places)) {
    std::nth_element(places.begin(), places.begin() + static_cast<std::ptrdiff_t>(n), places.end(), is_before);
    places.resize(static_cast<size_t>(n));
  }
  std::sort(places.begin(), places.end());
  return places;
}

}  // namespace tandem
