// SPDX-License-Identifier: MIT
// The value of ExchangeFlags::answered after the host has lost a ticket, for example for lack of memory: kLostTickets plus
// the first lost ticket. This ticket and all later ones get no answers, and the device does not wait for any. The host rolls
// them back (lib/device/hand_over.h). Their outputs are NaN where the host had a part, and their weights do not count.
#pragma once

#include <cstdint>

namespace tandem {

inline constexpr uint64_t kLostTickets = uint64_t{1} << 62;  // more than the number of tickets that are ever answered

}  // namespace tandem
