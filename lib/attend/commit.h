// SPDX-License-Identifier: MIT
// What a call leaves when it has succeeded: lengths, windows, statistics. The cache's mutex is held exclusively; cannot
// fail.
#pragma once

#include "lib/attend/call.h"

namespace tandem {

// The sequence's new tokens count, and the oldest leave the window.
void commit_tokens(const Call& call, SequenceCall& of);
// The new tokens are a guess, which Session::commit() ends.
void guess_tokens(const Call& call, const SequenceCall& of);
void count_bytes(const Call& call, const SequenceCall& of);

}  // namespace tandem
