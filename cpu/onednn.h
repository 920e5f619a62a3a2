// SPDX-License-Identifier: MIT
// f32 products by oneDNN, inside the calling thread.
//
// dnnl_sgemm() makes no objects. prepare_sgemm() makes its machine code once for the process, and a product allocates at
// most one buffer. oneDNN offers bf16 products only as primitives, which make objects and code for every shape. If an
// allocation fails in there the process ends. So this library has its own bf16 products (cpu/kernels/product_tile_inl.h).
//
// oneDNN may be built on OpenMP. There each calling thread would start a team of its own; SingleThread (cpu/pool_modes.h)
// keeps the team at one thread.
#pragma once

#include <cstdint>

#include "cpu/signals_held.h"
#include "lib/base/status.h"

namespace tandem::cpu {

// c (+)= a b; rows are contiguous, strides are elements between rows.
struct Sgemm {
  int64_t m = 0, n = 0, k = 0;
  const float* a = nullptr;  // [m, k]
  int64_t stride_a = 0;
  const float* b = nullptr;  // [k, n], or [n, k] where b_is_transposed
  int64_t stride_b = 0;
  bool b_is_transposed = false;
  float* c = nullptr;  // [m, n]
  int64_t stride_c = 0;
  bool accumulate = false;
};

// Creates oneDNN's code if the process has not done so. Returns OUT_OF_MEMORY if too little memory is free for that. Called
// when an engine is created: if an allocation fails in oneDNN after that check, the process ends.
Status prepare_sgemm();

// Must run under a SingleThread and with signals held (cpu/signals_held.h). Returns false if oneDNN had no memory; c is
// undefined then.
[[nodiscard]] bool sgemm(const Sgemm& product, const SignalsHeld& held);

}  // namespace tandem::cpu
