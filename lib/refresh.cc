// SPDX-License-Identifier: MIT
// Refreshing a selection.
//
//   weights   after an append: maw = (1 - alpha)^n maw + sum_i alpha (1 - alpha)^(n - 1 - i) w_i over its n queries,
//             which is what n updates in a row give; queries older than refresh_queries() have faded
//   select    the policy judges the evicted tokens, or all tokens outside the window
//   copy      the rows of the kept tokens, side by side for each KV head
//
// No decode step is to wait for that. In decode the MAW of the window is up to date and only the evicted block is judged:
// microseconds, for which a background job has the time from one attend of the layer to the next, which joins it; of calls
// on a device it is done when they have been observed, by all workers. Copies grow by new chunks, for moving all rows that
// are there already would take longer than a step.
//
// A re-evaluation is of another size. It multiplies the last queries with all keys: as much as the append's own attention
// over these queries, and as tens to hundreds of decode steps. No lag hides that where the steps use all cores. So it
// belongs to the append, at whose end it runs on the whole pool with the kernels of attention, a block of a head's keys at a
// time; none of its results depends on which worker computes what.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "lib/placement.h"
#include "lib/session.h"

namespace tandem {
namespace {

// Judges tokens [begin, end) of one KV head; the kept ones go to kept. Returns how many.
int64_t judge(Refresh& refresh, int32_t kv_head, int64_t begin, int64_t end, int64_t* halo_left, int32_t* kept_tokens) {
  const Session& session = *refresh.session;
  const Layer& layer = *refresh.layer;
  const float** maw = refresh.maw_rows.data() + int64_t{kv_head} * layer.group_size;
  int64_t n_tokens = 0;
  for (int64_t t = begin; t < end;) {
    SelectInput input;
    input.options = &session.options();
    input.eviction = refresh.eviction;
    input.host_len = std::max<int64_t>(0, refresh.host_end - session.options().sink_len);
    input.group_size = layer.group_size;
    input.n_tokens = std::min(Maw::kBlock - t % Maw::kBlock, end - t);
    for (int32_t g = 0; g < layer.group_size; ++g) maw[g] = refresh.state->maw.at(kv_head * layer.group_size + g, t);
    input.maw = maw;
    input.halo_left = halo_left;
    int32_t* kept = kept_tokens + n_tokens;
    const int64_t n_kept = refresh.policy->select(input, kept);
    for (int64_t i = 0; i < n_kept; ++i) kept[i] += static_cast<int32_t>(t);
    n_tokens += n_kept;
    t += input.n_tokens;
  }
  return n_tokens;
}

// The same, to the end of the head's list. Tokens before `begin` are judged once more for the halo that they cast.
void select_tokens(Refresh& refresh, int32_t kv_head, int64_t begin, int64_t end) {
  HeadSelection& head = refresh.state->heads[static_cast<size_t>(kv_head)];
  const PolicyOptions& options = refresh.session->options();
  int64_t halo_left = 0;
  if (refresh.eviction && begin < end)
    judge(refresh, kv_head, std::max(options.sink_len, begin - refresh.halo_reach), begin, &halo_left,
          refresh.discarded.data() + kv_head * refresh.halo_reach);
  head.n_tokens += judge(refresh, kv_head, begin, end, &halo_left, head.token_idx.as<int32_t>() + head.n_tokens);
}

// Copies large enough to have huge pages of their own: smaller ones would each become a mapping, of which a process has few.
void place_copies(const SelectionChunk& chunk, const Refresh& refresh, int32_t kv_head) {
  Cache& cache = refresh.session->cache();
  const Backend& cpu = cache.engine().cpu();
  const int32_t node = node_of_head(kv_head, refresh.layer->n_kv_heads, n_nodes(cpu));
  for (const Buffer& plane : chunk.planes)
    if (plane.bytes() >= kHugePageBytes) place(cpu, cache.host_tier(), plane.data(), plane.bytes(), node);
}

// Makes room for all selected tokens and some more, at most for all tokens outside the window; keeps the rows that are
// copied. A last chunk that is small grows, others stay as they are.
Status grow(HeadSelection& head, const Refresh& refresh, int32_t kv_head) {
  constexpr int64_t kSmall = 512;  // rows
  if (head.n_tokens <= head.capacity()) return {};
  const PlaneBytes bytes = plane_bytes(*refresh.layer);
  if (head.n_copied == 0) head.chunks.clear();
  const bool extends = !head.chunks.empty() && head.chunks.back().n_rows < kSmall;
  const int64_t first = extends ? head.chunks.back().first : head.capacity();
  const int64_t end =
      std::min(head.n_tokens + std::max(kSmall, head.n_tokens / 8), std::max(head.n_tokens, refresh.host_end));
  SelectionChunk chunk;
  TANDEM_TRY(SelectionChunk::create(refresh.session->cache().host_tier(), bytes, first, end - first, &chunk));
  place_copies(chunk, refresh, kv_head);
  if (!extends) {
    head.chunks.push_back(std::move(chunk));
    return {};
  }
  if (head.n_copied > first) copy_rows(head.row(bytes, first), chunk.row(bytes, first), bytes, head.n_copied - first);
  head.chunks.back() = std::move(chunk);
  return {};
}

// The rows of selected tokens [first, end).
void copy_selected(const HeadSelection& head, const Refresh& refresh, int32_t kv_head, int64_t first, int64_t end) {
  const PlaneBytes bytes = plane_bytes(*refresh.layer);
  const auto* tokens = head.token_idx.as<int32_t>();
  const KvRun* const runs = refresh.keys.runs.data() + kv_head * refresh.keys.n_runs;
  const auto begins_after = [](int64_t token, const KvRun& run) { return token < run.token_idx; };
  const KvRun* run =
      first < end ? std::upper_bound(runs, runs + refresh.keys.n_runs, tokens[first], begins_after) - 1 : runs;
  for (int64_t i = first; i < end; ++i) {
    while (tokens[i] >= run->token_idx + run->n_tokens) ++run;
    copy_rows(rows_of(*run).after(bytes, tokens[i] - run->token_idx), head.row(bytes, i), bytes, 1);
  }
}

bool has_room(HeadSelection& head, const Refresh& refresh, int32_t kv_head) {
  try {
    return grow(head, refresh, kv_head).ok();
  } catch (const std::bad_alloc&) {  // the error's own text
    return false;
  }
}

// Whether the rows of the tokens that are selected now can be copied: there is room for them.
bool judge_head(Refresh& refresh, int32_t kv_head) {
  Session& session = *refresh.session;
  HeadSelection& head = refresh.state->heads[static_cast<size_t>(kv_head)];
  const int64_t sink_len = session.options().sink_len;
  if (refresh.eviction) {
    select_tokens(refresh, kv_head, std::max(refresh.evict_begin, sink_len), refresh.evict_end);
  } else {
    head.n_tokens = head.n_copied = 0;
    select_tokens(refresh, kv_head, sink_len, refresh.host_end);
  }
  if (refresh.keys.keeps_positions) return false;  // rotated by position at attend time: read from the store, one by one
  const bool reaches = head.n_copied == head.n_tokens || head.token_idx.as<int32_t>()[head.n_copied] >= refresh.keys.begin;
  if (reaches && has_room(head, refresh, kv_head)) return true;
  refresh.uncopied = true;
  head.n_copied = 0;
  return false;
}

void refresh_head(Refresh& refresh, int32_t kv_head) {
  if (!judge_head(refresh, kv_head)) return;
  HeadSelection& head = refresh.state->heads[static_cast<size_t>(kv_head)];
  copy_selected(head, refresh, kv_head, head.n_copied, head.n_tokens);
  head.n_copied = head.n_tokens;
}

// All heads, of which each may have most of its keys selected: their rows are copied a piece at a time, by all workers.
void refresh_all_heads(Refresh& refresh, const Backend& cpu) {
  constexpr int64_t kPiece = 1024;  // rows
  struct Pieces {
    Refresh& refresh;
    int64_t n_of_head;
  };
  std::vector<HeadSelection>& heads = refresh.state->heads;
  const auto judge = [](void* context, int64_t kv_head, int32_t) {
    auto& of = *static_cast<Refresh*>(context);
    HeadSelection& head = of.state->heads[static_cast<size_t>(kv_head)];
    if (judge_head(of, static_cast<int32_t>(kv_head))) head.n_copied = head.n_tokens;
  };
  cpu.table->run(cpu.self, std::ssize(heads), judge, &refresh);
  int64_t most = 0;
  for (const HeadSelection& head : heads) most = std::max(most, head.n_copied);
  Pieces pieces{refresh, (most + kPiece - 1) / kPiece};
  const auto copy = [](void* context, int64_t idx, int32_t) {
    const auto& [of, n_of_head] = *static_cast<const Pieces*>(context);
    const int64_t kv_head = idx / n_of_head, first = idx % n_of_head * kPiece;
    const HeadSelection& head = of.state->heads[static_cast<size_t>(kv_head)];
    copy_selected(head, of, static_cast<int32_t>(kv_head), first, std::min(first + kPiece, head.n_copied));
  };
  cpu.table->run(cpu.self, pieces.n_of_head * std::ssize(heads), copy, &pieces);
}

// Until every head has a copy again, by whatever refresh.
void note_copies(Refresh& refresh) {
  const auto lacks_copy = [](const HeadSelection& head) { return head.n_copied < head.n_tokens; };
  const std::vector<HeadSelection>& heads = refresh.state->heads;
  refresh.wants_all = !refresh.keys.keeps_positions && std::any_of(heads.begin(), heads.end(), lacks_copy);
}

}  // namespace

void judge_evicted(void* context) {
  auto& refresh = *static_cast<Refresh*>(context);
  const RefreshTimer timer(*refresh.session);
  refresh.eviction = true;
  for (int32_t h = 0; h < refresh.layer->n_kv_heads; ++h) refresh_head(refresh, h);
  note_copies(refresh);
}

// Heads of all sequences side by side.
void judge_evicted_by_all(const std::vector<Refresh*>& refreshes) {
  if (refreshes.empty()) return;
  Session& session = *refreshes[0]->session;
  const RefreshTimer timer(session, static_cast<int64_t>(refreshes.size()));
  const Backend& cpu = session.cache().engine().cpu();
  for (Refresh* refresh : refreshes) refresh->eviction = true;
  const auto judge_head = [](void* context, int64_t idx, int32_t) {
    const auto& all = *static_cast<const std::vector<Refresh*>*>(context);
    const int32_t n_kv_heads = all[0]->layer->n_kv_heads;
    refresh_head(*all[static_cast<size_t>(idx / n_kv_heads)], static_cast<int32_t>(idx % n_kv_heads));
  };
  const int64_t n_heads = static_cast<int64_t>(refreshes.size()) * refreshes[0]->layer->n_kv_heads;
  cpu.table->run(cpu.self, n_heads, judge_head, const_cast<std::vector<Refresh*>*>(&refreshes));
  for (Refresh* refresh : refreshes) note_copies(*refresh);
}

// A job for each head and block of the MAW, so that weights are added where they belong.
void count_weights(Refresh& refresh, const CountedQueries& queries) {
  const Layer& layer = *refresh.layer;
  const float alpha = refresh.session->options().alpha;
  const Backend& cpu = refresh.session->cache().engine().cpu();
  refresh.coeff.resize(static_cast<size_t>(queries.n));
  double factor = alpha;
  for (int64_t i = queries.n - 1; i >= 0; --i, factor *= 1.0 - alpha)
    refresh.coeff[static_cast<size_t>(i)] = static_cast<float>(factor);
  const Visibility visibility{.begin = queries.begin, .end = queries.end};
  WeightJob job;
  job.layer = &layer;
  job.n_rows = static_cast<int32_t>(queries.n * layer.group_size);
  job.visibility = &visibility;
  job.coeff = refresh.coeff.data();
  job.keep = static_cast<float>(std::pow(1.0 - alpha, static_cast<double>(queries.n + queries.n_skipped)));
  job.out_stride = Maw::kBlock;
  refresh.weight_jobs.clear();
  for (int32_t h = 0; h < layer.n_kv_heads; ++h) {
    job.q = queries.q + h * queries.head_stride * layer.k_head_dim;
    job.lse = queries.lse + h * queries.head_stride;
    job.runs = refresh.keys.runs.data() + h * refresh.keys.n_runs;
    job.node = node_of_head(h, layer.n_kv_heads, n_nodes(cpu));
    for (int64_t t = queries.first_token; t < queries.end_token; t += job.n_keys) {
      while (job.runs->token_idx + job.runs->n_tokens <= t) ++job.runs;
      job.first_offset = t - job.runs->token_idx;
      job.n_keys = std::min(Maw::kBlock - t % Maw::kBlock, queries.end_token - t);
      job.out = refresh.state->maw.at(h * layer.group_size, t);
      refresh.weight_jobs.push_back(job);
    }
  }
  cpu.table->attn_weights(cpu.self, refresh.weight_jobs.data(), static_cast<int32_t>(refresh.weight_jobs.size()));
}

void count_held(Refresh& refresh) {
  if (refresh.n_queries > 0) {
    const auto capacity = static_cast<int64_t>(refresh.begin.size());
    count_weights(refresh, {refresh.q.data(), refresh.lse.data(), capacity * refresh.layer->group_size, refresh.n_queries,
                            refresh.n_skipped, refresh.begin.data(), refresh.end.data(), 0,
                            std::min(refresh.held_end, refresh.keys.length)});
  }
  refresh.n_queries = refresh.n_skipped = 0;
}

void re_evaluate(Refresh& refresh) {
  Session& session = *refresh.session;
  const RefreshTimer timer(session);
  const Backend& cpu = session.cache().engine().cpu();
  count_held(refresh);
  refresh.eviction = false;
  refresh_all_heads(refresh, cpu);
  note_copies(refresh);
  refresh.due = false;
}

void bind_refresh(Session& session, LayerState& state, size_t layer_idx) {
  const Layer& layer = session.cache().layers()[layer_idx];
  Refresh& refresh = state.refresh;
  if (refresh.session != nullptr) return;
  refresh.maw_rows.resize(static_cast<size_t>(layer.n_q_heads));
  refresh.session = &session;
  refresh.state = &state;
  refresh.layer = &layer;
  refresh.policy = &session.layer_policy(layer_idx);
  refresh.job.context = &refresh;
}

void reserve_held(Refresh& refresh) {
  const auto capacity = static_cast<size_t>(refresh_queries(refresh.session->options().alpha));
  const size_t n_rows = capacity * static_cast<size_t>(refresh.layer->n_q_heads);
  refresh.q.resize(n_rows * static_cast<size_t>(refresh.layer->k_head_dim));
  refresh.lse.resize(n_rows);
  refresh.begin.resize(capacity);
  refresh.end.resize(capacity);
}

void Refresh::take_keys(KeyRuns* late) {
  if (late->length == 0) return;
  std::swap(keys, *late);
  late->length = 0;
  reserve_refresh(*this);
}

void post_refresh(Refresh& refresh, void (*run)(void* refresh)) {
  refresh.job.run = run;
  refresh.job.is_long = run != judge_evicted;
  refresh.session->cache().engine().worker().post(refresh.job);
}

void reserve_refresh(Refresh& refresh) {
  const int64_t n_blocks = (refresh.keys.length + Maw::kBlock - 1) / Maw::kBlock;
  refresh.weight_jobs.reserve(static_cast<size_t>(n_blocks * refresh.layer->n_kv_heads));
  refresh.coeff.reserve(static_cast<size_t>(refresh_queries(refresh.session->options().alpha)));
  refresh.halo_reach = std::min(refresh.session->options().halo_len, refresh.keys.length);
  refresh.discarded.resize(static_cast<size_t>(refresh.halo_reach * refresh.layer->n_kv_heads));
}

}  // namespace tandem
