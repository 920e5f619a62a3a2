// SPDX-License-Identifier: MIT
// Rows of tensors to and from storage: one rounding, none where the types are equal.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "lib/backend.h"
#include "lib/dtype.h"

namespace tandem {

inline void convert_row(const Backend& cpu, int32_t from_type, const void* from, int32_t to_type, void* to, int64_t n) {
  if (from_type == to_type) {
    std::memcpy(to, from, static_cast<size_t>(row_bytes(from_type, n)));
  } else if (to_type == TANDEM_F32) {
    cpu.table->to_f32(cpu.self, from_type, from, static_cast<float*>(to), n);
  } else if (from_type == TANDEM_F32) {
    cpu.table->from_f32(cpu.self, to_type, static_cast<const float*>(from), to, n);
  } else {
    constexpr int64_t kBlock = 512;
    float block[kBlock];
    for (int64_t i = 0; i < n; i += kBlock) {
      const int64_t m = std::min(kBlock, n - i);
      cpu.table->to_f32(cpu.self, from_type, static_cast<const std::byte*>(from) + row_bytes(from_type, i), block, m);
      cpu.table->from_f32(cpu.self, to_type, block, static_cast<std::byte*>(to) + row_bytes(to_type, i), m);
    }
  }
}

}  // namespace tandem
