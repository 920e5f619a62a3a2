// SPDX-License-Identifier: MIT
// Makes lists of tiles (lib/tables/key_list.h) for the units that each query of a long append names.
//
// For each 128 query rows the maker collects the named units: one bit for each unit that any of these queries names, and the
// unit's class bits. Then it reads the set in order. So the time grows with the indices, with the tiles made of them, and
// with one word of the set for every 64 units of the piece.
#pragma once

#include <cstdint>
#include <vector>

#include "lib/call/named_keys.h"
#include "lib/tables/key_list.h"

namespace tandem {

// The queries of one sequence in one call of attend(), and their keys there: the whole window, or a piece.
struct TileQueries {
  const NamedKeys* named = nullptr;  // in host memory, rows ascending; units of 64, 128 or 256 tokens
  int64_t first_row = 0;             // of the first query, in `named`
  int32_t n_queries = 0;
  int32_t group_size = 0;               // query heads per KV head
  TokenRange tokens;                    // [begin, end) of the DeviceSequence. Indices of other tokens are skipped
  const int64_t* page_table = nullptr;  // of the sequence, in the format of DeviceSequences
  int32_t table_len = 0, page_len = 0;
};

// One thread uses a TileMaker. Several list heads may be made at once, each by a TileMaker and a thread of its own. A list
// head is a KV head with lists of its own, or all KV heads if they share lists. With random units, memory bandwidth limits
// the speed, so threads beyond this limit gain nothing.
class TileMaker {
 public:
  void begin(const TileQueries& queries);  // may throw bad_alloc

  int32_t n_lists() const;       // of a list head: one DeviceTiles for every kTileRows rows
  int64_t most_tiles() const;    // upper bound for a list
  int64_t most_entries() const;  // upper bound of the KeyTile entries that make() writes for a list head

  // Makes the lists of a list head. Tiles go to keys[first], first + 1, ... Returns the index after the last one.
  int64_t make(int32_t list_head, int64_t first, DeviceTiles* lists, KeyTile* keys);

 private:
  template <int kWords>
  int64_t make_of(int32_t list_head, int64_t first, DeviceTiles* lists, KeyTile* keys);
  template <int kWords>
  void count(int32_t list_head, int64_t first_query, int64_t end_query);
  template <int kWords, int kTilesOfUnit>
  KeyTile* write(KeyTile* to);

  TileQueries queries_;
  int64_t first_unit_ = 0, end_unit_ = 0;  // units of the piece
  int64_t first_tile_ = 0, end_tile_ = 0;  // tiles of 64 tokens of the piece
  int32_t n_words_ = 0;
  std::vector<int64_t> pages_;     // page of each tile
  std::vector<uint64_t> named_;    // one bit for each unit; all 0 between lists
  std::vector<uint32_t> classes_;  // [unit][n_words_]; all 0 between lists
};

}  // namespace tandem
