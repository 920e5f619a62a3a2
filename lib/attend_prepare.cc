// SPDX-License-Identifier: MIT
// What an attend call does before the first key is read: sequences, memory, which keys, where they are.
#include <algorithm>

#include "lib/attend_call.h"

namespace tandem {

Status AttendCall::enter() {
  scratch_.calls.clear();
  scratch_.calls.reserve(static_cast<size_t>(args_.n_sequences));
  int64_t first_row = 0;
  for (int32_t i = 0; i < args_.n_sequences; ++i) {
    SequenceCall call;
    const int64_t id = args_.sequences[i];
    call.sequence = cache_.find(id);
    if (call.sequence == nullptr)
      return fail(TANDEM_ERROR_NOT_FOUND, "sequences", "sequences[%d] = %lld is not in this cache", i,
                  static_cast<long long>(id));
    const Sequence& sequence = *call.sequence;
    const bool foreign = sequence.writer != nullptr && sequence.writer != &session_;
    if (foreign || (args_.k != nullptr && sequence.n_readers > 0))
      return fail(TANDEM_ERROR_BUSY, "sequences", "sequences[%d] = %lld is in flight in another session", i,
                  static_cast<long long>(id));
    call.q_len = args_.q_lens[i];
    call.first_row = first_row;
    first_row += call.q_len;
    if (call.q_len == 0) continue;
    call.length = sequence.lengths[layer_idx_] + (args_.k != nullptr ? call.q_len : 0);
    call.first_query = call.length - call.q_len;
    call.is_append = !args_.speculative && (call.q_len > 1 || args_.partial);
    if (args_.speculative && heads_ != nullptr)
      return fail(TANDEM_ERROR_UNSUPPORTED, "flags", "flags = TANDEM_ATTEND_SPECULATIVE: layer %d has streaming heads",
                  args_.layer_idx);
    TANDEM_TRY(check_state(call));
    scratch_.calls.push_back(call);
  }
  for (SequenceCall& call : scratch_.calls) {
    call.writer_before = call.sequence->writer;
    if (args_.k != nullptr)
      call.sequence->writer = &session_;
    else
      ++call.sequence->n_readers;
  }
  return {};
}

Status AttendCall::check_state(const SequenceCall& call) const {
  const Sequence& sequence = *call.sequence;
  const auto id = static_cast<long long>(sequence.id);
  if (sequence.speculative[layer_idx_] != 0)
    return fail(TANDEM_ERROR_INVALID_STATE, "sequences",
                "sequence %lld has %lld speculative tokens in layer %d: commit them first", id,
                static_cast<long long>(sequence.speculative[layer_idx_]), args_.layer_idx);
  if (args_.speculative && sequence.speculator != nullptr && sequence.speculator != &session_)
    return fail(TANDEM_ERROR_BUSY, "sequences", "sequence %lld has speculative tokens of another session", id);
  if (call.first_query < 0)
    return fail(TANDEM_ERROR_INVALID_ARGUMENT, "q_lens",
                "q_lens = %lld queries are more than the %lld tokens of sequence %lld", static_cast<long long>(call.q_len),
                static_cast<long long>(call.length), id);
  if (args_.k == nullptr || !session_.in_step_) return {};
  for (const Session::StepSequence& step : session_.step_) {
    if (step.id != sequence.id) continue;
    const int64_t left = step.lengths[layer_idx_] + step.q_len - sequence.lengths[layer_idx_];
    if (call.q_len <= left) return {};
    return fail(TANDEM_ERROR_INVALID_STATE, "q_lens", "q_lens = %lld for sequence %lld: the step has %lld left in layer %d",
                static_cast<long long>(call.q_len), id, static_cast<long long>(left), args_.layer_idx);
  }
  return fail(TANDEM_ERROR_INVALID_STATE, "sequences", "sequence %lld is not part of the open step", id);
}

Status AttendCall::wait_for_refreshes() {
  for (SequenceCall& call : scratch_.calls) {
    SequenceState* state = nullptr;
    {
      std::shared_lock lock(cache_.mutex());
      state = session_.state(call.sequence->id);
    }
    if (state != nullptr) session_.sums_.refresh_wait_ns += state->layers[layer_idx_].selection->join(args_.watch);
    TANDEM_TRY(args_.watch.check());
  }
  return {};
}

void AttendCall::clear_scratch() {
  scratch_.begin.clear();
  scratch_.end.clear();
  scratch_.tree_bits.clear();
  scratch_.tree_positions.clear();
}

Status AttendCall::prepare() {
  clear_scratch();
  for (SequenceCall& call : scratch_.calls) {
    Sequence& sequence = *call.sequence;
    // Only what is going to be written needs pages of its own.
    if (args_.k != nullptr)
      TANDEM_TRY(cache_.ensure(sequence, std::max(sequence.longest(), call.length), "q_lens", args_.watch));
    else
      TANDEM_TRY(session_.on_reserve(sequence, sequence.longest(), args_.watch));
    if (args_.parent_idx == nullptr)
      cache_.extend_positions(sequence, call.length);
    else
      sequence.parents.reserve(static_cast<size_t>(call.q_len));
    call.state = &session_.state(sequence.id)->layers[layer_idx_];
    session_.fetch_maw(sequence);
    call.found_begin = call.window_begin = call.state->window_begin;
    TANDEM_TRY(set_visibility(call));
    choose_keys(call);
    choose_for_streaming_heads(call);
    TANDEM_TRY(call.state->selection->prepare_on_host(&call, args_.speculative));
  }
  lay_out_floats();
  point_visibility();
  scratch_.host.begin(host_facts(), {});
  scratch_.host.lay_out(scratch_.calls);
  return {};
}

// Causal: query t sees tokens up to its own, at most a sliding window back.
Status AttendCall::set_visibility(SequenceCall& call) {
  call.visibility_at = scratch_.begin.size();
  const size_t n = call.visibility_at + static_cast<size_t>(call.q_len);
  for (std::vector<int64_t>* list : {&scratch_.begin, &scratch_.end})
    if (list->capacity() < n) list->reserve(std::max(n, 2 * list->capacity()));
  if (args_.speculative && args_.parent_idx != nullptr) set_tree(call);
  for (int64_t t = 0; t < call.q_len; ++t) {
    if (t % kManyTokens == 0) TANDEM_TRY(args_.watch.check());
    const int64_t token = call.first_query + t;
    const bool tree = call.visibility.tree_words > 0;
    const int64_t position =
        tree ? scratch_.tree_positions[call.positions_at + static_cast<size_t>(t)] : call.sequence->position(token);
    const int64_t begin =
        layer_.sliding_window > 0 ? cache_.first_within(*call.sequence, position, layer_.sliding_window) : 0;
    scratch_.begin.push_back(std::min(begin, tree ? call.first_query : token));
    scratch_.end.push_back(token + 1);
  }
  return {};
}

// A query of the tree sees its ancestors and itself among the new tokens, and sits as deep as its chain is long.
void AttendCall::set_tree(SequenceCall& call) {
  const int32_t* parents = args_.parent_idx + call.first_row;
  const int32_t n_words = static_cast<int32_t>((call.q_len + 63) / 64);
  call.visibility.tree_begin = call.first_query;
  call.visibility.tree_words = n_words;
  call.tree_at = scratch_.tree_bits.size();
  call.positions_at = scratch_.tree_positions.size();
  scratch_.tree_bits.resize(call.tree_at + static_cast<size_t>(call.q_len * n_words), 0);
  scratch_.depths.assign(static_cast<size_t>(call.q_len), 0);
  const int64_t root = call.sequence->position(call.first_query);
  // Within the tree, windows reach back along the chain.
  const bool streaming = policy_.host_keys(false) == HostKeys::kSinks;
  int64_t reach = layer_.sliding_window > 0 ? layer_.sliding_window : INT64_MAX;
  if (streaming) reach = std::min(reach, session_.options_.window_len);
  const int64_t sink_end = streaming && layer_.sliding_window == 0 ? session_.options_.sink_len : 0;
  for (int64_t t = 0; t < call.q_len; ++t) {
    const int32_t depth = parents[t] < 0 ? 0 : scratch_.depths[static_cast<size_t>(parents[t])] + 1;
    scratch_.depths[static_cast<size_t>(t)] = depth;
    scratch_.tree_positions.push_back(static_cast<int32_t>(root + depth));
    uint64_t* bits = scratch_.tree_bits.data() + call.tree_at + static_cast<size_t>(t * n_words);
    for (int64_t a = t; a >= 0; a = parents[a]) {
      const int64_t up = scratch_.depths[static_cast<size_t>(a)];
      if (depth - up < reach || call.first_query + up < sink_end) bits[a / 64] |= uint64_t{1} << (a % 64);
    }
  }
}

void AttendCall::choose_keys(SequenceCall& call) {
  const HostKeys host = policy_.host_keys(call.is_append);
  const int64_t least =
      *std::min_element(scratch_.begin.begin() + static_cast<std::ptrdiff_t>(call.visibility_at), scratch_.begin.end());
  call.dense_begin = least;
  if (host == HostKeys::kSinks) return choose_streaming(call);
  call.resident_begin = std::max(std::min(call.window_begin, call.length), least);
  call.host_begin = least;
  call.host_end = call.resident_begin;
  if (host == HostKeys::kSelected) {
    call.host_end = std::min(session_.options_.sink_len, call.resident_begin);
    call.selected = true;
  }
  call.has_host = call.resident_begin > least;  // nobody knows yet what will be selected when the queries are there
  call.first_job_key = call.resident_begin;
  // One processor has both parts, and they are one range: one job, and nothing to merge.
  if (host == HostKeys::kAll && !args_.on_device) {
    call.first_job_key = call.host_begin;
    call.has_host = false;
  }
  call.observes = policy_.keeps_maw && !call.is_append && !args_.speculative;
}

// Sinks and the newest window_len tokens of each query; inside a sliding-window layer there are no sinks to see.
void AttendCall::choose_streaming(SequenceCall& call) {
  call.visibility.sink_end = layer_.sliding_window > 0 ? 0 : session_.options_.sink_len;
  int64_t least = INT64_MAX;
  for (int64_t t = 0; t < call.q_len; ++t) {
    int64_t& begin = scratch_.begin[call.visibility_at + static_cast<size_t>(t)];
    // In a tree the window counts along the chain: siblings do not push each other out.
    const bool tree = call.visibility.tree_words > 0;
    const int64_t newest = call.first_query + (tree ? scratch_.depths[static_cast<size_t>(t)] : t);
    const int64_t reached = newest + 1 - session_.options_.window_len;
    begin = std::max(begin, tree ? std::min(reached, call.first_query) : reached);
    least = std::min(least, begin);
  }
  const SinksAndNewest keys =
      sinks_and_newest(session_.options_, call.visibility.sink_end, least, call.length, args_.on_device);
  call.host_begin = 0;
  call.host_end = keys.sink_end;
  call.resident_begin = keys.newest_begin;
  call.has_host = call.host_end > 0;
  call.first_job_key = call.resident_begin;
}

// Rows of floats of a call on host tensors: take(n) is asked for each.
template <typename F>
void AttendCall::lay_out(SequenceCall& call, F take) const {
  const int64_t n_rows = layer_.n_q_heads * call.q_len;
  call.q = take(n_rows * layer_.k_head_dim);
  call.o = take(n_rows * layer_.v_head_dim);
  call.lse = take(n_rows);
  if (call.has_host) {
    call.host_o = take(n_rows * layer_.v_head_dim);
    call.host_lse = take(n_rows);
  }
  if (call.observes) call.logits = take(n_rows * (call.length - call.resident_begin));
}

// Once for how many there are, then for where they are.
void AttendCall::lay_out_floats() {
  scratch_.n_floats = 0;
  for (SequenceCall& call : scratch_.calls) lay_out(call, [&](int64_t n) -> float* { return scratch_.take(n), nullptr; });
  scratch_.floats.reserve(scratch_.n_floats);
  scratch_.n_floats = 0;
  for (SequenceCall& call : scratch_.calls) lay_out(call, [&](int64_t n) { return scratch_.at(scratch_.take(n)); });
}

// Their vectors have grown to their end.
void AttendCall::point_visibility() {
  for (SequenceCall& call : scratch_.calls) {
    call.visibility.begin = scratch_.begin.data() + call.visibility_at;
    call.visibility.end = scratch_.end.data() + call.visibility_at;
    call.streaming_heads.visibility.begin = scratch_.begin.data() + call.streaming_heads.visibility_at;
    call.streaming_heads.visibility.end = scratch_.end.data() + call.streaming_heads.visibility_at;
    if (call.visibility.tree_words == 0) continue;
    call.visibility.tree_bits = scratch_.tree_bits.data() + call.tree_at;
    call.tree_positions = scratch_.tree_positions.data() + call.positions_at;
  }
}

HostPart::Facts AttendCall::host_facts() const {
  return {.cache = &cache_,
          .layer = &layer_,
          .heads = heads_,
          .layer_idx = args_.layer_idx,
          .selector = session_.selectors_[layer_idx_].get(),
          .selects = policy_.make != nullptr,
          .keeps_maw = policy_.keeps_maw,
          .is_speculative = args_.speculative,
          .q_is_bf16 = args_.q.dtype == TANDEM_BF16};
}

}  // namespace tandem
