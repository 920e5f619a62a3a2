// SPDX-License-Identifier: MIT
// Attention of many query rows: append, prefill, re-evaluation, and decode of layers in which very many query heads share a
// KV head (MLA).
//
// Reading K and V bounds decode. From some tens of rows on (crossover.h) arithmetic bounds a job, and matrix products
// compute it. attend() is flash attention by tiles, all of it inside the calling thread. A matrix unit does the same in
// another layout (matrix_block.h):
//
//   for each block of up to 512 rows of the task             q, o (f32), running max and sum stay in the worker's scratch
//     for each tile of 512 keys that the block may see       gathered from the runs once: converted, rotated, zero-padded
//       for each 128 rows of the block
//         s = q k^T            oneDNN, or ours in bf16        [128, 512], in the second-level cache
//         p = softmax step     SIMD, in place                 scale, cap, mask, running max and sum, o rescaled
//         o += p v             the same
//     o / sum, max + log sum                                  to the job; or o, max and sum as they are, to be merged
//
// If V aliases keys that need no rotation, the first columns of K's tile are V's tile, converted once.
//
// Precision: f32 products of the converted tiles, f32 accumulation. If q is exact in bf16 (q_is_bf16), bf16 keys that need
// no rotation are multiplied as bf16, which loses nothing. bf16 values are then multiplied by p rounded to bf16 (relative
// error 2^-9 for each key, of either sign), as in every bf16 attention kernel. sum and lse use the unrounded p.
//
// Not finite: a NaN or Inf in a key or value reaches exactly the rows that see the key. Logits are masked by selection.
// Non-finite values that only some rows of a block see are left out of the products, where 0 * NaN would spread, and added
// row by row.
#pragma once

#include <cstdint>
#include <memory>

#include "cpu/kernels/kernels.h"
#include "lib/base/status.h"
#include "lib/tables/backend.h"

namespace tandem::cpu {

// Returns the span of the rows over all keys of the job, with the job's o and lse as outputs.
inline Span whole_span(const AttendJob& job, int32_t row_begin, int32_t row_end) {
  Span span;
  span.job = &job;
  span.row_begin = row_begin;
  span.row_end = row_end;
  span.key_end = job.n_keys;
  span.o = job.o + int64_t{row_begin} * job.layer->v_head_dim;
  span.lse = job.lse + row_begin;
  return span;
}

// Returns the part of a span that has the rows [row_begin, row_end).
inline Span rows_of(const Span& span, int32_t row_begin, int32_t row_end) {
  Span rows = span;
  rows.row_begin = row_begin;
  rows.row_end = row_end;
  rows.o += int64_t{row_begin - span.row_begin} * span.job->layer->v_head_dim;
  for (float** each : {&rows.m, &rows.sum, &rows.lse})
    if (*each != nullptr) *each += row_begin - span.row_begin;
  return rows;
}

class MatmulAttend {
 public:
  static constexpr int32_t kTileQ = 128, kTileKv = 512;
  // Rows of a task that share one pass over the keys. A good task has this many; larger ones gain nothing. The last bits of
  // a row depend on the other rows of its task, so row ranges should depend only on the job, not on the number of workers.
  static constexpr int32_t kTaskRows = 512;

  // `kernels` gives the conversions and the instruction set of the SIMD part. The first call of a process creates oneDNN's
  // code, which takes some MiB.
  static Status create(const KernelTable& kernels, std::unique_ptr<MatmulAttend>* attend);
  virtual ~MatmulAttend() = default;

  // Allocates the scratch of n_workers workers; later calls add what is missing. No other function allocates. Must not run
  // beside attend(). After a failure everything prepared earlier is still usable.
  virtual Status prepare(const Layer& layer, int32_t n_workers) = 0;

  // Computes a span of any number of rows, and writes the job's logits if the job asks for them. May run concurrently with
  // different worker_idx in [0, n_workers). The job's layer must have been prepared.
  virtual void attend(const Span& span, int32_t worker_idx) = 0;
};

}  // namespace tandem::cpu
