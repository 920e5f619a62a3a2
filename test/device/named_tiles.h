// SPDX-License-Identifier: MIT
// Random lists of tiles (lib/tables/key_list.h): keys that each query, or each head of a group, names for itself. What is
// named is found token by token, so this is what is compared with what makes tiles of a caller's indices, too.
#pragma once

#include <cstdint>
#include <vector>

#include "lib/tables/device.h"
#include "reference/random.h"

namespace tandem::test {

struct TileOptions {
  int32_t n_heads = 0;   // that have lists: 1 or as many as there are KV heads; 0: the call has no tiles
  int32_t unit = 64;     // tokens that are named together
  double share = 0.3;    // of its units that a query names
  int32_t n_shared = 1;  // queries side by side that name these
  int32_t n_own = 0;     // units besides, of each query
  int32_t classes_by = kByQuery;
  bool hides_others = true;  // keys that no row names are NaN
};

class NamedTiles {
 public:
  // sequences, as in the call; those of a call's pieces have other keys, and the same queries.
  NamedTiles(const TileOptions& options, int32_t group_size, int32_t max_q_len, const std::vector<DeviceSequence>& sequences,
             reference::Random& random);

  // query, head: of the sequence, and of the KV head's group.
  bool has(size_t sequence, int64_t kv_head, int64_t query, int64_t head, int64_t token) const;
  bool has_any(size_t sequence, int64_t kv_head, int64_t token) const;  // any row
  // The indices that query names, pads of -1 last: [n_idx()]. Classes are queries.
  std::vector<int32_t> indices(size_t sequence, int32_t list_head, int64_t query) const;
  int32_t n_idx() const { return n_idx_; }
  const TileOptions& options() const { return options_; }

  // Lists and tiles of these sequences, whose tables and pages are those of a call.
  struct Made {
    std::vector<DeviceTiles> lists;
    std::vector<KeyTile> keys;
    DeviceTileLists described;  // without addresses
  };
  Made make(const std::vector<DeviceSequence>& sequences, const std::vector<int64_t>& tables, int32_t page_len) const;

 private:
  size_t row_of(size_t sequence, int64_t list_head, int64_t query, int64_t head) const;
  void add_list(const DeviceSequence& sequence, size_t nth, int32_t list_head, int64_t list, Made* made) const;

  TileOptions options_;
  int32_t group_size_, max_q_len_, n_idx_ = 0;
  std::vector<DeviceSequence> sequences_;
  std::vector<size_t> first_row_;         // of each sequence, in named_
  std::vector<std::vector<bool>> named_;  // [sequence][list head][query, or head]: of its units
};

// [n_rows, n_kv_heads, dim] with each KV head's rows group_size times. A reference that has keys of each KV head alone then
// has those of each query head.
std::vector<float> repeat_heads(const std::vector<float>& rows, int32_t group_size, int64_t dim);

}  // namespace tandem::test
