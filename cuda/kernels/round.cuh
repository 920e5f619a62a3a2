// SPDX-License-Identifier: MIT
// Rounds rows of numbers to storage types, bit for bit as the host's backend does, so window and host hold the same rows.
// cpu/kernels/convert_inl.h defines the types.
//
// A warp has a row. Number i of lane l's j-th four is 128 j + 4 l + i. So neighbouring lanes write neighbouring bytes,
// whether a number takes 4 bytes or half a byte. A group of 32 numbers is eight lanes.
//
// Sums and products are spelled as intrinsics where the compiler would fuse them.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstddef>
#include <cstdint>

#include "tandem/tandem.h"

namespace tandem::cuda {

inline constexpr int kFours = 2;  // fours of a lane: rows of up to 256 numbers
inline constexpr int kLaneNumbers = 4, kWarpNumbers = 32 * kLaneNumbers;

// Returns the place of a lane's j-th four numbers in a row.
__device__ inline int first_of_four(int j) { return kWarpNumbers * j + static_cast<int>(threadIdx.x % 32) * kLaneNumbers; }

// ---- one number --------------------------------------------------------------------------------------------------------

__device__ inline uint32_t bits_of(float x) { return __float_as_uint(x); }
__device__ inline bool is_nan(float x) { return (bits_of(x) & 0x7fffffffu) > 0x7f800000u; }

// NaN keeps sign and payload. The device's own conversions do not keep them.
__device__ inline uint32_t to_f16(float x) {
  if (is_nan(x)) return (bits_of(x) >> 16 & 0x8000u) | 0x7e00u | (bits_of(x) >> 13 & 0x3ffu);
  return __half_as_ushort(__float2half_rn(x));
}
__device__ inline uint32_t to_bf16(float x) {
  if (is_nan(x)) return bits_of(x) >> 16 | 0x40u;
  return (bits_of(x) + (bits_of(x) >> 16 & 1u) + 0x7fffu) >> 16;
}
// Too large numbers become NaN. The device's own conversion makes them the largest number.
__device__ inline uint32_t to_e4m3(float x) {
  const uint32_t sign = bits_of(x) >> 24 & 0x80u, size = bits_of(x) & 0x7fffffffu;
  if (size > 0x43e80000u) return sign | 0x7fu;  // above 464, or NaN
  if (size < 0x3c800000u)                       // below 2^-6: counts of 2^-9, the spacing at 16,384
    return sign | (bits_of(__fadd_rn(__uint_as_float(size), 16384.0f)) - 0x46800000u);
  return sign | (size - (120u << 23) + (size >> 20 & 1u) + 0x7ffffu) >> 20;
}

__device__ inline float from_f16(uint32_t bits) {
  if ((bits & 0x7fffu) > 0x7c00u) return __uint_as_float((bits & 0x8000u) << 16 | 0x7fc00000u | (bits & 0x3ffu) << 13);
  return __half2float(__ushort_as_half(static_cast<uint16_t>(bits)));
}

// Returns a pair of 16-bit numbers as rounding leaves it: NaN becomes quiet.
__device__ inline uint32_t quiet_pair(int32_t type, uint32_t pair) {
  const uint32_t largest = type == TANDEM_BF16 ? 0x7f80u : 0x7c00u, quiet = type == TANDEM_BF16 ? 0x40u : 0x200u;
  if ((pair & 0x7fffu) > largest) pair |= quiet;
  if ((pair >> 16 & 0x7fffu) > largest) pair |= quiet << 16;
  return pair;
}

// Returns numbers of a tensor of this type as they are stored, in the same type.
__device__ inline uint4 quiet_numbers(int32_t type, const uint4& x) {
  if (type == TANDEM_F32) return x;
  return make_uint4(quiet_pair(type, x.x), quiet_pair(type, x.y), quiet_pair(type, x.z), quiet_pair(type, x.w));
}

// ---- four numbers ------------------------------------------------------------------------------------------------------

__device__ inline int number_bytes(int32_t tensor_type) { return tensor_type == TANDEM_F32 ? 4 : 2; }

// Loads four numbers of a tensor unconverted, from any address that the type allows. Does not wait for the load.
__device__ inline uint4 load_four(const void* data, int32_t dtype, int64_t at) {
  const int bytes = number_bytes(dtype);
  const std::byte* const from = static_cast<const std::byte*>(data) + at * bytes;
  if (reinterpret_cast<uintptr_t>(from) % (bytes * kLaneNumbers) == 0) {
    if (bytes == 4) return *reinterpret_cast<const uint4*>(from);
    const uint2 pairs = *reinterpret_cast<const uint2*>(from);
    return make_uint4(pairs.x, pairs.y, 0, 0);
  }
  if (bytes == 4) {
    const auto* x = reinterpret_cast<const uint32_t*>(from);
    return make_uint4(x[0], x[1], x[2], x[3]);
  }
  const auto* x = reinterpret_cast<const uint16_t*>(from);
  return make_uint4(x[0] | x[1] << 16, x[2] | x[3] << 16, 0, 0);
}

__device__ inline void widen_four(int32_t dtype, const uint4& four, float (&x)[kLaneNumbers]) {
  const uint32_t words[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
  for (int i = 0; i < kLaneNumbers; ++i) {
    const uint32_t half = words[i / 2] >> i % 2 * 16 & 0xffffu;
    x[i] = dtype == TANDEM_F32    ? __uint_as_float(words[i])
           : dtype == TANDEM_BF16 ? __uint_as_float(half << 16)
                                  : from_f16(half);
  }
}

// Four numbers in a storage type. The codes take their first bytes, at 4 bits a number or more. scale: the f16 scale of
// their group.
struct StoredFour {
  uint4 codes;
  uint32_t scale;
};

// The largest magnitude of the lane's group, as bits, in the order NaN, infinity, numbers from above. number: the first
// number with that magnitude.
struct Largest {
  uint32_t magnitude;
  float number;
};
__device__ inline Largest largest_of_group(const float (&x)[kLaneNumbers]) {
  Largest largest{0, 0.0f};
#pragma unroll
  for (int i = 0; i < kLaneNumbers; ++i)
    if ((bits_of(x[i]) & 0x7fffffffu) > largest.magnitude) largest = {bits_of(x[i]) & 0x7fffffffu, x[i]};
#pragma unroll
  for (unsigned mask = 1; mask < 8; mask *= 2) {
    const uint32_t magnitude = __shfl_xor_sync(~0u, largest.magnitude, mask);
    const float number = __shfl_xor_sync(~0u, largest.number, mask);
    const bool is_before = (threadIdx.x & mask) != 0;
    if (magnitude > largest.magnitude || (magnitude == largest.magnitude && is_before)) largest = {magnitude, number};
  }
  return largest;
}

// q8_0 and q4_0. If the group is not finite, or its scale does not fit f16, the scale is NaN and the codes are 0.
template <bool kIsQ8>
__device__ inline StoredFour quantise(const float (&x)[kLaneNumbers]) {
  const Largest largest = largest_of_group(x);
  float scale = -0.0f;
  if (kIsQ8)
    scale = __fdiv_rn(__uint_as_float(largest.magnitude), 127.0f);
  else if (largest.magnitude > 0)
    scale = __fdiv_rn(largest.number, -8.0f);
  if (largest.magnitude >= 0x7f800000u || fabsf(scale) >= 65520.0f) return {make_uint4(0, 0, 0, 0), 0x7e00u};
  const float exact = __fdiv_rn(1.0f, scale), inverse = isfinite(exact) ? exact : 0.0f;
  uint32_t codes = 0;
#pragma unroll
  for (int i = 0; i < kLaneNumbers; ++i) {
    const float y = __fmul_rn(x[i], inverse);
    if (kIsQ8)
      codes |= (static_cast<uint32_t>(static_cast<int>(roundf(y))) & 0xffu) << 8 * i;
    else
      codes |= static_cast<uint32_t>(min(15, static_cast<int>(__fadd_rn(y, 8.5f)))) << 4 * i;
  }
  return {make_uint4(codes, 0, 0, 0), to_f16(scale)};
}

// q4_64. A group is 16 lanes, all within the row. StoredFour::scale has the scale and, above it, the minimum. If both zeros
// occur, the sign of the first counts.
__device__ inline StoredFour quantise_to_minimum(const float (&x)[kLaneNumbers]) {
  float least = x[0], most = x[0];
  bool is_finite = true;
#pragma unroll
  for (int i = 0; i < kLaneNumbers; ++i) {
    is_finite = is_finite && isfinite(x[i]);
    if (x[i] < least) least = x[i];
    if (x[i] > most) most = x[i];
  }
#pragma unroll
  for (unsigned mask = 1; mask < 16; mask *= 2) {
    const float other_least = __shfl_xor_sync(~0u, least, mask), other_most = __shfl_xor_sync(~0u, most, mask);
    const bool is_before = (threadIdx.x & mask) != 0;
    if (other_least < least || (other_least == least && is_before)) least = other_least;
    if (other_most > most || (other_most == most && is_before)) most = other_most;
  }
  const unsigned all_finite = __ballot_sync(~0u, is_finite), of_group = 0xffffu << threadIdx.x % 32 / 16 * 16;
  const float scale = __fdiv_rn(__fsub_rn(most, least), 15.0f);
  if ((all_finite & of_group) != of_group || !(fabsf(scale) < 65520.0f && fabsf(least) < 65520.0f))
    return {make_uint4(0, 0, 0, 0), 0x7e007e00u};
  const uint32_t d = to_f16(scale), m = to_f16(least);
  const float exact = __fdiv_rn(1.0f, from_f16(d)), inverse = isfinite(exact) ? exact : 0.0f, minimum = from_f16(m);
  uint32_t codes = 0;
#pragma unroll
  for (int i = 0; i < kLaneNumbers; ++i) {
    const float y = __fadd_rn(__fmul_rn(__fsub_rn(x[i], minimum), inverse), 0.5f);
    codes |= static_cast<uint32_t>(fmaxf(fminf(y, 15.0f), 0.0f)) << 4 * i;
  }
  return {make_uint4(codes, 0, 0, 0), d | m << 16};
}

// Rounds four numbers of each lane. Whole warps call it. Numbers behind the row's end must be 0.
__device__ inline StoredFour round_four(int32_t type, const float (&x)[kLaneNumbers]) {
  switch (type) {
    case TANDEM_F32:
      return {make_uint4(bits_of(x[0]), bits_of(x[1]), bits_of(x[2]), bits_of(x[3])), 0};
    case TANDEM_F16:
      return {make_uint4(to_f16(x[0]) | to_f16(x[1]) << 16, to_f16(x[2]) | to_f16(x[3]) << 16, 0, 0), 0};
    case TANDEM_BF16:
      return {make_uint4(to_bf16(x[0]) | to_bf16(x[1]) << 16, to_bf16(x[2]) | to_bf16(x[3]) << 16, 0, 0), 0};
    case TANDEM_E4M3:
      return {make_uint4(to_e4m3(x[0]) | to_e4m3(x[1]) << 8 | to_e4m3(x[2]) << 16 | to_e4m3(x[3]) << 24, 0, 0, 0), 0};
    case TANDEM_Q8_0:
      return quantise<true>(x);
    default:
      return quantise<false>(x);
  }
}

// Converts rounded numbers to f32.
__device__ inline void widen_stored(int32_t type, const StoredFour& stored, float (&x)[kLaneNumbers]) {
  const float scale = from_f16(stored.scale);
#pragma unroll
  for (int i = 0; i < kLaneNumbers; ++i) {
    const uint32_t byte = stored.codes.x >> 8 * i & 0xffu, size = byte & 0x7fu;
    if (type == TANDEM_E4M3)  // the exponent of an f32 has a bias of 120 more
      x[i] = __uint_as_float((byte & 0x80u) << 24 |
                             (size == 0x7fu ? 0x7fc00000u : bits_of(__fmul_rn(__uint_as_float(size << 20), 0x1p120f))));
    else if (type == TANDEM_Q8_0)
      x[i] = scale * static_cast<float>(static_cast<int8_t>(byte));
    else if (type == TANDEM_Q4_0)
      x[i] = scale * (static_cast<float>(stored.codes.x >> 4 * i & 0xfu) - 8.0f);
  }
  if (type == TANDEM_F32 || type == TANDEM_F16 || type == TANDEM_BF16) widen_four(type, stored.codes, x);
}

// Stores `bytes` bytes: 16, 8, 4 or 2. The address is a multiple of them.
__device__ inline void store_codes(std::byte* to, const uint4& codes, int bytes) {
  if (bytes == 16)
    *reinterpret_cast<uint4*>(to) = codes;
  else if (bytes == 8)
    *reinterpret_cast<uint2*>(to) = make_uint2(codes.x, codes.y);
  else if (bytes == 4)
    *reinterpret_cast<uint32_t*>(to) = codes.x;
  else
    *reinterpret_cast<uint16_t*>(to) = static_cast<uint16_t>(codes.x);
}

// Rounds four numbers and stores them to a tensor, at any address that the type allows.
__device__ inline void store_four(void* data, int32_t dtype, int64_t at, const float (&x)[kLaneNumbers]) {
  const int size = number_bytes(dtype);
  std::byte* const to = static_cast<std::byte*>(data) + at * size;
  const uint4 codes = round_four(dtype, x).codes;
  if (reinterpret_cast<uintptr_t>(to) % (size * kLaneNumbers) == 0) return store_codes(to, codes, size * kLaneNumbers);
  const uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
  for (int i = 0; i < kLaneNumbers; ++i)
    if (size == 4)
      reinterpret_cast<uint32_t*>(to)[i] = words[i];
    else
      reinterpret_cast<uint16_t*>(to)[i] = static_cast<uint16_t>(words[i / 2] >> i % 2 * 16);
}

}  // namespace tandem::cuda
