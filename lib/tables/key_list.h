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
// token, and only within the window. A key that no list names, or that the sliding window hides from every query of the
// call, is never part of a result, whatever its row holds.
//
// Lists come from the host, or a kernel makes them of the units that the caller of a call names (DeviceIndices).
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
  int32_t first = 0, n = 0;    // n = -1: the list is wrong, and o and lse of the queries that have it become NaN
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

// The units of 2^unit_shift tokens that the caller names for each query (tandem_selection in selection.h), in device memory:
// unit i is tokens [i << unit_shift, (i + 1) << unit_shift). The indices of a row ascend; pads of -1 are its last.
struct DeviceIndices {
  const int32_t* data = nullptr;              // [n_tokens, n_heads, n_idx], the indices of a row side by side
  int64_t token_stride = 0, head_stride = 0;  // elements
  int32_t n_idx = 0;
  int32_t n_heads = 0;  // 1: all KV heads attend the same keys. 0: the call names no keys
  int32_t unit_shift = 0;
  int32_t plus_window = 0;  // 1: sinks and the newest tokens are attended as well
};

}  // namespace tandem
