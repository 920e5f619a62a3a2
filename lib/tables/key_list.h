// SPDX-License-Identifier: MIT
// Key lists: the keys of a window that each KV head attends, in the form that device kernels read. kDeviceAbi changes when
// these structs change.
//
// Without lists every head attends tokens [begin, end) of its DeviceSequence. With lists, each head has its own entry:
// granules, which name up to eight neighbouring tokens each, and then a range up to the sequence's end.
//
//     granule 0     granule 1                         begin           end of the sequence
//     |x.x...xx|    |xxxxxxxx|   tokens not attended   [ every token  )
//
// A list does not express causality or a sliding window. Kernels apply both: a query sees a named key only up to its own
// token, and only within the window. A key that no list names, or that the sliding window hides from every query of the
// call, is never part of a result, whatever its row holds.
//
// The host makes lists, or a kernel makes them from the units that the caller of a call names (DeviceIndices).
//
// Where each of many queries names keys of its own, prefill kernels read tiles instead: lists of 64 tokens each, one list
// for every 128 query rows.
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
  int32_t first = 0, n = 0;    // n = -1: the list is wrong; o and lse of the queries that have it become NaN
  int32_t begin = 0;           // first token of the range, at least the sequence's begin. The sequence's end: no range
  int32_t sliding_window = 0;  // tokens, for this head; 0: the layer's
};

// The lists of a call, in device memory. As sequences do, they may change between the replays of a graph.
struct DeviceLists {
  const DeviceKeys* keys = nullptr;  // entry of the call's first sequence and first KV head; null: there are no lists
  const KeyGranule* granules = nullptr;
  int32_t n_heads = 0;       // entries of a sequence: 1, which all KV heads share, or the layer's number of KV heads
  int32_t per_sequence = 0;  // entries from one sequence's first to the next one's
  int32_t has_granules = 0;  // 0: n is 0 in every entry, in this call and in every replay
  // 1: kernels write the lists, so attend() reads none of them before the kernel in front of it has ended.
  int32_t are_written_by_kernels = 0;
};

// The units that the caller names for each query (tandem_selection in selection.h), in device memory. Unit i is tokens [i <<
// unit_shift, (i + 1) << unit_shift). The indices of a row ascend. A row may end in padding of -1.
struct DeviceIndices {
  const int32_t* data = nullptr;              // [n_tokens, n_heads, n_idx], the indices of a row contiguous
  int64_t token_stride = 0, head_stride = 0;  // elements
  int32_t n_idx = 0;
  int32_t n_heads = 0;  // 1: all KV heads attend the same keys. 0: the call names no keys
  int32_t unit_shift = 0;
  int32_t plus_window = 0;  // 1: sinks and the newest tokens are attended as well
};

// A list of tiles serves kTileRows query rows of one sequence and KV head. Row r is query r / group_size and head r %
// group_size of the KV head. The tiles have all keys that any of these rows attends.
inline constexpr int32_t kTileRows = 128;
inline constexpr int32_t kTileTokens = 64;  // the shortest page length

// kTileTokens tokens of one page. A sequence's begin and end may cut off some of them.
struct KeyTile {
  int32_t token = 0;     // the first token, a multiple of kTileTokens
  uint32_t classes = 0;  // bit c: rows of class c attend these tokens
  int64_t page = 0;      // where the page is: bytes from the page called 0, as in page tables
};

// A list of n tiles: entries [first, first + n * tile_words()) of DeviceTileLists::keys, in the order of their tokens, each
// token once.
struct DeviceTiles {
  int32_t first = 0, n = 0;
};

// The meaning of a class of rows. kByQuery: class c is the list's c-th query, counted from the query of its first row.
// kByHead: class c is head c of the KV head's group, which has at most 32 heads.
enum TileClasses : int32_t { kByQuery = 0, kByHead = 1 };

// Returns the number of entries for each tile of a list. They differ only in their bits: entry w has classes 32 w .. 32 w +
// 31. Only groups of fewer than four heads have more than 32 queries in a list.
constexpr int32_t tile_words(int32_t group_size, int32_t classes_by) {
  if (classes_by == kByHead) return 1;
  const int32_t n_split = kTileRows % group_size > 0 ? 1 : 0;  // a list may begin within a query
  return ((kTileRows - n_split + group_size - 1) / group_size + n_split + 31) / 32;
}

// The tiles of a call, in device memory. As sequences do, they may change between the replays of a graph. Copies, not
// kernels, write `lists`, so a kernel may read them before the kernel in front of it has ended. As above, a list does not
// express causality or a sliding window.
struct DeviceTileLists {
  // The list for rows [kTileRows t, kTileRows (t + 1)) of head h of sequence s is lists[s * per_sequence + h * per_head +
  // t]. Null: the call has no tiles.
  const DeviceTiles* lists = nullptr;
  const KeyTile* keys = nullptr;
  int32_t n_heads = 0;  // heads that have lists: 1, which all KV heads share, or the layer's number of KV heads
  int32_t per_head = 0, per_sequence = 0;
  int32_t most_tiles = 0;  // the most tiles of a list, now and in every replay
  int32_t classes_by = kByQuery;
  int32_t reserved = 0;
};

}  // namespace tandem
