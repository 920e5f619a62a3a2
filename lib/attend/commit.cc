// SPDX-License-Identifier: MIT
#include "lib/attend/commit.h"

#include <algorithm>

#include "lib/attend/session_states.h"

namespace tandem {

void commit_tokens(const Call& call, SequenceCall& of) {
  if (call.appends() && of.is_append && call.facts.policy.names_keys())
    call.session.states->find(of.sequence->id)->window.forget_lists(call.facts.idx);
  if (call.appends()) of.sequence->set_length(call.facts.idx, of.length);
  call.session.evict(&of.state->window_begin, of.length, call.n_layers);
}

void guess_tokens(const Call& call, const SequenceCall& of) {
  Sequence& sequence = *of.sequence;
  sequence.speculative[call.facts.idx] = of.q_len;
  sequence.speculator = call.session.states;
  sequence.parents.clear();
  const int32_t* const parent_idx = call.args.parent_idx;
  if (parent_idx != nullptr) sequence.parents.assign(parent_idx + of.first_row, parent_idx + of.first_row + of.q_len);
}

namespace {

// Counts as many keys as a query may attend, as the lists themselves are on the device.
void count_pruned(const Call& call, const SequenceCall& of) {
  const PruningOfLayer& pruning = call.session.options.pruning.layers[call.facts.idx];
  const PruningRecord& record = of.is_append ? pruning.append : pruning.decode;
  int64_t n_kept = INT64_MAX;
  for (const PruningStage& stage : record.stages)
    if (stage.is_there(of.length)) n_kept = stage.keep_len;
  n_kept = std::min(n_kept, of.length);
  const int64_t n_keys = std::min(of.length, record.sink_len + record.window_len + n_kept);
  call.session.sums.resident_kv_bytes_read += n_keys * plane_bytes(call.layer()).total() * call.layer().n_kv_heads;
}

}  // namespace

void count_bytes(const Call& call, const SequenceCall& of) {
  const int64_t key_bytes = plane_bytes(call.layer()).total() * call.n_layers;
  const int64_t per_token = key_bytes * call.facts.outside.n_kv_heads;
  tandem_session_stats& sums = call.session.sums;
  sums.n_query_tokens += of.q_len * call.n_layers;
  sums.dense_kv_bytes += (of.length - of.dense_begin) * key_bytes * call.layer().n_kv_heads;
  if (call.args.on_device && call.facts.policy.prunes) return count_pruned(call, of);
  if (call.names_keys()) return;  // the call's host part has counted which keys were read
  sums.resident_kv_bytes_read += (of.length - of.resident_begin) * per_token;
  const int64_t n_found = std::max<int64_t>(0, of.resident_begin - of.first_foreign());
  sums.host_kv_bytes_read += (of.host_end - of.host_begin + n_found) * per_token;
  if (call.facts.heads == nullptr) return;
  const int64_t streaming_bytes = call.facts.heads->n_streaming(call.layer()) * key_bytes;
  sums.resident_kv_bytes_read += (of.length - of.streaming_heads.keys.newest_begin) * streaming_bytes;
  sums.host_kv_bytes_read += of.streaming_heads.keys.sink_end * streaming_bytes;
}

}  // namespace tandem
