// SPDX-License-Identifier: MIT
// A chunk of a call on device tensors, as host and device count it (lib/tables/device.h has the protocol).
#pragma once

#include <cstdint>

#include "lib/tables/device.h"

namespace tandem {

inline constexpr int64_t kMostTicketTokens = 512;  // longer appends are cut
inline constexpr int64_t kMostStepTokens = 1024;   // of a planned step, which is never cut
inline constexpr int64_t kLeastTasks = 64;         // that a session has room for at a time

// What a call was made for, as its slot's header says: a graph that was captured for less than a step has is of no use.
struct TicketShape {
  static constexpr int32_t kMostLayers = 2048;
  int32_t layer_idx = 0;  // below that
  int32_t n_sequences = 0;
  int32_t n_tokens = 0, max_q_len = 0;  // below 2,048 and 1,024

  int32_t tag() const {
    return static_cast<int32_t>(static_cast<uint32_t>(layer_idx | max_q_len << 11) | static_cast<uint32_t>(n_tokens) << 21);
  }
  bool is_served_by(const SlotHeader& header) const {
    const auto tag = static_cast<uint32_t>(header.tag);
    return static_cast<int32_t>(tag & 0x7ff) == layer_idx && static_cast<int32_t>(tag >> 11 & 0x3ff) >= max_q_len &&
           static_cast<int32_t>(tag >> 21) >= n_tokens && header.n_sequences >= n_sequences;
  }
};

inline constexpr int64_t tickets_of(int64_t n_tokens) { return (n_tokens + kMostTicketTokens - 1) / kMostTicketTokens; }

}  // namespace tandem
