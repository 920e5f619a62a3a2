// SPDX-License-Identifier: MIT
// The steps of rebuild() before and after its products: hidden states are normalised, and sums become rows of pages.
//
//   normalise   x [n_rows, dim], as stored  ->  norm(x), rounded to the weights' type; a block has a row
//   store       y [n_rows, n_heads, dim] f32  ->  + bias, rotated, rounded to the storage type as append() does, into pages
//
// Products run beside these kernels, leave them little room, and wait for them. So the share of the device that a kernel
// takes counts, not its time alone.
#pragma once

#include "cuda/exchange_call.h"
#include "cuda/kernels/exchange_wait.cuh"
#include "cuda/kernels/rotate.cuh"

namespace tandem::cuda {

inline constexpr int kNormWarps = 8, kStoreWarps = 8;

struct NormCall {
  const void* x;
  void* to;
  const float *weight, *bias;  // null where the norm has none
  int32_t dim, x_type, to_type;
  int64_t x_bytes, x_scales_at;  // of a row of x; offset of its scales
  int32_t norm;
  float eps;
};

struct StoreCall {
  const float* y;
  const float* bias;  // [n_heads * dim] or null
  int64_t n_rows;
  int32_t n_heads, dim, type;
  int32_t four_bytes;  // bytes of four numbers' codes
  std::byte *codes, *scales;
  int64_t head_stride[2], row_bytes[2];  // of codes, and of scales
  int64_t page_bytes;
  int32_t page_len;
  Rotation rotation;
  const int64_t* page_positions;  // position of slot 0 of each page, where rows are rotated
};
struct StoreCalls {
  StoreCall of[2];  // K, V
};

__device__ inline float sum_of_block(float x, float* room) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) x += __shfl_xor_sync(~0u, x, mask);
  __syncthreads();  // all threads have read the room's last contents
  if (threadIdx.x % 32 == 0) room[threadIdx.x / 32] = x;
  __syncthreads();
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kNormWarps; ++i) sum += room[i];
  return sum;
}

// ---- numbers of 16 bits, eight at a time
// ----------------------------------------------------------------------------------

inline constexpr int kEight = 8;
using Eight = float[kEight];

template <bool kIsBf16>
__device__ inline void widen_eight(const uint4& bits, Eight& x) {
  const uint32_t pairs[] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
  for (int i = 0; i < kEight / 2; ++i) {
    const float2 pair = kIsBf16 ? make_float2(__uint_as_float(pairs[i] << 16), __uint_as_float(pairs[i] & 0xffff0000u))
                                : __half22float2(reinterpret_cast<const __half2&>(pairs[i]));
    x[2 * i] = pair.x;
    x[2 * i + 1] = pair.y;
  }
}

// Rounds as round_four(). The device's own conversion keeps less of a NaN, so pairs with a NaN take another way.
template <bool kIsBf16>
__device__ inline uint32_t round_pair(float x, float y) {
  if (x != x || y != y) return kIsBf16 ? to_bf16(x) | to_bf16(y) << 16 : to_f16(x) | to_f16(y) << 16;
  if (kIsBf16) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(x, y);
    return reinterpret_cast<const uint32_t&>(pair);
  }
  const __half2 pair = __floats2half2_rn(x, y);
  return reinterpret_cast<const uint32_t&>(pair);
}
template <bool kIsBf16>
__device__ inline uint4 round_eight(const Eight& x) {
  return make_uint4(round_pair<kIsBf16>(x[0], x[1]), round_pair<kIsBf16>(x[2], x[3]), round_pair<kIsBf16>(x[4], x[5]),
                    round_pair<kIsBf16>(x[6], x[7]));
}

// Loads eight numbers from any address that f32 allows.
__device__ inline void load_vector(const float* from, int first, Eight& x) {
  float halves[2][kLaneNumbers];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    widen_four(TANDEM_F32, load_four(from, TANDEM_F32, first + h * kLaneNumbers), halves[h]);
#pragma unroll
    for (int i = 0; i < kLaneNumbers; ++i) x[h * kLaneNumbers + i] = halves[h][i];
  }
}

// ---- normalise -------------------------------------------------------------------------------------------------------

// Groups of eight numbers that a thread keeps of its row, unconverted, so that it reads rows of up to 8,192 numbers once.
inline constexpr int kHeldEights = 4;

__device__ inline int first_held(int j) { return (j * kNormWarps * 32 + static_cast<int>(threadIdx.x)) * kEight; }

// A type of rows. load() reads eight numbers unconverted, and widen() converts them to f32.
template <bool kIsBf16>
struct Halves {
  using Held = uint4;
  __device__ static Held load(const std::byte* row, const std::byte*, int first) {
    return *reinterpret_cast<const uint4*>(row + first * 2);
  }
  __device__ static void widen(const Held& held, Eight& x) { widen_eight<kIsBf16>(held, x); }
};
// d c: one scale for 32 codes of 8 bits, or of 4 bits less 8.
template <bool kIsQ8>
struct Scaled {
  struct Held {
    uint32_t codes[kIsQ8 ? 2 : 1];
    uint32_t scale;
  };
  __device__ static Held load(const std::byte* row, const std::byte* scales, int first) {
    Held held;
#pragma unroll
    for (int i = 0; i < (kIsQ8 ? 2 : 1); ++i)
      held.codes[i] = reinterpret_cast<const uint32_t*>(row)[first / (kIsQ8 ? 4 : 8) + i];
    held.scale = reinterpret_cast<const uint16_t*>(scales)[first / 32];
    return held;
  }
  __device__ static void widen(const Held& held, Eight& x) {
    const float scale = from_f16(held.scale);
#pragma unroll
    for (int i = 0; i < kEight; ++i)
      x[i] = scale * static_cast<float>(kIsQ8 ? static_cast<int8_t>(held.codes[i / 4 % (kIsQ8 ? 2 : 1)] >> i % 4 * 8)
                                              : static_cast<int>(held.codes[0] >> i * 4 & 15u) - 8);
  }
};
// d c + m: a scale and a minimum for 64 codes of 4 bits.
struct FromMinimum {
  struct Held {
    uint32_t codes, scales;
  };
  __device__ static Held load(const std::byte* row, const std::byte* scales, int first) {
    return {reinterpret_cast<const uint32_t*>(row)[first / 8], reinterpret_cast<const uint32_t*>(scales)[first / 64]};
  }
  __device__ static void widen(const Held& held, Eight& x) {
    const float scale = from_f16(held.scales & 0xffffu), minimum = from_f16(held.scales >> 16);
#pragma unroll
    for (int i = 0; i < kEight; ++i) x[i] = __fmaf_rn(scale, static_cast<float>(held.codes >> i * 4 & 15u), minimum);
  }
};

// A row of x. A thread holds the first groups of its part.
template <class Type>
struct HeldRow {
  const std::byte *row, *scales;
  int dim;
  typename Type::Held held[kHeldEights];

  __device__ explicit HeldRow(const NormCall& call)
      : row(static_cast<const std::byte*>(call.x) + blockIdx.x * call.x_bytes),
        scales(row + call.x_scales_at),
        dim(call.dim) {
#pragma unroll
    for (int j = 0; j < kHeldEights; ++j)
      if (first_held(j) < dim) held[j] = Type::load(row, scales, first_held(j));
  }

  template <class F>
  __device__ void for_eights(F f) const {
    Eight x;
#pragma unroll
    for (int j = 0; j < kHeldEights; ++j)
      if (first_held(j) < dim) {
        Type::widen(held[j], x);
        f(first_held(j), x);
      }
    for (int j = kHeldEights; first_held(j) < dim; ++j) {
      Type::widen(Type::load(row, scales, first_held(j)), x);
      f(first_held(j), x);
    }
  }
};

template <class Type, bool kToBf16>
__device__ inline void normalise_row(const NormCall& call, float* room) {
  uint4* const to = static_cast<uint4*>(call.to) + int64_t{blockIdx.x} * (call.dim / kEight);
  const HeldRow<Type> row(call);
  float mean = 0.0f, scale = 1.0f;
  if (call.norm == TANDEM_NORM_LAYER) {
    float sum = 0.0f;
    row.for_eights([&](int, const Eight& x) { sum += ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7])); });
    mean = sum_of_block(sum, room) / static_cast<float>(call.dim);
  }
  if (call.norm != TANDEM_NORM_NONE) {
    float sum = 0.0f;
    row.for_eights([&](int, const Eight& x) {
#pragma unroll
      for (int i = 0; i < kEight; ++i) sum += (x[i] - mean) * (x[i] - mean);
    });
    scale = 1.0f / sqrtf(sum_of_block(sum, room) / static_cast<float>(call.dim) + call.eps);
  }
  row.for_eights([&](int first, Eight& x) {
    Eight weight, bias;
    if (call.weight != nullptr) load_vector(call.weight, first, weight);
    if (call.bias != nullptr) load_vector(call.bias, first, bias);
#pragma unroll
    for (int i = 0; i < kEight; ++i) {
      x[i] = (x[i] - mean) * scale;
      if (call.weight != nullptr) x[i] *= weight[i];
      if (call.bias != nullptr) x[i] += bias[i];
    }
    to[first / kEight] = round_eight<kToBf16>(x);
  });
}

template <class Type>
__device__ inline void normalise_row_to(const NormCall& call, float* room) {
  if (call.to_type == TANDEM_BF16) return normalise_row<Type, true>(call, room);
  normalise_row<Type, false>(call, room);
}

__global__ void __launch_bounds__(32 * kNormWarps) norm_kernel(const __grid_constant__ NormCall call) {
  __shared__ float room[kNormWarps];
  begin_behind();
  switch (call.x_type) {
    case TANDEM_F16:
      return normalise_row_to<Halves<false>>(call, room);
    case TANDEM_BF16:
      return normalise_row_to<Halves<true>>(call, room);
    case TANDEM_Q8_0:
      return normalise_row_to<Scaled<true>>(call, room);
    case TANDEM_Q4_0:
      return normalise_row_to<Scaled<false>>(call, room);
    default:
      return normalise_row_to<FromMinimum>(call, room);
  }
}

// ---- store -------------------------------------------------------------------------------------------------------------

// The most frequent case, types of 16 bits: a thread has the same eight numbers of a head in kHalvesRows consecutive rows.
inline constexpr int kHalvesRows = 8, kHalvesAtOnce = 4;

template <bool kIsBf16>
__device__ inline void store_halves(const StoreCall& call) {
  const int n_out = call.n_heads * call.dim, first = static_cast<int>(blockIdx.y * blockDim.x + threadIdx.x) * kEight;
  if (first >= n_out) return;
  const int head = first / call.dim, row = static_cast<int>(blockIdx.x) * kHalvesRows;
  const auto n_rows = static_cast<int>(min(call.n_rows - row, int64_t{kHalvesRows}));
  const float* from = call.y + int64_t{row} * n_out + first;
  std::byte* to = call.codes + row / call.page_len * call.page_bytes + head * call.head_stride[0] +
                  row % call.page_len * call.row_bytes[0] + (first - head * call.dim) * 2;
  Eight bias = {};
  if (call.bias != nullptr) load_vector(call.bias, first, bias);
#pragma unroll
  for (int begin = 0; begin < kHalvesRows; begin += kHalvesAtOnce) {
    float4 sums[kHalvesAtOnce][2];
#pragma unroll
    for (int r = 0; r < kHalvesAtOnce; ++r) {
      const auto* of_row = reinterpret_cast<const float4*>(from + int64_t{begin + r} * n_out);
      if (begin + r < n_rows) sums[r][0] = of_row[0], sums[r][1] = of_row[1];
    }
#pragma unroll
    for (int r = 0; r < kHalvesAtOnce; ++r) {
      if (begin + r >= n_rows) return;
      const float4 &a = sums[r][0], &b = sums[r][1];
      const Eight x = {a.x + bias[0], a.y + bias[1], a.z + bias[2], a.w + bias[3],
                       b.x + bias[4], b.y + bias[5], b.z + bias[6], b.w + bias[7]};
      *reinterpret_cast<uint4*>(to + (begin + r) * call.row_bytes[0]) = round_eight<kIsBf16>(x);
    }
  }
}

__global__ void __launch_bounds__(32 * kStoreWarps) store_halves_kernel(const __grid_constant__ StoreCalls calls) {
  begin_behind();
  const StoreCall& call = calls.of[blockIdx.z];
  if (call.type == TANDEM_BF16) return store_halves<true>(call);
  store_halves<false>(call);
}

// Stores all other rows, rotated keys included: a warp has a head's row.
__global__ void __launch_bounds__(32 * kStoreWarps) store_kernel(const __grid_constant__ StoreCall call) {
  __shared__ float rooms[kStoreWarps][kFours * kWarpNumbers];
  begin_behind();
  const int64_t n = call.n_rows * call.n_heads, step = int64_t{gridDim.x} * kStoreWarps;
  for (int64_t at = int64_t{blockIdx.x} * kStoreWarps + threadIdx.x / 32; at < n; at += step) {
    const int64_t row = at / call.n_heads, page = row / call.page_len, slot = row % call.page_len;
    const auto head = static_cast<int>(at % call.n_heads);
    float x[kFours][kLaneNumbers] = {};
#pragma unroll
    for (int j = 0; j < kFours; ++j) {
      const int first = first_of_four(j);
      if (first >= call.dim) continue;
      widen_four(TANDEM_F32, load_four(call.y, TANDEM_F32, at * call.dim + first), x[j]);
#pragma unroll
      for (int i = 0; i < kLaneNumbers; ++i)
        if (call.bias != nullptr) x[j][i] += call.bias[head * call.dim + first + i];
    }
    if (call.rotation.n_pairs > 0) rotate_row(call.rotation, call.page_positions[page] + slot, x, rooms[threadIdx.x / 32]);
    std::byte* const codes = call.codes + page * call.page_bytes + head * call.head_stride[0] + slot * call.row_bytes[0];
    std::byte* const scales = call.scales + page * call.page_bytes + head * call.head_stride[1] + slot * call.row_bytes[1];
#pragma unroll
    for (int j = 0; j < kFours; ++j) {
      const StoredFour stored = round_four(call.type, x[j]);
      const int four = first_of_four(j) / kLaneNumbers;
      if (first_of_four(j) >= call.dim) continue;
      store_codes(codes + four * call.four_bytes, stored.codes, call.four_bytes);
      if (call.row_bytes[1] > 0 && threadIdx.x % 8 == 0)
        store_codes(scales + four / 8 * 2, make_uint4(stored.scale, 0, 0, 0), 2);
    }
  }
}

}  // namespace tandem::cuda
