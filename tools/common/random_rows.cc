// SPDX-License-Identifier: MIT
#include "tools/common/random_rows.h"

#include <cmath>
#include <cstring>

namespace tools {

uint64_t next_random(uint64_t* state) {
  *state += 0x9e3779b97f4a7c15;  // splitmix64
  uint64_t z = *state;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
  z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
  return z ^ (z >> 31);
}

// Each number is the sum of four uniform numbers of 16 bits: mean 0, variance 1, tails to 3.5.
void fill_normal(float* out, int64_t n, uint64_t seed) {
  uint64_t state = seed * 0x2545f4914f6cdd1d + 1;
  const float scale = std::sqrt(3.0f) / 65536.0f;
  for (int64_t i = 0; i < n; ++i) {
    const uint64_t bits = next_random(&state);
    const int64_t sum = static_cast<int64_t>((bits & 0xffff) + (bits >> 16 & 0xffff) + (bits >> 32 & 0xffff) + (bits >> 48));
    out[i] = static_cast<float>(sum - 131070) * scale;
  }
}

uint16_t bf16_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

float f32_of(uint16_t bf16) {
  const uint32_t bits = static_cast<uint32_t>(bf16) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

}  // namespace tools
