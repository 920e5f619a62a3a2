// SPDX-License-Identifier: MIT
// The kernels that memory bandwidth bounds, as plain function pointers, one table per instruction set.
//
// All functions in these tables read K and V in their storage type, compute in f32, allocate nothing and keep no state. The
// caller (cpu/backend.cc) decides how the work is cut and where partial states are.
#pragma once

#include <cstdint>

#include "lib/model/dtype.h"
#include "lib/tables/backend.h"

namespace tandem::cpu {

inline constexpr int32_t kBlockKeys = 256;  // keys whose logits are kept at a time
inline constexpr int32_t kMaxAhead = 128;   // rows of K and V prefetched ahead
inline constexpr int32_t kSpanRows = 64;    // query rows per pass over K and V
// MLA's keys have more dims than others, but V aliases them and they arrive rotated. Layers with separate V or rotation here
// have at most kMaxPlainDim dims.
inline constexpr int32_t kMaxHeadDim = 576, kMaxPlainDim = 256;
inline constexpr int64_t kMaxScales = max_scales(kMaxHeadDim);  // scales of a row
inline constexpr int32_t kMaxTileDim = 128;                     // largest head_dim of K for the matrix unit

// The place of a job's key: the offset-th key of runs[run_idx].
struct KeyRef {
  int64_t run_idx = 0;
  int64_t offset = 0;
};

// Scales of the keys of a block, or of those keys that some rows see.
struct alignas(64) ScaleBlock {
  float k[kBlockKeys * kMaxScales];  // [keys][n]
  float v[kMaxScales * kBlockKeys];  // [n][kBlockKeys]
};

// Working memory of one worker; needs no initialisation.
struct alignas(64) SpanScratch {
  float logits[kSpanRows * kBlockKeys];
  float q[kSpanRows * kMaxHeadDim];  // rows [packed_begin, packed_end) of the job, scaled, in the vector kernels' layout
  int64_t packed_begin, packed_end;
  float m[kSpanRows];
  float sum[kSpanRows];
  float base[kSpanRows];     // the base of the exponents
  float rescale[kSpanRows];  // factor for the o and sum of earlier keys
  float ones[kSpanRows];
  ScaleBlock scales, seen_scales;
  alignas(64) uint32_t tiles[kSpanRows * kMaxTileDim * 2];  // the same rows in the matrix unit's layout
  float tile_scales[kSpanRows];                             // for codes: the factor for a row's sums
  const void* k_ahead[kBlockKeys + kMaxAhead];              // rows that are prefetched during a block
  const void* v_ahead[kBlockKeys + kMaxAhead];
  int64_t target;  // KernelTable::target of the kernel that used it last
};

// Keys from the offset-th of a run on, continued by those of the next runs. run == null: none.
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
  KeyRef first;  // the place of key_begin
  // Returns the keys that this thread reads after this span. Called once, in the last block or the one before, and
  // prefetched there.
  NextKeys (*next)(void* context) = nullptr;
  void* next_context = nullptr;
  // Called by matrix products between tiles of keys, because such a span may take a second. True: the call has been
  // cancelled, and the span may end with undefined results. Null: never cancelled.
  bool (*is_cancelled)(const void* context) = nullptr;
  const void* cancel_context = nullptr;
  // Rows that the thread reads after this span, one for each key of the span. They are prefetched instead of the span's own
  // rows, which must have been prefetched that way before. Null: the rows of this span and of `next` are prefetched.
  const void* k_ahead = nullptr;  // consecutive rows of the types of K and V
  const void* v_ahead = nullptr;
  // If m and sum are given, the keys of some rows may come in several spans. All but the first set `resumes`, all but the
  // last `goes_on`.
  bool resumes = false;
  bool goes_on = false;
  float* o = nullptr;    // [n_rows, v_head_dim]
  float* m = nullptr;    // [n_rows] or null. If given, o stays unnormalised, m is the largest logit and
  float* sum = nullptr;  //   sum the sum of exp(logit - m)
  float* lse = nullptr;  // [n_rows] or null. If given, o is normalised

  bool ends_early() const { return is_cancelled != nullptr && is_cancelled(cancel_context); }
};

// States of the same rows over disjoint keys, as spans with m and sum write them. Part i begins at
// parts + i * stride and holds o [n_rows, head_dim], m [n_rows], sum [n_rows].
struct PartialStates {
  const float* parts = nullptr;
  int64_t stride = 0;
  int32_t n_parts = 0;
  int32_t n_rows = 0;
  int32_t head_dim = 0;
};

inline constexpr int64_t kMatrixUnit = 1;  // not one of Highway's targets

struct MatrixKernels;  // matrix_kernels.h

struct KernelTable {
  const char* name;
  int64_t target;  // HWY_AVX2, ..., or kMatrixUnit if that is used
  void (*attend_span)(const Span& span, SpanScratch& scratch);
  // Merges the parts in their order: rows [row_begin, row_end) of o [n_rows, head_dim] and lse [n_rows].
  void (*combine)(const PartialStates& states, int64_t row_begin, int64_t row_end, float* o, float* lse);
  void (*merge)(const MergeJob& job, int64_t row_begin, int64_t row_end);
  void (*attn_weights)(const WeightJob& job, SpanScratch& scratch);
  void (*judge_chunks)(const ChunkJob& job, SpanScratch& scratch);
  void (*descend_chunks)(const DescentJob& job, SpanScratch& scratch);
  void (*observe)(float* maw, const float* logits, int64_t n_keys, float lse, float alpha);
  void (*to_f32)(int32_t dtype, const void* from, const void* scales, float* to, int64_t n);  // as in BackendTable
  void (*from_f32)(int32_t dtype, const float* from, void* to, void* scales, int64_t n);
  // Reads every byte the way attend_span does, to measure memory bandwidth. Returns a sum that depends on all bytes.
  uint64_t (*read_sum)(const void* data, int64_t n_bytes);
  // exp and tanh of the kernels, for tests.
  void (*exp)(const float* x, float* y, int64_t n);
  void (*tanh)(const float* x, float* y, int64_t n);
  const MatrixKernels* matrix;  // null: no matrix unit
};

}  // namespace tandem::cpu
