// SPDX-License-Identifier: MIT
// Refreshing a selection.
//
//   weights   after an append: maw = (1 - alpha)^n maw + sum_i alpha (1 - alpha)^(n - 1 - i) w_i over its n queries,
//             the same as n updates one by one; queries older than counted_queries() have faded
//   select    applies the policy's rule to the evicted tokens, or to all tokens outside the window
//   copy      copies the rows of the kept tokens, contiguous for each KV head
//
// Decode must not wait for a refresh. A decode step judges only the evicted block, which takes microseconds. On host tensors
// a background job does that before the layer's next call joins it. On device tensors all workers do it after observe().
// Copies grow by new blocks, as moving all rows would take longer than a step.
//
// A re-evaluation is far more work. It multiplies the last queries with all keys: as much work as the append's own attention
// for these queries, and as tens to hundreds of decode steps. Delaying it does not hide it if the steps use all cores. So it
// is part of the append: it runs at the append's end on the whole pool, with the kernels of attention, a block of a head's
// keys at a time. Results do not depend on which worker computes what.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <mutex>
#include <shared_mutex>

#include "lib/machine/placement.h"
#include "lib/select/hgca.h"
#include "lib/store/cache.h"

namespace tandem {
namespace {

// Judges tokens [begin, end) of one KV head and writes the kept ones to `kept_tokens`. Returns their number.
int64_t judge(HgcaState& state, int32_t kv_head, int64_t begin, int64_t end, int64_t* halo_left, int32_t* kept_tokens) {
  const PolicyOptions& options = state.hgca.options();
  const Layer& layer = state.hgca.layer();
  const float** maw = state.maw_rows.data() + int64_t{kv_head} * layer.group_size;
  int64_t n_tokens = 0;
  for (int64_t t = begin; t < end;) {
    SelectInput input;
    input.options = &options;
    input.eviction = state.eviction;
    input.host_len = std::max<int64_t>(0, state.host_end - options.sink_len);
    input.group_size = layer.group_size;
    input.n_tokens = std::min(Maw::kBlock - t % Maw::kBlock, end - t);
    for (int32_t g = 0; g < layer.group_size; ++g) maw[g] = state.maw.at(kv_head * layer.group_size + g, t);
    input.maw = maw;
    input.halo_left = halo_left;
    int32_t* kept = kept_tokens + n_tokens;
    const int64_t n_kept = hgca_select(input, kept);
    for (int64_t i = 0; i < n_kept; ++i) kept[i] += static_cast<int32_t>(t);
    n_tokens += n_kept;
    t += input.n_tokens;
  }
  return n_tokens;
}

// Appends the kept tokens of [begin, end) to the head's list. Judges tokens before `begin` again for the halo that they
// cast.
void select_tokens(HgcaState& state, int32_t kv_head, int64_t begin, int64_t end) {
  HeadSelection& head = state.heads[static_cast<size_t>(kv_head)];
  const PolicyOptions& options = state.hgca.options();
  int64_t halo_left = 0;
  if (state.eviction && begin < end)
    judge(state, kv_head, std::max(options.sink_len, begin - state.halo_reach), begin, &halo_left,
          state.discarded.data() + kv_head * state.halo_reach);
  head.n_tokens += judge(state, kv_head, begin, end, &halo_left, head.token_idx.as<int32_t>() + head.n_tokens);
}

// Places copies that have huge pages of their own. Each smaller copy would become a separate mapping, and a process has few.
void place_copies(const CopiedRows& block, const HgcaState& state, int32_t kv_head) {
  Cache& cache = state.hgca.cache();
  const Backend& cpu = state.hgca.cpu();
  const int32_t node = node_of_head(kv_head, state.hgca.layer().n_kv_heads, n_nodes(cpu));
  for (const Buffer& plane : block.planes)
    if (plane.bytes() >= kHugePageBytes) place(cpu, cache.host_tier(), plane.data(), plane.bytes(), node);
}

// Makes room for all selected tokens and some more, at most for all tokens outside the window. Keeps the rows that are
// copied. Replaces a small last block by a larger one; other blocks stay as they are.
Status grow(HeadSelection& head, const HgcaState& state, int32_t kv_head) {
  constexpr int64_t kSmall = 512;  // rows
  if (head.n_tokens <= head.capacity()) return {};
  const PlaneBytes bytes = plane_bytes(state.hgca.layer());
  if (head.n_copied == 0) head.blocks.clear();
  const bool extends = !head.blocks.empty() && head.blocks.back().n_rows < kSmall;
  const int64_t first = extends ? head.blocks.back().first : head.capacity();
  const int64_t end = std::min(head.n_tokens + std::max(kSmall, head.n_tokens / 8), std::max(head.n_tokens, state.host_end));
  CopiedRows block;
  TANDEM_TRY(CopiedRows::create(state.hgca.cache().host_tier(), bytes, first, end - first, &block));
  place_copies(block, state, kv_head);
  if (!extends) {
    head.blocks.push_back(std::move(block));
    return {};
  }
  if (head.n_copied > first) copy_rows(head.row(bytes, first), block.row(bytes, first), bytes, head.n_copied - first);
  head.blocks.back() = std::move(block);
  return {};
}

// Copies the rows of selected tokens [first, end).
void copy_selected(const HeadSelection& head, const HgcaState& state, int32_t kv_head, int64_t first, int64_t end) {
  const PlaneBytes bytes = plane_bytes(state.hgca.layer());
  const auto* tokens = head.token_idx.as<int32_t>();
  const KvRun* const runs = state.keys.runs.data() + kv_head * state.keys.n_runs;
  const auto begins_after = [](int64_t token, const KvRun& run) { return token < run.token_idx; };
  const KvRun* run = first < end ? std::upper_bound(runs, runs + state.keys.n_runs, tokens[first], begins_after) - 1 : runs;
  for (int64_t i = first; i < end; ++i) {
    while (tokens[i] >= run->token_idx + run->n_tokens) ++run;
    copy_rows(rows_of(*run).after(bytes, tokens[i] - run->token_idx), head.row(bytes, i), bytes, 1);
  }
}

bool has_room(HeadSelection& head, const HgcaState& state, int32_t kv_head) {
  try {
    return grow(head, state, kv_head).ok();
  } catch (const std::bad_alloc&) {  // building the error's text may also fail
    return false;
  }
}

// Judges a head. Returns true if the rows of the selected tokens can be copied, as there is room for them.
bool judge_head(HgcaState& state, int32_t kv_head) {
  HeadSelection& head = state.heads[static_cast<size_t>(kv_head)];
  const int64_t sink_len = state.hgca.options().sink_len;
  if (state.eviction) {
    select_tokens(state, kv_head, std::max(state.evict_begin, sink_len), state.evict_end);
  } else {
    head.n_tokens = head.n_copied = 0;
    select_tokens(state, kv_head, sink_len, state.host_end);
  }
  // Keys are rotated by position at attend time, so attention reads them from the store one by one.
  if (state.keys.keeps_positions) return false;
  const bool reaches = head.n_copied == head.n_tokens || head.token_idx.as<int32_t>()[head.n_copied] >= state.keys.begin;
  if (reaches && has_room(head, state, kv_head)) return true;
  state.uncopied = true;
  head.n_copied = 0;
  return false;
}

void refresh_head(HgcaState& state, int32_t kv_head) {
  if (!judge_head(state, kv_head)) return;
  HeadSelection& head = state.heads[static_cast<size_t>(kv_head)];
  copy_selected(head, state, kv_head, head.n_copied, head.n_tokens);
  head.n_copied = head.n_tokens;
}

// Refreshes all heads after an append. Each may have selected most of its keys, so all workers copy their rows in pieces.
void refresh_all_heads(HgcaState& state) {
  constexpr int64_t kPiece = 1024;  // rows
  struct Pieces {
    HgcaState& state;
    int64_t n_of_head;
  };
  const Backend& cpu = state.hgca.cpu();
  const auto judge = [](void* context, int64_t kv_head, int32_t) {
    auto& of = *static_cast<HgcaState*>(context);
    HeadSelection& head = of.heads[static_cast<size_t>(kv_head)];
    if (judge_head(of, static_cast<int32_t>(kv_head))) head.n_copied = head.n_tokens;
  };
  cpu.table->run(cpu.self, std::ssize(state.heads), judge, &state);
  int64_t most = 0;
  for (const HeadSelection& head : state.heads) most = std::max(most, head.n_copied);
  Pieces pieces{state, (most + kPiece - 1) / kPiece};
  const auto copy = [](void* context, int64_t idx, int32_t) {
    const auto& [of, n_of_head] = *static_cast<const Pieces*>(context);
    const int64_t kv_head = idx / n_of_head, first = idx % n_of_head * kPiece;
    const HeadSelection& head = of.heads[static_cast<size_t>(kv_head)];
    copy_selected(head, of, static_cast<int32_t>(kv_head), first, std::min(first + kPiece, head.n_copied));
  };
  cpu.table->run(cpu.self, pieces.n_of_head * std::ssize(state.heads), copy, &pieces);
}

// Counts refreshes and their time.
class RefreshTimer {
 public:
  explicit RefreshTimer(SelectorSums& sums, int64_t n_refreshes = 1)
      : sums_(sums), n_refreshes_(n_refreshes), start_(std::chrono::steady_clock::now()) {}
  ~RefreshTimer() {
    const auto spent = std::chrono::steady_clock::now() - start_;
    sums_.n_refreshes.fetch_add(n_refreshes_, std::memory_order_relaxed);
    sums_.refresh_ns.fetch_add(std::chrono::duration_cast<std::chrono::nanoseconds>(spent).count(),
                               std::memory_order_relaxed);
  }

 private:
  SelectorSums& sums_;
  int64_t n_refreshes_;
  std::chrono::steady_clock::time_point start_;
};

}  // namespace

// Evictions must bring the rows of all tokens until every head has its copy again.
void HgcaState::note_copies() {
  const auto lacks_copy = [](const HeadSelection& head) { return head.n_copied < head.n_tokens; };
  wants_all = !keys.keeps_positions && std::any_of(heads.begin(), heads.end(), lacks_copy);
}

void copy_loaded(HgcaState& state, const Sequence& sequence, int64_t window_begin) {
  {
    const std::shared_lock lock(state.hgca.cache().mutex());
    state.keys.fill(state.hgca.cache(), sequence, state.hgca.layer_idx(), 0, window_begin);
  }
  state.host_end = window_begin;
  for (int32_t h = 0; h < state.hgca.layer().n_kv_heads; ++h) {
    HeadSelection& head = state.heads[static_cast<size_t>(h)];
    if (state.keys.keeps_positions || head.n_tokens == 0) continue;
    if (!has_room(head, state, h)) {
      state.uncopied = true;
      continue;
    }
    copy_selected(head, state, h, 0, head.n_tokens);
    head.n_copied = head.n_tokens;
  }
  state.note_copies();
}

void HgcaState::judge_evicted() {
  const RefreshTimer timer(hgca.sums());
  eviction = true;
  for (int32_t h = 0; h < hgca.layer().n_kv_heads; ++h) refresh_head(*this, h);
  note_copies();
}

void judge_evicted_by_all(std::span<SelectState* const> states) {
  if (states.empty()) return;
  const auto at = [](std::span<SelectState* const> all, size_t i) { return static_cast<HgcaState*>(all[i]); };
  const Hgca& hgca = at(states, 0)->hgca;
  const RefreshTimer timer(hgca.sums(), std::ssize(states));
  for (size_t i = 0; i < states.size(); ++i) at(states, i)->eviction = true;
  const auto judge_head = [](void* context, int64_t idx, int32_t) {
    const auto& all = *static_cast<const std::span<SelectState* const>*>(context);
    const int32_t n_kv_heads = static_cast<HgcaState*>(all[0])->hgca.layer().n_kv_heads;
    refresh_head(*static_cast<HgcaState*>(all[static_cast<size_t>(idx / n_kv_heads)]),
                 static_cast<int32_t>(idx % n_kv_heads));
  };
  const Backend& cpu = hgca.cpu();
  cpu.table->run(cpu.self, std::ssize(states) * hgca.layer().n_kv_heads, judge_head, &states);
  for (size_t i = 0; i < states.size(); ++i) at(states, i)->note_copies();
}

// Makes one job for each head and block of the MAW, so that a job adds its weights in place.
void HgcaState::count_weights(const CountedQueries& queries) {
  const Layer& layer = hgca.layer();
  const float alpha = hgca.options().alpha;
  const Backend& cpu = hgca.cpu();
  coeff.resize(static_cast<size_t>(queries.n));
  double factor = alpha;
  for (int64_t i = queries.n - 1; i >= 0; --i, factor *= 1.0 - alpha)
    coeff[static_cast<size_t>(i)] = static_cast<float>(factor);
  const Visibility visibility{.begin = queries.begin, .end = queries.end};
  WeightJob weights;
  weights.layer = &layer;
  weights.n_rows = static_cast<int32_t>(queries.n * layer.group_size);
  weights.visibility = &visibility;
  weights.coeff = coeff.data();
  weights.keep = static_cast<float>(std::pow(1.0 - alpha, static_cast<double>(queries.n + queries.n_skipped)));
  weights.out_stride = Maw::kBlock;
  weight_jobs.clear();
  for (int32_t h = 0; h < layer.n_kv_heads; ++h) {
    weights.q = queries.q + h * queries.head_stride * layer.k_head_dim;
    weights.lse = queries.lse + h * queries.head_stride;
    weights.runs = keys.runs.data() + h * keys.n_runs;
    weights.node = node_of_head(h, layer.n_kv_heads, n_nodes(cpu));
    for (int64_t t = queries.first_token; t < queries.end_token; t += weights.n_keys) {
      while (weights.runs->token_idx + weights.runs->n_tokens <= t) ++weights.runs;
      weights.first_offset = t - weights.runs->token_idx;
      weights.n_keys = std::min(Maw::kBlock - t % Maw::kBlock, queries.end_token - t);
      weights.out = maw.at(h * layer.group_size, t);
      weight_jobs.push_back(weights);
    }
  }
  cpu.table->attn_weights(cpu.self, weight_jobs.data(), static_cast<int32_t>(weight_jobs.size()));
}

void HgcaState::count_held() {
  if (held.n > 0) {
    const auto capacity = static_cast<int64_t>(held.begin.size());
    count_weights({held.q.data(), held.lse.data(), capacity * hgca.layer().group_size, held.n, held.n_skipped,
                   held.begin.data(), held.end.data(), 0, std::min(held.end_token, keys.length)});
  }
  held.clear();
}

void HgcaState::re_evaluate() {
  const RefreshTimer timer(hgca.sums());
  count_held();
  eviction = false;
  refresh_all_heads(*this);
  note_copies();
  due = false;
}

void HgcaState::take_keys(KeyRuns* late) {
  if (late->length == 0) return;
  std::swap(keys, *late);
  late->length = 0;
  reserve_work();
}

void HgcaState::post_eviction(int64_t begin, int64_t end) {
  evict_begin = begin;
  evict_end = end;
  job.run = [](void* state) { static_cast<HgcaState*>(state)->judge_evicted(); };
  job.is_long = false;
  hgca.cache().engine().worker().post(job);
}

void HgcaState::reserve_work() {
  const int64_t n_blocks = (keys.length + Maw::kBlock - 1) / Maw::kBlock;
  weight_jobs.reserve(static_cast<size_t>(n_blocks * hgca.layer().n_kv_heads));
  coeff.reserve(static_cast<size_t>(hgca.n_counted()));
  halo_reach = std::min(hgca.options().halo_len, keys.length);
  discarded.resize(static_cast<size_t>(halo_reach * hgca.layer().n_kv_heads));
}

}  // namespace tandem
