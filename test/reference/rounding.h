// SPDX-License-Identifier: MIT
// Storage types by arithmetic alone: a number is rounded to a multiple of its quantum, and its bits are computed from the
// value. Shares nothing with the library's conversions, which use bit patterns or instructions.
#pragma once

#include <cstddef>
#include <cstdint>

namespace reference {

// Returns the nearest number of the type, ties to even. Overflow gives infinity, or NaN in e4m3, which has no infinity. NaN
// stays NaN.
double round_to(int32_t dtype, double x);
// Returns the spacing of 1.0. For a type with groups (reference/stored_row.h): that of f32, in which its values are exact.
double epsilon(int32_t dtype);
int64_t element_bytes(int32_t dtype);
const char* dtype_name(int32_t dtype);

void store(int32_t dtype, double x, void* element);  // rounds
double load(int32_t dtype, const void* element);
// Rounds n adjacent numbers. Much faster than one at a time.
void round_all(int32_t dtype, double* x, int64_t n);
void store_all(int32_t dtype, const double* x, int64_t n, void* elements);
void load_all(int32_t dtype, const void* elements, int64_t n, double* x);

}  // namespace reference
