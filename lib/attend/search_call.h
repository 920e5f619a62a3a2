// SPDX-License-Identifier: MIT
// Calls on device tensors in layers whose selector names keys. A search on the device finds the keys (lib/tables/search.h),
// and attend() gets them as key lists. The window has all keys of the sequences.
//
// A decode call searches with the sequences' own lists, which stay in the window. An append is cut into query blocks that
// share a list, and these into the parts that a kernel with key lists attends. All are described after the sequences. A part
// is a whole block if the device has a kernel for so many query rows:
//
//   descriptors   sequences | query blocks, for search() | parts of query blocks, for attend() | page tables
//   work space    key lists | granules | lists of blocks that no sequence keeps | work space of search()
#pragma once

#include "lib/attend/call.h"

namespace tandem {

// UNSUPPORTED: a group too large for searches. For a call also: speculation, and an append whose stages have blocks of
// different lengths.
Status check_searched(const SessionLayer& layer);
Status check_search(const Call& call);
// CAPACITY (window_tokens): the window cannot hold `length` tokens, as it must. may_bring: under head patterns, keys outside
// the window may be brought to the device for an append (lib/attend/whole_layer.h), or be left to the CPU in a decode call.
Status check_resident(const SessionCore& core, const SessionLayer& layer, int64_t length, bool may_bring);
// Returns whether the device searches for the keys of a chunk. It does not if every query attends all keys anyway, unless no
// other kernel takes so many queries. Planned steps always search, as sequences grow while a graph is replayed.
bool searches(const Call& chunk);
// The query blocks of a chunk of an append, and their parts.
struct SearchBlocks {
  int64_t block_len = 0, part_len = 0;  // queries
  int64_t n_blocks = 0, n_parts = 0;
};
SearchBlocks blocks_of(const Call& chunk);
// Returns the number of descriptors of the chunk's blocks and parts; 0 if it has none.
int64_t n_described(const Call& chunk);
// For a decode call: sets where the sequences' lists are. For an append: describes its blocks and their parts, after the
// sequences and n_between other descriptors.
void describe_search(Call& chunk, const DeviceSequences& on_device, DeviceSequence* sequences, int64_t n_between = 0);
// Makes the missing bounds of the sequences' keys. The rows of the call are in the window by then. A planned step calls this
// before its layers are attended; their searches then make the bounds of newer chunks.
Status bound_chunks(const Call& call, const DeviceSequences& sequences);
// Finds the keys of queries q and points call.lists to them.
Status search_keys(Call& call, const DeviceSequences& sequences, const DeviceRows& q, const DeviceAppend& append);
void commit_search(const Call& chunk, const SequenceCall& of);

}  // namespace tandem
