// SPDX-License-Identifier: MIT
// The instructions that the kernels are made of. In a fragment, g = lane / 4 and t = lane % 4:
//
// clang-format off
//   A [16 x 16]  a[0]: row g, columns 2 t, 2 t + 1    a[1]: row g + 8    a[2], a[3]: the same, columns + 8
//   B [16 x 8]   b[0]: rows 2 t, 2 t + 1, column g    b[1]: rows + 8
//   C [16 x 8]   c[0], c[1]: row g, columns 2 t, 2 t + 1    c[2], c[3]: row g + 8
// clang-format on
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace tandem::cuda {

__device__ inline uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

// Starts a copy of kBytes bytes to shared memory, behind the thread's earlier copies. If not `valid`, writes zeros and
// reads nothing.
template <int kBytes>
__device__ inline void copy_async(uint32_t to, const void* from, bool valid) {
  static_assert(kBytes == 8 || kBytes == 16);
  const int n = valid ? kBytes : 0;
  if constexpr (kBytes == 16)
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;\n" ::"r"(to), "l"(from), "r"(n) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;\n" ::"r"(to), "l"(from), "r"(n) : "memory");
}
template <int kBytes>
__device__ inline void copy_async(uint32_t to, const void* from) {
  if constexpr (kBytes == 16)
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;\n" ::"r"(to), "l"(from) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;\n" ::"r"(to), "l"(from) : "memory");
}
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }
template <int kPending>
__device__ inline void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(kPending) : "memory");
}

// Loads matrices of 8 rows of 16 bytes. Lane 8 i + r gives the address of row r of matrix i.
__device__ inline void load_matrices(uint32_t (&m)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];\n"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(row)
               : "memory");
}
__device__ inline void load_transposed(uint32_t (&m)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];\n"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(row)
               : "memory");
}
__device__ inline void load_two_transposed(uint32_t& a, uint32_t& b, uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];\n" : "=r"(a), "=r"(b) : "r"(row) : "memory");
}
__device__ inline uint32_t transpose(uint32_t m) {
  uint32_t result;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;\n" : "=r"(result) : "r"(m));
  return result;
}
__device__ inline uint32_t load_word(uint32_t at) {
  uint32_t word;
  asm volatile("ld.shared.b32 %0, [%1];\n" : "=r"(word) : "r"(at) : "memory");
  return word;
}

__device__ inline float4 load_floats(uint32_t at) {
  float4 x;
  asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];\n" : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "r"(at) : "memory");
  return x;
}
__device__ inline void store_half(uint32_t at, uint16_t half) {
  asm volatile("st.shared.b16 [%0], %1;\n" ::"r"(at), "h"(half) : "memory");
}
__device__ inline void store_words(uint32_t at, uint32_t a, uint32_t b) {
  asm volatile("st.shared.v2.b32 [%0], {%1,%2};\n" ::"r"(at), "r"(a), "r"(b) : "memory");
}
__device__ inline void store_words(uint32_t at, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};\n" ::"r"(at), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

// Pairs of 16-bit numbers of the type that a matrix product takes. `first` is in the lower half.
struct Half {
  static constexpr int kShift = 14;      // weights are multiplied by 2^kShift, so that small ones keep their bits
  static constexpr bool kNarrow = true;  // exponents have 5 bits, so rows of q are scaled to a range that fits
  __device__ static uint32_t pack(float first, float second) {
    const __half2 both = __floats2half2_rn(first, second);
    return *reinterpret_cast<const uint32_t*>(&both);
  }
  __device__ static float2 unpack(uint32_t pair) { return __half22float2(*reinterpret_cast<const __half2*>(&pair)); }
  __device__ static void multiply(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }
};
struct Bfloat {
  static constexpr int kShift = 0;
  static constexpr bool kNarrow = false;
  __device__ static uint32_t pack(float first, float second) {
    const __nv_bfloat162 both = __floats2bfloat162_rn(first, second);
    return *reinterpret_cast<const uint32_t*>(&both);
  }
  __device__ static float2 unpack(uint32_t pair) {
    return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
  }
  __device__ static void multiply(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }
};

// Splits two numbers into kParts summands each, in pairs. Each part holds the remainder that earlier parts leave. An
// infinity becomes NaN.
template <class Number, int kParts>
__device__ inline void split(float first, float second, uint32_t (&parts)[kParts]) {
#pragma unroll
  for (int i = 0; i < kParts; ++i) {
    parts[i] = Number::pack(first, second);
    if (i + 1 == kParts) break;
    const float2 taken = Number::unpack(parts[i]);
    first -= taken.x;
    second -= taken.y;
  }
}

__device__ inline float exp2_fast(float x) {  // relative error 2^-22; 0 for -inf
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}

// a / b for numbers that are not negative. Below 2^22 the first quotient is off by one at most, and is corrected. The
// general integer division takes several times as long, and a short call waits for it.
__device__ inline int divide(int a, int b) {
  if (a >= 1 << 22) return a / b;
  const int about = static_cast<int>(__fdividef(static_cast<float>(a), static_cast<float>(b)));
  const int rest = a - about * b;
  return about + (rest >= b ? 1 : 0) - (rest < 0 ? 1 : 0);
}

}  // namespace tandem::cuda
