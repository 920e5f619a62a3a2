// SPDX-License-Identifier: MIT
// Random lists of tiles (lib/tables/key_list.h). Each query, or each head of a group, names keys for itself. Named keys are
// looked up token by token here, so this class also checks the code that makes tiles from a caller's indices.
#pragma once

#include <cstdint>
#include <vector>

#include "lib/tables/device.h"
#include "reference/random.h"

namespace tandem::test {

struct TileOptions {
  int32_t n_heads = 0;   // lists of a sequence: 1, or one for each KV head; 0: the call has no tiles
  int32_t unit = 64;     // tokens of a unit, which are named together
  double share = 0.3;    // part of its units that a query names
  int32_t n_shared = 1;  // neighbouring queries that name the same units
  int32_t n_own = 0;     // further units that each query names alone
  int32_t classes_by = kByQuery;
  bool hides_others = true;  // true: keys that no row names are NaN
};

class NamedTiles {
 public:
  // sequences: those of the call. Sequences of the call's pieces have other keys and the same queries.
  NamedTiles(const TileOptions& options, int32_t group_size, int32_t max_q_len, const std::vector<DeviceSequence>& sequences,
             reference::Random& random);

  // query counts from the sequence's first, head from the first of the KV head's group.
  bool has(size_t sequence, int64_t kv_head, int64_t query, int64_t head, int64_t token) const;
  bool has_any(size_t sequence, int64_t kv_head, int64_t token) const;  // true if any row names the token
  // Returns the n_idx() indices that the query names, padded with -1. Needs classes by query.
  std::vector<int32_t> indices(size_t sequence, int32_t list_head, int64_t query) const;
  int32_t n_idx() const { return n_idx_; }
  const TileOptions& options() const { return options_; }

  // Lists and tiles of these sequences. tables and page_len are those of a call.
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
  std::vector<size_t> first_row_;         // for each sequence, index of its first row in named_
  std::vector<std::vector<bool>> named_;  // [sequence, list head, query or head][unit]
};

// Repeats the rows of each KV head of [n_rows, n_kv_heads, dim] group_size times. So a reference that has one set of keys
// for each KV head can have one for each query head.
std::vector<float> repeat_heads(const std::vector<float>& rows, int32_t group_size, int64_t dim);

}  // namespace tandem::test
