// SPDX-License-Identifier: MIT
// f32 products by oneDNN, inside the calling thread.
//
// dnnl_sgemm() makes no objects: its machine code is made once for the process, by prepare_sgemm(), and a product asks for a
// buffer at most. oneDNN's primitives, the only way to its bf16 products, make objects and code for every shape, and an
// allocation that fails meanwhile ends the process; so bf16 products are ours (cpu/kernels/product_tile_inl.h).
//
// oneDNN may be built on OpenMP, where each thread that executes would start a team of its own: SingleThread
// (cpu/pool_modes.h) keeps it to one.
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

// Makes oneDNN's code, where the process has not yet made it. OUT_OF_MEMORY: not enough is there for it. Called when an
// engine is created: oneDNN ends the process if an allocation fails meanwhile, in spite of the room that was found.
Status prepare_sgemm();

// Needs a SingleThread, and held signals (cpu/signals_held.h). False: oneDNN had no memory, and c is undefined.
[[nodiscard]] bool sgemm(const Sgemm& product, const SignalsHeld& held);

}  // namespace tandem::cpu
