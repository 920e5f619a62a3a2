// SPDX-License-Identifier: MIT
// Refreshing a selection, off the critical path.
//
//   weights   after an append: maw = (1 - alpha)^n maw + sum_i alpha (1 - alpha)^(n - 1 - i) w_i over its n queries,
//             which is what n updates in a row give; queries older than refresh_queries() have faded
//   select    the policy judges the evicted tokens, or all tokens outside the window
//   copy      the rows of the kept tokens, side by side for each KV head
//
// In decode the MAW of the window is up to date when the job starts and only the evicted block is judged.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "lib/session.h"

namespace tandem {
namespace {

// The part of a head's runs that covers tokens [begin, end).
void slice_runs(const Refresh& refresh, int32_t kv_head, int64_t begin, int64_t end, std::vector<KvRun>* out) {
  const Layer& layer = *refresh.layer;
  const PlaneBytes bytes = plane_bytes(layer);
  out->clear();
  for (int64_t r = 0; r < refresh.n_runs; ++r) {
    KvRun run = refresh.runs[static_cast<size_t>(kv_head * refresh.n_runs + r)];
    const int64_t first = std::max(begin, run.token_idx), last = std::min(end, run.token_idx + run.n_tokens);
    if (first >= last) continue;
    const int64_t skip = first - run.token_idx;
    point_run(rows_of(run).after(bytes, skip), layer, &run);
    run.token_idx = first;
    run.n_tokens = last - first;
    run.first_position += skip;
    if (run.positions != nullptr) run.positions += skip;
    out->push_back(run);
  }
}

void count_weights(Refresh& refresh, const PolicyOptions& options, const Backend& cpu) {
  const Layer& layer = *refresh.layer;
  const int64_t capacity = static_cast<int64_t>(refresh.begin.size()), n = refresh.n_queries;
  std::vector<float>& coeff = refresh.coeff;
  double factor = options.alpha;
  for (int64_t i = n - 1; i >= 0; --i, factor *= 1.0 - options.alpha)
    coeff[static_cast<size_t>(i)] = static_cast<float>(factor);
  const auto decay = static_cast<float>(std::pow(1.0 - options.alpha, static_cast<double>(n + refresh.n_skipped)));
  const Visibility visibility{.begin = refresh.begin.data(), .end = refresh.end.data()};
  std::vector<KvRun>& runs = refresh.slice;
  for (int32_t h = 0; h < layer.n_kv_heads; ++h) {
    for (int64_t t = 0; t < refresh.length; t += Maw::kBlock) {
      const int64_t n_keys = std::min(Maw::kBlock, refresh.length - t);
      slice_runs(refresh, h, t, t + n_keys, &runs);
      WeightJob job;
      job.layer = &layer;
      job.q = refresh.q.data() + h * capacity * layer.group_size * layer.k_head_dim;
      job.n_rows = static_cast<int32_t>(n * layer.group_size);
      job.n_runs = static_cast<int32_t>(runs.size());
      job.runs = runs.data();
      job.n_keys = n_keys;
      job.visibility = &visibility;
      job.lse = refresh.lse.data() + h * capacity * layer.group_size;
      job.coeff = coeff.data();
      job.out = refresh.weights.data();
      cpu.table->attn_weights(cpu.self, job);
      for (int32_t g = 0; g < layer.group_size; ++g) {
        float* maw = refresh.state->maw.at(h * layer.group_size + g, t);
        const float* weight = refresh.weights.data() + g * n_keys;
        for (int64_t j = 0; j < n_keys; ++j) maw[j] = maw[j] * decay + weight[j];
      }
    }
  }
}

// Judges tokens [begin, end) of one KV head; the kept ones go to kept. Returns how many.
int64_t judge(Refresh& refresh, int32_t kv_head, int64_t begin, int64_t end, int64_t* halo_left, int32_t* kept_tokens) {
  const Session& session = *refresh.session;
  const Layer& layer = *refresh.layer;
  std::vector<const float*>& maw = refresh.maw_rows;
  int64_t n_tokens = 0;
  for (int64_t t = begin; t < end;) {
    SelectInput input;
    input.options = &session.options();
    input.eviction = refresh.eviction;
    input.host_len = std::max<int64_t>(0, refresh.state->window_begin - session.options().sink_len);
    input.group_size = layer.group_size;
    input.n_tokens = std::min(Maw::kBlock - t % Maw::kBlock, end - t);
    for (int32_t g = 0; g < layer.group_size; ++g)
      maw[static_cast<size_t>(g)] = refresh.state->maw.at(kv_head * layer.group_size + g, t);
    input.maw = maw.data();
    input.halo_left = halo_left;
    int32_t* kept = kept_tokens + n_tokens;
    const int64_t n_kept = session.policy().select(input, kept);
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
          refresh.discarded.data());
  head.n_tokens += judge(refresh, kv_head, begin, end, &halo_left, head.token_idx.as<int32_t>() + head.n_tokens);
}

// Gives the planes room for all selected tokens, at most for all tokens outside the window; keeps the rows that are copied.
Status grow(HeadSelection& head, const Refresh& refresh, Tier& tier) {
  if (head.n_tokens <= head.capacity) return {};
  const PlaneBytes row_bytes = plane_bytes(*refresh.layer);
  const int64_t capacity =
      std::clamp(head.capacity * 3 / 2, head.n_tokens, std::max(head.n_tokens, refresh.state->window_begin));
  if (head.n_copied == 0) {
    for (Buffer& plane : head.planes) plane = Buffer();
    head.capacity = 0;
  }
  Buffer planes[kPlanes];
  for (int32_t p = 0; p < kPlanes; ++p) {
    if (row_bytes.of[p] == 0) continue;
    TANDEM_TRY(Buffer::create(tier, capacity * row_bytes.of[p], Use::kSelection, &planes[p]));
    if (head.n_copied > 0)
      std::memcpy(planes[p].data(), head.planes[p].data(), static_cast<size_t>(head.n_copied * row_bytes.of[p]));
  }
  for (int32_t p = 0; p < kPlanes; ++p) head.planes[p].swap(planes[p]);
  head.capacity = capacity;
  return {};
}

void copy_selected(HeadSelection& head, const Refresh& refresh, int32_t kv_head) {
  const PlaneBytes bytes = plane_bytes(*refresh.layer);
  const KvRun* run = refresh.runs.data() + kv_head * refresh.n_runs;
  for (int64_t i = head.n_copied; i < head.n_tokens; ++i) {
    const int64_t token = head.token_idx.as<int32_t>()[i];
    while (token >= run->token_idx + run->n_tokens) ++run;
    copy_rows(rows_of(*run).after(bytes, token - run->token_idx), head.rows().after(bytes, i), bytes, 1);
  }
  head.n_copied = head.n_tokens;
}

bool has_room(HeadSelection& head, const Refresh& refresh, Tier& tier) {
  try {
    return grow(head, refresh, tier).ok();
  } catch (const std::bad_alloc&) {  // the error's own text
    return false;
  }
}

void refresh_head(Refresh& refresh, int32_t kv_head) {
  Session& session = *refresh.session;
  HeadSelection& head = refresh.state->heads[static_cast<size_t>(kv_head)];
  const int64_t sink_len = session.options().sink_len;
  if (refresh.eviction) {
    select_tokens(refresh, kv_head, std::max(refresh.evict_begin, sink_len), refresh.evict_end);
  } else {
    head.n_tokens = head.n_copied = 0;
    select_tokens(refresh, kv_head, sink_len, refresh.state->window_begin);
  }
  if (refresh.keeps_positions) return;  // rotated by position at attend time: read from the store, token by token
  if (has_room(head, refresh, session.cache().host_tier())) {
    copy_selected(head, refresh, kv_head);
  } else {
    refresh.uncopied = true;
    head.n_copied = 0;
  }
}

}  // namespace

void run_refresh(void* context) {
  auto& refresh = *static_cast<Refresh*>(context);
  Session& session = *refresh.session;
  const RefreshTimer timer(session);
  if (refresh.n_queries > 0) count_weights(refresh, session.options(), session.cache().engine().cpu());
  for (int32_t h = 0; h < refresh.layer->n_kv_heads; ++h) refresh_head(refresh, h);
  refresh.n_queries = refresh.n_skipped = 0;
  refresh.due = false;
}

}  // namespace tandem
