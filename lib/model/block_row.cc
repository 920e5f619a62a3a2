// SPDX-License-Identifier: MIT
#include "lib/model/block_row.h"

#include <cstddef>
#include <cstring>

#include "lib/model/dtype.h"
#include "tandem/tandem.h"

namespace tandem {
namespace {

using Byte = uint8_t;

// Codes of one q4_0 block: reorder_q4() converts from the block's order to the store's, restore_q4() converts back.
constexpr int64_t kHalf = 16;
void reorder_q4(const Byte* block, Byte* codes) {
  const auto code = [&](int64_t i) { return i < kHalf ? block[i] & 15 : block[i - kHalf] >> 4; };
  for (int64_t j = 0; j < kHalf; ++j) codes[j] = static_cast<Byte>(code(2 * j) | code(2 * j + 1) << 4);
}
void restore_q4(const Byte* codes, Byte* block) {
  const auto code = [&](int64_t i) { return i % 2 == 0 ? codes[i / 2] & 15 : codes[i / 2] >> 4; };
  for (int64_t j = 0; j < kHalf; ++j) block[j] = static_cast<Byte>(code(j) | code(j + kHalf) << 4);
}

struct BlockFormat {
  int64_t elements;
  size_t scale_bytes;
  size_t code_bytes;
};
BlockFormat format_of(int32_t dtype) {
  const int64_t n = block_elements(dtype);
  return {n, static_cast<size_t>(scale_bytes(dtype, n)), static_cast<size_t>(row_bytes(dtype, n))};
}

}  // namespace

int64_t block_elements(int32_t dtype) { return find_dtype(dtype)->group; }

int64_t block_bytes(int32_t dtype) {
  const int64_t n = block_elements(dtype);
  return scale_bytes(dtype, n) + row_bytes(dtype, n);
}

void split_blocks(int32_t dtype, const void* blocks, int64_t n, void* codes, void* scales) {
  const BlockFormat format = format_of(dtype);
  const auto* from = static_cast<const Byte*>(blocks);
  auto *to = static_cast<Byte*>(codes), *f16 = static_cast<Byte*>(scales);
  for (int64_t i = 0; i < n; i += format.elements, to += format.code_bytes, f16 += format.scale_bytes) {
    std::memcpy(f16, from, format.scale_bytes);
    from += format.scale_bytes;
    if (dtype == TANDEM_Q4_0)
      reorder_q4(from, to);
    else
      std::memcpy(to, from, format.code_bytes);
    from += format.code_bytes;
  }
}

void join_blocks(int32_t dtype, const void* codes, const void* scales, int64_t n, void* blocks) {
  const BlockFormat format = format_of(dtype);
  const auto *from = static_cast<const Byte*>(codes), *f16 = static_cast<const Byte*>(scales);
  auto* to = static_cast<Byte*>(blocks);
  for (int64_t i = 0; i < n; i += format.elements, from += format.code_bytes, f16 += format.scale_bytes) {
    std::memcpy(to, f16, format.scale_bytes);
    to += format.scale_bytes;
    if (dtype == TANDEM_Q4_0)
      restore_q4(from, to);
    else
      std::memcpy(to, from, format.code_bytes);
    to += format.code_bytes;
  }
}

}  // namespace tandem
