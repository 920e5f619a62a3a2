// SPDX-License-Identifier: MIT
// Random numbers for the tensors of measurements, and bf16.
#pragma once

#include <cstdint>

namespace tools {

// Fills with normal random numbers, about as fast as memory. A seed always gives the same sequence.
void fill_normal(float* out, int64_t n, uint64_t seed);
uint64_t next_random(uint64_t* state);
uint16_t bf16_of(float value);  // nearest, ties to even; finite values only
float f32_of(uint16_t bf16);

}  // namespace tools
