// SPDX-License-Identifier: MIT
// Helpers with which the blocks of all pattern kernels find their work.
#pragma once

#include "cuda/kernels/exchange_wait.cuh"
#include "cuda/pattern_call.h"

namespace tandem::cuda {

__device__ inline const DeviceSequence& sequence_of(const PatternCall& call) {
  return call.patterns.sequences.sequences[call.sequence];
}

__device__ inline bool has_kind(const PatternCall& call, int head, uint32_t kind) {
  return (call.patterns.heads[head].kinds & kind) != 0;
}

__device__ inline uint32_t* choices_of(const PatternCall& call, int sequence, int head) {
  return call.patterns.choices + (int64_t{sequence} * call.n_q_heads + head) * call.places.n_words;
}

// A sequence's queries, and their blocks.
struct PatternQueries {
  int first, end;  // tokens

  __device__ explicit PatternQueries(const DeviceSequence& sequence)
      : first(static_cast<int>(sequence.end) - sequence.q_len), end(static_cast<int>(sequence.end)) {}
  __device__ int n_blocks() const { return (end - first + kQueryBlock - 1) / kQueryBlock; }
  __device__ int block_begin(int block) const { return first + block * kQueryBlock; }
  __device__ int block_end(int block) const { return min(end, block_begin(block) + kQueryBlock); }
  // Returns the number of key blocks that end at the block's first query or before.
  __device__ int n_candidates(int block) const { return block_begin(block) / kPatternKeyBlock; }
};

}  // namespace tandem::cuda
