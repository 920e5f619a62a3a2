// SPDX-License-Identifier: MIT
// Storage types of K and V. One struct and one line in the list per type; everything that depends on the type is
// instantiated from the list.
#pragma once

#include <cstdint>

#include "tandem/tandem.h"

namespace tandem {

struct DtypeInfo {
  int32_t dtype;
  const char* name;
  int32_t bits;    // per element
  double epsilon;  // spacing of 1.0
};

inline constexpr DtypeInfo kDtypes[] = {
    {TANDEM_F32, "f32", 32, 0x1p-23},
    {TANDEM_F16, "f16", 16, 0x1p-10},
    {TANDEM_BF16, "bf16", 16, 0x1p-7},
};

constexpr const DtypeInfo* find_dtype(int32_t dtype) {
  for (const DtypeInfo& info : kDtypes)
    if (info.dtype == dtype) return &info;
  return nullptr;
}

// Bytes of one row of head_dim elements.
constexpr int64_t row_bytes(int32_t dtype, int64_t head_dim) { return find_dtype(dtype)->bits * head_dim / 8; }

}  // namespace tandem
