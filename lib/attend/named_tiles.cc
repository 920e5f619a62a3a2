// SPDX-License-Identifier: MIT
#include "lib/attend/named_tiles.h"

#include <algorithm>
#include <bit>

#include "lib/machine/device_status.h"

namespace tandem {

void NamedTiles::begin(const NamedKeys* named, const SequenceCall& of, const Layer& layer) {
  named_ = named;
  if (named == nullptr) return;
  n_queries_ = of.q_len;
  own_of_first_ = of.first_query;
  group_size_ = layer.group_size;
  const int64_t n_units = (of.length >> named->unit_shift) + 1;
  n_words_ = (n_units + 63) / 64;
  units_.assign(static_cast<size_t>(n_words_ * named->n_heads), 0);
  for (int64_t t = 0; t < n_queries_; ++t)
    for (int32_t h = 0; h < named->n_heads; ++h) {
      uint64_t* const units = units_.data() + h * n_words_;
      for (const int32_t unit : named->row(t, h)) {
        if (unit < 0) break;  // pads are last
        units[unit / 64] |= uint64_t{1} << unit % 64;
      }
    }
}

std::span<const TokenRange> NamedTiles::named_of(HeadRange heads, TokenRange tokens) {
  ranges_.clear();
  const int32_t first = named_->n_heads == 1 ? 0 : heads.first, n = named_->n_heads == 1 ? 1 : heads.n;
  for (int64_t w = 0; w < n_words_; ++w) {
    uint64_t units = 0;
    for (int32_t h = first; h < first + n; ++h) units |= units_[static_cast<size_t>(h * n_words_ + w)];
    for (; units != 0; units &= units - 1) {
      const int64_t unit = 64 * w + std::countr_zero(units);
      const int64_t begin = std::max(unit << named_->unit_shift, tokens.begin),
                    end = std::min((unit + 1) << named_->unit_shift, tokens.end);
      if (begin >= end) continue;
      if (!ranges_.empty() && ranges_.back().end == begin)
        ranges_.back().end = end;
      else
        ranges_.push_back({begin, end});
    }
  }
  return ranges_;
}

Status NamedTiles::send(const Call& chunk, HeadRange heads, TokenRange tokens, const TilePages& pages,
                        DeviceAttend* launch) {
  maker_.begin(
      {named_, 0, static_cast<int32_t>(n_queries_), group_size_, tokens, pages.table, pages.table_len, pages.page_len});
  const int32_t n_heads = named_->n_heads == 1 ? 1 : heads.n, per_head = maker_.n_lists();
  const int64_t lists_bytes = device_aligned(int64_t{n_heads} * per_head * static_cast<int64_t>(sizeof(DeviceTiles)));
  const int64_t most_bytes = lists_bytes + n_heads * maker_.most_entries() * static_cast<int64_t>(sizeof(KeyTile));
  if (most_bytes > upload_bytes_) {
    upload_ = std::make_unique_for_overwrite<std::byte[]>(static_cast<size_t>(most_bytes));
    upload_bytes_ = most_bytes;
  }
  auto* const lists = reinterpret_cast<DeviceTiles*>(upload_.get());
  auto* const keys = reinterpret_cast<KeyTile*>(upload_.get() + lists_bytes);
  int64_t n_keys = 0;
  for (int32_t i = 0; i < n_heads; ++i)
    n_keys = maker_.make(named_->n_heads == 1 ? 0 : heads.first + i, n_keys, lists + int64_t{i} * per_head, keys);
  std::byte* const to = chunk.device().work().prefill_area() + chunk.taken.prefill.tiles_at;
  const int64_t bytes = lists_bytes + n_keys * static_cast<int64_t>(sizeof(KeyTile));
  TANDEM_TRY(call_device(chunk.device().device(), &DeviceTable::copy, to, upload_.get(), bytes, chunk.args.stream));
  DeviceTileLists& tiles = launch->tiles;
  tiles = {};
  tiles.lists = reinterpret_cast<const DeviceTiles*>(to);
  tiles.keys = reinterpret_cast<const KeyTile*>(to + lists_bytes);
  tiles.n_heads = n_heads;
  tiles.per_head = per_head;
  tiles.per_sequence = n_heads * per_head;
  for (int64_t i = 0; i < int64_t{n_heads} * per_head; ++i) tiles.most_tiles = std::max(tiles.most_tiles, lists[i].n);
  return {};
}

NotedKeys NamedTiles::of_last_query(const Call& chunk) const {
  NotedKeys noted;
  if (!any()) return noted;
  const auto last = static_cast<size_t>(n_queries_ - 1);
  const SeenTokens seen{chunk.scratch.begin[chunk.calls()[0].visibility_at + last], own_of_first_ + n_queries_ - 1};
  noted.note({*named_, n_queries_ - 1}, 0, seen, 0, true);
  return noted;
}

}  // namespace tandem
