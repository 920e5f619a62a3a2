// SPDX-License-Identifier: MIT
// The matmul path alone: types, dims, masks, extreme values, threads, placement. For the gate see matmul_gate.h.

#include <omp.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <thread>
#include <utility>

#include "cpu/kernels/softmax_tile.h"
#include "cpu/matmul_attend.h"
#include "matmul_case.h"
#include "matmul_gate.h"
#include "one_in.h"
#include "reference/rounding.h"
#include "reference/stored_row.h"
#include "with_cmocka.h"

namespace tandem::test {
namespace {

constexpr int32_t kDims[] = {64, 80, 96, 112, 128, 192, 256};
constexpr int32_t kTypes[] = {TANDEM_F32, TANDEM_F16, TANDEM_BF16, TANDEM_E4M3, TANDEM_Q8_0, TANDEM_Q4_0};

void test_types_and_dims(void**) {
  uint32_t seed = 1;
  for (int32_t dim : kDims) {
    for (int32_t type : kTypes) {
      CaseOptions options;
      options.k_type = options.v_type = type;
      options.k_head_dim = options.v_head_dim = dim;
      options.n_keys = 700;
      options.seed = ++seed;
      run_and_check(options);
    }
    CaseOptions exact_q;
    exact_q.k_head_dim = exact_q.v_head_dim = dim;
    exact_q.q_is_bf16 = true;
    exact_q.n_keys = 700;
    run_and_check(exact_q);
  }
}

void test_mixed_types_and_dims(void**) {
  uint32_t seed = 100;
  for (int32_t k_type : kTypes) {
    for (int32_t v_type : kTypes) {
      CaseOptions options;
      options.k_type = k_type;
      options.v_type = v_type;
      options.k_head_dim = seed % 2 ? 192 : 80;
      options.v_head_dim = seed % 2 ? 128 : 256;
      options.q_is_bf16 = seed % 4 < 2;
      options.seed = ++seed;
      options.n_rows = 50;
      options.logits = seed % 3 == 0;
      run_and_check(options);
    }
  }
}

void test_rows_and_keys(void**) {
  uint32_t seed = 200;
  for (int32_t n_rows : {1, 5, 127, 128, 129, 300, 512 * 3}) {
    for (int64_t n_keys : {0, 1, 511, 512, 513, 1300}) {
      for (bool q_is_bf16 : {false, true}) {
        CaseOptions options;
        options.n_rows = n_rows;
        options.n_keys = n_keys;
        options.k_head_dim = options.v_head_dim = 64;
        options.q_is_bf16 = q_is_bf16;
        options.group_size = seed % 2 ? 1 : 3;
        options.mask = seed % 5 == 0 ? Mask::kNone : Mask::kCausal;
        options.one_run = seed % 4 == 0;
        options.seed = ++seed;
        run_and_check(options);
      }
    }
  }
}

void test_masks(void**) {
  uint32_t seed = 300;
  for (Mask mask : {Mask::kNone, Mask::kCausal, Mask::kSliding, Mask::kTree}) {
    for (int32_t sink_len : {0, 3, 700}) {
      for (bool q_is_bf16 : {false, true}) {
        for (float soft_cap : {0.0f, 15.0f}) {
          CaseOptions options;
          options.mask = mask;
          options.sink_len = sink_len;
          options.window = sink_len == 3 ? 1 : 90;
          options.n_rows = 300;
          options.n_keys = 1500;
          options.k_head_dim = options.v_head_dim = 64;
          options.q_is_bf16 = q_is_bf16;
          options.soft_cap = soft_cap;
          options.gaps = seed % 2;
          options.unconditional_runs = seed % 3 == 0;
          options.logits = seed % 4 == 1;
          options.seed = ++seed;
          run_and_check(options);
        }
      }
    }
  }
}

void test_rope(void**) {
  uint32_t seed = 400;
  for (bool interleaved : {false, true}) {
    for (int32_t pairs : {10, 32, 64}) {
      for (int32_t type : kTypes) {
        CaseOptions options;
        options.k_type = type;
        options.rope_pairs = pairs;
        options.interleaved = interleaved;
        options.positions = seed % 2;
        options.one_run = seed % 3 == 0;
        options.q_is_bf16 = seed % 5 == 0;
        options.seed = ++seed;
        run_and_check(options);
      }
    }
  }
}

void test_alias(void**) {
  for (int32_t type : kTypes) {
    for (bool q_is_bf16 : {false, true}) {
      CaseOptions options;
      options.k_type = type;
      options.k_head_dim = 192;
      options.v_head_dim = 128;
      options.v_aliases_k = true;
      options.q_is_bf16 = q_is_bf16;
      options.group_size = 128;
      options.one_run = q_is_bf16;
      run_and_check(options);
    }
  }
}

// Scales far from 1. The queries either scale the logits back to ordinary sizes or do not.
void test_extreme_scales(void**) {
  const std::pair<float, float> kSizes[] = {{1e-29f, 1e28f}, {1e27f, 1e-28f}, {1e-40f, 2.0f}, {1e-38f, 1e30f}};
  for (const auto& [sm_scale, q_size] : kSizes) {
    for (bool q_is_bf16 : {false, true}) {
      CaseOptions options;
      options.q_size = q_size;
      options.q_is_bf16 = q_is_bf16;
      options.n_keys = 900;
      Case c(options);
      c.layer.sm_scale = sm_scale;
      make(c)->attend(cpu::whole_span(c.job, 0, c.job.n_rows), 0);
      check(c);
    }
  }
}

void test_far_logits(void**) {
  for (float q_size : {0.0f, 1e-3f, 40.0f}) {
    for (bool q_is_bf16 : {false, true}) {
      CaseOptions options;
      options.q_size = q_size;
      options.q_is_bf16 = q_is_bf16;
      options.n_keys = 1100;
      run_and_check(options);
    }
  }
}

// Each key in turn holds NaN or Inf. Rows that see it become NaN, and other rows keep every bit.
void check_nonfinite(const CaseOptions& options, int64_t key, bool in_value, float bad) {
  static TakesOneIn takes_case;
  if (!takes_case()) return;
  Case c(options);
  const auto attend = make(c);
  attend->attend(cpu::whole_span(c.job, 0, c.job.n_rows), 0);
  const std::vector<float> o = c.o, lse = c.lse;
  const int64_t dims = c.layer.v_head_dim, dim = options.v_aliases_k && key % 2 ? c.layer.k_head_dim - 1 : 7;
  const Case::Key& at = c.keys[static_cast<size_t>(key)];
  const int32_t type = in_value ? c.layer.v_type : c.layer.k_type;
  const DtypeInfo& info = *find_dtype(type);
  const bool groups = info.group > 0;
  if (groups)  // overwrites the scale
    to_storage(TANDEM_F16, NAN, in_value ? at.v_scales : at.k_scales, dim / info.group * info.scales);
  else if (type == TANDEM_E4M3)
    reference::store(type, static_cast<double>(bad), static_cast<uint8_t*>(in_value ? at.v : at.k) + dim);
  else
    to_storage(type, bad, in_value ? at.v : at.k, dim);
  attend->attend(cpu::whole_span(c.job, 0, c.job.n_rows), 0);
  int64_t n_seeing = 0;
  for (int64_t row = 0; row < c.job.n_rows; ++row) {
    const auto r = static_cast<size_t>(row);
    const bool sees = c.sees(row, key);
    n_seeing += sees;
    assert_int_equal(std::isnan(c.lse[r]), sees && !in_value);
    if (!sees) assert_true(std::bit_cast<uint32_t>(lse[r]) == std::bit_cast<uint32_t>(c.lse[r]));
    for (int64_t d = 0; d < dims; ++d) {
      const auto i = static_cast<size_t>(row * dims + d);
      const bool hit = groups ? d / info.group == dim / info.group : d == dim;
      const bool expected = sees && (!in_value || hit);
      if (std::isnan(c.o[i]) != expected)
        fail_msg("%s: key %lld row %lld dim %lld is %g", describe(options).c_str(), static_cast<long long>(key),
                 static_cast<long long>(row), static_cast<long long>(d), static_cast<double>(c.o[i]));
      if (!sees) assert_true(o[i] == c.o[i]);
      if (!expected) assert_true(std::fabs(o[i] - c.o[i]) < 1e-5f);
    }
  }
  assert_true(n_seeing < c.job.n_rows);  // otherwise the case proves nothing
}

void test_nonfinite(void**) {
  uint32_t seed = 500;
  for (Mask mask : {Mask::kCausal, Mask::kSliding, Mask::kTree}) {
    for (int32_t type : kTypes) {
      for (float bad : {NAN, INFINITY, -INFINITY}) {
        if (type > TANDEM_BF16 && !std::isnan(bad)) continue;  // these types can only hold NaN
        for (bool in_value : {false, true}) {
          CaseOptions options;
          options.mask = mask;
          options.k_type = options.v_type = type;
          options.k_head_dim = options.v_head_dim = 64;
          options.q_is_bf16 = type == TANDEM_BF16;
          options.n_rows = 600;
          options.n_keys = 1024 + seed % 2;
          options.window = 60;
          options.one_run = seed % 3 == 0;  // the values are read in place
          options.seed = ++seed;
          check_nonfinite(options, 1024 - 1 - seed % 90, in_value, bad);
          if (in_value) continue;  // where V aliases K, a bad value is a bad key
          options.k_head_dim = 128;
          options.v_aliases_k = true;
          check_nonfinite(options, 1024 - 1 - seed % 90, in_value, bad);
        }
      }
    }
  }
}

// An earlier job leaves nothing in the scratch: first a tile of NaN, then tiles that use less of the scratch.
void test_stale_scratch(void**) {
  for (bool q_is_bf16 : {false, true}) {
    CaseOptions options;
    options.q_is_bf16 = q_is_bf16;
    options.n_keys = 512;
    Case bad(options);
    std::fill(bad.q.begin(), bad.q.end(), NAN);
    std::fill(bad.k_bytes.begin(), bad.k_bytes.end(), uint8_t{0xff});
    std::fill(bad.v_bytes.begin(), bad.v_bytes.end(), uint8_t{0xff});
    const auto attend = make(bad);
    for (int32_t n_keys : {0, 1, 200, 513}) {
      attend->attend(cpu::whole_span(bad.job, 0, bad.job.n_rows), 0);
      options.n_keys = n_keys;
      options.n_rows = 5;
      Case c(options);
      attend->attend(cpu::whole_span(c.job, 0, c.job.n_rows), 0);
      check(c);
    }
  }
}

// NaN in q stays in its row.
void test_nonfinite_query(void**) {
  CaseOptions options;
  options.mask = Mask::kNone;
  options.n_keys = 1100;
  Case c(options);
  const auto attend = make(c);
  attend->attend(cpu::whole_span(c.job, 0, c.job.n_rows), 0);
  const std::vector<float> o = c.o;
  c.q[5 * 128 + 3] = NAN;
  attend->attend(cpu::whole_span(c.job, 0, c.job.n_rows), 0);
  for (size_t i = 0; i < o.size(); ++i) assert_true(i / 128 == 5 ? std::isnan(c.o[i]) : o[i] == c.o[i]);
}

// A range of rows writes only its own rows, and two threads give the result of one thread.
void test_ranges_and_threads(void**) {
  CaseOptions options;
  options.n_rows = 2048;
  options.n_keys = 1300;
  options.q_is_bf16 = true;
  Case c(options);
  const auto attend = make(c, nullptr, 2);
  attend->attend(cpu::whole_span(c.job, 130, 200), 0);
  for (size_t i = 0; i < c.o.size(); ++i) assert_int_equal(std::isnan(c.o[i]), i / 128 < 130 || i / 128 >= 200);
  for (int32_t row = 0; row < 2048; row += 512) attend->attend(cpu::whole_span(c.job, row, row + 512), 0);
  const std::vector<float> o = c.o, lse = c.lse;
  std::fill(c.o.begin(), c.o.end(), NAN);
  const auto half = [&](int32_t worker) {
    for (int32_t row = worker * 512; row < 2048; row += 1024) attend->attend(cpu::whole_span(c.job, row, row + 512), worker);
  };
  std::thread other(half, 1);
  half(0);
  other.join();
  assert_memory_equal(o.data(), c.o.data(), o.size() * sizeof(float));
  assert_memory_equal(lse.data(), c.lse.data(), lse.size() * sizeof(float));
  check(c);
}

// Neither the placement of the keys nor the bytes around them change a bit.
void test_placement(void**) {
  TakesOneIn takes_case;
  for (bool q_is_bf16 : {false, true}) {
    for (int32_t type : kTypes) {
      if (!takes_case()) continue;
      CaseOptions options;
      options.k_type = options.v_type = type;
      options.n_rows = 300;
      options.n_keys = 1700;
      options.q_is_bf16 = q_is_bf16;
      options.one_run = true;
      Case whole(options), pieces(options);
      pieces.runs.clear();
      std::vector<std::vector<uint8_t>> rows;
      for (int64_t key = 0, n = 1; key < options.n_keys; key += n, n = n % 97 + 13) {
        KvRun run = whole.runs[0];
        run.n_tokens = std::min(n, options.n_keys - key);
        run.token_idx = key;
        const auto move = [&](const void** place, int64_t row) {
          if (row == 0) return;
          const auto* from = static_cast<const uint8_t*>(*place) + key * row;
          *place = rows.emplace_back(from, from + run.n_tokens * row).data();
        };
        for (const void** place : {&run.k, &run.v}) move(place, row_bytes(type, 128));
        for (const void** place : {&run.k_scales, &run.v_scales}) move(place, scale_bytes(type, 128));
        pieces.runs.push_back(run);
      }
      pieces.job.runs = pieces.runs.data();
      pieces.job.n_runs = static_cast<int32_t>(pieces.runs.size());
      const auto attend = make(whole);
      attend->attend(cpu::whole_span(whole.job, 0, whole.job.n_rows), 0);
      attend->attend(cpu::whole_span(pieces.job, 0, whole.job.n_rows), 0);
      assert_memory_equal(whole.o.data(), pieces.o.data(), whole.o.size() * sizeof(float));
      assert_memory_equal(whole.lse.data(), pieces.lse.data(), whole.lse.size() * sizeof(float));
    }
  }
}

// Preparing for later geometries and workers keeps earlier ones usable. The caller's OpenMP setting is restored.
void test_prepare(void**) {
  std::unique_ptr<cpu::MatmulAttend> attend;
  assert_int_equal(cpu::MatmulAttend::create(kernels_of("pentium"), &attend).code(), TANDEM_ERROR_NOT_FOUND);
  omp_set_num_threads(3);
  assert_true(cpu::MatmulAttend::create(kernels_of(nullptr), &attend).ok());
  uint32_t seed = 600;
  for (int32_t round = 0; round < 2; ++round) {
    for (int32_t dim : {64, 256, 128}) {
      CaseOptions options;
      options.k_head_dim = dim;
      options.v_head_dim = 64;
      options.q_is_bf16 = round == 1;
      options.seed = ++seed;
      Case c(options);
      assert_true(attend->prepare(c.layer, 1 + round).ok());
      attend->attend(cpu::whole_span(c.job, 0, c.job.n_rows), round);
      check(c);
    }
  }
  assert_int_equal(omp_get_max_threads(), 3);
  omp_set_num_threads(1);
}

constexpr const char* kIsaNames[] = {"avx3_zen4", "avx3_dl", "avx3", "avx2", "sse4",   "ssse3", "sve2_128",
                                     "sve_256",   "sve2",    "sve",  "neon", "emu128", "scalar"};

void test_instruction_sets(void**) {
  int32_t n_tables = 0;
  const cpu::SoftmaxTileKernels* last = nullptr;
  for (const char* isa : kIsaNames) {
    const cpu::SoftmaxTileKernels* kernels = cpu::softmax_tile_kernels(isa);
    if (kernels == nullptr || kernels == last) continue;
    last = kernels;
    ++n_tables;
    for (bool q_is_bf16 : {false, true}) {
      CaseOptions options;
      options.q_is_bf16 = q_is_bf16;
      options.soft_cap = q_is_bf16 ? 20.0f : 0.0f;
      options.rope_pairs = q_is_bf16 ? 0 : 37;
      options.v_type = q_is_bf16 ? TANDEM_BF16 : TANDEM_F16;
      options.mask = Mask::kSliding;
      Case c(options);
      make(c, isa)->attend(cpu::whole_span(c.job, 0, c.job.n_rows), 0);
      check(c);
    }
    std::printf("  %s: target %llx\n", isa, static_cast<unsigned long long>(kernels->target));
  }
#if defined(__x86_64__)
  assert_true(n_tables >= 2);
#elif defined(__aarch64__)
  assert_true(n_tables >= 1);
#endif
}

void check_elementary(const cpu::SoftmaxTileKernels& kernels) {
  std::vector<float> x, y;
  for (double v = 0; v > -86.9; v -= 0.0013) x.push_back(static_cast<float>(v));
  y.resize(x.size());
  kernels.exp(x.data(), y.data(), static_cast<int64_t>(x.size()));
  for (size_t i = 0; i < x.size(); ++i) {
    const double want = std::exp(static_cast<double>(x[i]));
    assert_true(std::fabs(static_cast<double>(y[i]) / want - 1) <= 0x1p-22);
  }
  const float special[] = {0.0f, -0.0f, -88.0f, -1e4f, -1e30f, -INFINITY, NAN};
  float out[7];
  kernels.exp(special, out, 7);
  assert_true(out[0] == 1 && out[1] == 1 && out[2] == 0 && out[3] == 0 && out[4] == 0 && out[5] == 0 && std::isnan(out[6]));

  x.clear();
  for (int i = -64 * 128; i < 64 * 128; ++i) x.push_back(0.0371f * static_cast<float>(i));
  y = x;
  kernels.cap_logits(y.data(), static_cast<int64_t>(y.size()), 0.5f, 30.0f);
  for (size_t i = 0; i < x.size(); ++i) {
    const double want = 30.0 * std::tanh(static_cast<double>(x[i]) * 0.5 / 30.0);
    assert_true(std::fabs(static_cast<double>(y[i]) - want) <= 4e-7 * std::fabs(want) + 1e-12);
  }

  std::vector<uint16_t> half(65536);
  for (size_t i = 0; i < half.size(); ++i) half[i] = static_cast<uint16_t>(i);
  for (size_t i = 0; i < 65536; ++i) {
    for (size_t lane : {size_t{0}, size_t{39}}) {
      if (i % 257 != 0 && (i & 0x7f80) < 0x7b00) continue;
      std::vector<uint16_t> words(40, 0x3f80);
      words[lane] = half[i];
      const bool want = (i & 0x7f80) == 0x7f80;
      assert_int_equal(kernels.has_nonfinite(words.data(), 20, true), want);
    }
  }
  float wide[21];
  std::fill_n(wide, 21, std::bit_cast<float>(0x3f807f80u));  // the lower half of each number looks like Inf in bf16
  assert_false(kernels.has_nonfinite(wide, 21, false));
  wide[20] = INFINITY;
  assert_true(kernels.has_nonfinite(wide, 21, false));
}

void test_elementary(void**) {
  const cpu::SoftmaxTileKernels* last = nullptr;
  for (const char* isa : kIsaNames) {
    const cpu::SoftmaxTileKernels* kernels = cpu::softmax_tile_kernels(isa);
    if (kernels != nullptr && kernels != last) check_elementary(*kernels);
    last = kernels;
  }
}

// Random combinations of all options, with many keys.
void test_random(void**) {
  std::mt19937 random(11);
  for (uint32_t i = 0; i < 400; ++i) {
    const auto draw = [&](uint32_t n) { return static_cast<int32_t>(random() % n); };
    CaseOptions options;
    options.k_type = kTypes[draw(std::size(kTypes))];
    options.v_type = kTypes[draw(std::size(kTypes))];
    options.k_head_dim = kDims[draw(7)];
    options.v_head_dim = kDims[draw(7)];
    constexpr int32_t kRows[] = {1, 5, 127, 128, 129, 300, 1536};
    options.n_rows = kRows[draw(7)];
    constexpr int32_t kKeys[] = {0, 1, 511, 512, 513, 1300, 5000};
    options.n_keys = kKeys[draw(7)];
    constexpr int32_t kGroups[] = {1, 2, 3, 4, 8, 128};
    options.group_size = kGroups[draw(6)];
    options.mask = static_cast<Mask>(draw(4));
    options.window = 1 + draw(700);
    options.sink_len = draw(2) * draw(700);
    options.soft_cap = draw(3) == 0 ? 20.0f : 0.0f;
    options.rope_pairs = draw(3) == 0 ? options.k_head_dim / 2 - draw(2) * 5 : 0;
    options.interleaved = draw(2);
    options.positions = draw(2);
    options.q_is_bf16 = draw(2);
    options.one_run = draw(3) == 0;
    options.gaps = draw(2);
    options.unconditional_runs = draw(4) == 0;
    options.logits = draw(3) == 0;
    options.v_aliases_k = options.v_head_dim <= options.k_head_dim && draw(4) == 0;
    options.q_size = draw(4) == 0 ? 10.0f : 1.5f;
    options.seed = i + 1;
    run_and_check(options);
  }
}

}  // namespace
}  // namespace tandem::test

int main(int argc, char** argv) {
  using namespace tandem::test;
  const CMUnitTest fast[] = {
      cmocka_unit_test(test_elementary),
      cmocka_unit_test(test_types_and_dims),
      cmocka_unit_test(test_mixed_types_and_dims),
      cmocka_unit_test(test_rows_and_keys),
      cmocka_unit_test(test_masks),
      cmocka_unit_test(test_rope),
      cmocka_unit_test(test_alias),
      cmocka_unit_test(test_far_logits),
      cmocka_unit_test(test_extreme_scales),
      cmocka_unit_test(test_nonfinite),
      cmocka_unit_test(test_nonfinite_query),
      cmocka_unit_test(test_ranges_and_threads),
      cmocka_unit_test(test_stale_scratch),
      cmocka_unit_test(test_placement),
      cmocka_unit_test(test_prepare),
      cmocka_unit_test(test_instruction_sets),
  };
  const CMUnitTest full[] = {cmocka_unit_test(test_random)};
  for (int i = 1; i < argc; ++i)
    if (std::strcmp(argv[i], "vectors") == 0) use_matrix_unit(false);
  if (argc > 1 && std::strcmp(argv[1], "full") == 0) return cmocka_run_group_tests(full, nullptr, nullptr);
  return cmocka_run_group_tests(fast, nullptr, nullptr);
}
