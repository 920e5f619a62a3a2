// SPDX-License-Identifier: MIT
// The keys that searches on the device have found (lib/attend/search_call.h), as the host tells them. Lists that a sequence
// keeps stay in its window's memory: the host copies them when someone asks. Lists of appends give way to those of the next
// call, and nobody can ask for them.
#pragma once

#include "lib/attend/session_core.h"
#include "lib/call/call_args.h"
#include "lib/call/sequence_state.h"

namespace tandem {

int64_t most_searched(const PolicyOptions& options);  // tokens of a sequence whose keys a device finds
// Readers of kept lists wait for all work that `stream` has been asked for so far.
Status follow_searches(SessionCore& core, void* stream);
// Tokens of the lists that the last stage has kept, over layers and KV heads. Waits for the searches. 0 where the device
// does not give them any more.
int64_t count_searched_keys(const SessionCore& core, const SequenceState& state);
// The keys that the sequence's last query attended; it was attended on the device. Waits for its search. UNSUPPORTED
// (sequence): they are not there any more.
Status list_searched_keys(const SessionCore& core, const HeadOfSequence& head, const SequenceState& state, KeptKeys* kept);

// What key lists of head patterns have named, of all appends so far whose lists the device has made: pairs of a query and a
// key, and keys, before the lists' ranges.
struct ListedPairs {
  int64_t n = 0, n_keys = 0;
};
uint64_t* pair_totals(const SessionCore& core, size_t layer_idx);  // null where the host makes all lists
// [n_layers] Waits for the device. 0 where the device does not tell any more.
std::vector<ListedPairs> read_listed_pairs(const SessionCore& core);

}  // namespace tandem
