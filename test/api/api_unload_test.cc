// SPDX-License-Identifier: MIT
// A program that opens and closes the library again and again, with an engine in between or without, keeps no memory of it
// but some tens of bytes that libraries below keep by themselves.
//
// The heap's own count is compared, after some cycles in which the libraries below have made what they keep once. This
// program calls nothing of the library directly, so it is not linked to it.
#include <dlfcn.h>
#include <malloc.h>

#include <cstdio>

#include "tandem/tandem.h"
#include "with_cmocka.h"

namespace {

constexpr int kWarmUp = 10, kCycles = 100;
// A cycle. hwloc alone keeps 43 bytes when it has loaded a topology and is unloaded, libgomp alone 32 when it has run.
constexpr int64_t kMostBytes = 256;

void cycle(int32_t n_threads) {
  void* library = dlopen(TANDEM_LIBRARY, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) print_error("%s\n", dlerror());
  assert_non_null(library);
  if (n_threads > 0) {
    const auto create = reinterpret_cast<decltype(&tandem_engine_create)>(dlsym(library, "tandem_engine_create"));
    const auto release = reinterpret_cast<decltype(&tandem_engine_release)>(dlsym(library, "tandem_engine_release"));
    tandem_engine_options options = TANDEM_ENGINE_OPTIONS_INIT;
    options.n_threads = n_threads;
    options.matmul_rows = 64;  // not measured: that takes time
    tandem_engine* engine = nullptr;
    assert_int_equal(create(&engine, &options, nullptr), TANDEM_OK);
    release(engine);
  }
  assert_int_equal(dlclose(library), 0);
  assert_null(dlopen(TANDEM_LIBRARY, RTLD_NOW | RTLD_NOLOAD));  // it is really gone
}

void keeps_nothing(int32_t n_threads) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  skip();  // they replace the heap that is measured
#endif
  for (int i = 0; i < kWarmUp; ++i) cycle(n_threads);
  const auto before = static_cast<int64_t>(mallinfo2().uordblks);
  for (int i = 0; i < kCycles; ++i) cycle(n_threads);
  const int64_t kept = static_cast<int64_t>(mallinfo2().uordblks) - before;
  print_message("%d threads: %lld bytes kept in %d cycles\n", n_threads, static_cast<long long>(kept), kCycles);
  assert_true(kept <= (n_threads == 0 ? 0 : kMostBytes * kCycles));
}

void test_opened_and_closed(void**) { keeps_nothing(0); }
void test_with_an_engine(void**) { keeps_nothing(1); }

}  // namespace

int main() {
  setvbuf(stdout, nullptr, _IONBF, 0);
  const CMUnitTest tests[] = {cmocka_unit_test(test_opened_and_closed), cmocka_unit_test(test_with_an_engine)};
  return cmocka_run_group_tests(tests, nullptr, nullptr);
}
