// SPDX-License-Identifier: MIT
#include "sampler.h"

#include <algorithm>
#include <cmath>

namespace generate {

int64_t Sampler::sample(const float* logits, int64_t n) {
  const int64_t best = std::max_element(logits, logits + n) - logits;
  if (temperature_ <= 0) return best;
  const auto weight = [&](int64_t i) { return std::exp((static_cast<double>(logits[i]) - logits[best]) / temperature_); };
  double sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += weight(i);
  // Makes 53 random bits by hand, because std::uniform_real_distribution differs between libraries.
  double left = sum * static_cast<double>(random_() >> 11) * 0x1p-53;
  for (int64_t i = 0; i < n; ++i) {
    left -= weight(i);
    if (left < 0) return i;
  }
  return best;
}

double bits_of(const float* logits, int64_t n, int64_t token) {
  const double max = *std::max_element(logits, logits + n);
  double sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += std::exp(logits[i] - max);
  return (max + std::log(sum) - logits[token]) / std::log(2.0);
}

}  // namespace generate
