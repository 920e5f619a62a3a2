// SPDX-License-Identifier: MIT
// Joins what jobs over parts of a query row's keys have left of the row (ChunkJob::row_sums).
#pragma once

#include <cstdint>
#include <span>

namespace tandem {

// Of each part the largest logit and, behind it, the sum of exp(logit - this largest).
struct RowParts {
  const float* first = nullptr;
  int64_t n = 0, stride = 0;  // floats from a part to the next
};

// The log of the sum of exp(logit) over all parts. -inf where there are no keys.
float log_sum(const RowParts& parts);

// to[i] = logits[i] - shift, or the larger of this and to[i] where it is not the first row.
void raise_scores(std::span<const float> logits, float shift, bool is_first, float* to);

}  // namespace tandem
