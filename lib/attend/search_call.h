// SPDX-License-Identifier: MIT
// Calls on device tensors in layers whose selector names keys: a search on the device finds them (lib/tables/search.h), and
// attend() gets them as key lists. The window has all keys of the sequences.
//
// A decode call searches by the sequences' own lists, which stay in the window. An append is cut into query blocks, which
// share a list, and these into the parts that a kernel with key lists attends; all are described behind the sequences. A
// part is a whole block where the device has a kernel for so many query rows:
//
//   descriptors   sequences | query blocks, for search() | parts of query blocks, for attend() | page tables
//   work space    key lists | granules | lists of blocks that no sequence keeps | what search() asks for
#pragma once

#include "lib/attend/call.h"

namespace tandem {

// UNSUPPORTED: a group that no search takes; in a call also a guess, and an append whose stages have blocks of several
// lengths.
Status check_searched(const SessionLayer& layer);
Status check_search(const Call& call);
// CAPACITY (window_tokens): the window cannot have all of so many tokens, as it has to. may_bring: what the window lacks may
// come to the device for an append (lib/attend/whole_layer.h), or be the CPU's in a decode call, under head patterns.
Status check_resident(const SessionCore& core, const SessionLayer& layer, int64_t length, bool may_bring);
// Whether the device searches for the keys of a chunk. It does not where every query attends all keys anyway, unless no
// other kernel takes so many queries. Planned steps always search, as sequences grow while a graph is replayed.
bool searches(const Call& chunk);
// The query blocks of a chunk of an append, and their parts.
struct SearchBlocks {
  int64_t block_len = 0, part_len = 0;  // queries
  int64_t n_blocks = 0, n_parts = 0;
};
SearchBlocks blocks_of(const Call& chunk);
// How many descriptors a chunk has for its blocks and parts; 0 where it has none of its own.
int64_t n_described(const Call& chunk);
// Tells the sequences of a decode call where their lists are; describes the blocks of an append and their parts behind them
// and n_between other descriptors.
void describe_search(Call& chunk, const DeviceSequences& on_device, DeviceSequence* sequences, int64_t n_between = 0);
// Makes the bounds that the sequences' keys lack. The rows of the call are in the window by then. A planned step calls this
// before its layers are attended; their searches then bound newer chunks themselves.
Status bound_chunks(const Call& call, const DeviceSequences& sequences);
// Finds the keys of queries q and points call.lists at them.
Status search_keys(Call& call, const DeviceSequences& sequences, const DeviceRows& q, const DeviceAppend& append);
void commit_search(const Call& chunk, const SequenceCall& of);

}  // namespace tandem
