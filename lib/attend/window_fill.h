// SPDX-License-Identifier: MIT
// What a window should have and has not, after appends on the host, forks, truncations: rows from the store, and the moving
// averages of attention weights (MAW) of tokens that the device has not counted yet.
#pragma once

#include "lib/attend/call.h"

namespace tandem {

// Rows of one sequence before the chunk's own. rows_end: tokens from there on lie elsewhere than in the window's ring, as
// those of long appends do. The cache's mutex is held, at least shared.
Status fill_window(const Call& chunk, const SequenceCall& of, int64_t rows_end);
// Queries of tokens that are there already, in several parts: to the keys behind a part its queries give nothing, but older
// weights fade with them.
void fade_newer(const Call& chunk, const SequenceCall& of);

}  // namespace tandem
