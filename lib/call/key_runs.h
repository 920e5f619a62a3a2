// SPDX-License-Identifier: MIT
// Where the rows of some tokens of a sequence are, in all KV heads of a layer.
#pragma once

#include <cstdint>
#include <vector>

#include "lib/tables/backend.h"

namespace tandem {

class Cache;
struct Sequence;

struct KeyRuns {
  std::vector<KvRun> runs;  // of head 0 .. n_kv_heads - 1, n_runs each: tokens [begin, length)
  int64_t n_runs = 0;
  int64_t begin = 0, length = 0;
  bool keeps_positions = false;  // positions of keys are not their indices and the library rotates: nothing is copied

  // The cache's mutex is held.
  void fill(const Cache& cache, const Sequence& sequence, int32_t layer_idx, int64_t begin, int64_t length);
};

}  // namespace tandem
