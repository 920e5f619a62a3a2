// SPDX-License-Identifier: MIT
// Rows of every storage type from and to f32.
//
// Types with groups are rounded in f32, as ggml's reference does, so that the same numbers give the same codes:
//
//   q8_0   d = max |x| / 127                            code = x (1 / d), to nearest, halves away from zero
//   q4_0   d = x_m / -8, x_m the first of largest |x|   code = min(15, trunc(x (1 / d) + 8.5))
//
// with 0 for 1 / d where that would overflow, and d stored as f16. In q4_64 codes are chosen for the d and m that are
// stored:
//
//   q4_64  m = min x, d = (max x - min x) / 15, to f16  code = trunc((x - m) (1 / d) + 0.5), at least 0 and at most 15
//
// with 0 for 1 / d where d is 0. A group that is not finite, or whose d or m is none in f16, gets NaN for them.
#pragma once

#include <math.h>

#include "cpu/kernels/kernels.h"
#include "cpu/kernels/stored_inl.h"
#include "lib/dtype.h"

HWY_BEFORE_NAMESPACE();
namespace tandem::cpu {
namespace HWY_NAMESPACE {
namespace {

// Codes and the scales of each group. n: a multiple of 16.
template <class Stored>
HWY_INLINE void scaled_to_f32(const uint8_t* codes, const float* scales, float* to, int64_t n) {
  const F32 d;
  constexpr int64_t kStep = HWY_MAX_BYTES / sizeof(float);
  for (int64_t first = 0; first < n; first += Stored::kGroup, scales += Stored::kScales) {
    const auto group = Stored::group(d, scales, 1);
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

// n f16 scales, any alignment.
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

// The nearest f16; infinity where there is none.
HWY_INLINE float rounded_to_f16(float x) {
  const hn::CappedTag<float, 1> d1;
  uint8_t f16[sizeof(uint16_t)];
  StoredF16::store(d1, hn::Set(d1, x), f16, 0);
  return hn::GetLane(StoredF16::load(d1, f16, 0));
}

HWY_INLINE float inverse_of(float scale) { return isfinite(1.0f / scale) ? 1.0f / scale : 0.0f; }

// What the types with groups differ in: the scales of n finite numbers, before they are rounded to f16, and their codes.
template <class Stored>
struct Quantiser;

template <>
struct Quantiser<StoredQ8_0> {
  static void find(const float*, int64_t, float largest, float* scales) { scales[0] = largest / 127.0f; }
  static void put(const float* x, int64_t n, const float* scales, uint8_t* codes) {
    const float inverse = inverse_of(scales[0]);
    for (int64_t i = 0; i < n; ++i) codes[i] = static_cast<uint8_t>(static_cast<int8_t>(roundf(x[i] * inverse)));
  }
};

template <>
struct Quantiser<StoredQ4_0> {
  static void find(const float* x, int64_t n, float largest, float* scales) {
    int64_t i = 0;
    while (i < n && fabsf(x[i]) < largest) ++i;
    scales[0] = largest > 0.0f ? x[i] / -8.0f : -0.0f;
  }
  static void put(const float* x, int64_t n, const float* scales, uint8_t* codes) {
    const float inverse = inverse_of(scales[0]);
    const auto code = [&](int64_t i) {
      const int c = static_cast<int>(x[i] * inverse + 8.5f);
      return c < 15 ? c : 15;
    };
    for (int64_t i = 0; i < n; i += 2) codes[i / 2] = static_cast<uint8_t>(code(i) | code(i + 1) << 4);
  }
};

template <>
struct Quantiser<StoredQ4_64> {
  static void find(const float* x, int64_t n, float, float* scales) {
    float min = x[0], max = x[0];
    for (int64_t i = 1; i < n; ++i) {
      min = x[i] < min ? x[i] : min;
      max = x[i] > max ? x[i] : max;
    }
    scales[0] = rounded_to_f16((max - min) / 15.0f);
    scales[1] = rounded_to_f16(min);
  }
  static void put(const float* x, int64_t n, const float* scales, uint8_t* codes) {
    const float inverse = inverse_of(scales[0]), minimum = scales[1];
    const auto code = [&](int64_t i) {
      const float c = (x[i] - minimum) * inverse + 0.5f;
      return static_cast<int>(c < 0.0f ? 0.0f : c > 15.0f ? 15.0f : c);
    };
    for (int64_t i = 0; i < n; i += 2) codes[i / 2] = static_cast<uint8_t>(code(i) | code(i + 1) << 4);
  }
};

// The largest |x|; NaN or infinite where some x is.
HWY_INLINE float largest_magnitude(const float* x, int64_t n) {
  float largest = 0.0f;
  for (int64_t i = 0; i < n; ++i) {
    const float size = fabsf(x[i]);
    if (!(size <= largest)) largest = size;
    if (isnan(size)) return size;
  }
  return largest;
}

template <class Stored>
void quantise_row(const float* from, uint8_t* codes, uint8_t* scales, int64_t n) {
  const hn::CappedTag<float, 1> d1;
  for (int64_t i = 0; i < n; i += Stored::kGroup) {
    const int64_t m = n - i < Stored::kGroup ? n - i : Stored::kGroup;
    const float largest = largest_magnitude(from + i, m);
    float found[Stored::kScales] = {};
    bool fits = isfinite(largest);
    if (fits) Quantiser<Stored>::find(from + i, m, largest, found);
    for (int64_t k = 0; k < Stored::kScales; ++k)
      fits = fits && fabsf(found[k]) < 65520.0f;  // beyond, f16 has only infinity
    for (int64_t k = 0; k < Stored::kScales; ++k, scales += sizeof(uint16_t))
      StoredF16::store(d1, hn::Set(d1, fits ? found[k] : NAN), scales, 0);
    uint8_t* to = codes + i * Stored::kBits / 8;
    if (fits)
      Quantiser<Stored>::put(from + i, m, found, to);
    else
      memset(to, 0, static_cast<size_t>(m * Stored::kBits / 8));
  }
}

template <class Stored>
void row_from_f32(const float* from, uint8_t* codes, uint8_t* scales, int64_t n) {
  if constexpr (Stored::kGroup > 0)
    quantise_row<Stored>(from, codes, scales, n);
  else
    plain_from_f32<Stored>(from, codes, n);
}

// scales: f32, those of each group of the row.
void row_to_f32(int32_t dtype, const uint8_t* codes, const float* scales, float* to, int64_t n) {
  with_stored_type(dtype, [&](auto stored) HWY_ATTR { row_to_f32<decltype(stored)>(codes, scales, to, n); });
}

void to_f32(int32_t dtype, const void* codes, const void* scales, float* to, int64_t n) {
  float wide[kMaxScales + HWY_MAX_BYTES / sizeof(float)];
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
