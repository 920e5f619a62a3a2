// SPDX-License-Identifier: MIT
// Rotary embedding at attend time.
//
// A rotation by position p is a product of rotations by its base-256 digits. So four tables of 256 entries give every
// position below 2^32 with a handful of complex products, and 256 consecutive positions share all but the lowest digit.
// Entries are computed in double precision and stored in f32. The product's error stays near 3e-7. An attention factor is
// applied when a vector is rotated, not in the tables.
#pragma once

#include <cstdint>
#include <memory>
#include <new>
#include <vector>

namespace tandem {

// Rows whose length is a multiple of a cache line begin on one. Vectors of them are read for every key.
struct LineAligned {
  static constexpr std::align_val_t kAlignment{64};
  void operator()(float* data) const { ::operator delete[](data, kAlignment); }
};

struct RopeTable {
  static constexpr int32_t kDigits = 4;

  int32_t n_pairs = 0;       // rope_dims / 2
  bool interleaved = false;  // pairs (2 i, 2 i + 1) instead of (i, i + n_pairs)
  float attn_factor = 1.0f;
  std::vector<float> inv_freq;                    // [n_pairs], rounded; distinguishes tables
  std::unique_ptr<float[], LineAligned> cos_sin;  // [kDigits][256][2][n_pairs]: cos row, then sin row

  const float* row(int32_t digit, int32_t value) const {
    return cos_sin.get() + (static_cast<int64_t>(digit) * 256 + value) * 2 * n_pairs;
  }
};

// inv_freq: [n_pairs], radians per position.
RopeTable make_rope_table(const double* inv_freq, int32_t n_pairs, bool interleaved, float attn_factor);

// cos and sin of position p: out[0..n_pairs) and out[n_pairs..2 n_pairs).
void rope_angles(const RopeTable& table, int64_t position, float* out);

// Rotates the leading 2 n_pairs dims of a vector in place by the angles of rope_angles().
void rope_apply(const RopeTable& table, const float* angles, float* vector);

// Applies rope_angles() and rope_apply() to one vector.
void rope_rotate(const RopeTable& table, int64_t position, float* vector);

}  // namespace tandem
