// SPDX-License-Identifier: MIT
// Attention of many query rows: append, prefill, re-evaluation, decode where very many query heads share a KV head (MLA).
//
// Decode is bound by reading K and V; from some tens of rows on (crossover.h) a job is bound by arithmetic, and is attended
// by products of matrices. attend() is flash attention by tiles, all of it inside the calling thread (on a matrix unit the
// same, laid out otherwise: matrix_block.h):
//
//   for each block of up to 512 rows of the task             q, o (f32), running max and sum stay in the worker's scratch
//     for each tile of 512 keys that the block may see       gathered from the runs once: converted, rotated, zero-padded
//       for each 128 rows of the block
//         s = q k^T            oneDNN, or ours in bf16        [128, 512], in the second-level cache
//         p = softmax step     SIMD, in place                 scale, cap, mask, running max and sum, o rescaled
//         o += p v             the same
//     o / sum, max + log sum                                  to the job; or o, max and sum as they are, to be joined
//
// Where V aliases keys that need no rotation its tile is the first columns of theirs, converted once.
//
// Precision: f32 products of the converted tiles, f32 accumulation. Where q is exact in bf16 (q_is_bf16), bf16 keys that
// need no rotation are multiplied as bf16, which loses nothing; bf16 values then meet p rounded to bf16 (relative 2^-9 for
// each key, errors of either sign), as every bf16 attention kernel does. sum and lse are of the unrounded p.
//
// Not finite: a key or value that is NaN or Inf reaches exactly the rows that see it. Logits are masked by selection; values
// that only some rows of a block see are taken out of the products, where 0 * NaN would spread, and added row by row.
#pragma once

#include <cstdint>
#include <memory>

#include "cpu/kernels/kernels.h"
#include "lib/base/status.h"
#include "lib/tables/backend.h"

namespace tandem::cpu {

// Rows of a job over all its keys, to the job's o and lse.
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

// Some rows of a span.
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
  // Rows of a task that share one pass over the keys. A good task has this many; more gain nothing. A row's last bits depend
  // on which rows share its task, so ranges should be chosen by job alone, not by the number of workers.
  static constexpr int32_t kTaskRows = 512;

  // kernels: whose conversions and instruction set the SIMD part uses.
  // The first in a process makes oneDNN's code, for which it needs some MiB.
  static Status create(const KernelTable& kernels, std::unique_ptr<MatmulAttend>* attend);
  virtual ~MatmulAttend() = default;

  // Makes the scratch of n_workers workers; later calls add what is missing. The only function that allocates, and not to
  // run beside attend(). On failure everything prepared before is still usable.
  virtual Status prepare(const Layer& layer, int32_t n_workers) = 0;

  // Computes a span of any number of rows; writes the job's logits where wanted. Concurrent for different worker_idx in
  // [0, n_workers). The job's layer must have been prepared.
  virtual void attend(const Span& span, int32_t worker_idx) = 0;
};

}  // namespace tandem::cpu
