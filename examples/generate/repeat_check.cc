// SPDX-License-Identifier: MIT
#include "repeat_check.h"

#include <cmath>
#include <limits>
#include <string>

namespace generate {
namespace {

// Roundings per layer: normalized input, Q K V, rotated Q and K, attention's output; normalized input of the FFN, gate and
// up, their product.
constexpr double kRoundings = 7;

}  // namespace

double logits_distance(std::span<const float> first, std::span<const float> second) {
  if (first.size() != second.size()) return std::numeric_limits<double>::infinity();
  double difference = 0, length = 0;
  for (size_t i = 0; i < first.size(); ++i) {
    difference += std::pow(double{first[i]} - double{second[i]}, 2);
    length += std::pow(double{first[i]}, 2);
  }
  return difference == 0 ? 0 : std::sqrt(difference / length);
}

double repeat_bound(const Repeat& repeat) {
  if (repeat.is_one_plan) return 0;
  const auto n_layers = static_cast<double>(repeat.n_layers), n_keys = static_cast<double>(repeat.n_keys);
  const double roundings = std::ldexp(kRoundings * n_layers + 1, 2 - 2 * repeat.significant_bits) / 12;
  const double sums = n_layers * 2 * n_keys * std::pow(4 * 0x1p-24, 2);
  return std::sqrt(roundings + sums);
}

Failure check_repeat(std::span<const float> first, std::span<const float> second, const Repeat& repeat, double* distance) {
  *distance = logits_distance(first, second);
  const double bound = repeat_bound(repeat);
  if (*distance <= bound) return {};  // false for NaN
  const std::string apart = std::to_string(*distance) + " of their length apart";
  if (repeat.is_one_plan) return {"a step gave other logits the second time, " + apart + ", by the same plan"};
  return {"a step gave other logits the second time, " + apart + ": rounding explains " + std::to_string(bound)};
}

}  // namespace generate
