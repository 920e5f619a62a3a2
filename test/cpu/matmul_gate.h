// SPDX-License-Identifier: MIT
// The gate: against attention in double precision on the stored keys and values,
//   max |o - exact| <= 2 max |naive - exact| + 1e-5 (3 with a soft cap), |o - exact| <= 4 eps(type) sum p |v|,
//   |lse - exact| <= 1e-5 (1 + |exact|)
// where naive is the plain computation with the same roundings. With f32 values the rounding of the logits outweighs that
// of the values (an error of a logit is a relative error of its p), and naive itself exceeds 4 eps: there the second bound
// is 4 eps + 2 (3) times the largest relative error of naive. Large cases are checked in a sample of their rows.
#pragma once

#include <memory>

#include "cpu/matmul_attend.h"
#include "matmul_case.h"

namespace tandem::test {

// Prepared for the case. isa: of the SIMD part, null for the best.
std::unique_ptr<cpu::MatmulAttend> make(const Case& c, const char* isa = nullptr, int32_t n_workers = 1);

// Every row must be written; the sampled ones must be right.
void check(const Case& c);

// The whole case in one go.
void run_and_check(const CaseOptions& options);

}  // namespace tandem::test
