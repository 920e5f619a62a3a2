// SPDX-License-Identifier: MIT
// What ExchangeFlags::answered says when the host has lost a ticket, for lack of memory say: kLostTickets and the first of
// them. That one and all behind it get no answers, and nobody waits for any: they are taken back (lib/device/hand_over.h).
// Their outputs are NaN where the host had a part, and their weights do not count.
#pragma once

#include <cstdint>

namespace tandem {

inline constexpr uint64_t kLostTickets = uint64_t{1} << 62;  // more than are ever answered

}  // namespace tandem
