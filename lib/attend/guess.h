// SPDX-License-Identifier: MIT
// Speculation on device tensors. Speculative tokens are not in windows: their rows only go to the host, after the sequence's
// length. The host attends them, as its kernels know trees. The device attends the committed tokens:
//
//   tokens    0 ... | window ... first_query | speculative ...
//             host  | device                 | host
//
// On the device every query sees its keys up to first_query, whatever the tree, and a query with a window of its own begins
// at that window. So each query is described as a sequence of one query. The kept tokens are committed in the store, as for
// host tensors, and enter the window with the next call. Where attention weights are kept, the selector keeps queries and
// lse, and counts the weights of the kept queries.
#pragma once

#include "lib/attend/call.h"

namespace tandem {

// INVALID_STATE (flags), UNSUPPORTED (q_lens).
Status check_guess(const Call& call);
void leave_guess_to_host(SequenceCall* of);
// For a call with described queries: gives the sequences' own descriptors no resident keys and writes positions after
// `bytes` bytes. Returns the number of bytes then.
int64_t describe_guess(Call& chunk, std::byte* upload, int64_t bytes);

}  // namespace tandem
