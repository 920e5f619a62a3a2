// SPDX-License-Identifier: MIT
// Makes the bounds of chunks of keys (lib/tables/search.h): the smallest and the largest number of each dim, rounded
// outward to bf16. A warp has a chunk of one KV head, and 32 dims at a time. Lane 4 r + j has eight of these dims of every
// eighth key.
#pragma once

#include "cuda/kernels/exchange_wait.cuh"
#include "cuda/kernels/search_keys.cuh"

namespace tandem::cuda {

// bf16 is the upper half of a float. Truncation moves a number towards 0.
__device__ inline uint32_t bf16_at_most(float x) {
  const uint32_t cut = bits_of(x) >> 16;
  return (bits_of(x) & 0xffffu) != 0 && x < 0.0f ? cut + 1 : cut;
}
__device__ inline uint32_t bf16_at_least(float x) { return bf16_at_most(-x) ^ 0x8000u; }

// Bounds of eight dims, over the keys that the lane has seen. NaN does not count.
struct EightBounds {
  float least[kEight], most[kEight];

  __device__ void clear() {
#pragma unroll
    for (int i = 0; i < kEight; ++i) least[i] = INFINITY, most[i] = -INFINITY;
  }
  __device__ void include(const float (&x)[kEight], float factor) {
#pragma unroll
    for (int i = 0; i < kEight; ++i) {
      least[i] = fminf(least[i], x[i] * factor);
      most[i] = fmaxf(most[i], x[i] * factor);
    }
  }
  // Joins the bounds of all lanes that have the same dims.
  __device__ void include_lanes() {
#pragma unroll
    for (int i = 0; i < kEight; ++i)
#pragma unroll
      for (int mask = 4; mask < 32; mask *= 2) {
        least[i] = fminf(least[i], __shfl_xor_sync(~0u, least[i], mask));
        most[i] = fmaxf(most[i], __shfl_xor_sync(~0u, most[i], mask));
      }
  }
  // Stores the bounds of dims from `at` on, of dim, to a row.
  __device__ void store(uint16_t* row, int at, int dim) const {
#pragma unroll
    for (int i = 0; i < kEight; i += kLaneNumbers) {
      if (at + i >= dim) return;
      const auto low = [&](int k) { return bf16_at_most(least[i + k]) | bf16_at_most(least[i + k + 1]) << 16; };
      const auto high = [&](int k) { return bf16_at_least(most[i + k]) | bf16_at_least(most[i + k + 1]) << 16; };
      *reinterpret_cast<uint2*>(row + at + i) = make_uint2(low(0), low(2));
      *reinterpret_cast<uint2*>(row + dim + at + i) = make_uint2(high(0), high(2));
    }
  }
};

// The chunk whose bounds a warp makes.
struct ChunkPlace {
  const DeviceSequences* sequences;
  const DeviceSequence* sequence;
  const DeviceBounds* bounds;
  int kv_head;
  int chunk;
};

template <int32_t kType>
__device__ inline void bound_chunk(const WindowKeys& keys, const ChunkPlace& of) {
  const int lane = static_cast<int>(threadIdx.x % 32), own = lane / 4, n = 1 << of.bounds->chunk_shift;
  const int first = of.chunk << of.bounds->chunk_shift;
  int first_slot = 0;
  const int64_t first_page = find_page(*of.sequences, *of.sequence, keys.page_len, first, &first_slot);
  std::byte* const to = of.bounds->data + first_page + of.kv_head * of.bounds->head_stride +
                        int64_t{first_slot >> of.bounds->chunk_shift} * (4 * keys.dim);
#pragma unroll 1
  for (int at = lane % 4 * kEight; at - lane % 4 * kEight < keys.dim; at += kChunk) {
    EightBounds bounds;
    bounds.clear();
#pragma unroll 4
    for (int key = own; key < n; key += 8) {
      int slot = first_slot + key;
      int64_t page = first_page;
      if (slot >= keys.page_len) page = find_page(*of.sequences, *of.sequence, keys.page_len, first + key, &slot);
      RowPlaces place;
      find_key(keys, page, slot, of.kv_head, place, 0);
      StoredEight<kType> stored;
      stored.load(place.codes[0], place.scales[0], at, keys.dim);
      float x[kEight];
      stored.widen(x);
      bounds.include(x, stored.factor());
    }
    bounds.include_lanes();
    if (own == 0) bounds.store(reinterpret_cast<uint16_t*>(to), at, keys.dim);
  }
}

// Blocks share the chunks of each sequence and length. Warps share the KV heads of a chunk.
template <int32_t kType>
__global__ void __launch_bounds__(32 * kBoundWarps, 2) bound_chunks_kernel(const __grid_constant__ BoundChunksCall call) {
  let_next_start();
  const DeviceSequence sequence = call.bound.sequences.sequences[blockIdx.y];
  wait_for_before();
  const int step = static_cast<int>(gridDim.x) * kBoundWarps;
  for (int b = 0; b < call.bound.n_bounds; ++b) {
    const DeviceBounds& bounds = call.bound.bounds[b];
    const auto first = static_cast<int>(sequence.bounded >> bounds.chunk_shift);
    const int64_t n = max((sequence.end >> bounds.chunk_shift) - first, int64_t{0}) * call.n_kv_heads;
    for (int64_t i = static_cast<int>(blockIdx.x) * kBoundWarps + static_cast<int>(threadIdx.x / 32); i < n; i += step) {
      const int chunk = first + static_cast<int>(i / call.n_kv_heads), head = static_cast<int>(i % call.n_kv_heads);
      bound_chunk<kType>(call.keys, {&call.bound.sequences, &sequence, &bounds, head, chunk});
    }
  }
}

// Called by a search. Makes, for one KV head, the bounds of the newest chunk of each length that is complete before token
// p0. Each length has a warp.
__device__ __noinline__ inline void bound_newest(const SearchCall& call, const DeviceSequence& sequence, int64_t p0) {
  const int level = static_cast<int>(threadIdx.x / 32);
  static_assert(kSearchWarps >= kMostSearchStages);
  if (level >= call.search.n_bounds || sequence.q_len == 0) return;
  const DeviceBounds& bounds = call.search.bounds[level];
  const int64_t chunk = (p0 >> bounds.chunk_shift) - 1;
  if (chunk < 0 || (chunk + 1) << bounds.chunk_shift <= sequence.bounded) return;
  const ChunkPlace of = {&call.search.sequences, &sequence, &bounds, static_cast<int>(blockIdx.y), static_cast<int>(chunk)};
  switch (call.keys.type) {
    case TANDEM_F32:
      return bound_chunk<TANDEM_F32>(call.keys, of);
    case TANDEM_F16:
      return bound_chunk<TANDEM_F16>(call.keys, of);
    case TANDEM_BF16:
      return bound_chunk<TANDEM_BF16>(call.keys, of);
    case TANDEM_E4M3:
      return bound_chunk<TANDEM_E4M3>(call.keys, of);
    case TANDEM_Q8_0:
      return bound_chunk<TANDEM_Q8_0>(call.keys, of);
    default:
      return bound_chunk<TANDEM_Q4_0>(call.keys, of);
  }
}

}  // namespace tandem::cuda
