// SPDX-License-Identifier: MIT
// Converts rows of every storage type from and to f32.
//
// Types with groups are rounded in f32, as in ggml's reference, so the same numbers give the same codes:
//
//   q8_0   d = max |x| / 127                            code = x (1 / d), to nearest, halves away from zero
//   q4_0   d = x_m / -8, x_m the first of largest |x|   code = min(15, trunc(x (1 / d) + 8.5))
//
// 1 / d counts as 0 if it would overflow, and d is stored as f16. q4_64 chooses codes for the stored (rounded) d and m:
//
//   q4_64  m = min x, d = (max x - min x) / 15, to f16  code = trunc((x - m) (1 / d) + 0.5), at least 0 and at most 15
//
// 1 / d counts as 0 if d is 0. A group that is not finite, or whose d or m does not fit f16, gets NaN for them.
#pragma once

#include <math.h>

#include "cpu/kernels/kernels.h"
#include "cpu/kernels/stored_inl.h"
#include "lib/model/dtype.h"

HWY_BEFORE_NAMESPACE();
namespace tandem::cpu {
namespace HWY_NAMESPACE {
namespace {

// Converts n codes by the scales of their groups. n: a multiple of 16.
template <class Stored>
HWY_INLINE void scaled_to_f32(const uint8_t* codes, const float* scales, float* to, int64_t n) {
  const F32 d;
  constexpr int64_t kStep = HWY_MAX_BYTES / sizeof(float);
  for (int64_t first = 0; first < n; first += Stored::kGroup, scales += Stored::kScales) {
    const auto group = Stored::group(d, scales);
    const int64_t end = n - first < Stored::kGroup ? n : first + Stored::kGroup;
    for (int64_t i = first; i < end; i += kStep)
      hn::StoreU(group.of(d, Stored::load(d, codes, static_cast<size_t>(i))), d, to + i);
  }
}

template <class Stored>
HWY_INLINE void plain_to_f32(const uint8_t* from, float* to, int64_t n) {
  const F32 d;
  constexpr int64_t kStep = HWY_MAX_BYTES / sizeof(float);
  int64_t i = 0;
  for (; i + kStep <= n; i += kStep) hn::StoreU(Stored::load(d, from, static_cast<size_t>(i)), d, to + i);
  if (i == n) return;
  using Element = typename Stored::Element;
  Element tail[HWY_MAX_BYTES / 4] = {};
  float wide[HWY_MAX_BYTES / 4];
  memcpy(tail, from + static_cast<size_t>(i) * sizeof(Element), static_cast<size_t>(n - i) * sizeof(Element));
  hn::StoreU(Stored::load(d, reinterpret_cast<const uint8_t*>(tail), 0), d, wide);
  memcpy(to + i, wide, static_cast<size_t>(n - i) * sizeof(float));
}

// Copies the f16 scales of n blocks of a row.
HWY_INLINE void copy_block_scales(const uint8_t* row, int64_t block_bytes, int64_t n, uint16_t* to) {
  for (int64_t i = 0; i < n; ++i) memcpy(to + i, row + i * block_bytes, sizeof(uint16_t));
}
HWY_INLINE int64_t block_bytes_of(int32_t dtype) {
  return dtype == kQ8_0Blocks ? int64_t{StoredQ8_0Blocks::kBlockBytes} : int64_t{StoredQ4_0Blocks::kBlockBytes};
}

// Widens n f16 scales at any alignment.
HWY_INLINE void widen_scales(const void* from, int64_t n, float* to) {
  plain_to_f32<StoredF16>(static_cast<const uint8_t*>(from), to, n);
}

template <class Stored>
void row_to_f32(const uint8_t* codes, const float* scales, float* to, int64_t n) {
  if constexpr (Stored::kGroup > 0)
    scaled_to_f32<Stored>(codes, scales, to, n);
  else
    plain_to_f32<Stored>(codes, to, n);
}

template <class Stored>
HWY_INLINE void plain_from_f32(const float* from, uint8_t* to, int64_t n) {
  const F32 d;
  constexpr int64_t kStep = HWY_MAX_BYTES / sizeof(float);
  int64_t i = 0;
  for (; i + kStep <= n; i += kStep) Stored::store(d, hn::LoadU(d, from + i), to, static_cast<size_t>(i));
  if (i == n) return;
  using Element = typename Stored::Element;
  Element tail[HWY_MAX_BYTES / 4];
  float wide[HWY_MAX_BYTES / 4] = {};
  memcpy(wide, from + i, static_cast<size_t>(n - i) * sizeof(float));
  Stored::store(d, hn::LoadU(d, wide), reinterpret_cast<uint8_t*>(tail), 0);
  memcpy(to + static_cast<size_t>(i) * sizeof(Element), tail, static_cast<size_t>(n - i) * sizeof(Element));
}

// Returns the nearest f16; infinity if x is too large.
HWY_INLINE float rounded_to_f16(float x) {
  const hn::CappedTag<float, 1> d1;
  uint8_t f16[sizeof(uint16_t)];
  StoredF16::store(d1, hn::Set(d1, x), f16, 0);
  return hn::GetLane(StoredF16::load(d1, f16, 0));
}

HWY_INLINE float inverse_of(float scale) { return isfinite(1.0f / scale) ? 1.0f / scale : 0.0f; }

// Calls body(i, vector) for a whole group of n numbers.
template <class Body>
HWY_INLINE void for_vectors(const float* x, int64_t n, const Body& body) {
  const F32 d;
  constexpr int64_t kStep = HWY_MAX_BYTES / sizeof(float);
  for (int64_t i = 0; i < n; i += kStep) body(i, hn::LoadU(d, x + i));
}

// Returns the first number for which is_wanted(vector) is true. There must be one.
template <class IsWanted>
HWY_INLINE float first_of(const float* x, const IsWanted& is_wanted) {
  const F32 d;
  for (;; x += HWY_MAX_BYTES / sizeof(float)) {
    const auto i = hn::FindFirstTrue(d, is_wanted(hn::LoadU(d, x)));
    if (i >= 0) return x[i];
  }
}

// Writes n numbers from 0 to 255, or from -128 to 127, as bytes.
template <class Byte, class CodeOf>
HWY_INLINE void write_codes(const float* x, int64_t n, uint8_t* codes, const CodeOf& code_of) {
  for_vectors(x, n, [&](int64_t i, Vec v) HWY_ATTR {
    const hn::Rebind<Byte, F32> db;
    hn::StoreU(hn::DemoteTo(db, code_of(v)), db, reinterpret_cast<Byte*>(codes + i));
  });
}

// Packs codes of 4 bits two to a byte, the first in the lower half. Takes eight at a time, loaded so that the first code is
// the lowest byte of the word.
HWY_INLINE void pack_nibbles(const uint8_t* codes, int64_t n, uint8_t* to) {
  for (int64_t i = 0; i < n; i += 8) {
    uint64_t x;
    memcpy(&x, codes + i, sizeof(x));
    x = (x | x >> 4) & 0x00ff00ff00ff00ff;
    x = (x | x >> 8) & 0x0000ffff0000ffff;
    const auto packed = static_cast<uint32_t>(x | x >> 16);
    memcpy(to + i / 2, &packed, sizeof(packed));
  }
}

// The differences between types with groups, for a group of kGroup finite numbers: how to find the scales (before rounding
// to f16) and the codes.
template <class Stored>
struct Quantiser;

template <>
struct Quantiser<StoredQ8_0> {
  static HWY_INLINE void find(const float*, float largest, float* scales) { scales[0] = largest / 127.0f; }
  static HWY_INLINE void put(const float* x, const float* scales, uint8_t* codes) {
    const F32 d;
    const hn::RebindToSigned<F32> di;
    const Vec inverse = hn::Set(d, inverse_of(scales[0])), half = hn::Set(d, 0.5f), one = hn::Set(d, 1.0f);
    write_codes<int8_t>(x, StoredQ8_0::kGroup, codes, [&](Vec v) HWY_ATTR {
      const Vec scaled = hn::Mul(v, inverse), whole = hn::Trunc(scaled);
      const auto away = hn::Ge(hn::Abs(hn::Sub(scaled, whole)), half);
      return hn::ConvertTo(di, hn::Add(whole, hn::IfThenElseZero(away, hn::CopySign(one, scaled))));
    });
  }
};

template <>
struct Quantiser<StoredQ4_0> {
  static HWY_INLINE void find(const float* x, float largest, float* scales) {
    const F32 d;
    const Vec most = hn::Set(d, largest);
    const float x_m = first_of(x, [&](Vec v) HWY_ATTR { return hn::Eq(hn::Abs(v), most); });
    scales[0] = largest > 0.0f ? x_m / -8.0f : -0.0f;
  }
  static HWY_INLINE void put(const float* x, const float* scales, uint8_t* codes) {
    const F32 d;
    const hn::RebindToSigned<F32> di;
    const Vec inverse = hn::Set(d, inverse_of(scales[0])), middle = hn::Set(d, 8.5f);
    const auto most = hn::Set(di, 15);
    uint8_t apart[StoredQ4_0::kGroup];
    write_codes<uint8_t>(x, StoredQ4_0::kGroup, apart, [&](Vec v) HWY_ATTR {
      return hn::Min(hn::ConvertTo(di, hn::Add(hn::Mul(v, inverse), middle)), most);
    });
    pack_nibbles(apart, StoredQ4_0::kGroup, codes);
  }
};

template <>
struct Quantiser<StoredQ4_64> {
  static HWY_INLINE void find(const float* x, float, float* scales) {
    const F32 d;
    Vec least = hn::LoadU(d, x), most = least;
    for_vectors(x, StoredQ4_64::kGroup, [&](int64_t, Vec v) HWY_ATTR {
      least = hn::Min(least, v);
      most = hn::Max(most, v);
    });
    least = hn::MinOfLanes(d, least);
    most = hn::MaxOfLanes(d, most);
    // If there are zeros of either sign, the first one counts.
    const float min = first_of(x, [&](Vec v) HWY_ATTR { return hn::Eq(v, least); });
    const float max = first_of(x, [&](Vec v) HWY_ATTR { return hn::Eq(v, most); });
    scales[0] = rounded_to_f16((max - min) / 15.0f);
    scales[1] = rounded_to_f16(min);
  }
  static HWY_INLINE void put(const float* x, const float* scales, uint8_t* codes) {
    const F32 d;
    const hn::RebindToSigned<F32> di;
    const Vec inverse = hn::Set(d, inverse_of(scales[0])), minimum = hn::Set(d, scales[1]), half = hn::Set(d, 0.5f);
    const Vec most = hn::Set(d, 15.0f), zero = hn::Zero(d);
    uint8_t apart[StoredQ4_64::kGroup];
    write_codes<uint8_t>(x, StoredQ4_64::kGroup, apart, [&](Vec v) HWY_ATTR {
      const Vec code = hn::Add(hn::Mul(hn::Sub(v, minimum), inverse), half);
      return hn::ConvertTo(di, hn::Max(hn::Min(code, most), zero));
    });
    pack_nibbles(apart, StoredQ4_64::kGroup, codes);
  }
};

// Returns the largest |x| of n numbers, whole vectors of them; NaN if some x is not finite.
HWY_INLINE float largest_magnitude(const float* x, int64_t n) {
  const F32 d;
  Vec largest = hn::Zero(d), poison = hn::Zero(d);
  for_vectors(x, n, [&](int64_t, Vec v) HWY_ATTR {
    largest = hn::Max(largest, hn::Abs(v));
    poison = hn::Add(poison, hn::Sub(v, v));
  });
  const float most = hn::GetLane(hn::MaxOfLanes(d, largest));
  return hn::AllTrue(d, hn::Eq(poison, hn::Zero(d))) ? most : NAN;
}

// A row's last group may be short. It is padded with its first number, which changes neither its largest nor its least
// number.
template <class Stored>
void quantise_row(const float* from, uint8_t* codes, uint8_t* scales, int64_t n) {
  const hn::CappedTag<float, 1> d1;
  constexpr int64_t kGroup = Stored::kGroup;
  float filled[kGroup];
  uint8_t short_codes[kGroup];
  for (int64_t i = 0; i < n; i += kGroup) {
    const int64_t m = n - i < kGroup ? n - i : kGroup;
    const auto n_bytes = static_cast<size_t>(m * Stored::kBits / 8);
    const float* x = from + i;
    if (m < kGroup) {
      memcpy(filled, x, static_cast<size_t>(m) * sizeof(float));
      for (int64_t j = m; j < kGroup; ++j) filled[j] = x[0];
      x = filled;
    }
    const float largest = largest_magnitude(x, kGroup);
    float found[Stored::kScales] = {};
    bool fits = isfinite(largest);
    if (fits) Quantiser<Stored>::find(x, largest, found);
    for (int64_t k = 0; k < Stored::kScales; ++k)
      fits = fits && fabsf(found[k]) < 65520.0f;  // beyond that, f16 has only infinity
    for (int64_t k = 0; k < Stored::kScales; ++k, scales += sizeof(uint16_t))
      StoredF16::store(d1, hn::Set(d1, fits ? found[k] : NAN), scales, 0);
    uint8_t* to = codes + i * Stored::kBits / 8;
    if (!fits) {
      memset(to, 0, n_bytes);
    } else if (m == kGroup) {
      Quantiser<Stored>::put(x, found, to);
    } else {
      Quantiser<Stored>::put(x, found, short_codes);
      memcpy(to, short_codes, n_bytes);
    }
  }
}

template <class Stored>
void row_from_f32(const float* from, uint8_t* codes, uint8_t* scales, int64_t n) {
  if constexpr (Stored::kInBlocks)
    (void)from, (void)codes, (void)scales, (void)n;  // no cache has such rows
  else if constexpr (Stored::kGroup > 0)
    quantise_row<Stored>(from, codes, scales, n);
  else
    plain_from_f32<Stored>(from, codes, n);
}

// scales: f32, one set for each group of the row.
void row_to_f32(int32_t dtype, const uint8_t* codes, const float* scales, float* to, int64_t n) {
  with_stored_type(dtype, [&](auto stored) HWY_ATTR { row_to_f32<decltype(stored)>(codes, scales, to, n); });
}

void to_f32(int32_t dtype, const void* codes, const void* scales, float* to, int64_t n) {
  float wide[kMaxScales + HWY_MAX_BYTES / sizeof(float)];
  uint16_t in_row[kMaxScales];
  if (stored_dtype(dtype).in_blocks) {
    copy_block_scales(static_cast<const uint8_t*>(codes), block_bytes_of(dtype), n_scales(dtype, n), in_row);
    scales = in_row;
  }
  if (scales != nullptr) widen_scales(scales, n_scales(dtype, n), wide);
  row_to_f32(dtype, static_cast<const uint8_t*>(codes), wide, to, n);
}

void from_f32(int32_t dtype, const float* from, void* to, void* scales, int64_t n) {
  auto *codes = static_cast<uint8_t*>(to), *f16 = static_cast<uint8_t*>(scales);
  with_stored_type(dtype, [&](auto stored) HWY_ATTR { row_from_f32<decltype(stored)>(from, codes, f16, n); });
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace tandem::cpu
HWY_AFTER_NAMESPACE();
