// SPDX-License-Identifier: MIT
// Fills windows after appends on the host, forks and truncations: rows from the store, and the moving averages of attention
// weights (MAW) of tokens that the device has not counted yet.
#pragma once

#include "lib/attend/call.h"

namespace tandem {

// Copies missing rows of a sequence into its window, up to the chunk's own rows. Tokens from rows_end on are not in the
// ring: a long append keeps them in its work space. The cache's mutex is held, at least shared.
Status fill_window(const Call& chunk, const SequenceCall& of, int64_t rows_end);
// Fades the MAW of the keys newer than this chunk by (1 - alpha)^q_len, as if the chunk's queries had given these keys no
// weight. Needed if a call queries old tokens in several chunks.
void fade_newer(const Call& chunk, const SequenceCall& of);

}  // namespace tandem
