// SPDX-License-Identifier: MIT
// Attention weights of finished queries: summed over query tokens for the re-evaluation of selections, and one query's
// into the moving average.
#pragma once

#include "cpu/kernels/attend_span_inl.h"

HWY_BEFORE_NAMESPACE();
namespace tandem::cpu {
namespace HWY_NAMESPACE {
namespace {

inline constexpr int64_t kWeightRows = 16;

// exp(logit - lse) * coeff of one row added to its query head's sums; out is at the block's first key.
inline void add_weights(const View& view, const float* logits, float lse, float coeff, float* out) {
  const F32 d;
  const Vec shift = hn::Set(d, lse), factor = hn::Set(d, coeff);
  HWY_ALIGN float weights[kBlockKeys];
  const int64_t n = view.keys.n;
  for (int64_t j = 0; j < n; j += kLanes)
    hn::Store(hn::Mul(factor, exp_of(d, hn::Sub(hn::LoadU(d, logits + j), shift))), d, weights + j);
  if (view.picked == nullptr)
    for (int64_t j = 0; j < n; ++j) out[j] += weights[j];
  else
    for (int64_t j = 0; j < n; ++j) out[view.picked[j]] += weights[j];
}

// A query that saw nothing, or a NaN, has no weights to count.
inline bool is_finite(float lse) { return lse > -HUGE_VALF && lse < HUGE_VALF; }

inline void weigh_view(const WeightJob& job, const View& view, int64_t key_at, Rotator& rotator, float* logits,
                       float* packed) {
  const Layer& layer = *job.layer;
  const auto k_dim = static_cast<size_t>(layer.k_head_dim);
  KeyList keys = view.keys;
  for (int64_t first = view.row_begin; first < view.row_end; first += kWeightRows, keys.k_ahead = {}) {
    const int64_t n_rows = view.row_end - first < kWeightRows ? view.row_end - first : kWeightRows;
    const float* q = job.q + static_cast<size_t>(first) * k_dim;
    if (layer.rope != nullptr) {
      rotated_dots_of(layer.k_type, rotator, {q, n_rows, layer.k_head_dim, layer.sm_scale, packed}, keys, logits);
    } else {
      pack_rows_of(layer.k_type, q, n_rows, k_dim, layer.sm_scale, packed);
      dots_of(layer.k_type, packed, n_rows, k_dim, keys, logits);
    }
    for (int64_t r = first; r < first + n_rows; ++r) {
      const float coeff = job.coeff[r / layer.group_size];
      if (!is_finite(job.lse[r]) || coeff == 0.0f) continue;
      float* row = logits + (r - first) * kBlockKeys;
      finish_logits(layer, row, keys.n);
      add_weights(view, row, job.lse[r], coeff, job.out + r % layer.group_size * job.n_keys + key_at);
    }
  }
}

// The calling thread's stack holds all working memory, about 150 KiB.
void attn_weights(const WeightJob& job) {
  const Layer& layer = *job.layer;
  HWY_ALIGN float logits[kWeightRows * kBlockKeys];
  HWY_ALIGN float q[kWeightRows * kMaxHeadDim];
  ScaleBlock scales, seen_scales;
  memset(job.out, 0, static_cast<size_t>(layer.group_size * job.n_keys) * sizeof(float));
  if (job.n_rows == 0) return;
  BlockLoop loop;
  open_block_loop(loop, layer);
  KeyStream& stream = loop.stream;
  start(stream, job.runs, {}, job.n_keys, layer);
  for (int64_t at = 0; next_block(stream); at += stream.n) {
    open_views(loop.views, stream, job.visibility, 0, job.n_rows);
    if (loop.views.all_see_nothing) continue;
    load_block(loop, layer, scales);
    View view;
    bool is_fetched = false;
    while (next_view(loop.views, stream, &view)) {
      attach_scales(scales, layer, view, seen_scales);
      attach_positions(view, loop.rotator);
      if (view.picked == nullptr && !is_fetched) {
        view.keys.k_ahead = start_prefetch(stream.k, stream.k_apart, stream.k_stride);
        is_fetched = true;
      }
      weigh_view(job, view, at, loop.rotator, logits, q);
    }
  }
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
