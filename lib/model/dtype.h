// SPDX-License-Identifier: MIT
// Storage types of K, V and hidden states. Each type has one struct and one line in the list. All code that depends on the
// type is instantiated from the list.
//
// A cache keeps the codes of a row and its scales in two places. Tensors of a caller have ggml's blocks instead: each
// group's scale, then its codes. Kernels read both. Blocks have type numbers that no caller can pass (in_blocks()).
#pragma once

#include <cstdint>

#include "tandem/tandem.h"

namespace tandem {

struct DtypeInfo {
  int32_t dtype;
  const char* name;
  int32_t bits;    // per element
  int32_t group;   // consecutive elements of a row that share scales; 0: no scales. A row's last group may be short
  int32_t scales;  // f16 numbers per group: its scale, or its scale and its minimum
  // Spacing at 1.0. With scales: spacing of the codes, relative to the group's largest element or to its range.
  double epsilon;
  bool in_blocks = false;  // scales lie between the codes
};

inline constexpr DtypeInfo kDtypes[] = {
    {TANDEM_F32, "f32", 32, 0, 0, 0x1p-23},    {TANDEM_F16, "f16", 16, 0, 0, 0x1p-10},
    {TANDEM_BF16, "bf16", 16, 0, 0, 0x1p-7},   {TANDEM_E4M3, "e4m3", 8, 0, 0, 0x1p-3},
    {TANDEM_Q8_0, "q8_0", 8, 32, 1, 0x1p-7},   {TANDEM_Q4_0, "q4_0", 4, 32, 1, 0x1p-3},
    {TANDEM_Q4_64, "q4_64", 4, 64, 2, 0x1p-3},
};

// Finds a type that a caller may pass; null if there is none.
constexpr const DtypeInfo* find_dtype(int32_t dtype) {
  for (const DtypeInfo& info : kDtypes)
    if (info.dtype == dtype) return &info;
  return nullptr;
}

inline constexpr int32_t kQ8_0Blocks = 64 + TANDEM_Q8_0, kQ4_0Blocks = 64 + TANDEM_Q4_0;
inline constexpr DtypeInfo kBlockDtypes[] = {
    {kQ8_0Blocks, "q8_0 blocks", 8, 32, 1, 0x1p-7, true},
    {kQ4_0Blocks, "q4_0 blocks", 4, 32, 1, 0x1p-3, true},
};

// Returns the type of a tensor in its memory layout.
constexpr int32_t in_blocks(int32_t dtype) {
  return dtype == TANDEM_Q8_0 ? kQ8_0Blocks : dtype == TANDEM_Q4_0 ? kQ4_0Blocks : dtype;
}

// Finds a type that kernels read.
constexpr const DtypeInfo& stored_dtype(int32_t dtype) {
  for (const DtypeInfo& info : kBlockDtypes)
    if (info.dtype == dtype) return info;
  return *find_dtype(dtype);
}

// Types of q, o, lse and states. K and V may have any key type.
constexpr bool is_tensor_float(int32_t dtype) { return dtype == TANDEM_F32 || dtype == TANDEM_F16 || dtype == TANDEM_BF16; }

// Hidden states are in 16 bits, or in codes with scales. If they are in codes, hidden_dim is a multiple of kHiddenUnit. Then
// groups of every type end with the row, and each row begins at a multiple of 4 bytes.
inline constexpr int32_t kHiddenUnit = 64;
constexpr bool is_hidden_type(const DtypeInfo& info) {
  return info.dtype == TANDEM_F16 || info.dtype == TANDEM_BF16 || info.group > 0;
}

// Keys and values may have any type but q4_64.
constexpr bool is_key_type(int32_t dtype) { return find_dtype(dtype) != nullptr && dtype != TANDEM_Q4_64; }

// Names of the types of keys and values: "f32, f16, ...".
const char* key_type_names();

// Number of scales of one row, minima included. Always inlined, as the kernels call it: a compiler could emit a copy in an
// object for AVX-512, and the linker might keep that copy for all callers.
[[gnu::always_inline]] constexpr int64_t n_scales(int32_t dtype, int64_t head_dim) {
  const DtypeInfo& info = stored_dtype(dtype);
  return info.group == 0 ? 0 : (head_dim + info.group - 1) / info.group * info.scales;
}

// Bytes of one row of head_dim elements, and of the scales that are stored apart from it.
constexpr int64_t row_bytes(int32_t dtype, int64_t head_dim) {
  const DtypeInfo& info = stored_dtype(dtype);
  return (info.bits * head_dim + 7) / 8 + (info.in_blocks ? 2 * n_scales(dtype, head_dim) : 0);
}
constexpr int64_t scale_bytes(int32_t dtype, int64_t head_dim) {
  return stored_dtype(dtype).in_blocks ? 0 : 2 * n_scales(dtype, head_dim);
}

// Number of scales of a row in the type with the most scales.
constexpr int64_t max_scales(int64_t head_dim) {
  int64_t most = 0;
  for (const DtypeInfo& info : kDtypes)
    if (n_scales(info.dtype, head_dim) > most) most = n_scales(info.dtype, head_dim);
  return most;
}

}  // namespace tandem
