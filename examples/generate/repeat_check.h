// SPDX-License-Identifier: MIT
// Bounds the difference between the logits of the same step, run twice at the same place.
//
// Both runs attend the same keys. If both divide the keys in the same way between window, CPU and bus (one plan), every sum
// is the same, and the logits are equal bit by bit. Tandem's route "auto" makes a new plan for each call from measured
// rates, and a graph replay is planned for more keys than a call kernel by kernel. Then sums are divided differently, the
// last bits of a layer's output differ, and later activations may be rounded to another neighbour.
//
// The bound for that case has two parts and no fitted factor.
//
//   roundings  A number rounded to p bits errs by up to half a unit in the last place, evenly distributed: by a variance of
//              unit^2 / 12, which relative to mantissas that are even over [1, 2) is 2^(2 - 2 p) / 24. Two runs that share
//              nothing but the exact number differ by twice that. A layer rounds its activations kRoundings times, the last
//              norm once more.
//   sums       Attention in f32 errs by at most 4 eps sum_k p_k |v_k|, the gate of Tandem's own tests, eps = 2^-24. With n
//              keys of even weights and random values, this is 4 eps sqrt(n) of the output's length. Two runs differ by
//              sqrt(2) times that.
//
// Errors of different layers are independent. Every layer normalizes, so a relative difference in its input does not grow in
// its output. So squares add up.
#ifndef EXAMPLES_GENERATE_REPEAT_CHECK_H_
#define EXAMPLES_GENERATE_REPEAT_CHECK_H_

#include <cstdint>
#include <span>

#include "failure.h"

namespace generate {

struct Repeat {
  bool is_one_plan = false;
  int64_t n_layers = 0, n_keys = 0;
  int32_t significant_bits = 24;  // of activations: 24 for f32, 8 for bf16
};

// Returns the root of the sum of squared differences, relative to that of `first`. Infinite if the lengths differ.
double logits_distance(std::span<const float> first, std::span<const float> second);
// Returns the distance that rounding explains; 0 for one plan.
double repeat_bound(const Repeat& repeat);
// Refuses logits that are farther apart. *distance is always set.
Failure check_repeat(std::span<const float> first, std::span<const float> second, const Repeat& repeat, double* distance);

}  // namespace generate

#endif  // EXAMPLES_GENERATE_REPEAT_CHECK_H_
