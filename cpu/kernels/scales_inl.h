// SPDX-License-Identifier: MIT
// Scales of a block's keys, for storage types that have scales: widened to f32 once, for all rows of the span.
#pragma once

#include "cpu/kernels/convert_inl.h"
#include "cpu/kernels/key_block_inl.h"

HWY_BEFORE_NAMESPACE();
namespace tandem::cpu {
namespace HWY_NAMESPACE {
namespace {

// Number of scales of a row that are stored apart from the row.
struct ScaleCounts {
  int64_t k, v;
};
HWY_INLINE int64_t scales_apart(int32_t dtype, int64_t head_dim) {
  return stored_dtype(dtype).in_blocks ? 0 : n_scales(dtype, head_dim);
}
HWY_INLINE ScaleCounts scale_counts(const Layer& layer) {
  return {scales_apart(layer.k_type, layer.k_head_dim), scales_apart(layer.v_type, layer.v_head_dim)};
}

// Gathers the scales between the codes of up to kBlockKeys rows of V, a row of kBlockKeys for each scale of a key. Called
// for a few keys just before V is read, because rows further on have not been prefetched yet.
inline void gather_v_scales(const Layer& layer, const Row* v, int64_t n, float* to) {
  const int64_t n_groups = n_scales(layer.v_type, layer.v_head_dim), block_bytes = block_bytes_of(layer.v_type);
  uint16_t f16[kBlockKeys + HWY_MAX_BYTES / sizeof(float)];
  for (int64_t g = 0; g < n_groups; ++g) {
    for (int64_t j = 0; j < n; ++j) memcpy(f16 + j, v[j] + g * block_bytes, sizeof(uint16_t));
    widen_scales(f16, n, to + g * kBlockKeys);
  }
}

// Transposes rows of `stride` scales to a row of kBlockKeys for each of the first n_scales. Reads and writes whole vectors
// of keys.
inline void transpose_scales(const float* from, int64_t stride, int64_t n, int64_t n_scales, float* to) {
  const F32 d;
  for (int64_t j = 0; j < n; j += kLanes) {
    const float* rows = from + j * stride;
    Vec p0 = hn::Zero(d), p1 = p0, p2 = p0, p3 = p0;
    if (stride == 4)
      hn::LoadInterleaved4(d, rows, p0, p1, p2, p3);
    else if (stride == 3)
      hn::LoadInterleaved3(d, rows, p0, p1, p2);
    else if (stride == 2)
      hn::LoadInterleaved2(d, rows, p0, p1);
    const SizedVec part[4] = {p0, p1, p2, p3};
    if (stride <= 4) {
      for (int64_t g = 0; g < n_scales; ++g) hn::StoreU(part[g], d, to + g * kBlockKeys + j);
      continue;
    }
    for (int64_t i = 0; i < int64_t{kLanes}; ++i)
      for (int64_t g = 0; g < n_scales; ++g) to[g * kBlockKeys + j + i] = rows[i * stride + g];
  }
}

// Widens the scales of the stream's block to [n][n_scales] f32.
inline void widen_block(const KeyStream& s, bool of_v, int64_t n_scales, float* to) {
  const KvRun* run = s.block_run;
  int64_t offset = s.block_offset;
  for (int64_t at = 0; at < s.n; ++run, offset = 0) {
    const int64_t n = run->n_tokens - offset < s.n - at ? run->n_tokens - offset : s.n - at;
    const auto* f16 = static_cast<const uint16_t*>(of_v ? run->v_scales : run->k_scales);
    if (n > 0) widen_scales(f16 + offset * n_scales, n * n_scales, to + at * n_scales);
    at += n;
  }
}

HWY_INLINE void prefetch_bytes(const void* first, int64_t n) {
  const auto at = reinterpret_cast<uintptr_t>(first), end = at + static_cast<uintptr_t>(n);
  for (uintptr_t line = at & ~uintptr_t{kLine - 1}; line < end; line += kLine)
    prefetch_line(reinterpret_cast<Row>(line), true);
}

inline void prefetch_scales(NextKeys from, int64_t n, const ScaleCounts& counts) {
  for (; n > 0 && from.n_runs > 0; ++from.run, --from.n_runs, from.offset = 0) {
    const int64_t rest = from.run->n_tokens - from.offset, count = rest < n ? rest : n;
    const auto ask = [&](const void* scales, int64_t n_scales) HWY_ATTR {
      prefetch_bytes(static_cast<const uint16_t*>(scales) + from.offset * n_scales,
                     count * n_scales * int64_t{sizeof(uint16_t)});
    };
    if (counts.k > 0) ask(from.run->k_scales, counts.k);
    if (counts.v > 0) ask(from.run->v_scales, counts.v);
    n -= count;
  }
}

// A block begins with all of its scales. If they were not prefetched while the block before was computed, the block would
// wait for them (a tenth of decode on 16 cores). The last block prefetches the scales that the thread reads next.
inline void prefetch_next_scales(const KeyStream& s, const ScaleCounts& counts) {
  if (s.n_remaining == 0) return prefetch_scales(s.after, kBlockKeys, counts);
  NextKeys next{s.block_run, s.block_offset, INT64_MAX};
  skip_keys(next.run, next.offset, s.n);
  prefetch_scales(next, s.n_remaining < kBlockKeys ? s.n_remaining : kBlockKeys, counts);
}

// Loads the scales of the stream's block. If V aliases K, its scales are the first ones of K.
inline void load_scales(const KeyStream& s, const Layer& layer, ScaleBlock& scales) {
  const ScaleCounts counts = scale_counts(layer);
  if (counts.k + counts.v > 0) prefetch_next_scales(s, {counts.k, layer.v_aliases_k ? 0 : counts.v});
  if (counts.k > 0) widen_block(s, false, counts.k, scales.k);
  if (counts.v == 0) return;
  if (layer.v_aliases_k) return transpose_scales(scales.k, counts.k, s.n, counts.v, scales.v);
  HWY_ALIGN float rows[kBlockKeys * max_scales(kMaxPlainDim)];
  widen_block(s, true, counts.v, rows);
  transpose_scales(rows, counts.v, s.n, counts.v, scales.v);
}

// Gives a view the scales of its keys. The scales of picked keys are copied to `picked`.
inline void attach_scales(const ScaleBlock& scales, const Layer& layer, View& view, ScaleBlock& picked) {
  const ScaleCounts counts = scale_counts(layer);
  view.keys.n_k_scales = counts.k;
  view.keys.k_scales = scales.k;
  view.keys.v_scales = scales.v;
  if (view.picked == nullptr || counts.k + counts.v == 0) return;
  for (int64_t j = 0; j < view.keys.n; ++j) {
    const int64_t from = view.picked[j];
    for (int64_t g = 0; g < counts.k; ++g) picked.k[j * counts.k + g] = scales.k[from * counts.k + g];
    for (int64_t g = 0; g < counts.v; ++g) picked.v[g * kBlockKeys + j] = scales.v[g * kBlockKeys + from];
  }
  view.keys.k_scales = picked.k;
  view.keys.v_scales = picked.v;
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace tandem::cpu
HWY_AFTER_NAMESPACE();
