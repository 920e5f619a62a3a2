// SPDX-License-Identifier: MIT
// Reads from a cache: rows, and a digest of a sequence's contents.
#pragma once

#include <cstdint>

#include "lib/store/cache.h"

namespace tandem {

// These functions take the cache's mutex themselves. They fail with NOT_FOUND, BUSY or INVALID_ARGUMENT (first).
Status read_rows(const Cache& cache, int64_t id, int32_t layer_idx, int64_t first, const TensorView* k, const TensorView* v);
Status read_hidden(const Cache& cache, int64_t id, int32_t layer_idx, int64_t first, const TensorView& x);
Status hash_rows(const Cache& cache, int64_t id, uint64_t* digest);

}  // namespace tandem
