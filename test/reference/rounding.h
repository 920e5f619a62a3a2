// SPDX-License-Identifier: MIT
// Storage types, done with arithmetic alone: a number is rounded to a multiple of its quantum and the bits are spelled out
// from the value. It shares nothing with the library's conversions, which work on bit patterns or instructions.
#pragma once

#include <cstddef>
#include <cstdint>

namespace reference {

// Nearest number of the type, ties to even; overflow gives infinity (e4m3 has none: NaN), NaN stays NaN.
double round_to(int32_t dtype, double x);
// Spacing of 1.0. Of a type with groups (reference/stored_row.h): that of f32, in which its values are exact.
double epsilon(int32_t dtype);
int64_t element_bytes(int32_t dtype);
const char* dtype_name(int32_t dtype);

void store(int32_t dtype, double x, void* element);  // rounds
double load(int32_t dtype, const void* element);
// The same for n numbers side by side: faster by far than one at a time.
void round_all(int32_t dtype, double* x, int64_t n);
void store_all(int32_t dtype, const double* x, int64_t n, void* elements);
void load_all(int32_t dtype, const void* elements, int64_t n, double* x);

}  // namespace reference
