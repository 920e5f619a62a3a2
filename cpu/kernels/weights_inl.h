// SPDX-License-Identifier: MIT
// Attention weights of finished queries: sums them over query tokens for the re-evaluation of selections, and adds one
// query's weights to the moving average.
#pragma once

#include "cpu/kernels/attend_span_inl.h"

HWY_BEFORE_NAMESPACE();
namespace tandem::cpu {
namespace HWY_NAMESPACE {
namespace {

// Adds exp(logit - lse) * coeff of one row to its query head's sums. `out` points to the block's first key. lse may come
// from a kernel with other rounding, so a logit may be a little above it. exp_at_most_1() handles that too.
inline void add_weights(const View& view, const float* logits, float lse, float coeff, float* out) {
  const F32 d;
  const Vec shift = hn::Set(d, lse), factor = hn::Set(d, coeff);
  const int64_t n = view.keys.n, n_whole = view.picked == nullptr ? n - n % int64_t{kLanes} : 0;
  const auto weights_at = [&](int64_t j) HWY_ATTR {
    return hn::Mul(factor, exp_at_most_1(d, hn::Sub(hn::LoadU(d, logits + j), shift)));
  };
  for (int64_t j = 0; j < n_whole; j += kLanes) hn::StoreU(hn::Add(hn::LoadU(d, out + j), weights_at(j)), d, out + j);
  HWY_ALIGN float weights[kLanes];
  for (int64_t j = n_whole; j < n; j += kLanes) {
    hn::Store(weights_at(j), d, weights);
    for (int64_t i = j; i < n && i < j + int64_t{kLanes}; ++i)
      out[view.picked == nullptr ? i : view.picked[i]] += weights[i - j];
  }
}

// A query that saw no key, or a NaN, has no weights to count.
inline bool is_finite(float lse) { return lse > -HUGE_VALF && lse < HUGE_VALF; }

inline void weigh_view(const WeightJob& job, const View& view, int64_t key_at, bool by_tiles, Rotator& rotator,
                       SpanScratch& s) {
  const Layer& layer = *job.layer;
  dot_view(layer, job.q, view, by_tiles, rotator, s);
  for (int64_t r = view.row_begin; r < view.row_end; ++r) {
    const float coeff = job.coeff[r / layer.group_size];
    if (!is_finite(job.lse[r]) || coeff == 0.0f) continue;
    float* row = s.logits + (r - view.row_begin) * kBlockKeys;
    finish_logits(layer, {nullptr, 1.0f}, row, view.keys.n);
    add_weights(view, row, job.lse[r], coeff, job.out + r % layer.group_size * job.out_stride + key_at);
  }
}

// Weighs rows [row_begin, row_end), at most kSpanRows, over all keys.
inline void weigh_rows(const WeightJob& job, int32_t row_begin, int32_t row_end, bool by_tiles, SpanScratch& s) {
  const Layer& layer = *job.layer;
  s.packed_begin = s.packed_end = -1;
  BlockLoop loop;
  open_block_loop(loop, layer);
  KeyStream& stream = loop.stream;
  start(stream, job.runs, {0, job.first_offset}, job.n_keys, layer, false);
  for (int64_t at = 0; next_block(stream); at += stream.n) {
    open_views(loop.views, stream, job.visibility, row_begin, row_end);
    if (loop.views.all_see_nothing) continue;
    load_block(loop, layer, s.scales);
    View view;
    bool is_fetched = false;
    while (next_view(loop.views, stream, &view)) {
      attach_scales(s.scales, layer, view, s.seen_scales);
      attach_positions(view, loop.rotator);
      if (view.picked == nullptr && !is_fetched) {
        view.keys.k_ahead = start_prefetch(stream.k, stream.k_lead, stream.k_bytes);
        is_fetched = true;
      }
      weigh_view(job, view, at, by_tiles, loop.rotator, s);
    }
  }
}

// The keys of a job fit into the second-level cache (lib/select/hgca_judge.cc). They are read again for each tile of rows,
// and the queries of a tile are packed once.
void attn_weights(const WeightJob& job, SpanScratch& s) {
  const Layer& layer = *job.layer;
  for (int64_t g = 0; g < layer.group_size; ++g) {
    float* out = job.out + g * job.out_stride;
    if (job.keep == 0.0f)
      memset(out, 0, static_cast<size_t>(job.n_keys) * sizeof(float));
    else
      for (int64_t j = 0; j < job.n_keys; ++j) out[j] *= job.keep;
  }
  const bool by_tiles = takes_tiles(layer);
  s.target = kTarget;
  if (by_tiles) open_tiles();
  for (int32_t r = 0; r < job.n_rows; r += kSpanRows)
    weigh_rows(job, r, r + kSpanRows < job.n_rows ? r + kSpanRows : job.n_rows, by_tiles, s);
  if (by_tiles) close_tiles();
}

void observe(float* maw, const float* logits, int64_t n_keys, float lse, float alpha) {
  const F32 d;
  const Vec shift = hn::Set(d, lse), rate = hn::Set(d, alpha), keep = hn::Set(d, 1.0f - alpha);
  const bool empty = !is_finite(lse);
  for (int64_t i = 0; i < n_keys; i += kLanes) {
    const auto n = static_cast<size_t>(n_keys - i < int64_t{kLanes} ? n_keys - i : kLanes);
    Vec mean, logit;
    float tail[2][kLanes] = {};
    if (n < kLanes) {
      memcpy(tail[0], maw + i, n * sizeof(float));
      memcpy(tail[1], logits + i, n * sizeof(float));
      mean = hn::LoadU(d, tail[0]);
      logit = hn::LoadU(d, tail[1]);
    } else {
      mean = hn::LoadU(d, maw + i);
      logit = hn::LoadU(d, logits + i);
    }
    const Vec weight = empty ? hn::Zero(d) : exp_of(d, hn::Sub(logit, shift));
    mean = hn::MulAdd(rate, weight, hn::Mul(keep, mean));  // mean + rate (weight - mean) would lose small weights
    if (n < kLanes) {
      hn::StoreU(mean, d, tail[0]);
      memcpy(maw + i, tail[0], n * sizeof(float));
    } else {
      hn::StoreU(mean, d, maw + i);
    }
  }
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace tandem::cpu
HWY_AFTER_NAMESPACE();
