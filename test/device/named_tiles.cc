// SPDX-License-Identifier: MIT
#include "device/named_tiles.h"

#include <algorithm>

namespace tandem::test {

NamedTiles::NamedTiles(const TileOptions& options, int32_t group_size, int32_t max_q_len,
                       const std::vector<DeviceSequence>& sequences, reference::Random& random)
    : options_(options), group_size_(group_size), max_q_len_(max_q_len), sequences_(sequences) {
  for (const DeviceSequence& sequence : sequences) {
    first_row_.push_back(named_.size());
    const int64_t end = sequence.end + sequence.n_after, n_units = (end + options.unit - 1) / options.unit;
    const bool by_head = options.classes_by == kByHead;
    std::vector<bool> shared;
    for (int32_t head = 0; head < options.n_heads; ++head)
      for (int32_t row = 0; row < (by_head ? group_size : sequence.q_len); ++row) {
        std::vector<bool> units(static_cast<size_t>(n_units), false);
        if (row % options.n_shared != 0) units = shared;
        // A query names nothing after its own token.
        const int64_t own = by_head ? end : end - sequence.q_len + row + 1;
        for (int64_t unit = 0; unit < n_units && row % options.n_shared == 0; ++unit)
          units[static_cast<size_t>(unit)] = unit * options.unit < own && random.chance(options.share);
        shared = units;
        for (int32_t i = 0; i < options.n_own; ++i)
          units[static_cast<size_t>(random.integer(0, (own - 1) / options.unit))] = true;
        n_idx_ = std::max(n_idx_, static_cast<int32_t>(std::count(units.begin(), units.end(), true)));
        named_.push_back(std::move(units));
      }
  }
}

size_t NamedTiles::row_of(size_t sequence, int64_t list_head, int64_t query, int64_t head) const {
  const bool by_head = options_.classes_by == kByHead;
  const int64_t of_head = by_head ? group_size_ : sequences_[sequence].q_len;
  return first_row_[sequence] + static_cast<size_t>(list_head * of_head + (by_head ? head : query));
}

bool NamedTiles::has(size_t sequence, int64_t kv_head, int64_t query, int64_t head, int64_t token) const {
  const std::vector<bool>& units = named_[row_of(sequence, options_.n_heads == 1 ? 0 : kv_head, query, head)];
  const auto unit = static_cast<size_t>(token / options_.unit);
  return unit < units.size() && units[unit];
}

bool NamedTiles::has_any(size_t sequence, int64_t kv_head, int64_t token) const {
  const int64_t n_rows = options_.classes_by == kByHead ? group_size_ : sequences_[sequence].q_len;
  for (int64_t row = 0; row < n_rows; ++row)
    if (has(sequence, kv_head, row, row, token)) return true;
  return false;
}

std::vector<int32_t> NamedTiles::indices(size_t sequence, int32_t list_head, int64_t query) const {
  const std::vector<bool>& units = named_[row_of(sequence, list_head, query, 0)];
  std::vector<int32_t> idx;
  for (size_t unit = 0; unit < units.size(); ++unit)
    if (units[unit]) idx.push_back(static_cast<int32_t>(unit));
  idx.resize(static_cast<size_t>(n_idx_), -1);
  return idx;
}

void NamedTiles::add_list(const DeviceSequence& sequence, size_t nth, int32_t list_head, int64_t list, Made* made) const {
  const int32_t n_words = tile_words(group_size_, options_.classes_by);
  const int64_t first_row = list * kTileRows,
                end_row = std::min(first_row + kTileRows, int64_t{sequence.q_len} * group_size_);
  const bool by_head = options_.classes_by == kByHead;
  DeviceTiles& own = made->lists.emplace_back();
  own.first = static_cast<int32_t>(made->keys.size());
  for (int64_t token = sequence.begin / kTileTokens * kTileTokens; token < sequence.end; token += kTileTokens) {
    uint32_t classes[4] = {};
    for (int64_t row = first_row; row < end_row; row += by_head ? 1 : group_size_ - row % group_size_) {
      const int64_t query = row / group_size_, head = row % group_size_;
      const int64_t of = by_head ? head : query - first_row / group_size_;
      if (has(nth, list_head, query, head, token)) classes[of / 32] |= 1u << of % 32;
    }
    if (std::all_of(classes, classes + 4, [](uint32_t word) { return word == 0; })) continue;
    for (int32_t word = 0; word < n_words; ++word) made->keys.push_back({static_cast<int32_t>(token), classes[word], 0});
    ++own.n;
  }
  made->described.most_tiles = std::max(made->described.most_tiles, own.n);
}

NamedTiles::Made NamedTiles::make(const std::vector<DeviceSequence>& sequences, const std::vector<int64_t>& tables,
                                  int32_t page_len) const {
  Made made;
  made.described.n_heads = options_.n_heads;
  made.described.per_head = (max_q_len_ * group_size_ + kTileRows - 1) / kTileRows;
  made.described.per_sequence = options_.n_heads * made.described.per_head;
  made.described.classes_by = options_.classes_by;
  for (size_t i = 0; i < sequences.size(); ++i) {
    const size_t first = made.keys.size();
    for (int32_t head = 0; head < options_.n_heads; ++head)
      for (int64_t list = 0; list < made.described.per_head; ++list) add_list(sequences[i], i, head, list, &made);
    for (size_t at = first; at < made.keys.size(); ++at) {
      const int64_t entry = made.keys[at].token / page_len % sequences[i].table_len;
      made.keys[at].page = tables[static_cast<size_t>(sequences[i].table_begin + entry)];
    }
  }
  return made;
}

std::vector<float> repeat_heads(const std::vector<float>& rows, int32_t group_size, int64_t dim) {
  std::vector<float> repeated;
  repeated.reserve(rows.size() * static_cast<size_t>(group_size));
  for (auto row = rows.begin(); row != rows.end(); row += dim)
    for (int32_t i = 0; i < group_size; ++i) repeated.insert(repeated.end(), row, row + dim);
  return repeated;
}

}  // namespace tandem::test
