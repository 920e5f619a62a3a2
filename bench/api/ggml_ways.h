// SPDX-License-Identifier: MIT
// Ways to compute attention with ggml on the CPU.
#pragma once

#include <memory>

#include "rival.h"

namespace rivals {

// Ways to attend. kProducts: matrix products and softmax with V transposed, only f16 and bf16. kFlash: flash attention over
// head-major keys. kFlashTokenMajor: over token-major keys, the layout of llama.cpp's cache.
enum class Way { kProducts, kFlash, kFlashTokenMajor };

// The pool must outlive the result.
std::unique_ptr<Rival> make_ggml(const Pool& pool, Way way, const Shape& shape);

}  // namespace rivals
