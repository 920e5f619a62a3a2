// SPDX-License-Identifier: MIT
// Rows in storage types, including types with scales for each group of elements. Independent of the library's conversions:
// plain scalar arithmetic, in f32 where formats are defined by f32.
#pragma once

#include <cstdint>
#include <vector>

namespace reference {

// q8_0 and q4_0: groups of 32 with a scale; q4_64: groups of 64 with a scale and a minimum.
bool has_groups(int32_t dtype);
int64_t group_elements(int32_t dtype);
int64_t code_bytes(int32_t dtype, int64_t n);   // of a row of n elements
int64_t scale_bytes(int32_t dtype, int64_t n);  // 0 without groups

// codes: as a cache keeps them (4 bits: elements 2 j and 2 j + 1 in byte j); scales: f16, unused without groups.
void store_row(int32_t dtype, const double* x, int64_t n, void* codes, void* scales);
double load_element(int32_t dtype, const void* codes, const void* scales, int64_t i);
void load_row(int32_t dtype, const void* codes, const void* scales, int64_t n, double* x);
// Rounds a row to the values that it reads back as.
void round_row(int32_t dtype, double* x, int64_t n);
// Returns the row as blocks. q8_0 and q4_0 have ggml's layout.
std::vector<uint8_t> block_row(int32_t dtype, const double* x, int64_t n);

}  // namespace reference
