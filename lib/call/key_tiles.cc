// SPDX-License-Identifier: MIT
#include "lib/call/key_tiles.h"

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstring>
#include <utility>

namespace tandem {

namespace {

// Writes a tile's entries, each as two 64-bit numbers, which compilers write with one store. Three stores take twice as
// long.
template <int kWords>
KeyTile* put(int64_t token, const uint32_t (&classes)[kWords], int64_t page, KeyTile* to) {
  static_assert(sizeof(KeyTile) == 16 && offsetof(KeyTile, classes) == 4 && offsetof(KeyTile, page) == 8);
  static_assert(std::endian::native == std::endian::little);
  for (const uint32_t word : classes) {
    const uint64_t both[2] = {static_cast<uint64_t>(token) | uint64_t{word} << 32, static_cast<uint64_t>(page)};
    std::memcpy(to++, both, sizeof both);
  }
  return to;
}

}  // namespace

void TileMaker::begin(const TileQueries& queries) {
  queries_ = queries;
  const int64_t begin = queries.tokens.begin, end = std::max(queries.tokens.end, begin);
  const int64_t unit = int64_t{1} << queries.named->unit_shift;
  first_unit_ = begin / unit;
  end_unit_ = end > begin ? (end + unit - 1) / unit : first_unit_;
  first_tile_ = begin / kTileTokens;
  end_tile_ = end > begin ? (end + kTileTokens - 1) / kTileTokens : first_tile_;
  n_words_ = tile_words(queries.group_size, kByQuery);
  pages_.clear();
  for (int64_t tile = first_tile_; tile < end_tile_; ++tile)
    pages_.push_back(queries.page_table[tile * kTileTokens / queries.page_len % queries.table_len]);
  const int64_t n_units = end_unit_ - first_unit_;
  named_.assign(static_cast<size_t>((n_units + 63) / 64), 0);
  classes_.assign(static_cast<size_t>(n_units * n_words_), 0);
}

int32_t TileMaker::n_lists() const {
  return static_cast<int32_t>((int64_t{queries_.n_queries} * queries_.group_size + kTileRows - 1) / kTileRows);
}

int64_t TileMaker::most_tiles() const {
  const int64_t n_queries = std::min<int64_t>(queries_.n_queries, (kTileRows - 1) / queries_.group_size + 2);
  const int64_t per_unit = (int64_t{1} << queries_.named->unit_shift) / kTileTokens;
  return std::min(end_tile_ - first_tile_, n_queries * queries_.named->n_idx * per_unit);
}

int64_t TileMaker::most_entries() const { return n_lists() * most_tiles() * n_words_; }

int64_t TileMaker::make(int32_t list_head, int64_t first, DeviceTiles* lists, KeyTile* keys) {
  if (n_words_ == 1) return make_of<1>(list_head, first, lists, keys);
  return n_words_ == 2 ? make_of<2>(list_head, first, lists, keys) : make_of<4>(list_head, first, lists, keys);
}

template <int kWords>
int64_t TileMaker::make_of(int32_t list_head, int64_t first, DeviceTiles* lists, KeyTile* keys) {
  const int64_t n_rows = int64_t{queries_.n_queries} * queries_.group_size;
  const int32_t shift = queries_.named->unit_shift;
  const auto write = shift == 6   ? &TileMaker::write<kWords, 1>
                     : shift == 7 ? &TileMaker::write<kWords, 2>
                                  : &TileMaker::write<kWords, 4>;
  KeyTile* to = keys + first;
  for (int64_t row = 0; row < n_rows; row += kTileRows) {
    const KeyTile* const begin = to;
    count<kWords>(list_head, row / queries_.group_size, (std::min(row + kTileRows, n_rows) - 1) / queries_.group_size + 1);
    to = (this->*write)(to);
    *lists++ = {static_cast<int32_t>(begin - keys), static_cast<int32_t>((to - begin) / kWords)};
  }
  return to - keys;
}

// Both loops below read locals only. Otherwise the compiler must assume that their writes change members.
template <int kWords>
void TileMaker::count(int32_t list_head, int64_t first_query, int64_t end_query) {
  const auto first_unit = static_cast<uint32_t>(first_unit_);
  const uint32_t n_units = static_cast<uint32_t>(end_unit_) - first_unit;
  uint64_t* const named = named_.data();
  for (int64_t query = first_query; query < end_query; ++query) {
    const std::span<const int32_t> row = queries_.named->row(queries_.first_row + query, list_head);
    uint32_t* const classes = classes_.data() + (query - first_query) / 32;
    const uint32_t bit = uint32_t{1} << (query - first_query) % 32;
    // Pads of -1 compare as larger than every unit.
    const auto is_before = [](int32_t unit, uint32_t from) { return static_cast<uint32_t>(unit) < from; };
    auto idx = first_unit == 0 ? row.begin() : std::lower_bound(row.begin(), row.end(), first_unit, is_before);
    for (; idx != row.end(); ++idx) {
      const uint32_t unit = static_cast<uint32_t>(*idx) - first_unit;
      if (unit >= n_units) break;
      named[unit / 64] |= uint64_t{1} << unit % 64;
      classes[size_t{unit} * kWords] |= bit;
    }
  }
}

template <int kWords, int kTilesOfUnit>
KeyTile* TileMaker::write(KeyTile* to) {
  const int64_t n_tiles = end_tile_ - first_tile_;
  const int64_t* const pages = pages_.data();
  uint32_t* classes = classes_.data();
  const int64_t first_token = first_tile_ * kTileTokens;
  int64_t first = first_unit_ * kTilesOfUnit - first_tile_;  // tile of the word's first unit, counted in the piece
  for (uint64_t& word : named_) {
    for (uint64_t units = std::exchange(word, 0); units != 0; units &= units - 1) {
      const int unit = std::countr_zero(units);
      uint32_t own[kWords];
      std::copy_n(classes + unit * kWords, kWords, own);
      std::fill_n(classes + unit * kWords, kWords, 0);
      const int64_t tile = first + unit * kTilesOfUnit;
      if (tile >= 0 && tile + kTilesOfUnit <= n_tiles) [[likely]] {
        for (int i = 0; i < kTilesOfUnit; ++i)
          to = put<kWords>(first_token + (tile + i) * kTileTokens, own, pages[tile + i], to);
      } else {
        for (int64_t i = std::max<int64_t>(tile, 0); i < std::min(tile + kTilesOfUnit, n_tiles); ++i)
          to = put<kWords>(first_token + i * kTileTokens, own, pages[i], to);
      }
    }
    classes += 64 * kWords;
    first += 64 * kTilesOfUnit;
  }
  return to;
}

}  // namespace tandem
