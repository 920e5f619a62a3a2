// SPDX-License-Identifier: MIT
#include "lib/attend/descriptors.h"

#include <algorithm>

#include "lib/attend/guess.h"
#include "lib/machine/device_status.h"

namespace tandem {

void describe_sequences(const Call& chunk, DeviceSequence* to, int64_t* tables, int64_t* n_entries) {
  for (const SequenceCall& of : chunk.calls()) {
    *to = {};
    to->begin = of.resident_begin;
    to->end = of.length;
    to->q_len = static_cast<int32_t>(of.q_len);
    to->first_row = static_cast<int32_t>(of.first_row);
    to->table_begin = static_cast<int32_t>(*n_entries);
    to->table_len = static_cast<int32_t>(of.window->n_pages());
    to->has_host_part = of.has_cpu_part() || of.only_counts ? 1 : 0;
    to->evict_end = std::max(of.evict_end, of.resident_begin);
    to->first_evicted = static_cast<int32_t>(of.first_evicted);
    to->wants_lse = chunk.facts.policy.keeps_maw && (chunk.args.speculative || of.counts_on_host()) ? 1 : 0;
    to->position = of.sequence->position(of.first_query);
    for (const int64_t page : of.window->table()) tables[(*n_entries)++] = chunk.device().page_offset(page);
    ++to;
  }
}

void describe_streaming_heads(const Call& chunk, const DeviceSequence* all, DeviceSequence* to) {
  for (const SequenceCall& of : chunk.calls()) {
    *to = *all++;
    to->begin = of.streaming_heads.keys.newest_begin;
    ++to;
  }
}

Status upload_descriptors(Call& chunk, DeviceSequences* sequences) {
  const DeviceSession& device = chunk.device();
  const std::vector<SequenceCall>& calls = chunk.calls();
  std::byte* const upload = device.shared().upload(chunk.task->idx);
  const size_t n_described = calls.size() * (chunk.session.heads.empty() ? 1 : 2) +
                             (chunk.args.speculative ? static_cast<size_t>(chunk.args.q.n_tokens) : 0);
  const auto sequence_bytes = static_cast<int64_t>(n_described * sizeof(DeviceSequence));
  auto* const described = reinterpret_cast<DeviceSequence*>(upload);
  int64_t n_entries = 0;
  describe_sequences(chunk, described, reinterpret_cast<int64_t*>(upload + sequence_bytes), &n_entries);
  sequences->n_sequences = static_cast<int32_t>(calls.size());
  sequences->sequences = reinterpret_cast<const DeviceSequence*>(device.work().descriptors());
  if (chunk.facts.heads != nullptr) {
    describe_streaming_heads(chunk, described, described + calls.size());
    chunk.streaming_sequences = sequences->sequences + calls.size();
  }
  sequences->page_tables = reinterpret_cast<const int64_t*>(device.work().descriptors() + sequence_bytes);
  sequences->max_q_len = chunk.task->shape.max_q_len;
  for (const SequenceCall& of : calls) sequences->max_keys = std::max(sequences->max_keys, of.length - of.resident_begin);
  int64_t bytes = sequence_bytes + n_entries * static_cast<int64_t>(sizeof(int64_t));
  if (chunk.args.speculative) bytes = describe_guess(chunk, upload, bytes, *sequences);
  for (size_t r = 0; r < kMostRoutes; ++r)
    if (chunk.task->n_pieces[r] > 0)
      bytes +=
          chunk.session.key_routes[r]->describe(chunk.route_call(), upload + bytes, device.work().descriptors() + bytes);
  return call_device(device.device(), &DeviceTable::copy, device.work().descriptors(), upload, bytes, chunk.args.stream);
}

}  // namespace tandem
