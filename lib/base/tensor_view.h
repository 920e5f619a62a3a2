// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <cstdint>

namespace tandem {

// A checked tensor [n_tokens, n_heads, head_dim]. Rows (of elements, or of blocks) are contiguous.
struct TensorView {
  std::byte* data = nullptr;
  int32_t dtype = 0;
  int64_t n_tokens = 0;
  int64_t n_heads = 0;
  int64_t head_dim = 0;
  int64_t token_stride = 0;  // bytes
  int64_t head_stride = 0;   // bytes

  std::byte* row(int64_t token, int64_t head) const { return data + token * token_stride + head * head_stride; }
};

}  // namespace tandem
