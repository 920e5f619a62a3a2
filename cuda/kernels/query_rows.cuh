// SPDX-License-Identifier: MIT
// Query rows, and their states that blocks leave. Row r of a piece is head r % group_size of token r / group_size, so all
// query heads of a KV head share its keys.
#pragma once

#include "cuda/kernels/decode_work.cuh"

namespace tandem::cuda {

inline constexpr float kLog2E = 1.44269504089f, kLn2 = 0.69314718056f;

__device__ inline void store_number(void* data, int32_t dtype, int64_t at, float x) {
  if (dtype == TANDEM_BF16)
    static_cast<__nv_bfloat16*>(data)[at] = __float2bfloat16_rn(x);
  else if (dtype == TANDEM_F16)
    static_cast<__half*>(data)[at] = __float2half_rn(x);
  else
    static_cast<float*>(data)[at] = x;
}

// Stores four numbers at any address that the type allows.
__device__ inline void store_numbers(void* data, int32_t dtype, int64_t at, const float (&x)[4]) {
  const bool is_f32 = dtype == TANDEM_F32;
  std::byte* const to = static_cast<std::byte*>(data) + at * (is_f32 ? 4 : 2);
  if (reinterpret_cast<uintptr_t>(to) % (is_f32 ? 16 : 8) != 0) {
#pragma unroll 1
    for (int i = 0; i < 4; ++i) store_number(data, dtype, at + i, i < 2 ? (i == 0 ? x[0] : x[1]) : i == 2 ? x[2] : x[3]);
  } else if (is_f32) {
    *reinterpret_cast<float4*>(to) = make_float4(x[0], x[1], x[2], x[3]);
  } else {
    const bool is_bf16 = dtype == TANDEM_BF16;
    const auto pack = [&](float a, float b) { return is_bf16 ? Bfloat::pack(a, b) : Half::pack(a, b); };
    *reinterpret_cast<uint2*>(to) = make_uint2(pack(x[0], x[1]), pack(x[2], x[3]));
  }
}

// Returns where row r of a piece starts: its query head of its token.
__device__ inline int64_t row_offset(const DecodeCall& call, const Piece& piece, int r, int64_t token_stride,
                                     int64_t head_stride) {
  const int row = piece.first_row + r, token = row / call.group_size, head = row % call.group_size;
  return (piece.sequence.first_row + token) * token_stride + (piece.head * call.group_size + head) * head_stride;
}

// Returns the exponent of two that scales a row with this largest magnitude into the upper range of f16.
__device__ inline int to_range(float largest) {
  const int exponent = static_cast<int>(__float_as_uint(largest) >> 23) - 127;
  return exponent == 128 ? 0 : min(13 - exponent, 100);
}

__device__ inline float power_of_two(int exponent) { return __uint_as_float(static_cast<uint32_t>(exponent + 127) << 23); }

// Loads a number of a state from shared memory or, with kGlobal, from memory that other blocks write.
template <bool kGlobal, class T>
__device__ inline T load_state(const T* at) {
  if constexpr (kGlobal)
    return __ldcg(at);
  else
    return *at;
}

__device__ inline void fade(float4& to, float by) { to.x *= by, to.y *= by, to.z *= by, to.w *= by; }
__device__ inline void add(float4& to, float weight, const float4& x) {
  to.x += weight * x.x, to.y += weight * x.y, to.z += weight * x.z, to.w += weight * x.w;
}

// Merges n_states states, the i-th at state(i), a warp per row. A lane first has the weight of one state, then an element
// of o of each state. Calls out(r, dim, o, m, l) for every row. A lane has dims lane, lane + 32, ...
template <class Shape, bool kGlobal, class StateAt, class Out>
__device__ void merge_states(int n_states, int n_rows, StateAt state, Out out) {
  constexpr int kOfLane = (Shape::kVDim + 31) / 32, kRest = Shape::kRows * Shape::kStateStride;
  const int lane = threadIdx.x % 32;
  for (int r = threadIdx.x / 32; r < n_rows; r += Shape::kWarps) {
    float m = -INFINITY;
    for (int i = lane; i < n_states; i += 32) m = fmaxf(m, load_state<kGlobal>(state(i) + kRest + 2 * r));
    for (int mask = 16; mask > 0; mask /= 2) m = fmaxf(m, __shfl_xor_sync(~0u, m, mask));
    float l = 0.0f, o[kOfLane] = {};
    for (int first = 0; first < n_states; first += 32) {
      float own = 0.0f;
      if (first + lane < n_states) {
        const auto rest = load_state<kGlobal>(reinterpret_cast<const float2*>(state(first + lane) + kRest) + r);
        own = rest.x == -INFINITY ? 0.0f : exp2_fast(rest.x - m);
        l += own * rest.y;
      }
      const int n = min(32, n_states - first);
#pragma unroll 8
      for (int i = 0; i < n; ++i) {
        const float weight = __shfl_sync(~0u, own, i);
        const float* from = state(first + i) + r * Shape::kStateStride;
#pragma unroll
        for (int k = 0; k < kOfLane; ++k)
          if (lane + 32 * k < Shape::kVDim) {
            const float x = load_state<kGlobal>(from + lane + 32 * k);
            o[k] += weight == 0.0f ? 0.0f : weight * x;
          }
      }
    }
    for (int mask = 16; mask > 0; mask /= 2) l += __shfl_xor_sync(~0u, l, mask);
    out(r, Shape::kVDim, o, m, l);
  }
}

// The end of a row: the factor that normalises it, learned sink included, and its lse. The factor is 0 where the row saw no
// key.
struct RowEnd {
  float factor = 0.0f, lse = -INFINITY;
};

// Returns where the rows of a piece go. Chosen field by field, as reading a kernel's argument through a pointer is slower.
__device__ inline DeviceOutput output_of(const DecodeCall& call, const Piece& piece) {
  const bool is_finished = call.finished.o.data != nullptr && piece.sequence.has_host_part == 0;
  const DeviceOutput &a = call.finished, &b = call.out;
  DeviceOutput to;
  to.o.data = is_finished ? a.o.data : b.o.data;
  to.o.dtype = is_finished ? a.o.dtype : b.o.dtype;
  to.o.token_stride = is_finished ? a.o.token_stride : b.o.token_stride;
  to.o.head_stride = is_finished ? a.o.head_stride : b.o.head_stride;
  to.lse = is_finished ? a.lse : b.lse;
  to.lse_token_stride = is_finished ? a.lse_token_stride : b.lse_token_stride;
  to.lse_head_stride = is_finished ? a.lse_head_stride : b.lse_head_stride;
  to.sinks = is_finished ? a.sinks : b.sinks;
  return to;
}

// Ends a row. m, l: of the row's state. Weights were multiplied by 2^shift.
__device__ inline RowEnd end_row(const float* sinks, int q_head, float m, float l, int shift) {
  RowEnd end;
  const bool is_empty = m == -INFINITY && l == 0.0f;
  if (!is_empty) end = {1.0f / l, (m - static_cast<float>(shift)) * kLn2 + logf(l)};
  if (sinks == nullptr || sinks[q_head] == -INFINITY) return end;
  const float sink = sinks[q_head], most = fmaxf(sink, end.lse);
  const float share = is_empty ? 0.0f : expf(end.lse - most), sum = share + expf(sink - most);
  if (sum > 0.0f || isnan(sum)) end = {end.factor * (share / sum), most + logf(sum)};
  return end;
}

__device__ inline int q_head_of(const DecodeCall& call, const Piece& piece, int r) {
  return piece.head * call.group_size + (piece.first_row + r) % call.group_size;
}

// Ends row r of a piece.
__device__ inline RowEnd end_row(const DecodeCall& call, const Piece& piece, int r, float m, float l, int shift) {
  if (piece.n_granules < 0) return {NAN, NAN};
  return end_row(output_of(call, piece).sinks, q_head_of(call, piece, r), m, l, shift);
}

// Writes finished rows, one warp each.
struct RowWriter {
  const DecodeCall* call;
  const Piece* piece;
  int shift;

  template <int kOfLane>
  __device__ void operator()(int r, int dim, const float (&o)[kOfLane], float m, float l) const {
    const int lane = threadIdx.x % 32;
    const DeviceOutput out = output_of(*call, *piece);
    const RowEnd end = end_row(*call, *piece, r, m, l, shift);
    const int64_t at = row_offset(*call, *piece, r, out.o.token_stride, out.o.head_stride);
#pragma unroll
    for (int k = 0; k < kOfLane; ++k)
      if (lane + 32 * k < dim)
        store_number(out.o.data, out.o.dtype, at + lane + 32 * k, end.factor == 0.0f ? 0.0f : o[k] * end.factor);
    if (lane == 0 && out.lse != nullptr)
      out.lse[row_offset(*call, *piece, r, out.lse_token_stride, out.lse_head_stride)] = end.lse;
  }
};

}  // namespace tandem::cuda
