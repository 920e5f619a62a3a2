// SPDX-License-Identifier: MIT
// A stage of a search for chunks (lib/tables/search.h): one launch.
//
//   blocks     [query blocks][KV heads][pieces] and, in the first launch, one more that makes the bounds of new chunks
//   each       finds whether the stage runs (search_job.cuh), and judges a piece of the candidates (search_judges.cuh)
//   the last   of a list's blocks that have judged keeps the best and, in the last stage, writes the key list
//              (keep_best.cuh)
//
// Where the last stage does not run, one block writes the key list anew, as the window has moved on.
#pragma once

#include "cuda/kernels/bound_chunks.cuh"
#include "cuda/kernels/keep_best.cuh"
#include "cuda/kernels/search_judges.cuh"

namespace tandem::cuda {

// Runs in one block of a list, once all scores that the block needs are there.
__device__ __noinline__ inline void finish_stage(const SearchCall& call, const SearchJob& job) {
  __shared__ KeepRoom room;
  if (job.task == SearchTask::kJudge) keep_best(call, job, room);
  if (job.task == SearchTask::kKeepAll) keep_all(job);
  if (job.own == nullptr || job.is_last != 0) write_list(call, job, room);
}

// Waits for the results of earlier kernels. The first launch may run beside an append, and waits for the append's rows
// alone. The append has waited for all kernels before it, so their results are there, too. Later launches wait for the
// launch before.
__device__ inline void wait_for_stage(const SearchCall& call) {
  if (call.stage > 0 || call.rows_written == nullptr) return wait_for_before();
  if (threadIdx.x == 0)
    while (load_acquire(reinterpret_cast<const Word*>(call.rows_written)) != static_cast<Word>(call.epoch)) {
    }
  __syncthreads();
}

// Finds the block's job, the same for all of its threads. Returns false if the block has no work.
__device__ inline bool find_job(const SearchCall& call, SearchJob& job) {
  let_next_start();
  if (threadIdx.x == 0) {
    job.sequence = call.search.sequences.sequences[blockIdx.z];
    describe_job(call, job);
  }
  __syncthreads();  // a compiler may let other threads load parts of the job before they know whether they need them
  wait_for_stage(call);
  if (threadIdx.x == 0) find_task(call, job);
  __syncthreads();
  return job.task != SearchTask::kNone;
}

template <class Judge>
__device__ inline void run_stage(const SearchCall& call, const SearchJob& job) {
  if (job.task == SearchTask::kJudge) {
    Judge::judge(call, job);
    if (!is_last_block(call, job)) return;
  }
  finish_stage(call, job);
}

template <class Judge>
__global__ void __launch_bounds__(32 * kSearchWarps, Judge::kBlocks) search_kernel(const __grid_constant__ SearchCall call) {
  __shared__ SearchJob job;
  const bool has_task = find_job(call, job);
  if (static_cast<int>(blockIdx.x) == call.n_pieces) return bound_newest(call, job.sequence, job.p0);
  if (has_task) run_stage<Judge>(call, job);
}

}  // namespace tandem::cuda
