// SPDX-License-Identifier: MIT
#include "reference/gate.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>

#include "reference/rounding.h"
#include "reference/stored_row.h"

namespace reference {
namespace {

// Returns half a unit in the last place of an output tensor's type, at the size of x.
double output_rounding(int32_t o_type, double x) {
  const double smallest = o_type == TANDEM_F16 ? 0x1p-25 : o_type == TANDEM_BF16 ? 0x1p-134 : 0x1p-150;
  return std::max(0.5 * epsilon(o_type) * std::fabs(x), smallest);
}

struct Failure {
  const char* what;
  int64_t token;
  int32_t head, dim;
  double got, expected, bound;
};

void note(GateVerdict* verdict, const Failure& failure) {
  if (!verdict->pass) return;
  char text[256];
  std::snprintf(text, sizeof text, "%s at token %lld head %d dim %d: got %.9g, truth %.9g, error %.3g, bound %.3g",
                failure.what, static_cast<long long>(failure.token), failure.head, failure.dim, failure.got,
                failure.expected, std::fabs(failure.got - failure.expected), failure.bound);
  verdict->pass = false;
  verdict->message = text;
}

// Shares above 1, or NaN, fail.
bool used_up(double error, double bound, double* share) {
  const double s = error == 0.0 ? 0.0 : error / bound;
  if (share && !(s <= *share)) *share = s;
  return !(s <= 1.0);
}

void check_lse(const GateCall& call, int64_t token, int32_t head, double expected, GateVerdict* verdict) {
  const double got = call.lse(token, head), bound = 1e-5 * (1.0 + std::fabs(expected));
  if (expected == -std::numeric_limits<double>::infinity()) {
    if (got != expected) note(verdict, {"lse of an empty row", token, head, 0, got, expected, 0.0});
    return;
  }
  if (used_up(std::fabs(got - expected), bound, &verdict->shares.lse))
    note(verdict, {"lse", token, head, 0, got, expected, bound});
}

}  // namespace

void GateShares::include(const GateShares& other) {
  naive = std::max(naive, other.naive);
  mass = std::max(mass, other.mass);
  lse = std::max(lse, other.lse);
}

GateVerdict check_gate(const GateCall& call) {
  const Truth& truth = *call.truth;
  const double of_types = std::max(epsilon(call.layer->k_type), epsilon(call.layer->v_type));
  const double eps = std::max(of_types, call.mass_epsilon);
  const bool f32_storage = eps == epsilon(TANDEM_F32);
  const double naive_bound = (call.layer->soft_cap > 0.0f ? 3.0 : 2.0) * truth.naive_error + 1e-5;
  GateVerdict verdict;
  for (int64_t token = 0; token < truth.n_tokens; ++token) {
    for (int32_t head = 0; head < truth.n_q_heads; ++head) {
      const auto row = static_cast<size_t>(token * truth.n_q_heads + head);
      const bool empty = truth.lse[row] == -std::numeric_limits<double>::infinity();
      const double slack = f32_storage ? std::max(1.0, truth.logit_magnitude[row]) : 1.0;
      for (int32_t dim = 0; dim < truth.v_head_dim; ++dim) {
        const size_t at = row * static_cast<size_t>(truth.v_head_dim) + static_cast<size_t>(dim);
        const double got = call.o(token, head, dim), expected = truth.o[at], error = std::fabs(got - expected);
        if (empty) {
          if (got != 0.0) note(&verdict, {"o of an empty row", token, head, dim, got, 0.0, 0.0});
          continue;
        }
        const double rounding = call.o_type == TANDEM_F32 ? 0.0 : output_rounding(call.o_type, std::fabs(expected) + 1e-5);
        const double mass_bound = 4.0 * eps * slack * truth.mass[at] + rounding + 1e-37;
        // Shares are only reported if the output is not rounded.
        const bool exact_type = call.o_type == TANDEM_F32;
        if (used_up(error, naive_bound + rounding, exact_type ? &verdict.shares.naive : nullptr))
          note(&verdict, {"o against the plain computation", token, head, dim, got, expected, naive_bound + rounding});
        if (used_up(error, mass_bound, exact_type ? &verdict.shares.mass : nullptr))
          note(&verdict, {"o against eps sum p |v|", token, head, dim, got, expected, mass_bound});
      }
      if (call.lse) check_lse(call, token, head, truth.lse[row], &verdict);
    }
  }
  return verdict;
}

// Returns true if q has 16 bits, K and V have no more, and there are many rows.
bool device_rounds_p(const RefLayer& layer, int32_t q_type, int64_t most_q_len) {
  constexpr int64_t kRows = 64;
  return q_type != TANDEM_F32 && layer.k_type != TANDEM_F32 && layer.v_type != TANDEM_F32 &&
         most_q_len * layer.group_size() > kRows;
}

// Codes are exact in f32. Their weights are f16, like their numbers, or have two bf16 parts.
double device_mass_epsilon(const RefLayer& layer, bool rounds_p) {
  if (!has_groups(layer.v_type)) return 0.0;
  return rounds_p ? epsilon(TANDEM_F16) : 0x1p-16;
}

}  // namespace reference
