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

constexpr int64_t kGroup = 32;

struct Group {
  double scale = 0.0;  // as f16 has it
  int codes[kGroup] = {};
};

// volatile: every operation is rounded to f32 by itself, whatever the compiler would fuse.
float times(float a, float b) {
  volatile float product = a * b;
  return product;
}

Group quantise(int32_t dtype, const double* x, int64_t n) {
  Group group;
  float largest = 0.0f;  // with its sign
  bool finite = true;
  for (int64_t i = 0; i < n; ++i) {
    finite = finite && std::isfinite(x[i]);
    if (std::fabs(static_cast<float>(x[i])) > std::fabs(largest)) largest = static_cast<float>(x[i]);
  }
  const float scale = dtype == TANDEM_Q8_0 ? std::fabs(largest) / 127.0f : largest / -8.0f;
  group.scale = round_to(TANDEM_F16, static_cast<double>(scale));
  if (!finite || std::isinf(group.scale)) {
    group.scale = std::numeric_limits<double>::quiet_NaN();
    return group;
  }
  const float inverse = std::isfinite(1.0f / scale) ? 1.0f / scale : 0.0f;
  for (int64_t i = 0; i < n; ++i) {
    const float y = times(static_cast<float>(x[i]), inverse);
    group.codes[i] = dtype == TANDEM_Q8_0 ? static_cast<int>(std::lround(y)) : std::min(15, static_cast<int>(y + 8.5f)) - 8;
  }
  return group;
}

uint8_t nibbles(int low, int high) { return static_cast<uint8_t>((low + 8) | (high + 8) << 4); }

}  // namespace

bool has_groups(int32_t dtype) { return dtype == TANDEM_Q8_0 || dtype == TANDEM_Q4_0; }

int64_t code_bytes(int32_t dtype, int64_t n) {
  if (dtype == TANDEM_Q8_0) return n;
  return dtype == TANDEM_Q4_0 ? n / 2 : n * element_bytes(dtype);
}

int64_t scale_bytes(int32_t dtype, int64_t n) { return has_groups(dtype) ? (n + kGroup - 1) / kGroup * 2 : 0; }

void store_row(int32_t dtype, const double* x, int64_t n, void* codes, void* scales) {
  auto* to = static_cast<uint8_t*>(codes);
  if (!has_groups(dtype)) {
    store_all(dtype, x, n, to);
    return;
  }
  for (int64_t first = 0; first < n; first += kGroup) {
    const int64_t m = std::min(kGroup, n - first);
    const Group group = quantise(dtype, x + first, m);
    store(TANDEM_F16, group.scale, static_cast<uint8_t*>(scales) + first / kGroup * 2);
    const bool none = std::isnan(group.scale);
    for (int64_t i = 0; i < m; ++i) {
      if (dtype == TANDEM_Q8_0) to[first + i] = static_cast<uint8_t>(group.codes[i]);
      if (dtype == TANDEM_Q4_0 && i % 2 == 0) to[(first + i) / 2] = none ? 0 : nibbles(group.codes[i], group.codes[i + 1]);
    }
  }
}

double load_element(int32_t dtype, const void* codes, const void* scales, int64_t i) {
  const auto* from = static_cast<const uint8_t*>(codes);
  if (!has_groups(dtype)) return load(dtype, from + i * element_bytes(dtype));
  const double scale = load(TANDEM_F16, static_cast<const uint8_t*>(scales) + i / kGroup * 2);
  const int code = dtype == TANDEM_Q8_0 ? static_cast<int8_t>(from[i]) : (from[i / 2] >> (i % 2 * 4) & 15) - 8;
  return scale * code;
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
  for (int64_t first = 0; first < n; first += kGroup) {
    const Group group = quantise(dtype, x + first, kGroup);
    uint8_t scale[2];
    store(TANDEM_F16, group.scale, scale);
    blocks.insert(blocks.end(), scale, scale + 2);
    const bool none = std::isnan(group.scale);
    for (int64_t i = 0; i < kGroup; ++i) {
      if (dtype == TANDEM_Q8_0) blocks.push_back(static_cast<uint8_t>(group.codes[i]));
      if (dtype == TANDEM_Q4_0 && i < kGroup / 2)
        blocks.push_back(none ? 0 : nibbles(group.codes[i], group.codes[i + kGroup / 2]));
    }
  }
  return blocks;
}

}  // namespace reference
