// SPDX-License-Identifier: MIT
// Calls on device tensors in layers whose selector names keys: a search on the device finds them (lib/tables/search.h), and
// attend() gets them as key lists. The window has all keys of the sequences.
//
// A decode call searches by the sequences' own lists, which stay in the window. An append is cut into query blocks, which
// share a list, and these into the parts that a kernel with key lists attends; all are described behind the sequences:
//
//   descriptors   sequences | query blocks, for search() | parts of query blocks, for attend() | page tables
//   work space    key lists | granules | lists of blocks that no sequence keeps | what search() asks for
#pragma once

#include "lib/attend/call.h"

namespace tandem {

// UNSUPPORTED: a guess, records or a group that no search takes.
Status check_search(const Call& call);
// CAPACITY (window_tokens): the window cannot have all of so many tokens.
Status check_resident(const SessionCore& core, const SessionLayer& layer, int64_t length);
// Query blocks and their parts in a chunk of an append, and how many there are at most in one of n_rows rows.
struct SearchBlocks {
  int64_t block_len = 0, part_len = 0;  // queries
  int64_t n_blocks = 0, n_parts = 0;
};
SearchBlocks blocks_of(const PruningRecord& record, const Layer& layer, std::span<const SequenceCall> calls);
// Tells the sequences of a decode call where their lists are; describes the blocks of an append and their parts behind them.
void describe_search(Call& chunk, const DeviceSequences& on_device, DeviceSequence* sequences);
// Bounds that keys lack and the search may ask for, of a call whose rows are in the window. Of a planned step this comes
// before its layers' calls, which make those of newer chunks themselves.
Status bound_chunks(const Call& call, const DeviceSequences& sequences);
// Finds the keys and points call.lists at them.
Status search_keys(Call& call, const DeviceSequences& sequences, const DeviceAppend& append);
void commit_search(const Call& chunk, const SequenceCall& of);

}  // namespace tandem
