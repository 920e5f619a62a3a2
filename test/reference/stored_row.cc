// SPDX-License-Identifier: MIT
#include "reference/stored_row.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "reference/rounding.h"
#include "tandem/tandem.h"

namespace reference {
namespace {

constexpr int64_t kMaxGroup = 64;

struct Group {
  double scale = 0.0, minimum = 0.0;  // rounded to f16
  int codes[kMaxGroup] = {};          // as stored
};

// volatile: every operation is rounded to f32 separately, so that the compiler cannot fuse operations.
float times(float a, float b) {
  volatile float product = a * b;
  return product;
}

float inverse_of(float scale) { return std::isfinite(1.0f / scale) ? 1.0f / scale : 0.0f; }

Group quantise_from_zero(int32_t dtype, const double* x, int64_t n) {
  Group group;
  float largest = 0.0f;  // with its sign
  for (int64_t i = 0; i < n; ++i)
    if (std::fabs(static_cast<float>(x[i])) > std::fabs(largest)) largest = static_cast<float>(x[i]);
  const float scale = dtype == TANDEM_Q8_0 ? std::fabs(largest) / 127.0f : largest / -8.0f;
  group.scale = round_to(TANDEM_F16, static_cast<double>(scale));
  if (std::isinf(group.scale)) return group;
  const float inverse = inverse_of(scale);
  for (int64_t i = 0; i < n; ++i) {
    const float y = times(static_cast<float>(x[i]), inverse);
    group.codes[i] = dtype == TANDEM_Q8_0 ? static_cast<int>(std::lround(y)) : std::min(15, static_cast<int>(y + 8.5f));
  }
  return group;
}

Group quantise_from_minimum(const double* x, int64_t n) {
  Group group;
  const auto min = static_cast<float>(*std::min_element(x, x + n));
  const float span = static_cast<float>(*std::max_element(x, x + n)) - min;
  group.scale = round_to(TANDEM_F16, static_cast<double>(span / 15.0f));
  group.minimum = round_to(TANDEM_F16, static_cast<double>(min));
  if (std::isinf(group.scale) || std::isinf(group.minimum)) return group;
  const float inverse = inverse_of(static_cast<float>(group.scale));
  for (int64_t i = 0; i < n; ++i) {
    const float y = times(static_cast<float>(x[i]) - static_cast<float>(group.minimum), inverse) + 0.5f;
    group.codes[i] = static_cast<int>(std::clamp(y, 0.0f, 15.0f));
  }
  return group;
}

Group quantise(int32_t dtype, const double* x, int64_t n) {
  const bool finite = std::all_of(x, x + n, [](double value) { return std::isfinite(value); });
  if (finite) {
    const Group group = dtype == TANDEM_Q4_64 ? quantise_from_minimum(x, n) : quantise_from_zero(dtype, x, n);
    if (!std::isinf(group.scale) && !std::isinf(group.minimum)) return group;
  }
  constexpr double kNone = std::numeric_limits<double>::quiet_NaN();
  return {kNone, kNone, {}};
}

uint8_t nibbles(int low, int high) { return static_cast<uint8_t>(low | high << 4); }

int64_t group_scales(int32_t dtype) { return dtype == TANDEM_Q4_64 ? 2 : 1; }

void store_scales(int32_t dtype, const Group& group, uint8_t* scales) {
  store(TANDEM_F16, group.scale, scales);
  if (dtype == TANDEM_Q4_64) store(TANDEM_F16, group.minimum, scales + 2);
}

}  // namespace

bool has_groups(int32_t dtype) { return group_elements(dtype) > 0; }

int64_t group_elements(int32_t dtype) {
  return dtype == TANDEM_Q4_64 ? 64 : dtype == TANDEM_Q8_0 || dtype == TANDEM_Q4_0 ? 32 : 0;
}

int64_t code_bytes(int32_t dtype, int64_t n) {
  if (!has_groups(dtype)) return n * element_bytes(dtype);
  return dtype == TANDEM_Q8_0 ? n : n / 2;
}

int64_t scale_bytes(int32_t dtype, int64_t n) {
  const int64_t elements = group_elements(dtype);
  return elements == 0 ? 0 : (n + elements - 1) / elements * group_scales(dtype) * 2;
}

void store_row(int32_t dtype, const double* x, int64_t n, void* codes, void* scales) {
  auto *to = static_cast<uint8_t*>(codes), *f16 = static_cast<uint8_t*>(scales);
  if (!has_groups(dtype)) {
    store_all(dtype, x, n, to);
    return;
  }
  for (int64_t first = 0; first < n; first += group_elements(dtype), f16 += 2 * group_scales(dtype)) {
    const int64_t m = std::min(group_elements(dtype), n - first);
    const Group group = quantise(dtype, x + first, m);
    store_scales(dtype, group, f16);
    for (int64_t i = 0; i < m; ++i) {
      if (dtype == TANDEM_Q8_0)
        to[first + i] = static_cast<uint8_t>(group.codes[i]);
      else if (i % 2 == 0)
        to[(first + i) / 2] = nibbles(group.codes[i], group.codes[i + 1]);
    }
  }
}

double load_element(int32_t dtype, const void* codes, const void* scales, int64_t i) {
  const auto* from = static_cast<const uint8_t*>(codes);
  if (!has_groups(dtype)) return load(dtype, from + i * element_bytes(dtype));
  const auto* f16 = static_cast<const uint8_t*>(scales) + i / group_elements(dtype) * group_scales(dtype) * 2;
  const double scale = load(TANDEM_F16, f16);
  if (dtype == TANDEM_Q8_0) return scale * static_cast<int8_t>(from[i]);
  const int code = from[i / 2] >> (i % 2 * 4) & 15;
  if (dtype == TANDEM_Q4_0) return scale * (code - 8);
  return round_to(TANDEM_F32, scale * code + load(TANDEM_F16, f16 + 2));
}

void load_row(int32_t dtype, const void* codes, const void* scales, int64_t n, double* x) {
  if (!has_groups(dtype)) {
    load_all(dtype, codes, n, x);
    return;
  }
  for (int64_t i = 0; i < n; ++i) x[i] = load_element(dtype, codes, scales, i);
}

void round_row(int32_t dtype, double* x, int64_t n) {
  if (!has_groups(dtype)) {
    round_all(dtype, x, n);
    return;
  }
  std::vector<uint8_t> codes(static_cast<size_t>(code_bytes(dtype, n))), scales(static_cast<size_t>(scale_bytes(dtype, n)));
  store_row(dtype, x, n, codes.data(), scales.data());
  load_row(dtype, codes.data(), scales.data(), n, x);
}

std::vector<uint8_t> block_row(int32_t dtype, const double* x, int64_t n) {
  std::vector<uint8_t> blocks;
  const int64_t elements = group_elements(dtype);
  for (int64_t first = 0; first < n; first += elements) {
    const Group group = quantise(dtype, x + first, elements);
    uint8_t scales[4];
    store_scales(dtype, group, scales);
    blocks.insert(blocks.end(), scales, scales + 2 * group_scales(dtype));
    for (int64_t i = 0; i < elements; ++i) {
      if (dtype == TANDEM_Q8_0) blocks.push_back(static_cast<uint8_t>(group.codes[i]));
      if (dtype == TANDEM_Q4_0 && i < elements / 2) blocks.push_back(nibbles(group.codes[i], group.codes[i + elements / 2]));
      if (dtype == TANDEM_Q4_64 && i % 2 == 0) blocks.push_back(nibbles(group.codes[i], group.codes[i + 1]));
    }
  }
  return blocks;
}

}  // namespace reference
