// SPDX-License-Identifier: MIT
// Commits a successful call: lengths, windows, statistics. The cache's mutex is held exclusively. These functions cannot
// fail.
#pragma once

#include "lib/attend/call.h"

namespace tandem {

// Counts the new tokens in the sequence's length and evicts the oldest from the window.
void commit_tokens(const Call& call, SequenceCall& of);
// Records the new tokens as speculative, until Session::commit().
void guess_tokens(const Call& call, const SequenceCall& of);
void count_bytes(const Call& call, const SequenceCall& of);

}  // namespace tandem
