// SPDX-License-Identifier: MIT
// The keys that searches on the device have found (lib/attend/search_call.h), as the host reports them. Lists that a
// sequence keeps stay in its window's memory; the host copies them on request. The next call overwrites the lists of an
// append, so these cannot be reported.
#pragma once

#include "lib/attend/session_core.h"
#include "lib/call/call_args.h"
#include "lib/call/sequence_state.h"

namespace tandem {

int64_t most_searched(const PolicyOptions& options);  // most tokens of a sequence that a device searches
// Makes later readers of kept lists wait for all work launched on `stream` so far.
Status follow_searches(SessionCore& core, void* stream);
// Returns the tokens in the lists that the last stage has kept, over layers and KV heads. Waits for the searches. Returns 0
// if the lists cannot be read.
int64_t count_searched_keys(const SessionCore& core, const SequenceState& state);
// Lists the keys of the sequence's last query, which was attended on the device. Waits for its search. UNSUPPORTED
// (sequence): the lists no longer exist.
Status list_searched_keys(const SessionCore& core, const HeadOfSequence& head, const SequenceState& state, KeptKeys* kept);

// Totals over key lists of head patterns, in all appends so far whose lists the device has made. Both count only keys before
// the lists' ranges. n: pairs of a query and a key. n_keys: keys.
struct ListedPairs {
  int64_t n = 0, n_keys = 0;
};
uint64_t* pair_totals(const SessionCore& core, size_t layer_idx);  // null where the host makes all lists
// Returns the totals, [n_layers]. Waits for the device. All are 0 if they cannot be read.
std::vector<ListedPairs> read_listed_pairs(const SessionCore& core);

}  // namespace tandem
