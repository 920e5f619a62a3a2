// SPDX-License-Identifier: MIT
// Lists of tiles (lib/tables/key_list.h) of the units that the queries of a long append name, each for itself.
//
// For each 128 query rows, their units are collected: one bit for each unit that any of these queries names, and the class
// bits of that unit. The set is then read in order. So the time is that of the indices, of the tiles that come of them,
// and of a word of the set for every 64 units of the piece.
#pragma once

#include <cstdint>
#include <vector>

#include "lib/call/named_keys.h"
#include "lib/tables/key_list.h"

namespace tandem {

// Queries of one sequence in one call of attend(), and the keys that they have there: all of its window, or a piece.
struct TileQueries {
  const NamedKeys* named = nullptr;  // in host memory, rows in order; units of 64, 128 or 256 tokens
  int64_t first_row = 0;             // of the queries, in `named`
  int32_t n_queries = 0;
  int32_t group_size = 0;               // query heads of a KV head
  TokenRange tokens;                    // [begin, end) of the DeviceSequence. Indices of other tokens are passed over
  const int64_t* page_table = nullptr;  // of the sequence, as DeviceSequences have it
  int32_t table_len = 0, page_len = 0;
};

// Of one thread. Each list head may have a maker and a thread of its own: with random units, memory bandwidth limits the
// speed.
class TileMaker {
 public:
  void begin(const TileQueries& queries);  // may throw bad_alloc

  int32_t n_lists() const;       // of a list head: a DeviceTiles for every kTileRows rows
  int64_t most_tiles() const;    // of a list, at most
  int64_t most_entries() const;  // of a list head: KeyTile that make() writes, at most

  // The lists of a list head. Tiles go to keys[first], first + 1, ...; returns the place behind the last.
  int64_t make(int32_t list_head, int64_t first, DeviceTiles* lists, KeyTile* keys);

 private:
  template <int kWords>
  int64_t make_of(int32_t list_head, int64_t first, DeviceTiles* lists, KeyTile* keys);
  template <int kWords>
  void count(int32_t list_head, int64_t first_query, int64_t end_query);
  template <int kWords, int kTilesOfUnit>
  KeyTile* write(KeyTile* to);

  TileQueries queries_;
  int64_t first_unit_ = 0, end_unit_ = 0;  // of the piece
  int64_t first_tile_ = 0, end_tile_ = 0;  // likewise, in tiles of 64 tokens
  int32_t n_words_ = 0;
  std::vector<int64_t> pages_;     // of each tile
  std::vector<uint64_t> named_;    // a bit for each unit; 0 between lists
  std::vector<uint32_t> classes_;  // [unit][n_words_]; likewise
};

}  // namespace tandem
