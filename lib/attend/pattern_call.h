// SPDX-License-Identifier: MIT
// Calls on device tensors in layers that follow head patterns. In appends all keys of the sequences are on the device, in
// the window or brought there (lib/attend/whole_layer.h). In decode calls the CPU attends the keys outside the window. If
// every head attends all keys, or sinks and a window, the host makes the key lists (lib/tables/key_list.h): granules for the
// sinks and a range for the window. If some head chooses its keys, the device makes the lists of all heads
// (lib/tables/pattern_lists.h): it chooses for all heads at once, and writes the lists of each launch before the launch.
//
// An append is cut into blocks of queries, and these into parts that a kernel with key lists attends. Query heads of a group
// may attend different keys, but a kernel takes one list for each KV head. In that case the g-th query heads of all groups
// have a launch of their own, in which each KV head has one query head:
//
//   descriptors   sequences | parts of query blocks | key lists [launches][parts][n_kv_heads] | granules | page tables
//
//   or, where the device makes them:
//   descriptors   sequences | parts of query blocks | head patterns | page tables
//   work space    key lists [parts][n_kv_heads] of a launch | their granules | choices | what index_patterns() asks for
//
// A decode call attends as under policy "all". It has a list for each KV head if some KV head has a pattern in decode calls.
#pragma once

#include "lib/attend/call.h"
#include "lib/attend/session_states.h"

namespace tandem {

// UNSUPPORTED: patterns that only the CPU follows, learned sinks, groups with too many heads.
Status check_patterns(const SessionCore& core, const SessionLayer& layer);
inline bool follows_patterns(const Call& chunk) { return chunk.facts.policy.follows_patterns; }
// Returns whether the device makes the key lists of the chunk, which is then a chunk of an append.
bool makes_lists(const Call& chunk);
// A part: some queries of one pattern block (kPatternBlock) in one sequence, as many as a kernel with key lists takes.
// Returns the number of parts of an append's chunk; 0 in a decode call.
int64_t n_pattern_parts(const Call& chunk);
// Describes the parts, after the sequences and n_between other descriptors.
void describe_parts(Call& chunk, const DeviceSequences& on_device, DeviceSequence* sequences, int64_t n_between = 0);

// Key list entries and granules have the same size.
static_assert(sizeof(DeviceKeys) == sizeof(KeyGranule));
// pattern_lists_at() returns where the chunk's lists are. describe_pattern_lists() writes them: key lists and granules, or
// the head patterns from which the device makes lists. n_sequences: in a decode call, how many there is room for. Returns
// the number of entries written.
DeviceLists pattern_lists_at(const Call& chunk, const std::byte* place, int64_t n_sequences);
int64_t describe_pattern_lists(const Call& chunk, DeviceKeys* to, int64_t n_sequences);

// Attends the window, in all launches of an append.
Status attend_patterns(const Call& chunk, const DeviceAttend& window);
void commit_patterns(const Call& chunk, const SequenceCall& of);
// Lists the keys of the last query that a device has attended, as after a call on host tensors.
void list_pattern_keys(const SessionCore& core, const HeadOfSequence& head, const LayerState& state, KeptKeys* kept);

}  // namespace tandem
