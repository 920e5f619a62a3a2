// SPDX-License-Identifier: MIT
// A chunk of a call on device tensors, as host and device count it (protocol: lib/tables/device.h).
#pragma once

#include <cstdint>

#include "lib/tables/device.h"

namespace tandem {

inline constexpr int64_t kMostTicketTokens = 512;  // longer appends are cut into chunks
inline constexpr int64_t kMostStepTokens = 1024;   // a planned step is never cut
inline constexpr int64_t kLeastTasks = 64;         // fewest tasks that a session has room for

// The shape that a call was launched for, as its slot's header says. A graph captured for a smaller shape than the step's
// cannot serve it.
struct TicketShape {
  static constexpr int32_t kMostLayers = 2048;
  int32_t layer_idx = 0;  // below kMostLayers
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
