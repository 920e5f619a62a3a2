// SPDX-License-Identifier: MIT
// Merges states over disjoint keys.
//
//   m = max lse_i;  w_i = exp(lse_i - m);  o = sum w_i o_i / sum w_i;  lse = m + log(sum w_i)
//
// Only differences to the largest lse are exponentiated, so nothing overflows. A state with lse = -inf is empty and its o is
// not read. If all are empty the result is (0, -inf). NaN passes on. A single state comes out bit for bit.
#pragma once

#include <math.h>
#include <string.h>

#include "cpu/kernels/kernels.h"
#include "cpu/kernels/simd_math_inl.h"

HWY_BEFORE_NAMESPACE();
namespace tandem::cpu {
namespace HWY_NAMESPACE {
namespace {

// Sets out = out * keep + weight * o. With keep = false, `out` is only written. dim: any.
HWY_INLINE void add_weighted(float* out, const float* o, float weight, bool keep, int64_t dim) {
  const F32 d;
  constexpr int64_t kStep = HWY_MAX_BYTES / sizeof(float);
  const Vec w = hn::Set(d, weight);
  int64_t i = 0;
  for (; i + kStep <= dim; i += kStep) {
    const Vec v = hn::LoadU(d, o + i);
    hn::StoreU(keep ? hn::MulAdd(v, w, hn::LoadU(d, out + i)) : hn::Mul(v, w), d, out + i);
  }
  for (; i < dim; ++i) out[i] = keep ? out[i] + o[i] * weight : o[i] * weight;
}

HWY_INLINE void fill_zero(float* out, int64_t dim) { memset(out, 0, static_cast<size_t>(dim) * sizeof(float)); }

// o[0] may be o_out, because it is read before anything is written over it.
inline void merge_row(const MergeJob& job, int64_t r) {
  const bool has_sink = job.sinks != nullptr;
  const float sink = has_sink ? job.sinks[r % job.sink_period] : -HUGE_VALF;
  float m = sink;
  for (int32_t i = 0; i < job.n_states; ++i)
    if (job.lse[i][r] > m) m = job.lse[i][r];
  float sum = 0.0f;
  for (int32_t i = 0; i < job.n_states; ++i) {
    const float lse = job.lse[i][r];
    if (lse != -HUGE_VALF) sum += exp_of(lse - m);
  }
  if (has_sink && sink != -HUGE_VALF) sum += exp_of(sink - m);

  float* out = job.o_out + r * job.head_dim;
  bool keep = false;
  for (int32_t i = 0; i < job.n_states; ++i) {
    const float lse = job.lse[i][r];
    if (lse == -HUGE_VALF) continue;
    add_weighted(out, job.o[i] + r * job.head_dim, exp_of(lse - m) / sum, keep, job.head_dim);
    keep = true;
  }
  if (!keep) fill_zero(out, job.head_dim);
  job.lse_out[r] = sum == 0.0f ? -HUGE_VALF : m + logf(sum);
}

void merge(const MergeJob& job, int64_t row_begin, int64_t row_end) {
  for (int64_t r = row_begin; r < row_end; ++r) merge_row(job, r);
}

// Prefetches a row of every part at once. Other cores have written the parts.
HWY_INLINE void prefetch_parts(const PartialStates& states, int64_t r) {
  constexpr int64_t kLineFloats = 16;
  for (int32_t i = 0; i < states.n_parts; ++i) {
    const float* part = states.parts + i * states.stride;
    for (int64_t d = 0; d < states.head_dim; d += kLineFloats) __builtin_prefetch(part + r * states.head_dim + d, 0, 2);
    __builtin_prefetch(part + int64_t{states.n_rows} * states.head_dim + r, 0, 2);
  }
}

// Merges parts that carry (m, sum, sum of weighted values). Nothing is rounded to an lse in between.
void combine(const PartialStates& states, int64_t row_begin, int64_t row_end, float* o, float* lse) {
  const int64_t o_floats = int64_t{states.n_rows} * states.head_dim;
  prefetch_parts(states, row_begin);
  for (int64_t r = row_begin; r < row_end; ++r) {
    if (r + 1 < row_end) prefetch_parts(states, r + 1);
    const auto m_of = [&](int64_t part) { return states.parts[part * states.stride + o_floats + r]; };
    const auto sum_of = [&](int64_t part) { return states.parts[part * states.stride + o_floats + states.n_rows + r]; };
    float m = -HUGE_VALF;
    for (int32_t i = 0; i < states.n_parts; ++i)
      if (m_of(i) > m) m = m_of(i);
    float sum = 0.0f;
    for (int32_t i = 0; i < states.n_parts; ++i)
      if (sum_of(i) != 0.0f) sum += exp_of(m_of(i) - m) * sum_of(i);
    float* out = o + r * states.head_dim;
    fill_zero(out, states.head_dim);
    for (int32_t i = 0; i < states.n_parts; ++i) {
      if (sum_of(i) == 0.0f) continue;
      const float* part = states.parts + i * states.stride + r * states.head_dim;
      add_weighted(out, part, exp_of(m_of(i) - m) / sum, true, states.head_dim);
    }
    lse[r] = sum == 0.0f ? -HUGE_VALF : m + logf(sum);
  }
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace tandem::cpu
HWY_AFTER_NAMESPACE();
