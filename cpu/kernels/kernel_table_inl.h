// SPDX-License-Identifier: MIT
// All kernels of one instruction set. Each generated file includes this once, with HWY_TARGET set.
//
// Code in here may use only Highway and C headers. The linker could keep an inline function of the C++ library that was
// compiled for AVX-512 as the only copy for all code (test/cpu/weak_symbols.sh looks for such functions).
#pragma once

#include "cpu/kernels/chunks_inl.h"
#include "cpu/kernels/merge_inl.h"
#include "cpu/kernels/weights_inl.h"

HWY_BEFORE_NAMESPACE();
namespace tandem::cpu {
namespace HWY_NAMESPACE {
namespace {

// Reads as attend_span does: whole lines, in order, four pages prefetched in turn.
uint64_t read_sum(const void* data, int64_t n_bytes) {
  const hn::ScalableTag<uint64_t> d;
  constexpr int64_t kGroupBytes = kStreams * kPageBytes;
  constexpr auto kLineBytes = static_cast<int64_t>(kLine);
  const auto* bytes = static_cast<const uint8_t*>(data);
  auto a = hn::Zero(d), b = a;
  int64_t i = 0;
  for (; i + kLineBytes <= n_bytes; i += kLineBytes) {
    const int64_t group = i / kGroupBytes, line = i % kGroupBytes / kLineBytes;
    prefetch_line(bytes + (group + 1) * kGroupBytes + line % kStreams * kPageBytes + line / kStreams * kLineBytes);
    for (int64_t at = 0; at < kLineBytes; at += 2 * HWY_MAX_BYTES) {
      a = hn::Add(a, hn::LoadU(d, reinterpret_cast<const uint64_t*>(bytes + i + at)));
      if (HWY_MAX_BYTES < kLineBytes)
        b = hn::Add(b, hn::LoadU(d, reinterpret_cast<const uint64_t*>(bytes + i + at + HWY_MAX_BYTES)));
    }
  }
  uint64_t lanes[HWY_MAX_BYTES / sizeof(uint64_t)];
  hn::StoreU(hn::Add(a, b), d, lanes);
  uint64_t sum = 0;
  for (const uint64_t lane : lanes) sum += lane;
  for (; i < n_bytes; ++i) sum += bytes[i];
  return sum;
}

void exp_all(const float* x, float* y, int64_t n) {
  for (int64_t i = 0; i < n; ++i) y[i] = exp_of(x[i]);
}

void tanh_all(const float* x, float* y, int64_t n) {
  for (int64_t i = 0; i < n; ++i) y[i] = tanh_of(x[i]);
}

constexpr KernelTable make_table(const char* name) {
  return {name,     kTarget, &attend_span, &combine,  &merge,   &attn_weights, &judge_chunks, &descend_chunks,
          &observe, &to_f32, &from_f32,    &read_sum, &exp_all, &tanh_all,     kMatrix};
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace tandem::cpu
HWY_AFTER_NAMESPACE();
