// SPDX-License-Identifier: MIT
// Products of oneDNN where memory fails while they are computed: none is missing, and nothing is thrown through the pool.
#include <cmath>
#include <random>
#include <vector>

#include "cpu/onednn.h"
#include "failing_new.h"
#include "with_cmocka.h"

using namespace tandem;
using namespace failing_new;

namespace {

void test_products_without_memory(void**) {
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  std::vector<float> a(32 * 64), b(64 * 128), c(32 * 128), scratchpad(1 << 16);
  for (std::vector<float>* numbers : {&a, &b, &c})
    for (float& x : *numbers) x = normal(random);
  for (const bool accumulate : {false, true}) {
    const cpu::MatmulShape shape{32, 128, 64, 64, 128, 1, 128, false, accumulate};
    cpu::Matmul matmul;
    assert_true(cpu::Matmul::create(shape, &matmul).ok());
    assert_true(matmul.prepare(1).ok());
    std::vector<float> want = c;
    cpu::plain_matmul(shape, a.data(), b.data(), want.data());
    for (const bool goes_on : {false, true}) {
      for_ever = goes_on;
      int64_t nth = 0;
      do {
        std::vector<float> got = c;
        n_news = 0;
        fails_at = ++nth;
        armed = true;
        matmul.run(0, a.data(), b.data(), got.data(), scratchpad.data());
        armed = false;
        for (size_t i = 0; i < got.size(); ++i) assert_true(std::fabs(got[i] - want[i]) < 1e-4f);
      } while (n_news >= nth);
      print_message("%lld allocations failed one by one\n", static_cast<long long>(nth - 1));
    }
  }
}

}  // namespace

int main() {
  const CMUnitTest tests[] = {cmocka_unit_test(test_products_without_memory)};
  return cmocka_run_group_tests(tests, nullptr, nullptr);
}
