// SPDX-License-Identifier: MIT
// Speculation on device tensors. What is a guess stays out of windows: its rows go to the host alone, beyond the sequence's
// length, and the host attends to them, as its kernels know trees. The device attends to what is committed:
//
//   tokens    0 ... | window ... first_query | the guess ...
//             host  | device                 | host
//
// There every query sees its keys to the end, whatever the tree, and with a window of its own begins at its own: each is
// described as a sequence of one query. What is kept at the end is committed in the store, as for host tensors, and comes
// into the window with the next call. Where attention weights are kept, queries and lse stay with the selector, which counts
// the weights of those that are kept.
#pragma once

#include "lib/attend/call.h"

namespace tandem {

// INVALID_STATE (flags), UNSUPPORTED (q_lens).
Status check_guess(const Call& call);
void leave_guess_to_host(SequenceCall* of);
// Of a call whose queries are described: the sequences' own descriptors get no resident keys, and positions come behind
// `bytes` bytes. Returns how many bytes there are then.
int64_t describe_guess(Call& chunk, std::byte* upload, int64_t bytes);

}  // namespace tandem
