// SPDX-License-Identifier: MIT
// Joins the sums that jobs over parts of a query row's keys have left for the row (ChunkJob::row_sums).
#pragma once

#include <cstdint>
#include <span>

namespace tandem {

// Two floats for each part: the largest logit, then the sum of exp(logit - this largest).
struct RowParts {
  const float* first = nullptr;
  int64_t n = 0, stride = 0;  // floats from a part to the next
};

// Returns the log of the sum of exp(logit) over all parts, -inf where there are no keys.
float log_sum(const RowParts& parts);

// Raises to[i] to logits[i] - shift, or sets it to NaN where one of the two is NaN.
void raise_scores(std::span<const float> logits, float shift, float* to);

}  // namespace tandem
