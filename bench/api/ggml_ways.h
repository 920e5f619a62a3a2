// SPDX-License-Identifier: MIT
// Ways to compute attention with ggml on the CPU.
#pragma once

#include <memory>

#include "rival.h"

namespace rivals {

// Matrix products and softmax with V transposed, f16 and bf16 only; flash attention over head-major keys, and over
// token-major keys, which is how llama.cpp lays out its cache.
enum class Way { kProducts, kFlash, kFlashTokenMajor };

// The pool outlives the result.
std::unique_ptr<Rival> make_ggml(const Pool& pool, Way way, const Shape& shape);

}  // namespace rivals
