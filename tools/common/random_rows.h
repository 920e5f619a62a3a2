// SPDX-License-Identifier: MIT
// Random numbers for the tensors of measurements, and bf16.
#pragma once

#include <cstdint>

namespace tools {

// Normal random numbers with a fixed sequence per seed, about as fast as memory.
void fill_normal(float* out, int64_t n, uint64_t seed);
uint64_t next_random(uint64_t* state);
uint16_t bf16_of(float value);  // nearest, ties to even; finite values only
float f32_of(uint16_t bf16);

}  // namespace tools
