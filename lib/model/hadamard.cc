// SPDX-License-Identifier: MIT
#include "lib/model/hadamard.h"

#include <cmath>
#include <utility>

namespace tandem {
namespace {

constexpr int64_t kMaxRow = 512;  // the largest power of two below the largest head_dim, 576

// Writes sums and differences of the two halves, interleaved. log2(n) such stages are the whole transform in natural order:
// each stage turns the highest bit of the index into the lowest. All stages read and write contiguously, so all vectorise.
// The textbook's in-place butterflies do not if partners are closer than a vector's length, and take twice the time.
void stage(const float* __restrict from, float* __restrict to, int64_t half) {
  for (int64_t i = 0; i < half; ++i) {
    to[2 * i] = from[i] + from[i + half];
    to[2 * i + 1] = from[i] - from[i + half];
  }
}

}  // namespace

void hadamard_rotate(float* row, int64_t n) {
  float other[kMaxRow];
  float *from = row, *to = other;
  for (int64_t left = n; left > 1; left /= 2) {
    stage(from, to, n / 2);
    std::swap(from, to);
  }
  const float factor = 1.0f / std::sqrt(static_cast<float>(n));
  for (int64_t i = 0; i < n; ++i) row[i] = from[i] * factor;
}

}  // namespace tandem
