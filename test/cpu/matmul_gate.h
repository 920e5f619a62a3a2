// SPDX-License-Identifier: MIT
// The gate compares with attention in double precision on the stored keys and values:
//   max |o - exact| <= 2 max |naive - exact| + 1e-5 (3 with a soft cap), |o - exact| <= 4 eps(type) sum p |v|,
//   |lse - exact| <= 1e-5 (1 + |exact|)
// naive is the plain computation with the same roundings. With f32 values the rounding of the logits outweighs that of the
// values, because an error of a logit is a relative error of its p. There naive itself exceeds 4 eps, so the second bound
// is 4 eps + 2 (3) times the largest relative error of naive. Large cases check only a sample of their rows.
#pragma once

#include <memory>

#include "cpu/matmul_attend.h"
#include "matmul_case.h"

namespace tandem::test {

// Makes the kernel and prepares it for the case. isa: instruction set of the SIMD part, null for the best.
std::unique_ptr<cpu::MatmulAttend> make(const Case& c, const char* isa = nullptr, int32_t n_workers = 1);

// Checks that every row is written and that the sampled rows are right.
void check(const Case& c);

// Makes, runs and checks a case.
void run_and_check(const CaseOptions& options);

}  // namespace tandem::test
