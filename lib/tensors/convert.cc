// SPDX-License-Identifier: MIT
#include "lib/tensors/convert.h"

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "lib/model/block_row.h"
#include "lib/model/dtype.h"
#include "lib/model/hadamard.h"

namespace tandem {
namespace {

constexpr int64_t kMaxRow = 576;  // the largest head_dim
constexpr int64_t kMaxScales = max_scales(kMaxRow);

bool has_groups(int32_t dtype) { return find_dtype(dtype)->group > 0; }

// Codes and scales of a row of blocks.
struct SplitRow {
  std::byte codes[kMaxRow];
  uint16_t scales[kMaxScales];
};

void widen_row(const Backend& cpu, int32_t from_type, const void* from, float* values, int64_t n) {
  if (!has_groups(from_type)) return convert_row(cpu, from_type, from, TANDEM_F32, values, n);
  SplitRow split;
  split_blocks(from_type, from, n, split.codes, split.scales);
  cpu.table->to_f32(cpu.self, from_type, split.codes, split.scales, values, n);
}

void narrow_row(const Backend& cpu, const float* values, int32_t to_type, void* to, int64_t n) {
  if (!has_groups(to_type)) return convert_row(cpu, TANDEM_F32, values, to_type, to, n);
  SplitRow split;
  cpu.table->from_f32(cpu.self, to_type, values, split.codes, split.scales, n);
  join_blocks(to_type, split.codes, split.scales, n, to);
}

}  // namespace

void convert_row(const Backend& cpu, int32_t from_type, const void* from, int32_t to_type, void* to, int64_t n) {
  if (from_type == to_type) {
    std::memcpy(to, from, static_cast<size_t>(row_bytes(from_type, n)));
  } else if (to_type == TANDEM_F32) {
    cpu.table->to_f32(cpu.self, from_type, from, nullptr, static_cast<float*>(to), n);
  } else if (from_type == TANDEM_F32) {
    cpu.table->from_f32(cpu.self, to_type, static_cast<const float*>(from), to, nullptr, n);
  } else {
    float block[kMaxRow];
    for (int64_t i = 0; i < n; i += kMaxRow) {
      const int64_t m = std::min(kMaxRow, n - i);
      cpu.table->to_f32(cpu.self, from_type, static_cast<const std::byte*>(from) + row_bytes(from_type, i), nullptr, block,
                        m);
      cpu.table->from_f32(cpu.self, to_type, block, static_cast<std::byte*>(to) + row_bytes(to_type, i), nullptr, m);
    }
  }
}

void store_row(const Backend& cpu, int32_t from_type, const void* from, const StoredRow& to, int64_t n) {
  const bool rotated = to.rotation == TANDEM_ROTATION_HADAMARD;
  if (!rotated && !has_groups(from_type) && !has_groups(to.dtype))
    return convert_row(cpu, from_type, from, to.dtype, to.codes, n);
  if (!rotated && from_type == to.dtype) return split_blocks(to.dtype, from, n, to.codes, to.scales);
  float values[kMaxRow];
  const float* row = values;
  if (!rotated && from_type == TANDEM_F32)
    row = static_cast<const float*>(from);
  else
    widen_row(cpu, from_type, from, values, n);
  if (rotated) hadamard_rotate(values, n);
  cpu.table->from_f32(cpu.self, to.dtype, row, to.codes, to.scales, n);
}

void load_row(const Backend& cpu, const StoredRow& from, int32_t to_type, void* to, int64_t n) {
  const bool rotated = from.rotation == TANDEM_ROTATION_HADAMARD;
  if (!rotated && !has_groups(from.dtype) && !has_groups(to_type))
    return convert_row(cpu, from.dtype, from.codes, to_type, to, n);
  if (!rotated && from.dtype == to_type) return join_blocks(to_type, from.codes, from.scales, n, to);
  float values[kMaxRow];
  cpu.table->to_f32(cpu.self, from.dtype, from.codes, from.scales, values, n);
  if (rotated) hadamard_rotate(values, n);
  narrow_row(cpu, values, to_type, to, n);
}

namespace {

static_assert(kMaxRow % kHiddenUnit == 0);  // so parts of a row have whole groups

// Calls f(first, n, codes, scales) for parts of a row of n numbers. A part is at most as long as a row of K may be.
template <class Byte, class F>
void for_parts(int32_t dtype, Byte* row, int64_t n, F f) {
  Byte* const scales = row + row_bytes(dtype, n);
  for (int64_t first = 0; first < n; first += kMaxRow)
    f(first, std::min(kMaxRow, n - first), row + row_bytes(dtype, first), scales + scale_bytes(dtype, first));
}

}  // namespace

void store_hidden(const Backend& cpu, int32_t from_type, const void* from, int32_t to_type, void* row, int64_t n) {
  if (!has_groups(to_type)) return convert_row(cpu, from_type, from, to_type, row, n);
  for_parts(to_type, static_cast<std::byte*>(row), n, [&](int64_t first, int64_t m, std::byte* codes, std::byte* scales) {
    store_row(cpu, from_type, static_cast<const std::byte*>(from) + row_bytes(from_type, first), {to_type, codes, scales},
              m);
  });
}

void load_hidden(const Backend& cpu, int32_t from_type, const void* row, int32_t to_type, void* to, int64_t n) {
  if (!has_groups(from_type)) return convert_row(cpu, from_type, row, to_type, to, n);
  auto* const begin = static_cast<std::byte*>(const_cast<void*>(row));  // only read
  for_parts(from_type, begin, n, [&](int64_t first, int64_t m, std::byte* codes, std::byte* scales) {
    load_row(cpu, {from_type, codes, scales}, to_type, static_cast<std::byte*>(to) + row_bytes(to_type, first), m);
  });
}

}  // namespace tandem
