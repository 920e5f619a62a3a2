// SPDX-License-Identifier: MIT
#include "matmul_gate.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "cpu/kernels/softmax_tile.h"
#include "lib/model/dtype.h"
#include "one_in.h"
#include "with_cmocka.h"

namespace tandem::test {

std::unique_ptr<cpu::MatmulAttend> make(const Case& c, const char* isa, int32_t n_workers) {
  std::unique_ptr<cpu::MatmulAttend> attend;
  assert_true(cpu::MatmulAttend::create(kernels_of(isa), &attend).ok());
  assert_true(attend->prepare(c.layer, n_workers).ok());
  return attend;
}

namespace {

bool rounds_p(const Case& c) {
  return c.options.q_is_bf16 && c.layer.v_type == TANDEM_BF16 && cpu::has_bf16_products(*cpu::softmax_tile_kernels(nullptr));
}

std::set<int64_t> sample_rows(const Case& c) {
  const int64_t n = c.job.n_rows, affordable = 3'000'000 / std::max<int64_t>(1, c.job.n_keys * c.layer.k_head_dim);
  std::set<int64_t> rows;
  std::mt19937 random(c.options.seed);
  for (int64_t row : {0, 1, 31, 32, 63, 64, 127, 128, 129, 511, 512})
    if (row < n && static_cast<int64_t>(rows.size()) < std::max<int64_t>(affordable, 6)) rows.insert(row);
  rows.insert(n - 1);
  while (static_cast<int64_t>(rows.size()) < std::min(n, std::min<int64_t>(affordable, 48)))
    rows.insert(static_cast<int64_t>(random() % static_cast<uint64_t>(n)));
  return rows;
}

struct Gate {
  double worst = 0, allowed = 1e-5;  // of o
  double worst_relative = 0;         // to sum p |v|
  std::string failure;

  void miss(const char* what, int64_t row, double got, double want) {
    char text[160];
    std::snprintf(text, sizeof text, "%s row %lld: %.9g, exact %.9g", what, static_cast<long long>(row), got, want);
    if (failure.empty()) failure = text;
  }
};

void check_logits(const Case& c, int64_t row, const RowAnswer& answer, Gate* gate) {
  for (int64_t j = 0; c.job.logits != nullptr && j < c.job.n_keys; ++j) {
    const double got = static_cast<double>(c.logits[static_cast<size_t>(row * c.job.n_keys + j)]);
    const double want = answer.logits[static_cast<size_t>(j)];
    if (std::isinf(want) ? got != want : !(std::fabs(got - want) <= 2e-5 * (1 + std::fabs(want))))
      gate->miss("logit", row, got, want);
  }
}

}  // namespace

void check(const Case& c) {
  Gate gate;
  const auto dims = static_cast<size_t>(c.layer.v_head_dim);
  const double eps = find_dtype(c.layer.v_type)->epsilon;
  double naive_error = 0, naive_relative = 0;
  for (float x : c.o)
    if (std::isnan(x)) gate.miss("NaN in o", 0, 0, 0);
  for (int64_t row : sample_rows(c)) {
    const RowAnswer answer = exact(c, row);
    const std::vector<float> plain = naive(c, row, rounds_p(c));
    for (size_t d = 0; d < dims; ++d) {
      const double got = static_cast<double>(c.o[static_cast<size_t>(row) * dims + d]);
      naive_error = std::max(naive_error, std::fabs(static_cast<double>(plain[d]) - answer.o[d]));
      gate.worst = std::max(gate.worst, std::fabs(got - answer.o[d]));
      if (answer.size[d] == 0) continue;
      naive_relative = std::max(naive_relative, std::fabs(static_cast<double>(plain[d]) - answer.o[d]) / answer.size[d]);
      gate.worst_relative = std::max(gate.worst_relative, std::fabs(got - answer.o[d]) / answer.size[d]);
    }
    const double lse = static_cast<double>(c.lse[static_cast<size_t>(row)]);
    if (std::isinf(answer.lse) ? lse != answer.lse : !(std::fabs(lse - answer.lse) <= 1e-5 * (1 + std::fabs(answer.lse))))
      gate.miss("lse", row, lse, answer.lse);
    check_logits(c, row, answer, &gate);
  }
  const double slack = c.options.soft_cap > 0 ? 3 : 2;
  const double allowed_relative = 4 * eps + (c.layer.v_type == TANDEM_F32 ? slack * naive_relative : 0);
  gate.allowed += slack * naive_error;
  if (!(gate.worst_relative <= allowed_relative))
    gate.miss("relative o: error, allowed", 0, gate.worst_relative, allowed_relative);
  if (!(gate.worst <= gate.allowed)) gate.miss("o: error, allowed", 0, gate.worst, gate.allowed);
  if (!gate.failure.empty()) fail_msg("%s: %s", describe(c.options).c_str(), gate.failure.c_str());
}

void run_and_check(const CaseOptions& options) {
  static TakesOneIn takes_case;
  if (!takes_case()) return;
  Case c(options);
  const auto attend = make(c);
  attend->attend(cpu::whole_span(c.job, 0, c.job.n_rows), 0);
  check(c);
}

}  // namespace tandem::test
