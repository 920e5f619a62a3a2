// SPDX-License-Identifier: MIT
#include "lib/attend/descriptors.h"

#include <algorithm>

#include "lib/attend/guess.h"
#include "lib/attend/pattern_call.h"
#include "lib/attend/search_call.h"
#include "lib/machine/device_status.h"

namespace tandem {

void describe_sequences(const Call& chunk, DeviceSequence* to) {
  int32_t n_entries = 0;
  for (const SequenceCall& of : chunk.calls()) {
    *to = {};
    to->begin = of.resident_begin;
    to->end = of.length;
    to->q_len = static_cast<int32_t>(of.q_len);
    to->first_row = static_cast<int32_t>(of.first_row);
    to->table_begin = n_entries;
    to->table_len = static_cast<int32_t>(of.window->n_pages());
    n_entries += to->table_len;
    to->has_host_part = of.has_cpu_part() || of.only_counts ? 1 : 0;
    to->evict_end = std::max(of.evict_end, of.resident_begin);
    to->first_evicted = static_cast<int32_t>(of.first_evicted);
    to->wants_lse = chunk.facts.policy.keeps_maw && (chunk.args.speculative || of.counts_on_host()) ? 1 : 0;
    to->position = of.sequence->position(of.first_query);
    ++to;
  }
}

int64_t describe_tables(const Call& chunk, int64_t* to) {
  const int64_t* const first = to;
  for (const SequenceCall& of : chunk.calls())
    for (const int64_t page : of.window->table()) *to++ = chunk.device().page_offset(page);
  return to - first;
}

DeviceSequences step_sequences(const Call& call) {
  constexpr int64_t kAnyKeys = INT32_MAX;  // more than any window has
  const DeviceSession& device = call.device();
  const std::byte* const described = device.work().step_descriptors();
  DeviceSequences sequences;
  sequences.sequences = reinterpret_cast<const DeviceSequence*>(described + device.steps().layer_at(call.facts.idx));
  sequences.page_tables = reinterpret_cast<const int64_t*>(described + device.steps().tables_at());
  sequences.n_sequences = static_cast<int32_t>(device.held().step_sequences);
  sequences.max_q_len = static_cast<int32_t>(call.session.step.max_q_len);
  sequences.max_keys = kAnyKeys;
  return sequences;
}

// Copies write these lists, so are_written_by_kernels is 0.
DeviceLists lists_at(const Call& chunk, const std::byte* place, int64_t n_sequences) {
  if (follows_patterns(chunk)) return pattern_lists_at(chunk, place, n_sequences);
  DeviceLists lists;
  if (chunk.facts.heads == nullptr) return lists;
  lists.keys = reinterpret_cast<const DeviceKeys*>(place);
  lists.n_heads = lists.per_sequence = chunk.layer().n_kv_heads;
  return lists;
}

int64_t describe_lists(const Call& chunk, DeviceKeys* to, int64_t n_sequences) {
  if (follows_patterns(chunk)) return describe_pattern_lists(chunk, to, n_sequences);
  if (chunk.facts.heads == nullptr) return 0;
  const DeviceKeys* const first = to;
  for (const SequenceCall& of : chunk.calls())
    for (int32_t h = 0; h < chunk.layer().n_kv_heads; ++h, ++to) {
      *to = {};
      to->begin = static_cast<int32_t>(of.resident_begin);
      if (!chunk.facts.heads->streams(h)) continue;
      to->begin = static_cast<int32_t>(of.streaming_heads.keys.newest_begin);
      to->sliding_window = static_cast<int32_t>(chunk.session.options.window_len);
    }
  return to - first;
}

int64_t describe_lists_at(Call& chunk, std::byte* upload, const std::byte* there) {
  const auto n_sequences = std::ssize(chunk.calls());
  chunk.lists = lists_at(chunk, there, n_sequences);
  if (makes_lists(chunk)) chunk.head_patterns = reinterpret_cast<const DeviceHeadPattern*>(there);
  const int64_t n = describe_lists(chunk, reinterpret_cast<DeviceKeys*>(upload), n_sequences);
  return n * static_cast<int64_t>(sizeof(DeviceKeys));
}

namespace {

// Describes each query as a sequence of its own, after the sequences, which are already written. Speculative tokens are not
// in the window.
void describe_queries(const Call& chunk, DeviceSequence* sequences) {
  const DeviceSequence* own = sequences;
  DeviceSequence* query = sequences + chunk.calls().size();
  for (const SequenceCall& of : chunk.calls()) {
    for (int64_t t = 0; t < of.q_len; ++t, ++query) {
      const int64_t own_end = of.first_query + t + 1,
                    seen_begin = chunk.scratch.begin[of.visibility_at + static_cast<size_t>(t)];
      const int64_t window_end = chunk.args.speculative ? of.first_query : own_end;
      *query = *own;
      query->q_len = 1;
      query->first_row += static_cast<int32_t>(t);
      query->end = std::max<int64_t>(window_end, 1);  // at least 1, as the query itself is a token
      query->n_after = own_end - query->end;
      query->begin = window_end == 0 ? query->end : std::clamp(seen_begin, of.resident_begin, window_end);
    }
    ++own;
  }
}

}  // namespace

// Returns the number of descriptors after the sequences: single queries, or query blocks and their parts.
static int64_t n_behind(const Call& chunk) {
  if (chunk.args.speculative || (chunk.args.named != nullptr && chunk.task->shape.max_q_len > 1))
    return chunk.args.q.n_tokens;
  return n_described(chunk) + n_pattern_parts(chunk);
}

// Uploads sequences, queries that are described one by one, key lists, page tables, positions of speculative tokens, pieces.
Status upload_descriptors(Call& chunk, DeviceSequences* sequences) {
  const DeviceSession& device = chunk.device();
  const std::vector<SequenceCall>& calls = chunk.calls();
  std::byte* const upload = device.shared().upload(chunk.task->idx);
  std::byte* const there = device.work().descriptors();
  const int64_t n_others = n_behind(chunk);
  const bool is_pruned = searches(chunk);
  const auto n_described = static_cast<int64_t>(calls.size()) + n_others;
  int64_t bytes = n_described * static_cast<int64_t>(sizeof(DeviceSequence));
  bytes += describe_lists_at(chunk, upload + bytes, there + bytes);
  describe_sequences(chunk, reinterpret_cast<DeviceSequence*>(upload));
  const int64_t n_entries = describe_tables(chunk, reinterpret_cast<int64_t*>(upload + bytes));
  sequences->n_sequences = static_cast<int32_t>(calls.size());
  sequences->sequences = reinterpret_cast<const DeviceSequence*>(there);
  sequences->page_tables = reinterpret_cast<const int64_t*>(there + bytes);
  sequences->max_q_len = chunk.task->shape.max_q_len;
  for (const SequenceCall& of : calls) sequences->max_keys = std::max(sequences->max_keys, of.length - of.resident_begin);
  bytes += n_entries * static_cast<int64_t>(sizeof(int64_t));
  if (is_pruned) describe_search(chunk, *sequences, reinterpret_cast<DeviceSequence*>(upload));
  if (follows_patterns(chunk)) {
    describe_parts(chunk, *sequences, reinterpret_cast<DeviceSequence*>(upload));
  } else if (n_others > 0 && !is_pruned) {
    chunk.queries = *sequences;
    chunk.queries.sequences += calls.size();
    chunk.queries.n_sequences = static_cast<int32_t>(chunk.args.q.n_tokens);
    chunk.queries.max_q_len = 1;
    describe_queries(chunk, reinterpret_cast<DeviceSequence*>(upload));
  }
  if (chunk.args.speculative) bytes = describe_guess(chunk, upload, bytes);
  for (size_t r = 0; r < kMostRoutes; ++r)
    if (chunk.task->n_pieces[r] > 0)
      bytes += chunk.session.key_routes[r]->describe(chunk.route_call(), upload + bytes, there + bytes);
  return call_device(device.device(), &DeviceTable::copy, there, upload, bytes, chunk.args.stream);
}

}  // namespace tandem
