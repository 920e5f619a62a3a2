// SPDX-License-Identifier: MIT
#include "lib/select/row_sums.h"

#include <algorithm>
#include <cmath>

namespace tandem {

float log_sum(const RowParts& parts) {
  float largest = -INFINITY;
  for (int64_t i = 0; i < parts.n; ++i) largest = std::max(largest, parts.first[i * parts.stride]);
  double sum = 0.0;
  for (int64_t i = 0; i < parts.n; ++i) {
    const float* const part = parts.first + i * parts.stride;
    if (part[1] != 0.0f) sum += part[1] * std::exp(static_cast<double>(part[0] - largest));
  }
  return largest + static_cast<float>(std::log(sum));
}

void raise_scores(std::span<const float> logits, float shift, float* to) {
  for (size_t i = 0; i < logits.size(); ++i) {
    const float score = logits[i] - shift;
    if (score > to[i] || std::isnan(score)) to[i] = score;
  }
}

}  // namespace tandem
