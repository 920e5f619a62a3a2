// SPDX-License-Identifier: MIT
// Calls on device tensors in layers that follow head patterns. In appends all keys of the sequences are on the device, in the
// window or brought there (lib/attend/whole_layer.h); in decode calls the CPU attends those outside the window. Where every
// head attends all keys, or sinks and a window, the host makes the key lists (lib/tables/key_list.h): granules for the sinks, and
// a range for the window. Where some head chooses its keys, the device makes the lists of all heads
// (lib/tables/pattern_lists.h): it chooses for all heads at once, and writes the lists of a launch before this launch.
//
// An append is cut into blocks of queries, and these into parts that a kernel with key lists attends. Query heads of a group
// may attend different keys, and a kernel has one list for a KV head. Where any do, the g-th query heads of all groups have
// a launch of their own, in which each KV head has one query head:
//
//   descriptors   sequences | parts of query blocks | key lists [launches][parts][n_kv_heads] | granules | page tables
//
//   or, where the device makes them:
//   descriptors   sequences | parts of query blocks | head patterns | page tables
//   work space    key lists [parts][n_kv_heads] of a launch | their granules | choices | what index_patterns() asks for
//
// A decode call attends as policy "all" does, with a list for each KV head, where one has a pattern in decode calls.
#pragma once

#include "lib/attend/call.h"
#include "lib/attend/session_states.h"

namespace tandem {

// UNSUPPORTED: patterns that the CPU alone follows, learned sinks, groups of too many heads.
Status check_patterns(const SessionCore& core, const SessionLayer& layer);
inline bool follows_patterns(const Call& chunk) { return chunk.facts.policy.follows_patterns; }
// Whether the device makes the key lists of the chunk, which is of an append then.
bool makes_lists(const Call& chunk);
// How many parts a chunk of an append has; 0 in a decode call.
int64_t n_pattern_parts(const Call& chunk);
// Describes the parts behind the sequences and n_between other descriptors.
void describe_parts(Call& chunk, const DeviceSequences& on_device, DeviceSequence* sequences, int64_t n_between = 0);

// Entries of key lists and granules, which have one size.
static_assert(sizeof(DeviceKeys) == sizeof(KeyGranule));
// Where the chunk's lists are, and what is written there: key lists and granules, or head patterns that the device makes
// lists of. n_sequences: of a decode call, as many as there is room for. Returns how many entries have been written.
DeviceLists pattern_lists_at(const Call& chunk, const std::byte* place, int64_t n_sequences);
int64_t describe_pattern_lists(const Call& chunk, DeviceKeys* to, int64_t n_sequences);

// attend_window(); of an append in all of its launches.
Status attend_patterns(const Call& chunk, const DeviceAttend& window);
void commit_patterns(const Call& chunk, const SequenceCall& of);
// What the last query attended that a device has attended, as after a call on host tensors.
void list_pattern_keys(const SessionCore& core, const HeadOfSequence& head, const LayerState& state, KeptKeys* kept);

}  // namespace tandem
