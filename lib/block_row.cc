// SPDX-License-Identifier: MIT
#include "lib/block_row.h"

#include <cstddef>
#include <cstring>

#include "tandem/tandem.h"

namespace tandem {
namespace {

constexpr int64_t kScaleBytes = 2;

using Byte = uint8_t;

// Codes of one block, in the block's order and in ours.
void reorder_q4(const Byte* block, Byte* codes) {
  constexpr int64_t kHalf = kBlockElements / 2;
  const auto code = [&](int64_t i) { return i < kHalf ? block[i] & 15 : block[i - kHalf] >> 4; };
  for (int64_t j = 0; j < kHalf; ++j) codes[j] = static_cast<Byte>(code(2 * j) | code(2 * j + 1) << 4);
}
void restore_q4(const Byte* codes, Byte* block) {
  constexpr int64_t kHalf = kBlockElements / 2;
  const auto code = [&](int64_t i) { return i % 2 == 0 ? codes[i / 2] & 15 : codes[i / 2] >> 4; };
  for (int64_t j = 0; j < kHalf; ++j) block[j] = static_cast<Byte>(code(j) | code(j + kHalf) << 4);
}
void copy_q8(const Byte* from, Byte* to) { std::memcpy(to, from, kBlockElements); }

struct BlockFormat {
  int32_t dtype;
  int64_t code_bytes;
  void (*split)(const Byte* block, Byte* codes);
  void (*join)(const Byte* codes, Byte* block);
};
constexpr BlockFormat kFormats[] = {
    {TANDEM_Q8_0, kBlockElements, copy_q8, copy_q8},
    {TANDEM_Q4_0, kBlockElements / 2, reorder_q4, restore_q4},
};

const BlockFormat* find(int32_t dtype) {
  for (const BlockFormat& format : kFormats)
    if (format.dtype == dtype) return &format;
  return nullptr;
}

}  // namespace

int64_t block_bytes(int32_t dtype) {
  const BlockFormat* format = find(dtype);
  return format == nullptr ? 0 : kScaleBytes + format->code_bytes;
}

void split_blocks(int32_t dtype, const void* blocks, int64_t n, void* codes, void* scales) {
  const BlockFormat& format = *find(dtype);
  const auto* from = static_cast<const Byte*>(blocks);
  for (int64_t block = 0; block < n / kBlockElements; ++block, from += kScaleBytes + format.code_bytes) {
    std::memcpy(static_cast<Byte*>(scales) + block * kScaleBytes, from, kScaleBytes);
    format.split(from + kScaleBytes, static_cast<Byte*>(codes) + block * format.code_bytes);
  }
}

void join_blocks(int32_t dtype, const void* codes, const void* scales, int64_t n, void* blocks) {
  const BlockFormat& format = *find(dtype);
  auto* to = static_cast<Byte*>(blocks);
  for (int64_t block = 0; block < n / kBlockElements; ++block, to += kScaleBytes + format.code_bytes) {
    std::memcpy(to, static_cast<const Byte*>(scales) + block * kScaleBytes, kScaleBytes);
    format.join(static_cast<const Byte*>(codes) + block * format.code_bytes, to + kScaleBytes);
  }
}

}  // namespace tandem
