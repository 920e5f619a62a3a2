// SPDX-License-Identifier: MIT
// Storage types for the kernels. A struct per type loads a vector of f32 from element i of a row and stores one. There are
// two lists: the types of keys and values, and all types, with those only for hidden states. To add a type, write its struct
// and its line in one of the lists (and in lib/model/dtype.h).
//
// In types with groups, kGroup elements share kScales numbers: a scale, or a scale and a minimum. These types load codes,
// and group() returns the object that turns codes into numbers. kScalesWeights: for V, the scale multiplies the rows'
// weights instead.
//
// Types with scales between the codes (kInBlocks) occur only in tensors that a caller owns. Kernels read them and never
// store them.
//
// The tiles read rows in pairs of vectors. A type may load the elements of a pair in another order if that is cheaper.
// kOddEven: vector 0 holds the even elements and vector 1 the odd ones. q is packed in that order, and o stays in it until a
// span is finished (sort_pairs). The end of a row that fills no pair is in order.
#pragma once

#include <string.h>

#include "cpu/kernels/simd_math_inl.h"
#include "lib/model/dtype.h"
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

// Loads a pair of vectors in the order of the row.
template <class Stored>
struct InOrder {
  static constexpr bool kInBlocks = false;
  static constexpr bool kOddEven = false;
  template <class D>
  static HWY_INLINE hn::Vec<D> load_half(D d, const uint8_t* row, size_t i, size_t half) {
    return Stored::load(d, row, i + half * hn::Lanes(d));
  }
};

struct StoredF32 : InOrder<StoredF32> {
  using Element = float;
  static constexpr int64_t kBits = 32, kGroup = 0, kScales = 0;
  static constexpr bool kScalesWeights = false;
  template <class D>
  static HWY_INLINE hn::Vec<D> load(D d, const uint8_t* row, size_t i) {
    return hn::LoadU(d, reinterpret_cast<const float*>(row) + i);
  }
  template <class D>
  static HWY_INLINE void store(D d, hn::Vec<D> v, uint8_t* row, size_t i) {
    hn::StoreU(v, d, reinterpret_cast<float*>(row) + i);
  }
};

#if HWY_TARGET == HWY_AVX3_DL
// For each 32-bit lane, the upper half holds the index of the row's word that becomes the lane's upper half. The lower half
// becomes 0.
alignas(64) constexpr uint32_t kWordOfLane[16] = {0x00000, 0x10000, 0x20000, 0x30000, 0x40000, 0x50000, 0x60000, 0x70000,
                                                  0x80000, 0x90000, 0xa0000, 0xb0000, 0xc0000, 0xd0000, 0xe0000, 0xf0000};
#endif

struct StoredBf16 {
  static constexpr bool kInBlocks = false;
  using Element = uint16_t;
  static constexpr int64_t kBits = 16, kGroup = 0, kScales = 0;
  static constexpr bool kScalesWeights = false;
  // The result is an f32 whose upper half is the bf16. Even elements take one instruction, and so do odd ones. In order a
  // vector takes two, or a permutation of words if the processor has a fast one.
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
#if HWY_TARGET == HWY_AVX3_DL
    if constexpr (sizeof(hn::Vec<D>) == sizeof(kWordOfLane)) {  // one instruction that Highway has no name for
      const auto words = hn::Load(du32, kWordOfLane);
      const auto wide = _mm512_castsi256_si512(bits.raw);
      return hn::BitCast(d, decltype(words){_mm512_maskz_permutexvar_epi16(0xaaaaaaaa, words.raw, wide)});
    }
#endif
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

struct StoredF16 : InOrder<StoredF16> {
  using Element = uint16_t;
  static constexpr int64_t kBits = 16, kGroup = 0, kScales = 0;
  static constexpr bool kScalesWeights = false;
  template <class D>
  static HWY_INLINE hn::Vec<D> load(D d, const uint8_t* row, size_t i) {
#if TANDEM_F16_BY_HAND
    const hn::RebindToUnsigned<D> du32;
    const hn::Rebind<uint16_t, D> du16;
    const auto half = hn::PromoteTo(du32, hn::LoadU(du16, reinterpret_cast<const uint16_t*>(row) + i));
    const auto sign = hn::ShiftLeft<16>(hn::And(half, hn::Set(du32, 0x8000)));
    const auto rest = hn::And(half, hn::Set(du32, 0x7fff));
    // The exponent's bias grows by 112. inf and NaN get the largest exponent. Subnormals count 2^-24, the spacing at 0.5.
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

struct StoredE4m3 : InOrder<StoredE4m3> {
  using Element = uint8_t;
  static constexpr int64_t kBits = 8, kGroup = 0, kScales = 0;
  static constexpr bool kScalesWeights = false;
  // The exponent's bias grows by 120. Subnormals count units of 2^-9. With exponent 121 they are added
  // to 2^-6, which is then subtracted.
  template <class D>
  static HWY_INLINE hn::Vec<D> load(D d, const uint8_t* row, size_t i) {
    const hn::RebindToUnsigned<D> du32;
    const hn::RebindToSigned<D> di32;
    const hn::Rebind<uint8_t, D> du8;
    const auto code = hn::PromoteTo(du32, hn::LoadU(du8, row + i));
    const auto size = hn::And(code, hn::Set(du32, 0x7f)), sign = hn::ShiftLeft<24>(hn::And(code, hn::Set(du32, 0x80)));
    const auto wide = hn::ShiftLeft<20>(size), least = hn::Set(du32, 121u << 23);
    const auto normal = hn::Add(wide, hn::Set(du32, 120u << 23));
    const auto subnormal = hn::BitCast(du32, hn::Sub(hn::BitCast(d, hn::Add(wide, least)), hn::BitCast(d, least)));
    auto bits = hn::IfThenElse(hn::RebindMask(du32, hn::Lt(hn::BitCast(di32, size), hn::Set(di32, 8))), subnormal, normal);
    bits = hn::IfThenElse(hn::Eq(size, hn::Set(du32, 0x7f)), hn::Set(du32, 0x7fc00000u), bits);
    return hn::BitCast(d, hn::Or(bits, sign));
  }
  template <class D>
  static HWY_INLINE void store(D d, hn::Vec<D> v, uint8_t* row, size_t i) {
    const hn::RebindToUnsigned<D> du32;
    const hn::RebindToSigned<D> di32;
    const hn::Rebind<uint8_t, D> du8;
    const auto all = hn::BitCast(du32, v);
    const auto sign = hn::ShiftRight<24>(hn::And(all, hn::Set(du32, 0x80000000u)));
    const auto bits = hn::And(all, hn::Set(du32, 0x7fffffffu));
    const auto odd = hn::And(hn::ShiftRight<20>(bits), hn::Set(du32, 1));
    const auto normal =
        hn::ShiftRight<20>(hn::Add(hn::Sub(bits, hn::Set(du32, 120u << 23)), hn::Add(odd, hn::Set(du32, 0x7ffff))));
    const auto at_16k = hn::BitCast(du32, hn::Add(hn::BitCast(d, bits), hn::Set(d, 16384.0f)));  // the spacing there is 2^-9
    const auto subnormal = hn::Sub(at_16k, hn::Set(du32, 0x46800000u));
    const auto size = hn::BitCast(di32, bits);
    const auto is_small = hn::RebindMask(du32, hn::Lt(size, hn::Set(di32, 0x3c800000)));  // below 2^-6
    const auto is_large = hn::RebindMask(du32, hn::Gt(size, hn::Set(di32, 0x43e80000)));  // above 464, or NaN
    const auto out = hn::IfThenElse(is_large, hn::Set(du32, 0x7f), hn::IfThenElse(is_small, subnormal, normal));
    // DemoteTo, because TruncateTo returns only every fourth code on AVX3_DL (Highway 1.0.3).
    hn::StoreU(hn::DemoteTo(du8, hn::BitCast(di32, hn::Or(out, sign))), du8, row + i);
  }
};

// Codes of a group times its scale.
struct Scaled {
  SizedVec scale;
  HWY_INLINE Vec of(F32, Vec codes) const { return hn::Mul(codes, scale); }
};

struct StoredQ8_0 : InOrder<StoredQ8_0> {
  using Element = uint8_t;
  static constexpr int64_t kBits = 8, kGroup = 32, kScales = 1;
  static constexpr bool kScalesWeights = true;
  static HWY_INLINE Scaled group(F32 d, const float* scales) { return {hn::Set(d, scales[0])}; }
  template <class D>
  static HWY_INLINE hn::Vec<D> load(D d, const uint8_t* row, size_t i) {
    const hn::RebindToSigned<D> di32;
    const hn::Rebind<int8_t, D> di8;
    return hn::ConvertTo(d, hn::PromoteTo(di32, hn::LoadU(di8, reinterpret_cast<const int8_t*>(row) + i)));
  }
};

// ggml's block: a scale, then its 32 codes.
struct StoredQ8_0Blocks : InOrder<StoredQ8_0Blocks> {
  using Element = uint8_t;
  static constexpr int64_t kBits = 8, kGroup = 32, kScales = 1, kBlockBytes = 34;
  static constexpr bool kScalesWeights = true, kInBlocks = true;
  static HWY_INLINE Scaled group(F32 d, const float* scales) { return {hn::Set(d, scales[0])}; }
  template <class D>
  static HWY_INLINE hn::Vec<D> load(D d, const uint8_t* row, size_t i) {
    return StoredQ8_0::load(d, row + (i / kGroup + 1) * (kBlockBytes - kGroup), i);
  }
};

// Codes of 4 bits, loaded as integers. Byte j of a row holds the code of element 2 j in its lower half and of 2 j + 1 in its
// upper half.
struct Nibbles {
  using Element = uint8_t;
  static constexpr int64_t kBits = 4;
  static constexpr bool kOddEven = true, kInBlocks = false;
  template <class D>
  static HWY_INLINE hn::Vec<hn::RebindToUnsigned<D>> load_half(D, const uint8_t* row, size_t i, size_t half) {
    const hn::RebindToUnsigned<D> du32;
    const hn::Rebind<uint8_t, D> du8;
    const auto pairs = hn::PromoteTo(du32, hn::LoadU(du8, row + i / 2));
    return half == 0 ? hn::And(pairs, hn::Set(du32, 15)) : hn::ShiftRight<4>(pairs);
  }
  // In order: a pair of codes becomes a word of 64 bits.
  template <class D>
  static HWY_INLINE hn::Vec<hn::RebindToUnsigned<D>> load(D, const uint8_t* row, size_t i) {
    const hn::RebindToUnsigned<D> du32;
    const hn::Repartition<uint64_t, D> du64;
    const hn::Rebind<uint32_t, decltype(du64)> half_u32;
    const hn::Rebind<uint8_t, decltype(du64)> half_u8;
    const auto pairs = hn::PromoteTo(du64, hn::PromoteTo(half_u32, hn::LoadU(half_u8, row + i / 2)));
    return hn::BitCast(du32, hn::And(hn::Or(pairs, hn::ShiftLeft<28>(pairs)), hn::Set(du64, 0x0000000f0000000full)));
  }
};

// The same in ggml's block (a scale, then 16 bytes): byte j holds the code of element j in its lower half and of j + 16 in
// its upper half.
struct BlockNibbles {
  using Element = uint8_t;
  static constexpr int64_t kBits = 4, kBlockBytes = 18;
  static constexpr bool kOddEven = false, kInBlocks = true;
  template <class D>
  static HWY_INLINE hn::Vec<hn::RebindToUnsigned<D>> load(D, const uint8_t* row, size_t i) {
    const hn::RebindToUnsigned<D> du32;
    const hn::Rebind<uint8_t, D> du8;
    const auto bytes = hn::PromoteTo(du32, hn::LoadU(du8, row + i / 32 * kBlockBytes + sizeof(uint16_t) + i % 16));
    return i % 32 < 16 ? hn::And(bytes, hn::Set(du32, 15)) : hn::ShiftRight<4>(bytes);
  }
  template <class D>
  static HWY_INLINE hn::Vec<hn::RebindToUnsigned<D>> load_half(D d, const uint8_t* row, size_t i, size_t half) {
    return load(d, row, i + half * hn::Lanes(d));
  }
};

#if HWY_MAX_BYTES == 64
// A vector of 16 lanes holds the numbers of all 16 codes of a group.
alignas(64) constexpr float kCodes[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
alignas(64) constexpr float kCodesLess8[16] = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
struct FromTable {
  SizedVec numbers;
  HWY_INLINE Vec of(F32 d, hn::Vec<hn::RebindToUnsigned<F32>> codes) const {
    return hn::TableLookupLanes(numbers, hn::IndicesFromVec(d, codes));
  }
};
#else
// Codes of a group times its scale plus its minimum. The product is exact in f32, so fusing the sum changes nothing.
struct FromMinimum {
  SizedVec scale, minimum;
  HWY_INLINE Vec of(F32 d, hn::Vec<hn::RebindToUnsigned<F32>> codes) const {
    const hn::RebindToSigned<F32> di32;
    return hn::MulAdd(hn::ConvertTo(d, hn::BitCast(di32, codes)), scale, minimum);
  }
};
#endif

// The stored codes are codes plus 8.
template <class Codes>
struct FourBits : Codes {
  static constexpr int64_t kGroup = 32, kScales = 1;
#if HWY_MAX_BYTES == 64
  static constexpr bool kScalesWeights = false;
  static HWY_INLINE FromTable group(F32 d, const float* scales) {
    return {hn::Mul(hn::Load(d, kCodesLess8), hn::Set(d, scales[0]))};
  }
#else
  static constexpr bool kScalesWeights = true;
  static HWY_INLINE Scaled group(F32 d, const float* scales) { return {hn::Set(d, scales[0])}; }
  template <class D, class V = hn::Vec<hn::RebindToUnsigned<D>>>
  static HWY_INLINE hn::Vec<D> value_of(D d, V code) {
    const hn::RebindToSigned<D> di32;
    return hn::ConvertTo(d, hn::Sub(hn::BitCast(di32, code), hn::Set(di32, 8)));
  }
  template <class D>
  static HWY_INLINE hn::Vec<D> load_half(D d, const uint8_t* row, size_t i, size_t half) {
    return value_of(d, Codes::load_half(d, row, i, half));
  }
  template <class D>
  static HWY_INLINE hn::Vec<D> load(D d, const uint8_t* row, size_t i) {
    return value_of(d, Codes::load(d, row, i));
  }
#endif
};
using StoredQ4_0 = FourBits<Nibbles>;
using StoredQ4_0Blocks = FourBits<BlockNibbles>;

// A type only for hidden states.
struct StoredQ4_64 : Nibbles {
  static constexpr int64_t kGroup = 64, kScales = 2;
  static constexpr bool kScalesWeights = false;
  static HWY_INLINE auto group(F32 d, const float* scales) {
    const auto scale = hn::Set(d, scales[0]), minimum = hn::Set(d, scales[1]);
#if HWY_MAX_BYTES == 64
    return FromTable{hn::MulAdd(hn::Load(d, kCodes), scale, minimum)};
#else
    return FromMinimum{scale, minimum};
#endif
  }
};

// clang-format off
#define TANDEM_KEY_TYPES(X)        \
  X(TANDEM_F32, StoredF32)         \
  X(TANDEM_F16, StoredF16)         \
  X(TANDEM_BF16, StoredBf16)       \
  X(TANDEM_E4M3, StoredE4m3)       \
  X(TANDEM_Q8_0, StoredQ8_0)       \
  X(TANDEM_Q4_0, StoredQ4_0)       \
  X(kQ8_0Blocks, StoredQ8_0Blocks) \
  X(kQ4_0Blocks, StoredQ4_0Blocks)
#define TANDEM_STORED_TYPES(X) \
  TANDEM_KEY_TYPES(X)          \
  X(TANDEM_Q4_64, StoredQ4_64)
// clang-format on

// Returns the byte at which element i of a row begins. i is the first element of a group.
template <class Stored>
constexpr size_t byte_of(size_t i) {
  if constexpr (Stored::kInBlocks)
    return i / Stored::kGroup * Stored::kBlockBytes;
  else
    return i * Stored::kBits / 8;
}

#define TANDEM_CASE(dtype_value, Stored) \
  case dtype_value:                      \
    return use(Stored());
// Calls use(Stored()) with the type of that number.
template <class Use>
HWY_INLINE void with_stored_type(int32_t dtype, const Use& use) {
  switch (dtype) { TANDEM_STORED_TYPES(TANDEM_CASE) }
}
// Calls use(Stored()) for the types of keys and values.
template <class Use>
HWY_INLINE void with_key_type(int32_t dtype, const Use& use) {
  switch (dtype) { TANDEM_KEY_TYPES(TANDEM_CASE) }
}
#undef TANDEM_CASE

// Reorders the two vectors of a pair from row order to the order in which the type loads them.
template <class Stored, class D>
HWY_INLINE void unsort_pair(D d, hn::Vec<D>& a, hn::Vec<D>& b) {
  if constexpr (Stored::kOddEven) {
    const auto even = hn::ConcatEven(d, b, a), odd = hn::ConcatOdd(d, b, a);
    a = even;
    b = odd;
  }
}

// Restores row order for a row of n floats, in place. Within every 128 bits the interleaved vectors are in order.
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

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace tandem::cpu
HWY_AFTER_NAMESPACE();
