// SPDX-License-Identifier: MIT
// What the times of a part outside the window say, and how long the bus has for the next one before its queries come: from
// moments that somebody else has seen, in the order of the calls. It looks at no clock.
//
//   caller's stream   ... layer l | what lies between | layer l + 1: queries, window ...
//   CPU                   part |                                    part |
//   bus                    pieces | pieces of l + 1, as far as there are buffers ... |
//                                 |<--- ahead, at most ---->|<- late ->|
//
// Copies are asked for with the call, long before the device gets there, and begin when there is a buffer and the bus has
// brought what was asked for before. A buffer that pieces of the part before have is free when its queries have come.
#pragma once

#include <cstdint>
#include <map>
#include <utility>

namespace tandem {

// From the last key being on the device to its being attended and the states being one.
inline constexpr double kStreamEndNs = 60'000.0;
// From queries being there to the first buffer being free that a piece attended with them was in.
inline constexpr double kFreeNs = 40'000.0;

// In ns of one clock.
struct PartMoments {
  int32_t layer_idx = 0;
  int64_t n_queries = 0;  // the most of a sequence
  double asked = 0.0;     // the call was about to ask for copies
  double arrived = 0.0;   // the queries were there
  bool has_host = false, has_stream = false;
  bool is_rows = false;   // rows of a long append came, and no queries: how long the bus has is not to be learned from that
  int64_t n_pieces = 0;   // that cross the bus
  double host_end = 0.0;  // the CPU's states were there
  double streamed = 0.0;  // the last key was on the device
};

// All in ns.
struct PartReading {
  double host = 0.0, total = 0.0;  // from the queries' coming: the CPU, both
  double bus = 0.0;                // from the asking, the end of the part before, or a buffer being free
  double ahead = 0.0, late = 0.0;  // of that, before the queries came and behind
  bool is_steady = false;          // the bus did not wait for buffers: else that is the most that it took
};

class PartTimes {
 public:
  // Throws bad_alloc, and has then read nothing.
  PartReading note(const PartMoments& part);
  // How long the bus would have, as the last such calls went. 0: there were none.
  double ahead_ns(int32_t layer_idx, int64_t n_queries) const;

 private:
  void note_gap(const PartMoments& part);

  std::map<std::pair<int32_t, int64_t>, double> ahead_;  // by layer and power of two of queries
  bool has_last_ = false;
  double last_free_ = 0.0;     // the bus, if the part had ended as it did and its stream as late as that allows
  bool has_streamed_ = false;  // what follows is of the last part that did
  double last_streamed_ = 0.0;
  double last_arrived_ = 0.0, before_arrived_ = 0.0;  // the queries of the last piece, and of the one before
};

}  // namespace tandem
