// SPDX-License-Identifier: MIT
#include "lib/model/rope.h"

#include <cmath>

namespace tandem {

RopeTable make_rope_table(const double* inv_freq, int32_t n_pairs, bool interleaved, float attn_factor) {
  RopeTable table;
  table.n_pairs = n_pairs;
  table.interleaved = interleaved;
  table.attn_factor = attn_factor;
  for (int32_t i = 0; i < n_pairs; ++i) table.inv_freq.push_back(static_cast<float>(inv_freq[i]));
  table.cos_sin.reset(new (LineAligned::kAlignment) float[static_cast<size_t>(RopeTable::kDigits) * 256 * 2 * n_pairs]);
  float* out = table.cos_sin.get();
  double step = 1.0;
  for (int32_t digit = 0; digit < RopeTable::kDigits; ++digit, step *= 256.0) {
    for (int32_t value = 0; value < 256; ++value, out += int64_t{2} * n_pairs) {
      for (int32_t i = 0; i < n_pairs; ++i) {
        const double angle = step * value * inv_freq[i];
        out[i] = static_cast<float>(std::cos(angle));
        out[n_pairs + i] = static_cast<float>(std::sin(angle));
      }
    }
  }
  return table;
}

void rope_angles(const RopeTable& table, int64_t position, float* out) {
  const int32_t n = table.n_pairs;
  const float* lowest = table.row(0, static_cast<int32_t>(position & 255));
  for (int32_t i = 0; i < 2 * n; ++i) out[i] = lowest[i];
  for (int32_t digit = 1; digit < RopeTable::kDigits; ++digit) {
    const auto value = static_cast<int32_t>((position >> (8 * digit)) & 255);
    if (value == 0) continue;
    const float* row = table.row(digit, value);
    for (int32_t i = 0; i < n; ++i) {
      const float c = out[i], s = out[n + i];
      out[i] = c * row[i] - s * row[n + i];
      out[n + i] = c * row[n + i] + s * row[i];
    }
  }
}

void rope_apply(const RopeTable& table, const float* angles, float* vector) {
  const int32_t n = table.n_pairs;
  for (int32_t i = 0; i < n; ++i) {
    float& a = vector[table.interleaved ? 2 * i : i];
    float& b = vector[table.interleaved ? 2 * i + 1 : i + n];
    const float c = angles[i] * table.attn_factor, s = angles[n + i] * table.attn_factor;
    const float x = a, y = b;
    a = x * c - y * s;
    b = x * s + y * c;
  }
}

void rope_rotate(const RopeTable& table, int64_t position, float* vector) {
  std::vector<float> angles(static_cast<size_t>(2 * table.n_pairs));
  rope_angles(table, position, angles.data());
  rope_apply(table, angles.data(), vector);
}

}  // namespace tandem
