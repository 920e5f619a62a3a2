// SPDX-License-Identifier: MIT
#include "cpu/onednn.h"

#include <dnnl.h>
#include <sys/mman.h>

#include <mutex>
#include <new>

#include "cpu/aligned_bytes.h"
#include "cpu/pool_modes.h"

namespace tandem::cpu {

bool sgemm(const Sgemm& product, const SignalsHeld&) {
  try {
    return dnnl_sgemm('N', product.b_is_transposed ? 'T' : 'N', product.m, product.n, product.k, 1.0f, product.a,
                      product.stride_a, product.b, product.stride_b, product.accumulate ? 1.0f : 0.0f, product.c,
                      product.stride_c) == dnnl_success;
  } catch (const std::bad_alloc&) {  // thrown through a C function
    return false;
  }
}

namespace {

// Several times the size of oneDNN's code. If oneDNN gets no memory for code, it writes to address 0.
constexpr size_t kCodeBytes = size_t{16} << 20;

Status require_room_for_code() {
  void* room = mmap(nullptr, kCodeBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (room == MAP_FAILED) return fail(TANDEM_ERROR_OUT_OF_MEMORY, "", "no memory for the code of matrix products");
  munmap(room, kCodeBytes);
  return {};
}

// Runs every kind of product that attention uses. By the lengths oneDNN chooses among kernels that copy and kernels that do
// not.
Status run_each_kind() {
  constexpr int64_t kMost = 512, kDims = 64;
  AlignedBytes zeros;
  TANDEM_TRY(allocate_aligned(3 * kMost * kMost * sizeof(float), &zeros));
  auto* a = reinterpret_cast<float*>(zeros.get());
  float *b = a + kMost * kMost, *c = b + kMost * kMost;
  for (int64_t i = 0; i < 3 * kMost * kMost; ++i) a[i] = 0.0f;
  TANDEM_TRY(require_room_for_code());
  const SingleThread single;
  const SignalsHeld held;
  for (const int64_t m : {int64_t{32}, int64_t{128}}) {
    for (const int64_t n_keys : {int64_t{128}, kMost}) {
      const bool done = sgemm({m, n_keys, kDims, a, kDims, b, kDims, true, c, kMost, false}, held) &&
                        sgemm({m, kDims, n_keys, a, kMost, b, kDims, false, c, kDims, true}, held);
      if (!done) return fail(TANDEM_ERROR_OUT_OF_MEMORY, "", "oneDNN had no memory for a matrix product");
    }
  }
  return {};
}

}  // namespace

Status prepare_sgemm() {
  static std::mutex mutex;
  static bool is_prepared = false;
  const std::lock_guard lock(mutex);
  if (!is_prepared) TANDEM_TRY(run_each_kind());
  is_prepared = true;
  return {};
}

}  // namespace tandem::cpu
