// SPDX-License-Identifier: MIT
// Storage types as the kernels see them: a struct per type that loads a vector of f32 from element i of a row and stores
// one, and the list of all. To add a type, write its struct and its line in TANDEM_STORED_TYPES (and in lib/dtype.h).
//
// The tiles read rows in pairs of vectors, and a type may hand out the elements of a pair in an order of its own where that
// is cheaper: kOddEven says that vector 0 holds the even ones and vector 1 the odd ones. q is packed in that order, and o
// stays in it until a span is finished (sort_pairs). What is left of a row behind its pairs is in order.
#pragma once

#include <string.h>

#include "cpu/kernels/simd_math_inl.h"
#include "tandem/tandem.h"

// Instruction sets without a conversion from f16.
#if HWY_TARGET == HWY_SSE4 || HWY_TARGET == HWY_SSSE3
#define TANDEM_F16_BY_HAND 1
#else
#define TANDEM_F16_BY_HAND 0
#endif

HWY_BEFORE_NAMESPACE();
namespace tandem::cpu {
namespace HWY_NAMESPACE {
namespace {

struct StoredF32 {
  using Element = float;
  static constexpr bool kOddEven = false;
  template <class D>
  static HWY_INLINE hn::Vec<D> load_half(D d, const uint8_t* row, size_t i, size_t half) {
    return load(d, row, i + half * hn::Lanes(d));
  }
  template <class D>
  static HWY_INLINE hn::Vec<D> load(D d, const uint8_t* row, size_t i) {
    return hn::LoadU(d, reinterpret_cast<const float*>(row) + i);
  }
  template <class D>
  static HWY_INLINE void store(D d, hn::Vec<D> v, uint8_t* row, size_t i) {
    hn::StoreU(v, d, reinterpret_cast<float*>(row) + i);
  }
};

struct StoredBf16 {
  using Element = uint16_t;
  // An f32 whose upper half is the number: one instruction for the even elements, one for the odd ones. In order it takes
  // two.
  static constexpr bool kOddEven = true;
  template <class D>
  static HWY_INLINE hn::Vec<D> load_half(D d, const uint8_t* row, size_t i, size_t half) {
    const hn::RebindToUnsigned<D> du32;
    const auto pairs = hn::LoadU(du32, reinterpret_cast<const uint32_t*>(row + i * sizeof(Element)));
    return hn::BitCast(d, half == 0 ? hn::ShiftLeft<16>(pairs) : hn::And(pairs, hn::Set(du32, 0xffff0000u)));
  }
  template <class D>
  static HWY_INLINE hn::Vec<D> load(D d, const uint8_t* row, size_t i) {
    const hn::RebindToUnsigned<D> du32;
    const hn::Rebind<uint16_t, D> du16;
    const auto bits = hn::LoadU(du16, reinterpret_cast<const uint16_t*>(row) + i);
    return hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(du32, bits)));
  }
  template <class D>
  static HWY_INLINE void store(D, hn::Vec<D> v, uint8_t* row, size_t i) {
    const hn::RebindToUnsigned<D> du32;
    const hn::Rebind<uint16_t, D> du16;
    const auto bits = hn::BitCast(du32, v);
    const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(du32, 1));
    const auto rounded = hn::ShiftRight<16>(hn::Add(hn::Add(bits, odd), hn::Set(du32, 0x7fff)));
    const auto quiet = hn::Or(hn::ShiftRight<16>(bits), hn::Set(du32, 0x40));
    const auto out = hn::IfThenElse(hn::RebindMask(du32, hn::IsNaN(v)), quiet, rounded);
    hn::StoreU(hn::TruncateTo(du16, out), du16, reinterpret_cast<uint16_t*>(row) + i);
  }
};

struct StoredF16 {
  using Element = uint16_t;
  static constexpr bool kOddEven = false;
  template <class D>
  static HWY_INLINE hn::Vec<D> load_half(D d, const uint8_t* row, size_t i, size_t half) {
    return load(d, row, i + half * hn::Lanes(d));
  }
  template <class D>
  static HWY_INLINE hn::Vec<D> load(D d, const uint8_t* row, size_t i) {
#if TANDEM_F16_BY_HAND
    const hn::RebindToUnsigned<D> du32;
    const hn::Rebind<uint16_t, D> du16;
    const auto half = hn::PromoteTo(du32, hn::LoadU(du16, reinterpret_cast<const uint16_t*>(row) + i));
    const auto sign = hn::ShiftLeft<16>(hn::And(half, hn::Set(du32, 0x8000)));
    const auto rest = hn::And(half, hn::Set(du32, 0x7fff));
    // The exponent's bias grows by 112; inf and NaN take the largest. Subnormals are counts of 2^-24 = the spacing at 0.5.
    const auto normal = hn::Add(hn::ShiftLeft<13>(rest), hn::Set(du32, 112u << 23));
    const auto special = hn::Or(hn::ShiftLeft<13>(rest), hn::Set(du32, 0x7f800000));
    const auto at_half = hn::BitCast(d, hn::Or(rest, hn::Set(du32, 0x3f000000)));
    const auto subnormal = hn::BitCast(du32, hn::Sub(at_half, hn::Set(d, 0.5f)));
    const hn::RebindToSigned<D> di32;
    const auto size = hn::BitCast(di32, rest);
    auto bits = hn::IfThenElse(hn::RebindMask(du32, hn::Gt(size, hn::Set(di32, 0x7bff))), special, normal);
    bits = hn::IfThenElse(hn::RebindMask(du32, hn::Lt(size, hn::Set(di32, 0x400))), subnormal, bits);
    return hn::BitCast(d, hn::Or(sign, bits));
#else
    const hn::Rebind<hwy::float16_t, D> df16;
    return hn::PromoteTo(d, hn::LoadU(df16, reinterpret_cast<const hwy::float16_t*>(row) + i));
#endif
  }
  // In integers, so that every instruction set gives the same bits.
  template <class D>
  static HWY_INLINE void store(D d, hn::Vec<D> v, uint8_t* row, size_t i) {
    const hn::RebindToUnsigned<D> du32;
    const hn::RebindToSigned<D> di32;
    const hn::Rebind<uint16_t, D> du16;
    const auto all = hn::BitCast(du32, v);
    const auto sign = hn::ShiftRight<16>(hn::And(all, hn::Set(du32, 0x80000000)));
    const auto bits = hn::And(all, hn::Set(du32, 0x7fffffff));
    const auto odd = hn::And(hn::ShiftRight<13>(bits), hn::Set(du32, 1));
    const auto normal =
        hn::ShiftRight<13>(hn::Add(hn::Sub(bits, hn::Set(du32, 112u << 23)), hn::Add(odd, hn::Set(du32, 0xfff))));
    const auto at_half = hn::BitCast(du32, hn::Add(hn::BitCast(d, bits), hn::Set(d, 0.5f)));
    const auto subnormal = hn::Sub(at_half, hn::Set(du32, 0x3f000000));
    const auto size = hn::BitCast(di32, bits);
    const auto is_small = hn::RebindMask(du32, hn::Lt(size, hn::Set(di32, 0x38800000)));  // below 2^-14
    const auto is_large = hn::RebindMask(du32, hn::Gt(size, hn::Set(di32, 0x477fefff)));  // 65520 and more
    const auto is_nan = hn::RebindMask(du32, hn::Gt(size, hn::Set(di32, 0x7f800000)));
    auto out = hn::IfThenElse(is_small, subnormal, normal);
    out = hn::IfThenElse(is_large, hn::Set(du32, 0x7c00), out);
    const auto quiet = hn::Or(hn::And(hn::ShiftRight<13>(bits), hn::Set(du32, 0x3ff)), hn::Set(du32, 0x7e00));
    out = hn::Or(hn::IfThenElse(is_nan, quiet, out), sign);
    hn::StoreU(hn::TruncateTo(du16, out), du16, reinterpret_cast<uint16_t*>(row) + i);
  }
};

// clang-format off
#define TANDEM_STORED_TYPES(X) \
  X(TANDEM_F32, StoredF32)     \
  X(TANDEM_F16, StoredF16)     \
  X(TANDEM_BF16, StoredBf16)
// clang-format on

// The two vectors of a pair, in order, as the type hands them out.
template <class Stored, class D>
HWY_INLINE void unsort_pair(D d, hn::Vec<D>& a, hn::Vec<D>& b) {
  if constexpr (Stored::kOddEven) {
    const auto even = hn::ConcatEven(d, b, a), odd = hn::ConcatOdd(d, b, a);
    a = even;
    b = odd;
  }
}

// And back, for a row of n floats, in place. Within every 128 bits the interleaved vectors are in order.
inline void sort_odd_even(float* row, size_t n) {
  const F32 d;
  constexpr size_t kPairLanes = HWY_MAX_BYTES / sizeof(float), kBlock = 4;
  HWY_ALIGN float mixed[2 * kPairLanes];
  for (; n >= 2 * kPairLanes; row += 2 * kPairLanes, n -= 2 * kPairLanes) {
    const Vec even = hn::LoadU(d, row), odd = hn::LoadU(d, row + kPairLanes);
    hn::Store(hn::InterleaveLower(d, even, odd), d, mixed);
    hn::Store(hn::InterleaveUpper(d, even, odd), d, mixed + kPairLanes);
    for (size_t block = 0; block < kPairLanes; block += kBlock) {
      memcpy(row + 2 * block, mixed + block, kBlock * sizeof(float));
      memcpy(row + 2 * block + kBlock, mixed + kPairLanes + block, kBlock * sizeof(float));
    }
  }
}

template <class Stored>
void sort_pairs(float* row, size_t n) {
  if constexpr (Stored::kOddEven) sort_odd_even(row, n);
}

template <class Stored>
void convert_to_f32(const uint8_t* from, float* to, int64_t n) {
  const F32 d;
  const int64_t n_lanes = static_cast<int64_t>(hn::Lanes(d));
  int64_t i = 0;
  for (; i + n_lanes <= n; i += n_lanes) hn::StoreU(Stored::load(d, from, static_cast<size_t>(i)), d, to + i);
  if (i == n) return;
  using Element = typename Stored::Element;
  Element tail[HWY_MAX_BYTES / 4] = {};
  float wide[HWY_MAX_BYTES / 4];
  memcpy(tail, from + static_cast<size_t>(i) * sizeof(Element), static_cast<size_t>(n - i) * sizeof(Element));
  hn::StoreU(Stored::load(d, reinterpret_cast<const uint8_t*>(tail), 0), d, wide);
  memcpy(to + i, wide, static_cast<size_t>(n - i) * sizeof(float));
}

template <class Stored>
void convert_from_f32(const float* from, uint8_t* to, int64_t n) {
  const F32 d;
  const int64_t n_lanes = static_cast<int64_t>(hn::Lanes(d));
  int64_t i = 0;
  for (; i + n_lanes <= n; i += n_lanes) Stored::store(d, hn::LoadU(d, from + i), to, static_cast<size_t>(i));
  if (i == n) return;
  using Element = typename Stored::Element;
  Element tail[HWY_MAX_BYTES / 4];
  float wide[HWY_MAX_BYTES / 4] = {};
  memcpy(wide, from + i, static_cast<size_t>(n - i) * sizeof(float));
  Stored::store(d, hn::LoadU(d, wide), reinterpret_cast<uint8_t*>(tail), 0);
  memcpy(to + static_cast<size_t>(i) * sizeof(Element), tail, static_cast<size_t>(n - i) * sizeof(Element));
}

void to_f32(int32_t dtype, const void* from, float* to, int64_t n) {
  const auto* bytes = static_cast<const uint8_t*>(from);
  switch (dtype) {
#define TANDEM_CASE(dtype_value, Stored) \
  case dtype_value:                      \
    return convert_to_f32<Stored>(bytes, to, n);
    TANDEM_STORED_TYPES(TANDEM_CASE)
#undef TANDEM_CASE
  }
}

void from_f32(int32_t dtype, const float* from, void* to, int64_t n) {
  auto* bytes = static_cast<uint8_t*>(to);
  switch (dtype) {
#define TANDEM_CASE(dtype_value, Stored) \
  case dtype_value:                      \
    return convert_from_f32<Stored>(from, bytes, n);
    TANDEM_STORED_TYPES(TANDEM_CASE)
#undef TANDEM_CASE
  }
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace tandem::cpu
HWY_AFTER_NAMESPACE();
