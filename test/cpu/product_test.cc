// SPDX-License-Identifier: MIT
// Compares products of tiles, by our kernels of every instruction set and by oneDNN, with sums in double precision.
#include <bit>
#include <cmath>
#include <random>
#include <vector>

#include "cpu/kernels/softmax_tile.h"
#include "cpu/onednn.h"
#include "cpu/pool_modes.h"
#include "lib/tables/backend.h"
#include "with_cmocka.h"

namespace tandem::test {
namespace {

// Returns the kernels of the instruction sets that this processor has.
std::vector<const cpu::SoftmaxTileKernels*> all_kernels() {
  std::vector<const cpu::SoftmaxTileKernels*> found;
  for (int32_t i = 0; cpu_isa_name(i) != nullptr; ++i) {
    const cpu::SoftmaxTileKernels* kernels = cpu::softmax_tile_kernels(cpu_isa_name(i));
    if (kernels != nullptr && (found.empty() || kernels != found.back())) found.push_back(kernels);
  }
  return found;
}

float bf16_of(uint16_t bits) { return std::bit_cast<float>(uint32_t{bits} << 16); }

// Compares one product with sums in double precision. Rows of b are plain or in panels. Rows of a and c are longer than the
// product. The elements between the rows are NaN in a and must stay unchanged in c.
void check_product(const cpu::SoftmaxTileKernels& kernels, int64_t m, int64_t n, int64_t k, bool bf16, bool accumulate) {
  std::mt19937 random(static_cast<uint32_t>(m * 31 + n * 7 + k));
  std::normal_distribution<float> normal;
  const int64_t stride_a = k + 3, stride_c = n + 5;
  std::vector<float> a(static_cast<size_t>(m * stride_a), NAN), b(static_cast<size_t>(k * n)),
      columns(static_cast<size_t>(k * n)), panels(static_cast<size_t>(k * n), NAN),
      c(static_cast<size_t>(m * stride_c), 0.5f);
  for (int64_t i = 0; i < m; ++i)
    for (int64_t l = 0; l < k; ++l) a[static_cast<size_t>(i * stride_a + l)] = normal(random);
  for (float& x : b) x = normal(random);
  for (int64_t l = 0; l < k; ++l)
    for (int64_t j = 0; j < n; ++j) columns[static_cast<size_t>(j * k + l)] = b[static_cast<size_t>(l * n + j)];
  const auto times = [&](float x, float y) {
    const auto xs = std::bit_cast<uint32_t>(x), ys = std::bit_cast<uint32_t>(y);
    if (!bf16) return static_cast<double>(x) * static_cast<double>(y);
    return static_cast<double>(bf16_of(static_cast<uint16_t>(xs))) *
               static_cast<double>(bf16_of(static_cast<uint16_t>(ys))) +
           static_cast<double>(bf16_of(static_cast<uint16_t>(xs >> 16))) *
               static_cast<double>(bf16_of(static_cast<uint16_t>(ys >> 16)));
  };
  if (bf16)  // the lower halves must be bf16 numbers as well, not arbitrary bits
    for (std::vector<float>* words : {&a, &b, &columns})
      for (float& x : *words) {
        const uint32_t upper = std::bit_cast<uint32_t>(x) >> 16;
        if (!std::isnan(x)) x = std::bit_cast<float>(upper << 16 | upper);
      }
  const bool packed = n % cpu::kPanelColumns == 0 && k % 4 == 0;
  for (const bool in_panels : {false, true}) {
    if (in_panels && !packed) continue;
    if (in_panels) kernels.pack_columns({columns.data(), n, k, panels.data()});
    std::vector<float> got = c;
    const cpu::Product product{a.data(),
                               stride_a,
                               in_panels ? panels.data() : b.data(),
                               in_panels ? cpu::kPanelColumns : n,
                               in_panels ? k * cpu::kPanelColumns : cpu::kPanelColumns,
                               got.data(),
                               stride_c,
                               m,
                               n,
                               k,
                               accumulate};
    (bf16 ? kernels.multiply_bf16 : kernels.multiply)(product);
    for (int64_t i = 0; i < m; ++i) {
      for (int64_t j = 0; j < stride_c; ++j) {
        double want = j < n && !accumulate ? 0 : 0.5;
        for (int64_t l = 0; j < n && l < k; ++l)
          want += times(a[static_cast<size_t>(i * stride_a + l)], b[static_cast<size_t>(l * n + j)]);
        const double have = static_cast<double>(got[static_cast<size_t>(i * stride_c + j)]);
        if (!(std::fabs(have - want) <= 2e-6 * static_cast<double>(k)))
          fail_msg("%lld x %lld x %lld: %g, not %g", static_cast<long long>(m), static_cast<long long>(n),
                   static_cast<long long>(k), have, want);
      }
    }
  }
}

void test_products(void**) {
  for (const cpu::SoftmaxTileKernels* kernels : all_kernels()) {
    for (const bool bf16 : {false, true}) {
      if (bf16 && !cpu::has_bf16_products(*kernels)) continue;
      for (const int64_t m : {1, 2, 5, 6, 7, 12, 35})
        for (const int64_t n : {16, 48, 64, 80, 112, 128, 192})
          for (const int64_t k : {4, 64, 80, 127, 128, 129, 512})
            check_product(*kernels, m, n, k, bf16, (m + n + k) % 2 == 0);
    }
  }
}

// Two bf16 numbers of a column become one word.
void test_pairs(void**) {
  for (const cpu::SoftmaxTileKernels* kernels : all_kernels()) {
    std::vector<uint16_t> rows(8 * 100);
    for (size_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<uint16_t>(i * 77);
    std::vector<uint32_t> words(4 * 80);
    kernels->pack_pairs({rows.data(), 100, 8, 80, words.data()});
    for (size_t i = 0; i < 4; ++i)
      for (size_t j = 0; j < 80; ++j)
        assert_int_equal(words[i * 80 + j], rows[2 * i * 100 + j] | static_cast<uint32_t>(rows[(2 * i + 1) * 100 + j])
                                                                        << 16);
  }
}

// Multiplies by b and by b transposed, into rows with gaps. The gaps must stay unchanged.
void test_sgemm(void**) {
  assert_true(cpu::prepare_sgemm().ok());
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  constexpr int64_t kM = 32, kN = 128, kK = 64, kStrideC = 130;
  std::vector<float> a(kM * kK), b(kK * kN), c(kM * kStrideC, 0.5f);
  for (std::vector<float>* numbers : {&a, &b})
    for (float& x : *numbers) x = normal(random);
  const cpu::SingleThread single;
  for (const bool transposed : {false, true}) {
    for (const bool accumulate : {false, true}) {
      std::vector<float> got = c;
      const cpu::Sgemm product{kM,         kN,         kK,       a.data(),  kK, b.data(), transposed ? kK : kN,
                               transposed, got.data(), kStrideC, accumulate};
      assert_true(cpu::sgemm(product, cpu::SignalsHeld()));
      for (int64_t i = 0; i < kM; ++i) {
        for (int64_t j = 0; j < kStrideC; ++j) {
          double want = j < kN && !accumulate ? 0 : 0.5;
          for (int64_t l = 0; j < kN && l < kK; ++l)
            want += static_cast<double>(a[static_cast<size_t>(i * kK + l)]) *
                    static_cast<double>(b[static_cast<size_t>(transposed ? j * kK + l : l * kN + j)]);
          assert_true(std::fabs(static_cast<double>(got[static_cast<size_t>(i * kStrideC + j)]) - want) < 1e-4);
        }
      }
    }
  }
}

}  // namespace
}  // namespace tandem::test

int main() {
  using namespace tandem::test;
  const CMUnitTest tests[] = {cmocka_unit_test(test_products), cmocka_unit_test(test_pairs), cmocka_unit_test(test_sgemm)};
  return cmocka_run_group_tests(tests, nullptr, nullptr);
}
