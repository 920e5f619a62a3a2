// SPDX-License-Identifier: MIT
// oneDNN matmuls of fixed shape for matmul_bench, which compares the library with them. Many workers run them, each in its
// own thread.
//
// A primitive takes 0.1 to 0.2 ms to create and 0.4 us to call, so shapes are few and created ahead. oneDNN may use OpenMP.
// Then each thread that creates or executes would start its own team. SingleThread limits the team to one thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "cpu/onednn.h"
#include "cpu/pool_modes.h"
#include "lib/base/status.h"

namespace tandem::cpu {

// c (+)= a b, a: [m, k] and c: [m, n] with contiguous rows, b: [k, n] with any two strides, one of them 1. c is f32.
struct MatmulShape {
  int64_t m = 0, n = 0, k = 0;
  int64_t stride_a = 0;  // between rows, elements
  int64_t stride_bk = 0, stride_bn = 0;
  int64_t stride_c = 0;
  bool bf16 = false;  // a and b are bf16, else f32
  bool accumulate = false;
};

// Returns whether this processor multiplies bf16 faster than f32 (AVX512_BF16 or AMX).
bool onednn_has_fast_bf16();

class Matmul {
 public:
  Matmul();
  ~Matmul();
  Matmul(Matmul&&) noexcept;
  Matmul& operator=(Matmul&&) noexcept;

  static Status create(const MatmulShape& shape, Matmul* matmul);
  // Creates what n_workers need to run concurrently. The first call also runs the product once.
  Status prepare(int32_t n_workers);
  size_t scratchpad_bytes() const;
  // scratchpad: scratchpad_bytes() of this worker, aligned to 64. Returns false if oneDNN has failed.
  [[nodiscard]] bool run(int32_t worker_idx, const void* a, const void* b, float* c, void* scratchpad) const;

 private:
  struct Impl;
  Status run_first();
  std::unique_ptr<Impl> impl_;
};

}  // namespace tandem::cpu
