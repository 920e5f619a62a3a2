// SPDX-License-Identifier: MIT
#include "lib/pieces/search_layout.h"

#include <algorithm>
#include <bit>

namespace tandem {

static_assert(kMostStages == kMostSearchStages);

std::vector<int64_t> bounded_lengths(const PruningOfLayer& pruning) {
  std::vector<int64_t> lengths;
  for (const PruningRecord* record : {&pruning.decode, &pruning.append})
    for (const PruningStage& stage : record->stages)
      if (stage.judge == Judge::kBounds && std::find(lengths.begin(), lengths.end(), stage.chunk_len) == lengths.end())
        lengths.push_back(stage.chunk_len);
  return lengths;
}

int64_t describe_record(const PruningRecord& record, const std::vector<int64_t>& bounded, int64_t n_lists,
                        DeviceSearch* search) {
  int64_t bytes = 0;
  search->n_stages = static_cast<int32_t>(record.stages.size());
  search->sink_len = record.sink_len;
  search->window_len = record.window_len;
  for (size_t i = 0; i < record.stages.size(); ++i) {
    const PruningStage& from = record.stages[i];
    DeviceSearchStage& to = search->stages[i];
    to.judge = static_cast<int32_t>(from.judge);
    to.chunk_shift = std::countr_zero(static_cast<uint64_t>(from.chunk_len));
    to.interval = static_cast<int32_t>(from.interval);
    to.plus_next = from.plus_next ? 1 : 0;
    to.keep_len = from.keep_len;
    to.from_len = from.from_len;
    to.to_len = from.to_len;
    to.lists_at = bytes;
    to.most_kept = static_cast<int32_t>(from.keep_len / from.chunk_len);
    to.bounds_idx = -1;
    if (from.judge == Judge::kBounds)
      to.bounds_idx = static_cast<int32_t>(std::find(bounded.begin(), bounded.end(), from.chunk_len) - bounded.begin());
    bytes += n_lists * kept_list_bytes(to.most_kept);
  }
  return bytes;
}

// Chunks smaller than a granule may each need a granule of their own.
int64_t most_granules(const PruningRecord& record, int64_t n_tokens) {
  int64_t most = 0;
  for (const PruningStage& stage : record.stages)
    most = std::max(most, stage.keep_len / std::min<int64_t>(stage.chunk_len, kGranuleKeys));
  return std::min(most + record.sink_len / kGranuleKeys, n_tokens / kGranuleKeys) + 2;
}

bool keeps_all(const PruningRecord& record, int64_t n_tokens, bool overlaps) {
  int64_t overlap = 0;
  for (const PruningStage& stage : record.stages)
    if (overlaps) overlap = std::max(overlap, stage.interval - 1);
  return std::all_of(record.stages.begin(), record.stages.end(), [&](const PruningStage& stage) {
    const int64_t n_seen = stage.to_len == 0 ? n_tokens : std::min(n_tokens, stage.to_len);
    if (n_seen < stage.from_len) return true;
    const int64_t end = n_seen - record.window_len + overlap, n_chunks = (end + stage.chunk_len - 1) / stage.chunk_len;
    return end <= record.sink_len || n_chunks * stage.chunk_len - record.sink_len <= stage.keep_len;
  });
}

bool has_one_query_block(const PruningRecord& record) {
  return std::all_of(record.stages.begin(), record.stages.end(),
                     [&](const PruningStage& stage) { return stage.query_block == record.stages[0].query_block; });
}

}  // namespace tandem
