// SPDX-License-Identifier: MIT
#include "reference/rounding.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <iterator>
#include <limits>
#include <type_traits>

#include "tandem/tandem.h"

namespace reference {
namespace {

struct Format {
  int32_t dtype;
  const char* name;
  int32_t bytes;
  int32_t mantissa_bits;
  int32_t min_exponent;  // for normal numbers
  int32_t max_exponent;
  bool has_infinity = true;  // false: the largest exponent is used for numbers, its last one is NaN, and overflow gives NaN
};

constexpr Format kFormats[] = {
    {TANDEM_F32, "f32", 4, 23, -126, 127},
    {TANDEM_F16, "f16", 2, 10, -14, 15},
    {TANDEM_BF16, "bf16", 2, 7, -126, 127},
    {TANDEM_E4M3, "e4m3", 1, 3, -6, 8, false},
};

// Returns the index in kFormats. A type with groups has the values of f32.
constexpr size_t index_of(int32_t dtype) {
  for (size_t i = 0; i < std::size(kFormats); ++i)
    if (kFormats[i].dtype == dtype) return i;
  return 0;
}

const Format& format_of(int32_t dtype) { return kFormats[index_of(dtype)]; }

// Calls work(a constant, the index of the type's format). The oracle spends its time here, so loops over elements are
// compiled once for each format, with its numbers as constants.
template <typename Work>
auto with_format(int32_t dtype, Work work) {
  switch (dtype) {
    case TANDEM_F16:
      return work(std::integral_constant<size_t, index_of(TANDEM_F16)>());
    case TANDEM_BF16:
      return work(std::integral_constant<size_t, index_of(TANDEM_BF16)>());
    case TANDEM_E4M3:
      return work(std::integral_constant<size_t, index_of(TANDEM_E4M3)>());
    default:
      return work(std::integral_constant<size_t, index_of(TANDEM_F32)>());
  }
}

// 2^exponent for exponents of normal doubles, and the exponent of a normal double. Written by hand, because both are used
// often.
inline double power_of_two(int32_t exponent) { return std::bit_cast<double>(static_cast<uint64_t>(exponent + 1023) << 52); }
inline int32_t exponent_of(double x) { return static_cast<int32_t>(std::bit_cast<uint64_t>(x) >> 52 & 0x7FF) - 1023; }

// Rounds x to an integer, ties to even, for |x| < 2^51. Beyond 2^52 a double has no fraction.
inline double nearest_integer(double x) { return std::copysign((x + 0x1.8p52) - 0x1.8p52, x); }

// Returns the bits of a number that the format can represent: sign, biased exponent, mantissa.
template <size_t kFormat>
inline uint32_t spell(double x) {
  constexpr Format format = kFormats[kFormat];
  const int32_t total = 8 * format.bytes;
  const uint32_t sign = std::signbit(x) ? uint32_t{1} << (total - 1) : 0;
  const uint32_t exponent_mask = ((uint32_t{1} << (total - 1 - format.mantissa_bits)) - 1) << format.mantissa_bits;
  if (!format.has_infinity && !std::isfinite(x)) return sign | ((uint32_t{1} << (total - 1)) - 1);
  if (std::isnan(x)) return exponent_mask | uint32_t{1} << (format.mantissa_bits - 1);
  if (std::isinf(x)) return sign | exponent_mask;
  const double magnitude = std::fabs(x);
  if (magnitude < power_of_two(format.min_exponent))
    return sign | static_cast<uint32_t>(magnitude * power_of_two(format.mantissa_bits - format.min_exponent));
  const int32_t exponent = exponent_of(magnitude);
  const auto significand = static_cast<uint32_t>(magnitude * power_of_two(format.mantissa_bits - exponent));
  return sign | static_cast<uint32_t>(exponent - format.min_exponent + 1) << format.mantissa_bits |
         (significand - (uint32_t{1} << format.mantissa_bits));
}

template <size_t kFormat>
inline double unspell(uint32_t bits) {
  constexpr Format format = kFormats[kFormat];
  const int32_t total = 8 * format.bytes;
  const double sign = bits >> (total - 1) ? -1.0 : 1.0;
  const uint32_t mantissa = bits & ((uint32_t{1} << format.mantissa_bits) - 1);
  const int32_t n_exponents = 1 << (total - 1 - format.mantissa_bits);
  const auto exponent = static_cast<int32_t>(bits >> format.mantissa_bits) & (n_exponents - 1);
  if (!format.has_infinity && mantissa == (uint32_t{1} << format.mantissa_bits) - 1 && exponent == n_exponents - 1)
    return std::numeric_limits<double>::quiet_NaN();
  if (format.has_infinity && exponent == n_exponents - 1)
    return mantissa ? std::numeric_limits<double>::quiet_NaN() : sign * std::numeric_limits<double>::infinity();
  const int32_t scale = format.min_exponent - format.mantissa_bits + (exponent ? exponent - 1 : 0);
  const uint32_t hidden = exponent ? uint32_t{1} << format.mantissa_bits : 0;
  return sign * static_cast<double>(mantissa + hidden) * power_of_two(scale);
}

template <size_t kFormat>
inline double round_one(double x) {
  constexpr Format format = kFormats[kFormat];
  if (std::isinf(x) && !format.has_infinity) return std::copysign(std::numeric_limits<double>::quiet_NaN(), x);
  if (x == 0.0 || !std::isfinite(x)) return x;
  const int32_t quantum = std::max(exponent_of(x), format.min_exponent) - format.mantissa_bits;
  const double rounded = nearest_integer(x * power_of_two(-quantum)) * power_of_two(quantum);
  const double largest =
      (2.0 - power_of_two(-format.mantissa_bits) * (format.has_infinity ? 1.0 : 2.0)) * power_of_two(format.max_exponent);
  if (std::fabs(rounded) <= largest) return rounded;
  const double none =
      format.has_infinity ? std::numeric_limits<double>::infinity() : std::numeric_limits<double>::quiet_NaN();
  return std::copysign(none, x);
}

template <size_t kFormat>
inline void store_one(double x, void* element) {
  const uint32_t bits = spell<kFormat>(round_one<kFormat>(x));
  std::memcpy(element, &bits, static_cast<size_t>(kFormats[kFormat].bytes));  // low bytes first
}

template <size_t kFormat>
inline double load_one(const void* element) {
  uint32_t bits = 0;
  std::memcpy(&bits, element, static_cast<size_t>(kFormats[kFormat].bytes));
  return unspell<kFormat>(bits);
}

}  // namespace

double round_to(int32_t dtype, double x) {
  return with_format(dtype, [x](auto format) { return round_one<format()>(x); });
}

void round_all(int32_t dtype, double* x, int64_t n) {
  with_format(dtype, [=](auto format) {
    for (int64_t i = 0; i < n; ++i) x[i] = round_one<format()>(x[i]);
  });
}

double epsilon(int32_t dtype) { return std::ldexp(1.0, -format_of(dtype).mantissa_bits); }
int64_t element_bytes(int32_t dtype) { return format_of(dtype).bytes; }
const char* dtype_name(int32_t dtype) {
  if (dtype == TANDEM_Q4_64) return "q4_64";
  return dtype == TANDEM_Q8_0 ? "q8_0" : dtype == TANDEM_Q4_0 ? "q4_0" : format_of(dtype).name;
}

void store(int32_t dtype, double x, void* element) {
  with_format(dtype, [=](auto format) { store_one<format()>(x, element); });
}

void store_all(int32_t dtype, const double* x, int64_t n, void* elements) {
  with_format(dtype, [=](auto format) {
    auto* to = static_cast<char*>(elements);
    for (int64_t i = 0; i < n; ++i) store_one<format()>(x[i], to + i * kFormats[format()].bytes);
  });
}

double load(int32_t dtype, const void* element) {
  return with_format(dtype, [=](auto format) { return load_one<format()>(element); });
}

void load_all(int32_t dtype, const void* elements, int64_t n, double* x) {
  with_format(dtype, [=](auto format) {
    const auto* from = static_cast<const char*>(elements);
    for (int64_t i = 0; i < n; ++i) x[i] = load_one<format()>(from + i * kFormats[format()].bytes);
  });
}

}  // namespace reference
