// SPDX-License-Identifier: MIT
// The bandwidth-bound kernels as plain function pointers, one table per instruction set.
//
// Everything in these tables reads K and V in their storage type, computes in f32, allocates nothing and keeps no state.
// How the work is cut and where partial states live is the caller's business (cpu/backend.cc).
#pragma once

#include <cstdint>

#include "lib/model/dtype.h"
#include "lib/tables/backend.h"

namespace tandem::cpu {

inline constexpr int32_t kBlockKeys = 256;  // keys whose logits are kept at a time
inline constexpr int32_t kMaxAhead = 128;   // rows of K and V prefetched ahead
inline constexpr int32_t kSpanRows = 64;    // query rows per pass over K and V
// MLA's keys have more dims than others. V aliases them and they come rotated: what lies apart or is rotated here has fewer.
inline constexpr int32_t kMaxHeadDim = 576, kMaxPlainDim = 256;
inline constexpr int64_t kMaxScales = max_scales(kMaxHeadDim);  // of a row
inline constexpr int32_t kMaxTileDim = 128;                     // head_dim of K for the matrix unit

// A key of a job by its run: the offset-th of runs[run_idx].
struct KeyRef {
  int64_t run_idx = 0;
  int64_t offset = 0;
};

// Scales of the keys of a block, or of those that some rows see.
struct alignas(64) ScaleBlock {
  float k[kBlockKeys * kMaxScales];  // [keys][n]
  float v[kMaxScales * kBlockKeys];  // [n][kBlockKeys]
};

// Working memory of one worker; needs no initialisation.
struct alignas(64) SpanScratch {
  float logits[kSpanRows * kBlockKeys];
  float q[kSpanRows * kMaxHeadDim];  // rows [packed_begin, packed_end) of the job, scaled, as the tiles read them,
  int64_t packed_begin, packed_end;
  float m[kSpanRows];
  float sum[kSpanRows];
  float base[kSpanRows];     // what exponents are taken relative to
  float rescale[kSpanRows];  // of what o and sum hold already
  float ones[kSpanRows];
  ScaleBlock scales, seen_scales;
  alignas(64) uint32_t tiles[kSpanRows * kMaxTileDim * 2];  //   or as the matrix unit does
  float tile_scales[kSpanRows];                             //   (of codes, what a row's sums are multiplied by)
  const void* k_ahead[kBlockKeys + kMaxAhead];              // rows that a block prefetches
  const void* v_ahead[kBlockKeys + kMaxAhead];
  int64_t target;  // KernelTable::target of the kernel that used it last
};

// Keys from the offset-th of a run on, and those of the runs behind it; or none.
struct NextKeys {
  const KvRun* run = nullptr;
  int64_t offset = 0;
  int64_t n_runs = 0;
};

// Rows [row_begin, row_end) of a job over keys [key_begin, key_end). attend_span takes at most kSpanRows.
struct Span {
  const AttendJob* job = nullptr;
  int32_t row_begin = 0;
  int32_t row_end = 0;
  int64_t key_begin = 0;
  int64_t key_end = 0;
  KeyRef first;  // where key_begin is
  // What this thread reads after this span: asked for, once, in its last block or the one before, and prefetched there.
  NextKeys (*next)(void* context) = nullptr;
  void* next_context = nullptr;
  // Asked by matrix products between tiles of keys, for such a span may take a second. True: the call has been cancelled,
  // and the span may end with its results undefined. Null: never.
  bool (*is_cancelled)(const void* context) = nullptr;
  const void* cancel_context = nullptr;
  // Rows that the thread reads after this span, one for each key of the span: prefetched instead of the span's own rows,
  // which have been prefetched that way themselves. Null: the rows of this span and of `next` are prefetched.
  const void* k_ahead = nullptr;  // consecutive rows of the types of K and V
  const void* v_ahead = nullptr;
  // The keys of some rows may come in several spans, if m and sum are given: all but the first resume, all but the last go
  // on.
  bool resumes = false;
  bool goes_on = false;
  float* o = nullptr;    // [n_rows, v_head_dim]
  float* m = nullptr;    // [n_rows] or null. Given: o stays unnormalised, m is the largest logit and
  float* sum = nullptr;  //   sum the sum of exp(logit - m)
  float* lse = nullptr;  // [n_rows] or null. Given: o is normalised

  bool ends_early() const { return is_cancelled != nullptr && is_cancelled(cancel_context); }
};

// States of the same rows over disjoint keys, as spans leave them with m and sum. Part i begins at
// parts + i * stride and holds o [n_rows, head_dim], m [n_rows], sum [n_rows].
struct PartialStates {
  const float* parts = nullptr;
  int64_t stride = 0;
  int32_t n_parts = 0;
  int32_t n_rows = 0;
  int32_t head_dim = 0;
};

inline constexpr int64_t kMatrixUnit = 1;  // no target of Highway

struct MatrixKernels;  // matrix_kernels.h

struct KernelTable {
  const char* name;
  int64_t target;  // HWY_AVX2, ..., and kMatrixUnit where it is used
  void (*attend_span)(const Span& span, SpanScratch& scratch);
  // Joins the parts in their order, rows [row_begin, row_end) of o [n_rows, head_dim] and lse [n_rows].
  void (*combine)(const PartialStates& states, int64_t row_begin, int64_t row_end, float* o, float* lse);
  void (*merge)(const MergeJob& job, int64_t row_begin, int64_t row_end);
  void (*attn_weights)(const WeightJob& job, SpanScratch& scratch);
  void (*judge_chunks)(const ChunkJob& job, SpanScratch& scratch);
  void (*descend_chunks)(const DescentJob& job, SpanScratch& scratch);
  void (*observe)(float* maw, const float* logits, int64_t n_keys, float lse, float alpha);
  void (*to_f32)(int32_t dtype, const void* from, const void* scales, float* to, int64_t n);  // as in BackendTable
  void (*from_f32)(int32_t dtype, const float* from, void* to, void* scales, int64_t n);
  // Reads every byte the way attend_span does and returns a sum that depends on all of them: what the memory can give.
  uint64_t (*read_sum)(const void* data, int64_t n_bytes);
  // exp and tanh of the kernels, for tests.
  void (*exp)(const float* x, float* y, int64_t n);
  void (*tanh)(const float* x, float* y, int64_t n);
  const MatrixKernels* matrix;  // null: there is no matrix unit
};

}  // namespace tandem::cpu
