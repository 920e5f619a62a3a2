// SPDX-License-Identifier: MIT
// What a cache gives back: rows, and a digest of all that a sequence has.
#pragma once

#include <cstdint>

#include "lib/store/cache.h"

namespace tandem {

// They take the cache's mutex themselves. NOT_FOUND, BUSY, INVALID_ARGUMENT (first).
Status read_rows(const Cache& cache, int64_t id, int32_t layer_idx, int64_t first, const TensorView* k, const TensorView* v);
Status read_hidden(const Cache& cache, int64_t id, int32_t layer_idx, int64_t first, const TensorView& x);
Status hash_rows(const Cache& cache, int64_t id, uint64_t* digest);

}  // namespace tandem
