// SPDX-License-Identifier: MIT
#include "lib/pieces/search_counts.h"

#include <algorithm>
#include <bit>

#include "lib/model/dtype.h"

namespace tandem {
namespace {

int64_t whole_chunks(int64_t n_tokens, int64_t chunk_len) { return (n_tokens + chunk_len - 1) / chunk_len * chunk_len; }

// Returns the bytes that a stage reads of a KV head to judge n_tokens tokens of candidates.
int64_t judged_bytes(const CountedSearch& search, const PruningStage& stage, int64_t n_tokens, bool is_last) {
  const Layer& layer = search.layer;
  const int64_t of_key = row_bytes(layer.k_type, layer.k_head_dim) + scale_bytes(layer.k_type, layer.k_head_dim);
  const int64_t n_chunks = n_tokens / stage.chunk_len;
  switch (stage.judge) {
    case Judge::kBounds:
      return n_chunks * 4 * layer.k_head_dim;
    case Judge::kDescent:
      return n_chunks * std::bit_width(static_cast<uint64_t>(stage.chunk_len)) * of_key;
    case Judge::kExact: {
      const bool normalises = is_last && (search.shares_lists ? layer.n_q_heads : layer.group_size) > 1;
      return (n_tokens + (normalises ? search.record.sink_len + search.record.window_len : 0)) * of_key;
    }
  }
  return 0;
}

// Returns the candidates of a stage as a list that still keeps all of them. end: end of the candidates.
KeptStages::Stage find_candidates(const PruningRecord& record, const PruningStage& stage, const KeptStages::Stage* before,
                                  int64_t end) {
  KeptStages::Stage from;
  from.has_all = before == nullptr || before->has_all;
  from.begin = before == nullptr ? record.sink_len : before->begin;
  from.end = whole_chunks(end, stage.chunk_len);
  if (before != nullptr) from.end = std::min(from.end, before->end);
  from.n_tokens = std::max<int64_t>(0, from.end - from.begin);
  if (!from.has_all) from.n_tokens = std::min(from.n_tokens, before->n_tokens);
  return from;
}

}  // namespace

SearchCounts count_search(const CountedSearch& search, KeptStages* kept) {
  const std::vector<PruningStage>& stages = search.record.stages;
  uint32_t places = 0;
  int64_t overlap = 0;
  for (size_t i = 0; i < stages.size(); ++i) {
    if (!stages[i].is_there(search.p0 + 1)) continue;
    places |= 1u << i;
    if (search.overlaps) overlap = std::max(overlap, stages[i].interval - 1);
  }
  const int64_t end = search.p0 + 1 - search.record.window_len + overlap;
  const int32_t last = last_place(search.record, search.p0);
  SearchCounts counts;
  kept->mark = search.mark;
  const KeptStages::Stage* before = nullptr;
  for (size_t i = 0; i < stages.size(); ++i) {
    if ((places >> i & 1) == 0) continue;
    const PruningStage& stage = stages[i];
    KeptStages::Stage& own = kept->stages[i];
    const bool is_due = own.mark != search.mark || own.places != places || search.p0 - own.ran_at >= stage.interval ||
                        (before != nullptr && before->ran_at > own.ran_at);
    if (is_due) {
      own = find_candidates(search.record, stage, before, end);
      own.mark = search.mark, own.places = places, own.ran_at = search.p0;
      ++counts.n_stages;
      if (own.n_tokens > stage.keep_len) {
        counts.stage_bytes[i] =
            search.layer.n_kv_heads * judged_bytes(search, stage, own.n_tokens, static_cast<int32_t>(i) == last);
        counts.judged_bytes += counts.stage_bytes[i];
        own.n_tokens = stage.keep_len;
        own.has_all = false;
      }
    }
    before = &own;
  }
  return counts;
}

// Lists age together, so the intervals determine how often a stage runs. The runs are counted over the calls of several of
// the longest intervals.
PlannedJudging plan_judging(const CountedSearch& search) {
  constexpr int64_t kRounds = 16, kMostCalls = 1 << 14;
  const std::vector<PruningStage>& stages = search.record.stages;
  KeptStages none;
  const SearchCounts all = count_search(search, &none);
  int64_t longest = 1;
  for (const PruningStage& stage : stages)
    if (stage.is_there(search.p0 + 1)) longest = std::max(longest, stage.interval);
  const int64_t n_calls = std::min(kRounds * longest, kMostCalls);
  std::array<int64_t, static_cast<size_t>(kMostStages)> n_runs = {}, ran_at = {};
  for (int64_t call = 0; call < n_calls; ++call) {
    bool runs = call == 0;
    for (size_t i = 0; i < stages.size(); ++i) {
      if (!stages[i].is_there(search.p0 + 1)) continue;
      runs = runs || call - ran_at[i] >= stages[i].interval;
      if (!runs) continue;
      ran_at[i] = call;
      ++n_runs[i];
    }
  }
  PlannedJudging planned;
  bool is_first = true;
  for (size_t i = 0; i < stages.size(); ++i) {
    if (!stages[i].is_there(search.p0 + 1)) continue;
    const auto bytes = static_cast<double>(all.stage_bytes[i]);
    const double mean = bytes * static_cast<double>(n_runs[i]) / static_cast<double>(n_calls);
    planned.mean_bytes += mean;
    planned.most_bytes += bytes;
    if (is_first) planned.first_mean_bytes = mean;
    is_first = false;
  }
  return planned;
}

int32_t last_place(const PruningRecord& record, int64_t p0) {
  int32_t last = -1;
  for (size_t i = 0; i < record.stages.size(); ++i)
    if (record.stages[i].is_there(p0 + 1)) last = static_cast<int32_t>(i);
  return last;
}

}  // namespace tandem
