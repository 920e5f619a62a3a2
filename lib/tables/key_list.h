// SPDX-License-Identifier: MIT
// Key lists: which keys of a window each KV head attends, in the form that device kernels read. kDeviceAbi changes with the
// structs here, too.
//
// Without lists every head attends the tokens [begin, end) of its DeviceSequence. With lists, each head has an entry of its
// own: granules, which name up to eight neighbouring tokens each, and behind them a range up to the sequence's end.
//
//     granule 0     granule 1                         begin           end of the sequence
//     |x.x...xx|    |xxxxxxxx|   tokens not attended   [ every token  )
//
// A list does not express causality or a sliding window. Kernels apply both: a query sees a named key only up to its own
// token, and only within the window. A key that no list names is never part of a result, whatever its row holds. A key that
// a list names has numbers in its row, also where the sliding window hides it from every query: its value is multiplied by
// 0.
#pragma once

#include <cstdint>

namespace tandem {

// The copy engine's swizzle repeats every eight rows, so eight rows are the smallest box.
inline constexpr int32_t kGranuleKeys = 8;

// Tokens of one page. Bit i of `keys` names token + i.
struct KeyGranule {
  int32_t token = 0;  // a multiple of kGranuleKeys, below the entry's `begin`
  uint32_t keys = 0;
  int64_t page = 0;  // where the token's page is: bytes from the page called 0, as in page tables
};

// The keys of one KV head of a sequence: granules[first .. first + n), in the order of their tokens, each token once; then
// tokens [begin, end of the sequence).
struct DeviceKeys {
  int32_t first = 0, n = 0;    // n is not negative
  int32_t begin = 0;           // first token of the range, not before the sequence's begin. The sequence's end: no range
  int32_t sliding_window = 0;  // tokens, for this head; 0: the layer's sliding window
};

// The lists of a call, in device memory: as sequences do, they may change between the replays of a graph.
struct DeviceLists {
  const DeviceKeys* keys = nullptr;  // of the call's first sequence and first KV head; null: there are no lists
  const KeyGranule* granules = nullptr;
  int32_t n_heads = 0;       // entries of a sequence: 1, which all KV heads share, or as many as the layer has KV heads
  int32_t per_sequence = 0;  // entries from one sequence's first to the next one's
  int32_t has_granules = 0;  // 0: n is 0 in every entry, in this call and in every replay
  // 1: kernels write the lists, so attend() reads none of them before the kernel in front of it has ended.
  int32_t are_written_by_kernels = 0;
};

}  // namespace tandem
