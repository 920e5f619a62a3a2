// SPDX-License-Identifier: MIT
// Sums that both kinds of probe kernels (pattern_probe.cuh, wide_probes.cuh) share: sums of exponentials, and the weights
// of bands of distances.
//
// A warp multiplies tiles of 16 keys, one after another, with 64 probes. A tile begins at a multiple of 16 tokens, and its
// keys and the probes are at most six bands apart. The next tile is nearer by one band. So a lane keeps its part of these
// bands in registers, and one band is finished with each tile:
//
//   distances     |  band 4  |  band 3  |  band 2  |  band 1  |  band 0  |  band -1 |     from the tile's first key
//   tile t         finished                                               begins
//   tile t + 1                 finished                                               begins
//
// A lane has the weights of probes r + 8 p and keys c + 8 i, p from 0 to 7 and i from 0 to 1, for two neighbouring r or two
// neighbouring c. Let x be the distance of probe r and key c. Then probe r + 8 p and key c + 8 i are x + 8 (p - i) apart.
// So weights with equal p - i, from -1 to 7, stay together in every lane. Two neighbours of these half bands are a band,
// and x alone says which two.
#pragma once

#include "cuda/kernels/stored_eight.cuh"
#include "cuda/pattern_call.h"

namespace tandem::cuda {

inline constexpr int kProbeGroups = kPatternProbes / kColumns;
static_assert(kProbeTile == 8 * kKeys && kPatternBand == kProbeTile);

__device__ inline void add_pair(float_pair& to, float_pair other) {
  const float most = fmaxf(to.most, other.most);
  to.sum = to.sum * exp2_fast(to.most - most) + other.sum * exp2_fast(other.most - most);
  to.most = most;
}

// The lane's part of the sums of weights of half bands. Weights with p - i = k (above) are in [k + 1]. Bands are finished
// from the farthest on, one with each tile.
struct BandSums {
  static constexpr int kHalves = kProbeGroups + kKeys - 1;
  float halves[2][kHalves];  // of the lane's first r or c, and of its second one
  float carried[2];          // the half band that left `halves` with the last tile and has no band yet
  float waiting[2];          // a band that was finished a tile too early
  bool is_odd[2], is_far[2];

  // x, next_x: of the lane's first r or c and of its second one, for a tile that begins with token 0, less whole bands:
  // from -7 to 22.
  BandSums() = default;
  __device__ BandSums(int x, int next_x) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int of = h == 0 ? x : next_x;
      is_odd[h] = (of >> 3 & 1) != 0;
      is_far[h] = of >= 8;
      carried[h] = waiting[h] = 0.0f;
#pragma unroll
      for (int k = 0; k < kHalves; ++k) halves[h][k] = 0.0f;
    }
  }
  // Adds the weights of probe p. A tile's half bands lie two places behind those of the last tile. Probes with the largest
  // p come first, so that a place is read before it is overwritten. weight, next_weight: with i = 0 and i = 1.
  __device__ __forceinline__ void add(int p, int h, float weight, float next_weight) {
    float(&of)[kHalves] = halves[h];
    if (p == kProbeGroups - 1) of[p + 1] = of[p - 1];
    of[p + 1] += weight;
    of[p] = (p >= 2 ? of[p - 2] : 0.0f) + next_weight;
  }
  // Goes on as after a tile without weights.
  __device__ __forceinline__ void pass() {
#pragma unroll
    for (int p = kProbeGroups - 1; p >= 0; --p)
#pragma unroll
      for (int h = 0; h < 2; ++h) add(p, h, 0.0f, 0.0f);
  }
  // Returns this lane's share of the weights in the farthest band of distances, to which no later tile adds. Called once
  // after each tile.
  __device__ __forceinline__ float finish_band() {
    float sum = 0.0f;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float band = halves[h][kHalves - 1] + (is_odd[h] ? carried[h] : halves[h][kHalves - 2]);
      sum += is_far[h] ? band : waiting[h];
      carried[h] = halves[h][kHalves - 2];
      waiting[h] = band;
    }
    return sum;
  }
};

}  // namespace tandem::cuda
