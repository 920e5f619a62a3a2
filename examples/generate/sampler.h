// SPDX-License-Identifier: MIT
#ifndef EXAMPLES_GENERATE_SAMPLER_H_
#define EXAMPLES_GENERATE_SAMPLER_H_

#include <cstdint>
#include <random>

namespace generate {

// Chooses the next token: the most likely one at temperature 0, otherwise drawn from softmax(logits / temperature). The same
// seed gives the same tokens on every machine.
class Sampler {
 public:
  Sampler(double temperature, uint64_t seed) : temperature_(temperature), random_(seed) {}
  int64_t sample(const float* logits, int64_t n);

 private:
  double temperature_;
  std::mt19937_64 random_;
};

// Returns -log2 of the probability that the logits give to `token`.
double bits_of(const float* logits, int64_t n, int64_t token);

}  // namespace generate

#endif  // EXAMPLES_GENERATE_SAMPLER_H_
