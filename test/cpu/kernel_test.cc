// SPDX-License-Identifier: MIT
// Compares attend, attention weights, the largest logits of chunks, and logits with double precision, for every instruction
// set of this processor.

#include <cmath>

#include "cpu/attend_case.h"
#include "cpu/isa_backends.h"
#include "one_in.h"
#include "with_cmocka.h"

namespace tandem::test {
namespace {

constexpr int32_t kTypes[] = {TANDEM_F32, TANDEM_F16, TANDEM_BF16, TANDEM_E4M3, TANDEM_Q8_0, TANDEM_Q4_0};
constexpr int32_t kDims[] = {64, 80, 96, 112, 128, 192, 256};
constexpr int64_t kLengths[] = {0,  1,  2,  3,  4,   5,   7,   8,   9,   15,  16,  17,  31,  32,  33,   60,   63,
                                64, 65, 66, 70, 127, 128, 129, 255, 256, 257, 258, 511, 512, 513, 1000, 2100, 5000};

template <class T, size_t n>
T pick(Random& random, const T (&from)[n]) {
  return from[random.below(n)];
}

TakesOneIn takes_case;

void check_all(std::vector<IsaBackend>& backends, const CaseOptions& options, bool with_weights) {
  if (!takes_case()) return;
  const AttendCase attend(options);
  for (IsaBackend& isa : backends) {
    std::string wrong = attend.check(isa.backend, options.seed % 3 == 0);
    if (wrong.empty() && with_weights) wrong = attend.check_weights(isa.backend);
    if (wrong.empty() && with_weights) wrong = attend.check_chunks(isa.backend);
    if (!wrong.empty()) fail_msg("%s: %s", isa.kernels->name, wrong.c_str());
  }
}

// Every length, with a random mix of all other options.
void random_cases(int64_t n_cases, int64_t max_keys, uint64_t seed) {
  std::vector<IsaBackend> backends = isa_backends(2);
  assert_true(!backends.empty());
  Random random{seed};
  for (int64_t i = 0; i < n_cases; ++i) {
    CaseOptions o;
    o.seed = random.next() >> 40;
    o.k_type = pick(random, kTypes);
    o.v_type = random.below(3) == 0 ? pick(random, kTypes) : o.k_type;
    o.k_dim = random.below(2) ? 128 : pick(random, kDims);
    o.v_dim = random.below(3) ? o.k_dim : pick(random, kDims);
    if (random.below(8) == 0) {
      o.v_aliases_k = true;
      o.v_type = o.k_type;
      o.v_dim = std::min(o.v_dim, o.k_dim);
    }
    o.n_keys = std::min(max_keys, kLengths[static_cast<size_t>(i) % std::size(kLengths)]);
    const int32_t groups[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 33};
    o.group_size = pick(random, groups);
    o.q_len = static_cast<int32_t>(random.below(2) ? 1 : 1 + random.below(5));
    if (random.below(16) == 0 && o.n_keys <= 600) o.group_size = 8, o.q_len = 17;  // several tiles of rows
    if (o.n_keys > 1000) o.group_size = std::min(o.group_size, 8), o.q_len = std::min(o.q_len, 2);
    o.mask = static_cast<Mask>(random.below(5));
    o.runs = static_cast<Runs>(random.below(5));
    o.soft_cap = random.below(5) == 0 ? 5.0f + static_cast<float>(random.below(40)) : 0.0f;
    const double peaks[] = {0.0, 0.1, 1.0, 1.0, 3.0, 12.0};
    o.peak = pick(random, peaks);
    if (random.below(5) == 0) {
      o.rope = static_cast<int32_t>(1 + random.below(2));
      o.rope_dims = random.below(2) ? 0 : static_cast<int32_t>(2 * (1 + random.below(o.k_dim / 2)));
      o.attn_factor = random.below(2) ? 1.0 : 1.2;
      if (random.below(3) == 0) o.positions = static_cast<Positions>(1 + random.below(2));
      o.first_position = random.below(2) ? 0 : random.below(70000);
    }
    check_all(backends, o, i % 4 == 0);
  }
}

void random_cases_fast(void**) { random_cases(1500, 5000, 12345); }
void random_cases_full(void**) { random_cases(8000, 5000, 777); }

// Every pair of types x every pair of dims, in decode shape.
void types_and_dims(void**) {
  std::vector<IsaBackend> backends = isa_backends(1);
  for (const int32_t k_type : kTypes)
    for (const int32_t v_type : kTypes)
      for (const int32_t k_dim : kDims)
        for (const int32_t v_dim : kDims) {
          CaseOptions o;
          o.k_type = k_type, o.v_type = v_type, o.k_dim = k_dim, o.v_dim = v_dim;
          o.group_size = 4, o.n_keys = 70;
          o.seed = static_cast<uint64_t>(int64_t{k_dim} * v_dim + k_type + v_type);
          check_all(backends, o, false);
        }
}

// Every length up to a few tiles x every number of rows around the tile size.
void lengths_and_rows(void**) {
  std::vector<IsaBackend> backends = isa_backends(1);
  for (int64_t n_keys = 0; n_keys <= 70; ++n_keys)
    for (const int32_t n_rows : {1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 33}) {
      CaseOptions o;
      o.k_type = o.v_type = kTypes[static_cast<size_t>(n_keys + n_rows) % std::size(kTypes)];
      o.group_size = n_rows, o.n_keys = n_keys;
      o.seed = static_cast<uint64_t>(100 * n_keys + n_rows + 1);
      check_all(backends, o, false);
    }
}

// MLA: V is the first 512 of K's 576 dims. Tests every type x lengths around a block x rows of one tile and of several
// tiles. The matmul library attends 128 rows and more.
void latent_keys(void**) {
  std::vector<IsaBackend> backends = isa_backends(2);
  int64_t n = 0;
  for (const int32_t type : kTypes)
    for (const int64_t n_keys : {0, 1, 70, 255, 256, 257, 600})
      for (const int32_t n_rows : {1, 4, 16, 100, 128}) {
        if (++n % 2 != 0 && n_rows > 16) continue;
        CaseOptions o;
        o.k_type = o.v_type = type, o.k_dim = 576, o.v_dim = 512, o.v_aliases_k = true;
        o.group_size = n_rows, o.n_keys = n_keys;
        if (n_rows == 4 && n % 3 == 0) o.group_size = 2, o.q_len = 2, o.mask = static_cast<Mask>(n % 5);
        o.runs = static_cast<Runs>(n % 4);
        o.soft_cap = n % 7 == 0 ? 20.0f : 0.0f;
        o.seed = static_cast<uint64_t>(n + 1);
        check_all(backends, o, n_rows <= 16);
      }
}

// Library RoPE at positions that get another digit, beyond 2^24 and up to 2^31, starting anywhere in a stretch. Tests
// consecutive runs and runs with gaps, explicit positions, and numbers of pairs that do or do not fill vectors.
void rotated_keys(void**) {
  std::vector<IsaBackend> backends = isa_backends(2);
  constexpr int64_t kFirst[] = {0, 1, 15, 31, 250, 65533, (1 << 24) - 70, (1 << 24) + 5, INT64_C(0x7fff0000)};
  constexpr int64_t kSomeLengths[] = {1, 3, 4, 5, 31, 33, 70, 257, 600};
  Random random{31};
  for (const int64_t first : kFirst)
    for (const int64_t n_keys : kSomeLengths)
      for (const int32_t rope : {TANDEM_ROPE_HALVES, TANDEM_ROPE_INTERLEAVED}) {
        CaseOptions o;
        o.k_type = pick(random, kTypes), o.v_type = TANDEM_F32;
        o.k_dim = random.below(2) ? 128 : pick(random, kDims), o.v_dim = 64;
        o.group_size = static_cast<int32_t>(1 + random.below(6)), o.n_keys = n_keys;
        o.runs = static_cast<Runs>(random.below(5));
        if (random.below(2)) o.q_len = 3, o.mask = static_cast<Mask>(random.below(5));
        o.rope = rope;
        o.rope_dims = random.below(2) ? 0 : static_cast<int32_t>(2 * (1 + random.below(o.k_dim / 2)));
        o.attn_factor = random.below(2) ? 1.0 : 1.3;
        o.positions = static_cast<Positions>(random.below(3));
        o.first_position = first;
        o.seed = 3 * static_cast<uint64_t>(1 + random.below(1 << 20));  // a seed whose cases check the logits
        check_all(backends, o, n_keys > 60);
      }
}

// NaN in a key that no row sees changes no bit. NaN in a key that some rows see makes only those rows NaN.
void nan_keys(void**) {
  std::vector<IsaBackend> backends = isa_backends(2);
  Random random{4242};
  for (int64_t i = 0; i < some_of(150); ++i) {
    CaseOptions o;
    o.k_type = pick(random, kTypes), o.v_type = pick(random, kTypes);
    o.k_dim = o.v_dim = 64;
    o.group_size = static_cast<int32_t>(1 + random.below(5)), o.q_len = static_cast<int32_t>(1 + random.below(6));
    o.n_keys = 1 + random.below(i % 10 == 0 ? 3000 : 600);
    o.mask = static_cast<Mask>(1 + random.below(4));
    o.runs = static_cast<Runs>(random.below(5));
    o.rope = random.below(4) == 0 ? TANDEM_ROPE_HALVES : TANDEM_ROPE_CALLER;
    o.seed = random.next() >> 40;
    AttendCase attend(o);
    const int64_t key =
        random.below(4) ? o.n_keys - 1 - random.below(std::min<int64_t>(o.n_keys, 8)) : random.below(o.n_keys);
    const bool in_v = random.below(2) != 0;
    const auto n_rows = static_cast<size_t>(attend.n_rows), dim = static_cast<size_t>(o.v_dim);
    for (IsaBackend& isa : backends) {
      AttendCase poisoned(o);
      std::vector<float> o_before(n_rows * dim), lse_before(n_rows), o_after(n_rows * dim), lse_after(n_rows);
      const AttendJob before = poisoned.job(o_before.data(), lse_before.data(), nullptr);
      assert_true(isa.backend.table->attend(isa.backend.self, &before, 1).ok());
      poisoned.poison(key, in_v);
      const AttendJob after = poisoned.job(o_after.data(), lse_after.data(), nullptr);
      assert_true(isa.backend.table->attend(isa.backend.self, &after, 1).ok());
      for (size_t row = 0; row < n_rows; ++row) {
        const bool sees = poisoned.sees(static_cast<int64_t>(row), key);
        if (sees && !in_v && !std::isnan(lse_after[row]))
          fail_msg("%s: lse hides a NaN: %s", isa.kernels->name, o.text().c_str());
        if (!(sees && !in_v)) assert_memory_equal(&lse_before[row], &lse_after[row], sizeof(float));
        for (size_t c = 0; c < dim; ++c) {
          if (sees != std::isnan(o_after[row * dim + c]))
            fail_msg("%s: row %zu: %g: %s", isa.kernels->name, row, static_cast<double>(o_after[row * dim + c]),
                     o.text().c_str());
        }
        if (!sees) assert_memory_equal(&o_before[row * dim], &o_after[row * dim], dim * sizeof(float));
      }
    }
  }
}

// Logits that are far apart give weights of exactly 0.
void far_away_logits(void**) {
  std::vector<IsaBackend> backends = isa_backends(1);
  for (const double peak : {100.0, 1e4, 1e6, 1e18}) {
    CaseOptions o;
    o.group_size = 4, o.n_keys = 300, o.peak = peak, o.seed = 3;
    check_all(backends, o, false);
  }
}

}  // namespace
}  // namespace tandem::test

int main(int argc, char** argv) {
  using namespace tandem::test;
  if (argc > 1) {
    const CMUnitTest full[] = {cmocka_unit_test(random_cases_full)};
    return cmocka_run_group_tests(full, nullptr, nullptr);
  }
  (void)argv;
  const CMUnitTest tests[] = {
      cmocka_unit_test(lengths_and_rows),  cmocka_unit_test(types_and_dims), cmocka_unit_test(latent_keys),
      cmocka_unit_test(rotated_keys),      cmocka_unit_test(nan_keys),       cmocka_unit_test(far_away_logits),
      cmocka_unit_test(random_cases_fast),
  };
  return cmocka_run_group_tests(tests, nullptr, nullptr);
}
