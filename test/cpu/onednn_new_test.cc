// SPDX-License-Identifier: MIT
// Products of oneDNN where memory fails while they are computed, before them and behind: none is missing, none is added
// twice, and nothing is thrown through the pool. And where it fails while they are made.
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <random>
#include <vector>

#include "cpu/matmul_attend.h"
#include "cpu/matmul_case.h"
#include "cpu/onednn.h"
#include "failing_new.h"
#include "with_cmocka.h"

using namespace tandem;
using namespace failing_new;

namespace {

// body(), in which the nth allocation and perhaps all behind it fail, for each n there is. Returns how many there were.
template <typename Body>
int64_t for_each_failure(const Body& body) {
  int64_t n = 0;
  for (const bool goes_on : {false, true}) {
    for_ever = goes_on;
    int64_t nth = 0;
    do {
      n_news = 0;
      fails_at = ++nth;
      body();
    } while (n_news >= nth);
    n = nth - 1;
  }
  return n;
}

// A product of a process that may map so many bytes more. 0: it is right, or there is no memory for it, which is said.
int product_within(int64_t bytes) {
  int64_t n_pages = 0;
  std::FILE* statm = std::fopen("/proc/self/statm", "r");
  if (statm == nullptr || std::fscanf(statm, "%ld", &n_pages) != 1) return 1;
  std::fclose(statm);
  const auto limit = static_cast<rlim_t>(n_pages * sysconf(_SC_PAGESIZE) + bytes);
  const rlimit limits{limit, limit};
  std::vector<float> a(32 * 64, 1.0f), b(64 * 128, 2.0f), c(32 * 128), scratchpad(1 << 16);
  if (setrlimit(RLIMIT_AS, &limits) != 0) return 2;
  cpu::Matmul matmul;
  try {
    Status status = cpu::Matmul::create({32, 128, 64, 64, 128, 1, 128, false, false}, &matmul);
    if (status.ok()) status = matmul.prepare(1);
    if (!status.ok()) return status.code() == TANDEM_ERROR_OUT_OF_MEMORY ? 0 : 3;
  } catch (const std::bad_alloc&) {  // which calls of the library turn into a status
    return 0;
  }
  if (!matmul.run(0, a.data(), b.data(), c.data(), scratchpad.data(), cpu::SignalsHeld())) return 4;
  return c.front() == 128.0f && c.back() == 128.0f ? 0 : 5;
}

// oneDNN itself crashes where it gets no memory for its code. The first test: in this process it has made none yet.
void test_code_without_memory(void**) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  skip();  // they map memory of their own
#endif
  for (int64_t bytes = 0; bytes < 40 << 20; bytes += 1 << 19) {
    const pid_t child = fork();
    if (child == 0) _exit(product_within(bytes));
    int status = 0;
    assert_int_equal(waitpid(child, &status, 0), child);
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 0)
      fail_msg("%lld bytes: status 0x%x", static_cast<long long>(bytes), static_cast<unsigned>(status));
  }
}

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
    const int64_t n = for_each_failure([&] {
      std::vector<float> got = c;
      armed = true;
      const bool is_done = matmul.run(0, a.data(), b.data(), got.data(), scratchpad.data(), cpu::SignalsHeld());
      armed = false;
      assert_true(is_done || accumulate);
      if (!is_done) {  // a sum that may be anything: once more from the beginning
        got = c;
        matmul.run_plainly(a.data(), b.data(), got.data());
      }
      for (size_t i = 0; i < got.size(); ++i) assert_true(std::fabs(got[i] - want[i]) < 1e-4f);
    });
    print_message("%lld allocations failed one by one\n", static_cast<long long>(n));
  }
}

// Of values whose first columns are 0, and so what is added to the sums there: whether it has been cannot be seen in them.
void test_sums_without_memory(void**) {
  test::CaseOptions options;
  options.k_type = options.v_type = TANDEM_F32;
  options.k_head_dim = 64;
  options.v_head_dim = 256;
  options.n_rows = 200;
  options.n_keys = 1100;
  options.mask = test::Mask::kNone;
  options.group_size = 8;
  options.logits = true;
  test::Case c(options);
  for (const test::Case::Key& key : c.keys) std::fill_n(static_cast<float*>(key.v), 128, 0.0f);
  test::use_matrix_unit(false);
  std::unique_ptr<cpu::MatmulAttend> attend;
  assert_true(cpu::MatmulAttend::create(test::kernels_of(nullptr), &attend).ok());
  assert_true(attend->prepare(c.layer, false, 1).ok());
  const cpu::Span span = cpu::whole_span(c.job, 0, c.job.n_rows);
  attend->attend(span, 0);
  const std::vector<float> o = c.o, lse = c.lse, logits = c.logits;
  const int64_t n = for_each_failure([&] {
    for (std::vector<float>* out : {&c.o, &c.lse, &c.logits}) std::fill(out->begin(), out->end(), NAN);
    armed = true;
    attend->attend(span, 0);
    armed = false;
    for (size_t i = 0; i < o.size(); ++i) assert_true(std::fabs(c.o[i] - o[i]) < 1e-4f);
    for (size_t i = 0; i < lse.size(); ++i) assert_true(std::fabs(c.lse[i] - lse[i]) < 1e-4f);
    for (size_t i = 0; i < logits.size(); ++i) assert_true(std::fabs(c.logits[i] - logits[i]) < 1e-4f);
  });
  assert_true(n > 0);
  print_message("%lld allocations failed one by one\n", static_cast<long long>(n));
}

}  // namespace

int main() {
  const CMUnitTest tests[] = {cmocka_unit_test(test_code_without_memory), cmocka_unit_test(test_products_without_memory),
                              cmocka_unit_test(test_sums_without_memory)};
  return cmocka_run_group_tests(tests, nullptr, nullptr);
}
