// SPDX-License-Identifier: MIT
// The matmul path for one KV head with many query heads: MLA's shape, and jobs that are cut along their keys.

#include <algorithm>
#include <cmath>
#include <vector>

#include "matmul_gate.h"
#include "with_cmocka.h"

namespace tandem::test {
namespace {

constexpr int32_t kTypes[] = {TANDEM_F32, TANDEM_F16, TANDEM_BF16, TANDEM_E4M3, TANDEM_Q8_0, TANDEM_Q4_0};

// MLA: one KV head of 576/512 dims for up to 128 query heads. Tests lengths around the tiles of keys, and several queries
// at once.
void test_latent_keys(void**) {
  uint32_t seed = 450;
  for (int32_t type : kTypes) {
    for (int64_t n_keys : {1, 127, 511, 512, 513, 1030}) {
      CaseOptions options;
      options.k_type = type;
      options.n_keys = n_keys;
      options.k_head_dim = 576;
      options.v_head_dim = 512;
      options.v_aliases_k = true;
      options.q_is_bf16 = seed % 2;
      options.group_size = seed % 3 ? 128 : 16;
      options.n_rows = seed % 4 == 0 ? 3 * options.group_size : options.group_size;
      options.mask = seed % 5 ? Mask::kNone : Mask::kSliding;
      options.one_run = seed % 2 == 0;
      options.logits = seed % 3 == 1;
      options.seed = ++seed;
      run_and_check(options);
    }
  }
}

// A single key has a weight of exactly 1, however large its logit is. This requires the same rounding of the largest
// product and the exponent.
void test_large_logits(void**) {
  for (int32_t dim : {64, 128, 576}) {
    for (float q_size : {1e6f, 1e10f, 1e14f}) {
      CaseOptions options;
      options.k_type = options.v_type = TANDEM_F32;
      options.n_keys = 1;
      options.k_head_dim = dim;
      options.v_head_dim = std::min(dim, 512);
      options.v_aliases_k = dim == 576;
      options.group_size = 128;
      options.mask = Mask::kNone;
      options.q_size = q_size;
      Case c(options);
      make(c)->attend(cpu::whole_span(c.job, 0, c.job.n_rows), 0);
      const auto dims = static_cast<size_t>(c.layer.v_head_dim);
      for (size_t i = 0; i < c.o.size(); ++i)
        assert_true(static_cast<double>(c.o[i]) == c.v_at(0, static_cast<int64_t>(i % dims)));
      for (float lse : c.lse) assert_true(std::isfinite(lse));
    }
  }
}

// Attends a job in pieces of its keys, cut anywhere, and merges them. The result must be as good as that of the whole job,
// and its bits must not depend on the ranges of rows.
void check_pieces(const CaseOptions& options, int64_t piece_keys) {
  Case c(options);
  const auto attend = make(c);
  const int32_t n_rows = c.job.n_rows;
  const int64_t n_pieces = (c.job.n_keys + piece_keys - 1) / piece_keys, dims = c.layer.v_head_dim;
  cpu::PartialStates states;
  states.stride = n_rows * (dims + 2);
  states.n_parts = static_cast<int32_t>(n_pieces);
  states.n_rows = n_rows;
  states.head_dim = c.layer.v_head_dim;
  std::vector<float> parts(static_cast<size_t>(states.stride * n_pieces), NAN);
  states.parts = parts.data();
  cpu::Span span = cpu::whole_span(c.job, 0, n_rows);
  span.lse = nullptr;
  for (int64_t piece = 0; piece < n_pieces; ++piece) {
    span.key_begin = piece * piece_keys;
    span.key_end = std::min(c.job.n_keys, span.key_begin + piece_keys);
    span.o = parts.data() + piece * states.stride;
    span.m = span.o + n_rows * dims;
    span.sum = span.m + n_rows;
    attend->attend(span, 0);
    span.first.offset += span.key_end - span.key_begin;
    while (span.first.run_idx < c.job.n_runs &&
           span.first.offset >= c.runs[static_cast<size_t>(span.first.run_idx)].n_tokens)
      span.first.offset -= c.runs[static_cast<size_t>(span.first.run_idx++)].n_tokens;
  }
  for (int32_t row = 0; row < n_rows; row += 7)
    kernels_of(nullptr).combine(states, row, std::min(row + 7, n_rows), c.o.data(), c.lse.data());
  check(c);
}

void test_pieces(void**) {
  uint32_t seed = 470;
  for (Mask mask : {Mask::kNone, Mask::kCausal, Mask::kSliding, Mask::kTree}) {
    for (int64_t piece_keys : {200, 512, 1024}) {
      for (bool q_is_bf16 : {false, true}) {
        CaseOptions options;
        options.mask = mask;
        options.sink_len = seed % 3 ? 40 : 0;
        options.window = 90;
        options.n_rows = seed % 4 ? 150 : 600;
        options.n_keys = 1700;
        options.k_head_dim = 192;
        options.v_head_dim = 128;
        options.v_aliases_k = seed % 2;
        options.q_is_bf16 = q_is_bf16;
        options.soft_cap = seed % 5 ? 0.0f : 15.0f;
        options.gaps = seed % 2;
        options.unconditional_runs = seed % 3 == 0;
        options.logits = seed % 4 == 1;
        options.seed = ++seed;
        check_pieces(options, piece_keys);
      }
    }
  }
}

}  // namespace
}  // namespace tandem::test

int main(int argc, char**) {
  using namespace tandem::test;
  use_matrix_unit(argc == 1);  // argument "vectors": without the matrix unit
  const CMUnitTest tests[] = {
      cmocka_unit_test(test_latent_keys),
      cmocka_unit_test(test_large_logits),
      cmocka_unit_test(test_pieces),
  };
  return cmocka_run_group_tests(tests, nullptr, nullptr);
}
