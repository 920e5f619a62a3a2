// SPDX-License-Identifier: MIT
// Derives two times from the moments of a part, which is a chunk's work on its keys outside the window: how long CPU and bus
// took, and how long the bus has for the next part before its queries arrive. Callers pass the moments, in the order of the
// calls. This code reads no clock.
//
//   caller's stream   ... layer l | work between layers | layer l + 1: queries, window ...
//   CPU                   part |                                    part |
//   bus                    pieces | pieces of l + 1, as far as there are buffers ... |
//                                 |<--- ahead, at most ---->|<- late ->|
//
// Copies are requested with the call, long before the device gets there. They begin once a buffer is free and the bus has
// finished earlier copies. A buffer that holds pieces of the previous part is free once that part's queries have come.
#pragma once

#include <cstdint>
#include <map>
#include <utility>

namespace tandem {

// Time from the arrival of the last key on the device until this key has been attended and the states are merged.
inline constexpr double kStreamEndNs = 60'000.0;
// Time from the arrival of the queries until the first buffer is free, whose piece was attended with these queries.
inline constexpr double kFreeNs = 40'000.0;

// All times in ns of one clock.
struct PartMoments {
  int32_t layer_idx = 0;
  int64_t n_queries = 0;  // maximum over the sequences
  double asked = 0.0;     // the call was about to request copies
  double arrived = 0.0;   // the queries arrived
  bool has_host = false, has_stream = false;
  bool is_rows = false;   // rows of a long append came without queries: the part does not show how long the bus has
  int64_t n_pieces = 0;   // pieces that cross the bus
  double host_end = 0.0;  // the CPU's states were ready
  double streamed = 0.0;  // the last key was on the device
};

// All in ns.
struct PartReading {
  double host = 0.0, total = 0.0;  // since the queries arrived: of the CPU, of CPU and bus
  double bus = 0.0;                // since request, end of the previous part and a free buffer, the latest counts
  double ahead = 0.0, late = 0.0;  // shares of `bus` before and after the queries arrived
  bool is_steady = false;          // the bus did not wait for buffers; else `bus` is an upper bound
};

class PartTimes {
 public:
  // Throws bad_alloc and then has recorded nothing.
  PartReading note(const PartMoments& part);
  // Returns the gap that earlier calls of this layer and about this number of queries predict; 0 if there were none.
  double ahead_ns(int32_t layer_idx, int64_t n_queries) const;

 private:
  void note_gap(const PartMoments& part);

  std::map<std::pair<int32_t, int64_t>, double> ahead_;  // by layer and power of two of queries
  bool has_last_ = false;
  double last_free_ = 0.0;     // latest time at which the bus could end without lengthening the last part
  bool has_streamed_ = false;  // true: the members below describe the last part that streamed
  double last_streamed_ = 0.0;
  double last_arrived_ = 0.0, before_arrived_ = 0.0;  // when queries arrived: of the last piece, of the one before
};

}  // namespace tandem
