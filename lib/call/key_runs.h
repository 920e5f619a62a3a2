// SPDX-License-Identifier: MIT
// Where the rows of a sequence's tokens [begin, length) are, in all KV heads of a layer.
#pragma once

#include <cstdint>
#include <vector>

#include "lib/tables/backend.h"

namespace tandem {

class Cache;
struct Sequence;

struct KeyRuns {
  std::vector<KvRun> runs;  // n_runs runs for each head 0 .. n_kv_heads - 1
  int64_t n_runs = 0;
  int64_t begin = 0, length = 0;
  bool keeps_positions = false;  // keys have explicit positions and the library rotates: no rows are copied

  // The cache's mutex is held.
  void fill(const Cache& cache, const Sequence& sequence, int32_t layer_idx, int64_t begin, int64_t length);
};

}  // namespace tandem
