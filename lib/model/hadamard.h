// SPDX-License-Identifier: MIT
// The orthonormal Walsh-Hadamard rotation of a row, which spreads an outlier dim over all dims.
//
//   y = H x / sqrt(n),  H[i][j] = (-1)^popcount(i & j)
//
// H / sqrt(n) is symmetric and orthogonal, so it is its own inverse, and q.k does not change when both are rotated. Stored
// keys of a rotated layer hold y (lib/tensors/convert.h). A query is rotated when it is converted to f32
// (lib/attend/host_lane.cc).
// Ashkboos et al., "QuaRot: Outlier-Free 4-Bit Inference in Rotated LLMs", 2024.
#pragma once

#include <cstdint>

namespace tandem {

constexpr bool hadamard_has(int64_t n) { return n > 0 && (n & (n - 1)) == 0; }

// Rotates the row in place. n: a power of two, at most 512.
void hadamard_rotate(float* row, int64_t n);

}  // namespace tandem
