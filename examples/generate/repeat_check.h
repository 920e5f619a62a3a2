// SPDX-License-Identifier: MIT
// The same step twice at the same place: how far apart its logits may be.
//
// Both runs attend the same keys. Where they also cut them the same way between window, CPU and bus (one plan), every sum is
// the same sum and the logits are equal, bit by bit. Tandem's route "auto" makes a new plan for each call from the rates
// that it measures, and the replay of a graph is planned for more keys than a call kernel by kernel. Then sums are cut
// elsewhere, the last bits of a layer's output differ, and from there on activations may be rounded to the other neighbour.
//
// The bound for that case has two parts, and no factor that was fitted.
//
//   roundings  A number rounded to p bits errs by up to half a unit in the last place, evenly distributed: by a variance of
//              unit^2 / 12, which relative to mantissas that are even over [1, 2) is 2^(2 - 2 p) / 24. Two runs that share
//              nothing but the exact number differ by twice that. A layer rounds its activations kRoundings times, the last
//              norm once more.
//   sums       Attention in f32 errs by at most 4 eps sum_k p_k |v_k|, the gate of Tandem's own tests, eps = 2^-24. With n
//              keys of even weights and random values, this is 4 eps sqrt(n) of the output's length. Two runs differ by
//              sqrt(2) times that.
//
// Errors of different layers are independent, and a relative difference in a layer's input becomes no larger relative one in
// its output, as every layer normalizes. So squares add up.
#ifndef EXAMPLES_GENERATE_REPEAT_CHECK_H_
#define EXAMPLES_GENERATE_REPEAT_CHECK_H_

#include <cstdint>
#include <span>

#include "failure.h"

namespace generate {

struct Repeat {
  bool is_one_plan = false;
  int64_t n_layers = 0, n_keys = 0;
  int32_t significant_bits = 24;  // of activations: 24 of f32, 8 of bf16
};

// Root of the sum of squares of the differences, by that of `first`. Infinite where the two have different lengths.
double logits_distance(std::span<const float> first, std::span<const float> second);
// What rounding explains; 0 for one plan.
double repeat_bound(const Repeat& repeat);
// Refuses logits that are further apart. *distance is set all the same.
Failure check_repeat(std::span<const float> first, std::span<const float> second, const Repeat& repeat, double* distance);

}  // namespace generate

#endif  // EXAMPLES_GENERATE_REPEAT_CHECK_H_
