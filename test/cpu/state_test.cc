// SPDX-License-Identifier: MIT
// The kernels around attention, for each instruction set: merge, exp and tanh, conversions, moving average, read_sum.

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "cpu/attend_case.h"
#include "cpu/isa.h"
#include "one_in.h"
#include "reference/rounding.h"
#include "reference/stored_row.h"
#include "with_cmocka.h"

namespace tandem::test {
namespace {

template <class Fn>
void each_isa(Fn fn) {
  int n = 0;
  for (int32_t i = 0; const cpu::KernelTable* table = cpu::isa_table(i); ++i) {
    if (!cpu::isa_available(*table)) continue;
    fn(*table);
    ++n;
  }
  assert_true(n > 0);
}

void exp_is_accurate(void**) {
  each_isa([](const cpu::KernelTable& table) {
    std::vector<float> x, y;
    for (double at = -104.0; at < 88.8; at += 0.00073) x.push_back(static_cast<float>(at));
    for (int i = -1000; i < 1000; ++i) x.push_back(static_cast<float>(i) * 1e-9f);
    y.resize(x.size());
    table.exp(x.data(), y.data(), static_cast<int64_t>(x.size()));
    for (size_t i = 0; i < x.size(); ++i) {
      const double want = std::exp(static_cast<double>(x[i])), error = std::fabs(static_cast<double>(y[i]) - want);
      const double bound = want > 3.4028235e38 ? INFINITY : std::max(want * 0x1p-22, 0x1p-149);
      if (!(error <= bound))
        fail_msg("%s: exp(%.9g) = %.9g", table.name, static_cast<double>(x[i]), static_cast<double>(y[i]));
    }
    const float special[] = {-INFINITY, -1e38f, -1000.0f, -110.0f, 0.0f, -0.0f, 89.0f, 1000.0f, INFINITY, NAN, -NAN};
    float out[std::size(special)];
    table.exp(special, out, std::size(special));
    for (int i = 0; i < 4; ++i) assert_true(std::bit_cast<uint32_t>(out[i]) == 0);
    assert_true(out[4] == 1.0f && out[5] == 1.0f);
    for (int i = 6; i < 9; ++i) assert_true(out[i] == INFINITY);
    assert_true(std::isnan(out[9]) && std::isnan(out[10]));
  });
}

void tanh_is_accurate(void**) {
  each_isa([](const cpu::KernelTable& table) {
    std::vector<float> x, y;
    for (double at = 1e-30; at < 1e30; at *= 1.0007) {
      x.push_back(static_cast<float>(at));
      x.push_back(static_cast<float>(-at));
    }
    y.resize(x.size());
    table.tanh(x.data(), y.data(), static_cast<int64_t>(x.size()));
    for (size_t i = 0; i < x.size(); ++i) {
      const double want = std::tanh(static_cast<double>(x[i]));
      if (!(std::fabs(static_cast<double>(y[i]) - want) <= std::fabs(want) * 0x1p-22))
        fail_msg("%s: tanh(%.9g) = %.9g", table.name, static_cast<double>(x[i]), static_cast<double>(y[i]));
    }
    const float special[] = {-INFINITY, INFINITY, 0.0f, NAN};
    float out[4];
    table.tanh(special, out, 4);
    assert_true(out[0] == -1.0f && out[1] == 1.0f && out[2] == 0.0f && std::isnan(out[3]));
  });
}

void check_value(const cpu::KernelTable& table, int32_t dtype, const void* code, float got) {
  const double want = reference::load(dtype, code);
  const bool same =
      std::isnan(want) ? std::isnan(got) : std::bit_cast<uint32_t>(got) == std::bit_cast<uint32_t>(static_cast<float>(want));
  if (!same) fail_msg("%s: type %d: %.9g for %.9g", table.name, dtype, static_cast<double>(got), want);
}

void narrow_types_to_f32_exactly(void**) {
  each_isa([](const cpu::KernelTable& table) {
    std::vector<uint8_t> codes(256 + 5);
    std::vector<float> values(codes.size() + 1, 7.0f);
    for (size_t i = 0; i < codes.size(); ++i) codes[i] = static_cast<uint8_t>(i);
    table.to_f32(TANDEM_E4M3, codes.data(), nullptr, values.data(), static_cast<int64_t>(codes.size()));
    for (size_t i = 0; i < codes.size(); ++i) check_value(table, TANDEM_E4M3, &codes[i], values[i]);
    for (const int32_t dtype : {TANDEM_F16, TANDEM_BF16}) {
      std::vector<uint16_t> from(65536 + 5);
      std::vector<float> to(from.size() + 1, 7.0f);
      for (size_t i = 0; i < from.size(); ++i) from[i] = static_cast<uint16_t>(i);
      table.to_f32(dtype, from.data(), nullptr, to.data(), static_cast<int64_t>(from.size()));
      for (size_t i = 0; i < from.size(); ++i) check_value(table, dtype, &from[i], to[i]);
      assert_true(to.back() == 7.0f);
    }
  });
}

void check_rounding(const cpu::KernelTable& table, int32_t dtype, const std::vector<float>& from) {
  const auto size = static_cast<size_t>(reference::element_bytes(dtype));
  std::vector<uint8_t> to(from.size() * size + 1, 0x12);
  table.from_f32(dtype, from.data(), to.data(), nullptr, static_cast<int64_t>(from.size()));
  assert_true(to.back() == 0x12);
  for (size_t i = 0; i < from.size(); ++i) {
    uint16_t got = 0, want = 0;
    std::memcpy(&got, &to[i * size], size);
    if (!std::isnan(from[i])) {
      reference::store(dtype, static_cast<double>(from[i]), &want);
      if (want == got) continue;
    } else if (std::isnan(reference::load(dtype, &got))) {
      continue;
    }
    fail_msg("%s: type %d: %.9g (%x) -> %x for %x", table.name, dtype, static_cast<double>(from[i]),
             std::bit_cast<uint32_t>(from[i]), got, want);
  }
}

void rounds_to_nearest_even(void**) {
  each_isa([](const cpu::KernelTable& table) {
    for (const int32_t dtype : {TANDEM_F16, TANDEM_BF16, TANDEM_E4M3}) {
      std::vector<float> from;
      for (uint64_t bits = 0; bits < uint64_t{1} << 32; bits += 2039)
        from.push_back(std::bit_cast<float>(static_cast<uint32_t>(bits)));
      check_rounding(table, dtype, from);
      from.clear();  // every tie and the numbers next to it
      for (uint32_t half = 0; half < 65536; ++half) {
        const auto bits = static_cast<uint16_t>(half);
        const auto value = static_cast<float>(reference::load(dtype, &bits));
        const uint32_t middle = dtype == TANDEM_BF16 ? 0x8000 : dtype == TANDEM_F16 ? 0x1000 : 0x80000;
        for (const uint32_t step : {0u, 1u, middle - 1, middle, middle + 1})
          from.push_back(std::bit_cast<float>(std::bit_cast<uint32_t>(value) + step));
        if (dtype == TANDEM_F16 && (half & 0x7c00) == 0)
          for (const float off : {0.49f, 0.5f, 0.51f}) from.push_back(value + off * 0x1p-24f);
        if (dtype == TANDEM_E4M3 && half < 8)
          for (const float off : {0.49f, 0.5f, 0.51f}) from.push_back(value + off * 0x1p-9f);
      }
      check_rounding(table, dtype, from);
    }
  });
}

// Returns the error bound of q4_64 by its definition in double precision: half a scale or, at the ends of the range, the
// part that the rounding of scale and minimum leaves uncovered.
double bound_of_q4_64(const float* x, int64_t n, double scale, double minimum) {
  const auto range = std::minmax_element(x, x + n);
  const double min = static_cast<double>(*range.first), max = static_cast<double>(*range.second);
  const double covers = std::fabs(minimum - min) + 15.0 * std::fabs(scale - (max - min) / 15.0);
  const double in_f32 = 0x1p-22 * std::max(std::fabs(min), std::fabs(max));
  return std::max(0.5 * scale, covers) + in_f32;
}

void check_q4_64_row(const cpu::KernelTable& table, const std::vector<float>& x) {
  constexpr int64_t kGroup = 64;
  const auto n = static_cast<int64_t>(x.size());
  std::vector<uint8_t> codes(x.size() / 2 + 1, 0x12);
  std::vector<uint16_t> scales(static_cast<size_t>((n + kGroup - 1) / kGroup * 2 + 1), 0x1234);
  std::vector<float> back(x.size() + 1, 7.0f);
  table.from_f32(TANDEM_Q4_64, x.data(), codes.data(), scales.data(), n);
  table.to_f32(TANDEM_Q4_64, codes.data(), scales.data(), back.data(), n);
  assert_true(codes.back() == 0x12 && scales.back() == 0x1234 && back.back() == 7.0f);
  for (int64_t first = 0; first < n; first += kGroup) {
    const int64_t m = std::min(kGroup, n - first), end = first + m;
    const double scale = reference::load(TANDEM_F16, &scales[static_cast<size_t>(first / kGroup * 2)]);
    const double minimum = reference::load(TANDEM_F16, &scales[static_cast<size_t>(first / kGroup * 2 + 1)]);
    const double bound = bound_of_q4_64(x.data() + first, m, scale, minimum);
    const auto range = std::minmax_element(x.data() + first, x.data() + first + m);
    if (*range.first == *range.second) assert_true(scale == 0.0);
    for (auto i = static_cast<size_t>(first); i < static_cast<size_t>(end); ++i) {
      const double error = std::fabs(static_cast<double>(back[i]) - static_cast<double>(x[i]));
      if (!(error <= bound))
        fail_msg("%s: %.9g is stored as %.9g, bound %.3g", table.name, static_cast<double>(x[i]),
                 static_cast<double>(back[i]), bound);
      for (auto j = static_cast<size_t>(first); j < i; ++j)
        if (x[i] < x[j] ? back[i] > back[j] : back[i] < back[j] && x[i] > x[j])
          fail_msg("%s: %.9g and %.9g change places", table.name, static_cast<double>(x[i]), static_cast<double>(x[j]));
    }
  }
}

// Ranges and minima of every ratio, starting with f16's subnormals, also with rows that end within a group and with equal
// numbers.
void q4_64_stays_within_its_bound(void**) {
  each_isa([](const cpu::KernelTable& table) {
    Random random{31};
    for (int32_t round = 0; round < 1500; ++round) {
      const double size = std::ldexp(1.0, static_cast<int>(random.below(40)) - 26);
      const double offset =
          random.below(3) == 0 ? 0.0 : std::ldexp(random.normal(), static_cast<int>(random.below(40)) - 26);
      std::vector<float> x(static_cast<size_t>(16 * (1 + random.below(16))));
      for (float& value : x) value = static_cast<float>(offset + (round % 16 == 0 ? 0.0 : size * random.uniform()));
      check_q4_64_row(table, x);
    }
  });
}

// Returns a number of a group: any number, one between two codes where the largest is 127, a zero of either sign, or a tiny
// number.
float number_of_group(Random& random, int64_t kind) {
  const double sign = random.below(2) == 0 ? -1.0 : 1.0;
  if (kind == 0) return static_cast<float>(random.normal());
  if (kind == 1) return static_cast<float>(sign * (static_cast<double>(random.below(254)) / 2.0));
  if (kind == 2) return static_cast<float>(sign * 0.0);
  return static_cast<float>(sign * std::ldexp(random.uniform(), static_cast<int>(random.below(250)) - 149));
}

void check_groups(const cpu::KernelTable& table, int32_t dtype, const std::vector<float>& x) {
  const auto n = static_cast<int64_t>(x.size());
  const auto n_codes = static_cast<size_t>(reference::code_bytes(dtype, n));
  const auto n_scales = static_cast<size_t>(reference::scale_bytes(dtype, n)) / sizeof(uint16_t);
  std::vector<uint8_t> codes(n_codes + 1, 0x12), want_codes(n_codes);
  std::vector<uint16_t> scales(n_scales + 1, 0x1234), want_scales(n_scales);
  table.from_f32(dtype, x.data(), codes.data(), scales.data(), n);
  const std::vector<double> exact(x.begin(), x.end());
  reference::store_row(dtype, exact.data(), n, want_codes.data(), want_scales.data());
  assert_true(codes.back() == 0x12 && scales.back() == 0x1234);
  for (size_t i = 0; i < n_scales; ++i) {
    const double got = reference::load(TANDEM_F16, &scales[i]), want = reference::load(TANDEM_F16, &want_scales[i]);
    if (scales[i] != want_scales[i] && !(std::isnan(got) && std::isnan(want)))
      fail_msg("%s: type %d, scale %zu of %lld numbers: %g for %g", table.name, dtype, i, static_cast<long long>(n), got,
               want);
  }
  for (size_t i = 0; i < n_codes; ++i)
    if (codes[i] != want_codes[i])
      fail_msg("%s: type %d, byte %zu of %lld numbers: %x for %x", table.name, dtype, i, static_cast<long long>(n), codes[i],
               want_codes[i]);
}

// Compares codes and scales bit for bit, also in rows that end within a group.
void groups_round_as_their_definition(void**) {
  each_isa([](const cpu::KernelTable& table) {
    Random random{47};
    for (int32_t round = 0; round < 3000; ++round) {
      std::vector<float> x(static_cast<size_t>(16 * (1 + random.below(16))));
      const int64_t kind = random.below(4);
      const auto anywhere = [&]() -> float& { return x[static_cast<size_t>(random.below(static_cast<int64_t>(x.size())))]; };
      for (float& value : x) value = number_of_group(random, random.below(4) == 0 ? random.below(4) : kind);
      if (kind == 1) anywhere() = random.below(2) == 0 ? 127.0f : -127.0f;
      if (round % 50 == 0) anywhere() = round % 100 == 0 ? NAN : INFINITY;
      for (const int32_t dtype : {TANDEM_Q8_0, TANDEM_Q4_0, TANDEM_Q4_64}) check_groups(table, dtype, x);
    }
  });
}

// Tests every 61st number, which covers all exponents and every pattern of the bits that are rounded away.
void f32_rounds_everywhere(void**) {
  constexpr uint64_t kStep = 61;
  for (const int32_t dtype : {TANDEM_F16, TANDEM_BF16, TANDEM_E4M3}) {
    std::vector<float> from(1 << 20);
    for (uint64_t first = 0; first < uint64_t{1} << 32; first += kStep * from.size()) {
      for (size_t i = 0; i < from.size(); ++i) from[i] = std::bit_cast<float>(static_cast<uint32_t>(first + kStep * i));
      for (int32_t i = 0; const cpu::KernelTable* table = cpu::isa_table(i); ++i)
        if (cpu::isa_available(*table) && (i == 0 || std::strcmp(table->name, "sse4") == 0))
          check_rounding(*table, dtype, from);
    }
  }
}

// Compares random states, some empty, some far apart, with double precision.
void merge_matches(void**) {
  each_isa([](const cpu::KernelTable& table) {
    Random random{99};
    for (int64_t round = 0; round < some_of(4000); ++round) {
      const auto n_states = static_cast<size_t>(random.below(6)), n_rows = static_cast<size_t>(1 + random.below(4));
      const auto dim = static_cast<size_t>(1 + random.below(round % 8 == 0 ? 260 : 40));
      std::vector<std::vector<float>> o(n_states), lse(n_states);
      std::vector<const float*> o_at, lse_at;
      for (size_t s = 0; s < n_states; ++s) {
        o[s].resize(n_rows * dim);
        for (size_t r = 0; r < n_rows; ++r) {
          const double spreads[] = {0.0, 1e-7, 1.0, 50.0, 300.0, 1e5};
          const bool empty = random.below(4) == 0;
          lse[s].push_back(empty ? -INFINITY : static_cast<float>(random.normal() * spreads[random.below(6)]));
          for (size_t c = 0; c < dim; ++c) o[s][r * dim + c] = empty ? NAN : static_cast<float>(random.normal());
        }
        o_at.push_back(o[s].data());
        lse_at.push_back(lse[s].data());
      }
      const bool has_sink = random.below(3) == 0;
      const float sinks[2] = {static_cast<float>(random.normal() * 3.0), random.below(4) ? 1.5f : -INFINITY};
      std::vector<float> o_out(n_rows * dim + 1, 5.0f), lse_out(n_rows + 1, 5.0f);
      std::vector<double> want(n_rows * dim, 0.0), want_lse(n_rows);
      for (size_t r = 0; r < n_rows; ++r) {
        double m = has_sink ? static_cast<double>(sinks[r % 2]) : -INFINITY, sum = 0.0;
        for (const auto& l : lse) m = std::max(m, static_cast<double>(l[r]));
        if (m == -INFINITY) {
          want_lse[r] = m;
          continue;
        }
        if (has_sink) sum += std::exp(static_cast<double>(sinks[r % 2]) - m);
        for (const auto& l : lse) sum += std::exp(static_cast<double>(l[r]) - m);
        for (size_t s = 0; s < n_states; ++s)
          for (size_t c = 0; c < dim && lse[s][r] != -INFINITY; ++c)
            want[r * dim + c] += std::exp(static_cast<double>(lse[s][r]) - m) / sum * static_cast<double>(o[s][r * dim + c]);
        want_lse[r] = m + std::log(sum);
      }
      MergeJob job;
      job.n_rows = static_cast<int64_t>(n_rows), job.head_dim = static_cast<int32_t>(dim);
      job.n_states = static_cast<int32_t>(n_states), job.o = o_at.data(), job.lse = lse_at.data();
      job.sinks = has_sink ? sinks : nullptr, job.sink_period = 2;
      const bool in_place = n_states > 0 && random.below(3) == 0;
      job.o_out = in_place ? o[0].data() : o_out.data(), job.lse_out = in_place ? lse[0].data() : lse_out.data();
      table.merge(job, 0, job.n_rows);
      for (size_t r = 0; r < n_rows; ++r) {
        const auto got = static_cast<double>(job.lse_out[r]);
        if (!(got == want_lse[r] || std::fabs(got - want_lse[r]) <= 2e-7 * (1.0 + std::fabs(want_lse[r]))))
          fail_msg("%s: lse %.9g for %.9g", table.name, got, want_lse[r]);
        for (size_t c = 0; c < dim; ++c)
          if (!(std::fabs(static_cast<double>(job.o_out[r * dim + c]) - want[r * dim + c]) <= 3e-6))
            fail_msg("%s: o %.9g for %.9g", table.name, static_cast<double>(job.o_out[r * dim + c]), want[r * dim + c]);
      }
      assert_true(o_out.back() == 5.0f && lse_out.back() == 5.0f);
    }
  });
}

void merge_extremes(void**) {
  each_isa([](const cpu::KernelTable& table) {
    const float o[2][3] = {{1, 2, 3}, {10, 20, 30}};
    const float* o_at[2] = {o[0], o[1]};
    float lse[2], o_out[3], lse_out;
    const float* lse_at[2] = {&lse[0], &lse[1]};
    MergeJob job;
    job.n_rows = 1, job.head_dim = 3, job.n_states = 2, job.o = o_at, job.lse = lse_at, job.o_out = o_out,
    job.lse_out = &lse_out;
    lse[0] = 3.25f, lse[1] = -INFINITY;  // a single state is copied bit for bit
    table.merge(job, 0, 1);
    assert_true(o_out[0] == 1 && o_out[1] == 2 && o_out[2] == 3 && lse_out == 3.25f);
    lse[0] = 0.0f, lse[1] = 1e30f;
    table.merge(job, 0, 1);
    assert_true(o_out[0] == 10 && o_out[2] == 30 && lse_out == 1e30f);
    lse[0] = NAN;
    table.merge(job, 0, 1);
    assert_true(std::isnan(o_out[0]) && std::isnan(lse_out));
    lse[0] = lse[1] = -INFINITY;
    table.merge(job, 0, 1);
    assert_true(o_out[0] == 0 && o_out[1] == 0 && lse_out == -INFINITY);
    const float sink = 2.0f;
    job.sinks = &sink;
    table.merge(job, 0, 1);
    assert_true(o_out[0] == 0 && lse_out == 2.0f);
    job.n_states = 0;
    table.merge(job, 0, 1);
    assert_true(o_out[0] == 0 && lse_out == 2.0f);
  });
}

void moving_average(void**) {
  each_isa([](const cpu::KernelTable& table) {
    for (int64_t n = 0; n < 70; ++n) {
      Random random{static_cast<uint64_t>(n + 1)};
      std::vector<float> logits, maw, before;
      for (int64_t i = 0; i < n; ++i) {
        logits.push_back(random.below(5) == 0 ? -INFINITY : static_cast<float>(7.0 - 3.0 * std::fabs(random.normal())));
        maw.push_back(static_cast<float>(random.uniform()));
      }
      maw.push_back(9.0f);
      before = maw;
      const bool empty = n % 7 == 3;
      table.observe(maw.data(), logits.data(), n, empty ? -INFINITY : 8.0f, 0.3f);
      for (size_t i = 0; i < static_cast<size_t>(n); ++i) {
        const double weight = empty ? 0.0 : std::exp(static_cast<double>(logits[i]) - 8.0);
        const auto mean = static_cast<double>(before[i]);
        assert_true(std::fabs(static_cast<double>(maw[i]) - (mean + static_cast<double>(0.3f) * (weight - mean))) < 1e-6);
      }
      assert_true(maw.back() == 9.0f);
    }
  });
}

void read_sum_reads_all(void**) {
  each_isa([](const cpu::KernelTable& table) {
    std::vector<uint8_t> data(1111);
    for (size_t i = 0; i < data.size(); ++i) data[i] = static_cast<uint8_t>(i * 7);
    const uint64_t before = table.read_sum(data.data(), static_cast<int64_t>(data.size()));
    for (uint8_t& byte : data) {
      ++byte;
      assert_true(table.read_sum(data.data(), static_cast<int64_t>(data.size())) != before);
      --byte;
    }
  });
}

}  // namespace
}  // namespace tandem::test

int main(int argc, char**) {
  using namespace tandem::test;
  if (argc > 1) {
    const CMUnitTest full[] = {cmocka_unit_test(f32_rounds_everywhere)};
    return cmocka_run_group_tests(full, nullptr, nullptr);
  }
  const CMUnitTest tests[] = {
      cmocka_unit_test(exp_is_accurate),
      cmocka_unit_test(tanh_is_accurate),
      cmocka_unit_test(narrow_types_to_f32_exactly),
      cmocka_unit_test(rounds_to_nearest_even),
      cmocka_unit_test(q4_64_stays_within_its_bound),
      cmocka_unit_test(groups_round_as_their_definition),
      cmocka_unit_test(merge_matches),
      cmocka_unit_test(merge_extremes),
      cmocka_unit_test(moving_average),
      cmocka_unit_test(read_sum_reads_all),
  };
  return cmocka_run_group_tests(tests, nullptr, nullptr);
}
