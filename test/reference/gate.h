// SPDX-License-Identifier: MIT
// The numerics gate decides whether an output is right.
//
//   max |o - truth| <= 2 max |naive - truth| + 1e-5     over the whole output (3 with a soft cap)
//   |o - truth| <= 4 eps sum_k p_k |v_k|                per element, eps of the storage type
//   |lse - truth| <= 1e-5 (1 + |lse|)                   per row
//
// An output tensor in f16 or bf16 may add one rounding: at most half a unit in the last place. The second bound is about
// the storage type of K and V. For f32 storage the bare bound is tighter than f32 arithmetic: a logit has an error of some
// eps / 2 times sm_scale * sum |q_i k_i| before exp sees it. (The plain computation misses the bare bound by a factor of 17
// where that sum is 25.) For f32 storage only, eps is therefore multiplied by max(1, that sum), with the largest sum of the
// row.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "reference/attention_reference.h"

namespace reference {

struct GateCall {
  const Truth* truth = nullptr;
  const RefLayer* layer = nullptr;
  int32_t o_type = TANDEM_F32;
  double mass_epsilon = 0.0;  // replaces the storage type's epsilon in the second bound where larger (reference/rounding.h)
  std::function<double(int64_t token, int32_t head, int32_t dim)> o;
  std::function<double(int64_t token, int32_t head)> lse;  // empty: lse was not requested
};

// Largest share of each bound that was used. A share above 1 is a failure.
struct GateShares {
  double naive = 0.0;
  double mass = 0.0;
  double lse = 0.0;
  void include(const GateShares& other);
};

struct GateVerdict {
  bool pass = true;
  std::string message;  // the first failing element
  GateShares shares;
};

GateVerdict check_gate(const GateCall& call);

// For calls on a device whose longest sequence has most_q_len queries: returns whether weights may be rounded
// (Queries::naive_rounds_p). The second function returns mass_epsilon.
bool device_rounds_p(const RefLayer& layer, int32_t q_type, int64_t most_q_len);
double device_mass_epsilon(const RefLayer& layer, bool rounds_p);

}  // namespace reference
