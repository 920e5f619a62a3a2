// SPDX-License-Identifier: MIT
#include "lib/rates/part_times.h"

#include <algorithm>
#include <bit>

namespace tandem {
namespace {

constexpr double kNewest = 0.3;     // weight of the newest gap
constexpr double kMore = 50'000.0;  // ns; a caller may rest, so a gap counts for at most twice the known gap plus this

std::pair<int32_t, int64_t> key_of(int32_t layer_idx, int64_t n_queries) {
  return {layer_idx, static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(std::max<int64_t>(1, n_queries))))};
}

}  // namespace

// Learns the gap before the part: the time from the request of the copies, or from last_free_ if that is later, until the
// part's queries arrive. In this gap the bus can bring keys ahead.
void PartTimes::note_gap(const PartMoments& part) {
  const auto [known, is_first] = ahead_.try_emplace(key_of(part.layer_idx, part.n_queries));
  const double gap = std::max(0.0, part.arrived - (has_last_ ? std::max(part.asked, last_free_) : part.asked));
  known->second = is_first ? gap : known->second + kNewest * (std::min(gap, 2.0 * known->second + kMore) - known->second);
}

PartReading PartTimes::note(const PartMoments& part) {
  if (!part.is_rows) note_gap(part);
  PartReading reading;
  reading.host = part.has_host ? std::max(0.0, part.host_end - part.arrived) : 0.0;
  if (part.has_stream) {
    const double free = std::max(part.asked, last_streamed_);
    const double needs = (part.n_pieces > 1 ? last_arrived_ : before_arrived_) + kFreeNs;
    const double begin = has_streamed_ ? std::max(free, before_arrived_ + kFreeNs) : part.asked;
    reading.is_steady = !has_streamed_ || part.asked >= last_arrived_ || free >= needs;
    reading.bus = std::max(0.0, part.streamed - begin);
    reading.late = std::max(0.0, part.streamed - std::max(begin, part.arrived));
    reading.ahead = reading.bus - reading.late;
    has_streamed_ = true;
    last_streamed_ = part.streamed;
    before_arrived_ = part.n_pieces > 1 ? part.arrived : last_arrived_;
    last_arrived_ = part.arrived;
  }
  reading.total = std::max(reading.host, part.has_stream ? part.streamed - part.arrived : 0.0);
  has_last_ = true;
  last_free_ = std::max({part.arrived, part.arrived + reading.host - kStreamEndNs, part.has_stream ? part.streamed : 0.0});
  return reading;
}

double PartTimes::ahead_ns(int32_t layer_idx, int64_t n_queries) const {
  const auto known = ahead_.find(key_of(layer_idx, n_queries));
  return known != ahead_.end() ? known->second : 0.0;
}

}  // namespace tandem
