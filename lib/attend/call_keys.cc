// SPDX-License-Identifier: MIT
#include "lib/attend/call_keys.h"

#include <algorithm>

namespace tandem {
namespace {

// A query of a tree sees its ancestors and itself among the new tokens. Its depth is the length of its chain.
void set_tree(const Call& call, SequenceCall& of) {
  AttendScratch& scratch = call.scratch;
  const int32_t* parents = call.args.parent_idx + of.first_row;
  const int32_t n_words = static_cast<int32_t>((of.q_len + 63) / 64);
  of.visibility.tree_begin = of.first_query;
  of.visibility.tree_words = n_words;
  of.tree_at = scratch.tree_bits.size();
  of.positions_at = scratch.tree_positions.size();
  scratch.tree_bits.resize(of.tree_at + static_cast<size_t>(of.q_len * n_words), 0);
  scratch.depths.assign(static_cast<size_t>(of.q_len), 0);
  const int64_t root = of.sequence->position(of.first_query), sliding_window = call.layer().sliding_window;
  // Within the tree, windows reach back along the chain.
  const bool streaming = call.facts.policy.host_keys(false) == HostKeys::kSinks;
  int64_t reach = sliding_window > 0 ? sliding_window : INT64_MAX;
  if (streaming) reach = std::min(reach, call.session.options.window_len);
  const int64_t sink_end = streaming && sliding_window == 0 ? call.session.options.sink_len : 0;
  for (int64_t t = 0; t < of.q_len; ++t) {
    const int32_t depth = parents[t] < 0 ? 0 : scratch.depths[static_cast<size_t>(parents[t])] + 1;
    scratch.depths[static_cast<size_t>(t)] = depth;
    scratch.tree_positions.push_back(static_cast<int32_t>(root + depth));
    uint64_t* bits = scratch.tree_bits.data() + of.tree_at + static_cast<size_t>(t * n_words);
    for (int64_t a = t; a >= 0; a = parents[a]) {
      const int64_t up = scratch.depths[static_cast<size_t>(a)];
      if (depth - up < reach || of.first_query + up < sink_end) bits[a / 64] |= uint64_t{1} << (a % 64);
    }
  }
}

// Sets the sinks and the newest window_len tokens of each query. Layers with a sliding window have no sinks.
void see_sinks_and_newest(const Call& call, SequenceCall& of) {
  AttendScratch& scratch = call.scratch;
  const PolicyOptions& options = call.session.options;
  of.visibility.sink_end = call.layer().sliding_window > 0 ? 0 : options.sink_len;
  int64_t least = INT64_MAX;
  for (int64_t t = 0; t < of.q_len; ++t) {
    int64_t& begin = scratch.begin[of.visibility_at + static_cast<size_t>(t)];
    // In a tree the window counts along the chain: siblings do not push each other out.
    const bool tree = of.visibility.tree_words > 0;
    const int64_t newest = of.first_query + (tree ? scratch.depths[static_cast<size_t>(t)] : t);
    const int64_t reached = newest + 1 - options.window_len;
    begin = std::max(begin, tree ? std::min(reached, of.first_query) : reached);
    least = std::min(least, begin);
  }
  const SinksAndNewest keys = sinks_and_newest(options, of.visibility.sink_end, least, of.length, call.args.on_device);
  of.host_begin = 0;
  of.host_end = keys.sink_end;
  of.resident_begin = keys.newest_begin;
  of.has_host = of.host_end > 0;
  of.first_job_key = of.resident_begin;
}

void choose_keys(const Call& call, SequenceCall& of) {
  const HostKeys host = call.facts.policy.host_keys(of.is_append);
  const std::vector<int64_t>& begin = call.scratch.begin;
  const int64_t least = *std::min_element(begin.begin() + static_cast<std::ptrdiff_t>(of.visibility_at), begin.end());
  of.dense_begin = least;
  if (host == HostKeys::kSinks) return see_sinks_and_newest(call, of);
  of.resident_begin = std::max(std::min(of.window_begin, of.length), least);
  of.host_begin = least;
  of.host_end = of.resident_begin;
  of.selected = host == HostKeys::kSelected;
  if (of.selected) of.host_end = std::min(call.session.options.sink_len, of.resident_begin);
  of.has_host = of.resident_begin > least;  // the selection follows once the queries are available
  of.first_job_key = of.resident_begin;
  // One processor has both parts, and they are one range: one job and no merge.
  if ((host == HostKeys::kAll || host == HostKeys::kNamed) && !call.args.on_device) {
    of.first_job_key = of.host_begin;
    of.has_host = false;
  }
  of.observes = call.facts.policy.keeps_maw && !of.is_append && !call.args.speculative;
}

// Finds, for each query, the first token whose key is within the largest distance of the layer's patterns.
Status cap_distances(const Call& call, SequenceCall& of) {
  if (!call.facts.policy.follows_patterns) return {};
  const int64_t most = call.session.options.patterns[call.facts.idx].max_distance;
  const Sequence& sequence = *of.sequence;
  if (most == 0 || sequence.position(of.length - 1) - sequence.position(0) <= most) return {};
  std::vector<int64_t>& end = call.scratch.capped_end;
  of.capped.any = true;
  of.capped.end_at = end.size();
  for (int64_t t = 0; t < of.q_len; ++t) {
    if (t % kManyTokens == 0) TANDEM_TRY(call.args.watch.check());
    end.push_back(sequence.first_within(sequence.position(of.first_query + t), most + 1));
  }
  return {};
}

// Sets sinks and newest keys for the layer's streaming heads.
void see_for_streaming_heads(const Call& call, SequenceCall& of) {
  if (call.facts.heads == nullptr) return;
  AttendScratch& scratch = call.scratch;
  const PolicyOptions& options = call.session.options;
  SequenceCall::StreamingHeads& own = of.streaming_heads;
  own.visibility.sink_end = options.sink_len;
  own.visibility_at = scratch.begin.size();
  for (int64_t t = 0; t < of.q_len; ++t) {
    const int64_t token = of.first_query + t;
    scratch.begin.push_back(std::max<int64_t>(0, token + 1 - options.window_len));
    scratch.end.push_back(token + 1);
  }
  const bool on_device = call.args.on_device;
  own.keys = sinks_and_newest(options, options.sink_len, scratch.begin[own.visibility_at], of.length, on_device);
  // Queries of tokens that are already in the sequence may see keys before the window's begin. All heads' keys begin there
  // then.
  if (on_device) of.resident_begin = std::min(of.resident_begin, own.keys.newest_begin);
  of.host_end = std::min(of.host_end, of.resident_begin);
  if (call.facts.heads->retrieval.n_kv_heads == 0) of.host_begin = of.host_end = of.resident_begin;
  if (on_device) of.has_host = of.host_end > of.host_begin || own.keys.sink_end > 0;
}

}  // namespace

void clear_visibility(AttendScratch& scratch) {
  scratch.begin.clear();
  scratch.end.clear();
  scratch.capped_end.clear();
  scratch.tree_bits.clear();
  scratch.tree_positions.clear();
}

// Query t sees tokens up to its own, at most a sliding window back.
Status set_visibility(const Call& call, SequenceCall& of) {
  AttendScratch& scratch = call.scratch;
  const int64_t sliding_window = call.layer().sliding_window;
  of.visibility_at = scratch.begin.size();
  const size_t n = of.visibility_at + static_cast<size_t>(of.q_len);
  for (std::vector<int64_t>* list : {&scratch.begin, &scratch.end})
    if (list->capacity() < n) list->reserve(std::max(n, 2 * list->capacity()));
  if (call.args.speculative && call.args.parent_idx != nullptr) set_tree(call, of);
  for (int64_t t = 0; t < of.q_len; ++t) {
    if (t % kManyTokens == 0) TANDEM_TRY(call.args.watch.check());
    const int64_t token = of.first_query + t;
    const bool tree = of.visibility.tree_words > 0;
    const int64_t position =
        tree ? scratch.tree_positions[of.positions_at + static_cast<size_t>(t)] : of.sequence->position(token);
    const int64_t begin = sliding_window > 0 ? of.sequence->first_within(position, sliding_window) : 0;
    scratch.begin.push_back(std::min(begin, tree ? of.first_query : token));
    scratch.end.push_back(token + 1);
  }
  return {};
}

Status see_keys(const Call& call, SequenceCall& of) {
  TANDEM_TRY(set_visibility(call, of));
  TANDEM_TRY(cap_distances(call, of));
  choose_keys(call, of);
  see_for_streaming_heads(call, of);
  return {};
}

void point_visibility(AttendScratch& scratch) {
  for (SequenceCall& of : scratch.calls) {
    of.visibility.begin = scratch.begin.data() + of.visibility_at;
    of.visibility.end = scratch.end.data() + of.visibility_at;
    if (of.capped.any) of.capped.end = scratch.capped_end.data() + of.capped.end_at;
    of.streaming_heads.visibility.begin = scratch.begin.data() + of.streaming_heads.visibility_at;
    of.streaming_heads.visibility.end = scratch.end.data() + of.streaming_heads.visibility_at;
    if (of.visibility.tree_words == 0) continue;
    of.visibility.tree_bits = scratch.tree_bits.data() + of.tree_at;
    of.tree_positions = scratch.tree_positions.data() + of.positions_at;
  }
}

}  // namespace tandem
