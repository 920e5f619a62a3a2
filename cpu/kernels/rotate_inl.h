// SPDX-License-Identifier: MIT
// Library RoPE: the keys of a block, converted and rotated into f32 rows that the tiles then read.
//
// The angle of a position is the product of its base-256 digits' angles (lib/rope.h). Consecutive positions share all
// but the lowest digit, so the product of the others, with the attention factor in it, is kept from key to key.
#pragma once

#include "cpu/kernels/scales_inl.h"

HWY_BEFORE_NAMESPACE();
namespace tandem::cpu {
namespace HWY_NAMESPACE {
namespace {

struct Rotator {
  const RopeTable* table;
  int64_t high_position;     // position >> 8 that `high` is for, -1 for none
  float high[kMaxPlainDim];  // cos row, then sin row
  float angles[kMaxPlainDim];
  Row rows[kBlockKeys];  // the rotated keys
};

// out = a * b as complex numbers, rows of cos and sin.
HWY_INLINE void multiply_angles(const float* a, const float* b, int64_t n, float* out) {
  const F32 d;
  int64_t i = 0;
  for (; i + int64_t{kLanes} <= n; i += kLanes) {
    const Vec ac = hn::LoadU(d, a + i), as = hn::LoadU(d, a + n + i);
    const Vec bc = hn::LoadU(d, b + i), bs = hn::LoadU(d, b + n + i);
    hn::StoreU(hn::NegMulAdd(as, bs, hn::Mul(ac, bc)), d, out + i);
    hn::StoreU(hn::MulAdd(ac, bs, hn::Mul(as, bc)), d, out + n + i);
  }
  for (; i < n; ++i) {
    const float ac = a[i], as = a[n + i];
    out[i] = ac * b[i] - as * b[n + i];
    out[n + i] = ac * b[n + i] + as * b[i];
  }
}

inline const float* angles_at(Rotator& rotator, int64_t position) {
  const RopeTable& table = *rotator.table;
  const int64_t n = table.n_pairs;
  if (rotator.high_position != position >> 8 || rotator.high_position < 0) {
    rotator.high_position = position >> 8;
    for (int64_t i = 0; i < n; ++i) {
      rotator.high[i] = table.attn_factor;
      rotator.high[n + i] = 0.0f;
    }
    for (int32_t digit = 1; digit < RopeTable::kDigits; ++digit) {
      const auto value = static_cast<int32_t>((position >> (8 * digit)) & 255);
      if (value != 0) multiply_angles(rotator.high, table.row(digit, value), n, rotator.high);
    }
  }
  multiply_angles(table.row(0, static_cast<int32_t>(position & 255)), rotator.high, n, rotator.angles);
  return rotator.angles;
}

inline void rotate_row(const float* angles, int64_t n, bool interleaved, float* x) {
  const F32 d;
  int64_t i = 0;
  for (; i + int64_t{kLanes} <= n; i += kLanes) {
    const Vec c = hn::LoadU(d, angles + i), s = hn::LoadU(d, angles + n + i);
    Vec a, b;
    if (interleaved) {
      hn::LoadInterleaved2(d, x + 2 * i, a, b);
    } else {
      a = hn::LoadU(d, x + i);
      b = hn::LoadU(d, x + n + i);
    }
    const Vec a_out = hn::NegMulAdd(b, s, hn::Mul(a, c)), b_out = hn::MulAdd(b, c, hn::Mul(a, s));
    if (interleaved) {
      hn::StoreInterleaved2(a_out, b_out, d, x + 2 * i);
    } else {
      hn::StoreU(a_out, d, x + i);
      hn::StoreU(b_out, d, x + n + i);
    }
  }
  for (; i < n; ++i) {
    float& a = x[interleaved ? 2 * i : i];
    float& b = x[interleaved ? 2 * i + 1 : i + n];
    const float a_in = a, b_in = b;
    a = a_in * angles[i] - b_in * angles[n + i];
    b = a_in * angles[n + i] + b_in * angles[i];
  }
}

// Keys of the block into `to`, [s.n, k_head_dim], and pointers to them into rotator.rows.
inline void rotate_block(Rotator& rotator, const KeyStream& s, const Layer& layer, const ScaleBlock& scales, float* to) {
  const int64_t n_k_scales = scale_counts(layer).k;
  const KvRun* run = s.block_run;
  int64_t offset = s.block_offset;
  Prefetcher ahead = start_prefetch(s.k, s.k_apart, s.k_stride);
  for (int64_t j = 0; j < s.n; ++j, ++offset) {
    for (; offset == run->n_tokens; ++run) offset = 0;
    for (size_t byte = 0; byte < ahead.row_bytes; byte += kLine) prefetch_next(ahead, ahead.stream++ % kStreams);
    float* row = to + j * layer.k_head_dim;
    row_to_f32(layer.k_type, s.k[j], scales.k + j * n_k_scales, row, layer.k_head_dim);
    const int64_t position = run->positions != nullptr ? run->positions[offset] : run->first_position + offset;
    rotate_row(angles_at(rotator, position), rotator.table->n_pairs, rotator.table->interleaved, row);
    rotator.rows[j] = reinterpret_cast<Row>(row);
  }
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace tandem::cpu
HWY_AFTER_NAMESPACE();
