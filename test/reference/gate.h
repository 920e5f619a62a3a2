// SPDX-License-Identifier: MIT
// The numerics gate: when an output counts as right.
//
//   max |o - truth| <= 2 max |naive - truth| + 1e-5     over the whole output (3 with a soft cap)
//   |o - truth| <= 4 eps sum_k p_k |v_k|                per element, eps of the storage type
//   |lse - truth| <= 1e-5 (1 + |lse|)                   per row
//
// An output tensor in f16 or bf16 may add one rounding: half a unit in the last place at most. The second bound is about
// the type that K and V are stored in. For f32 storage it would ask for more than f32 arithmetic has: a logit carries an
// error of some eps / 2 times sm_scale * sum |q_i k_i| before exp sees it (the plain computation misses the bare bound by a
// factor of 17 where that is 25), so there, and only there, eps is multiplied by max(1, that sum), taken from the row's
// largest.
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
  double mass_epsilon = 0.0;  // of the second bound, where it is more than the storage type's (reference/rounding.h)
  std::function<double(int64_t token, int32_t head, int32_t dim)> o;
  std::function<double(int64_t token, int32_t head)> lse;  // empty: not asked for
};

// Shares of the bounds used up, the largest seen; above 1 is a failure.
struct GateShares {
  double naive = 0.0;
  double mass = 0.0;
  double lse = 0.0;
  void include(const GateShares& other);
};

struct GateVerdict {
  bool pass = true;
  std::string message;  // the first element that failed
  GateShares shares;
};

GateVerdict check_gate(const GateCall& call);

// Of calls on a device, whose longest sequence has so many queries: whether weights may be rounded
// (Queries::naive_rounds_p), and mass_epsilon.
bool device_rounds_p(const RefLayer& layer, int32_t q_type, int64_t most_q_len);
double device_mass_epsilon(const RefLayer& layer, bool rounds_p);

}  // namespace reference
