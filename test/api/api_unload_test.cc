// SPDX-License-Identifier: MIT
// A program opens and closes the library repeatedly, with or without an engine in between. It must keep no memory except
// some tens of bytes that other libraries keep.
//
// The test compares the heap's own count, after some cycles in which the libraries below have made their one-time
// allocations. Libraries that keep memory at every open and close, like oneDNN 3.6 (214 bytes), are measured without
// Tandem. This program is not linked to the library and calls nothing of it directly.
#include <dlfcn.h>
#include <link.h>
#include <malloc.h>

#include <algorithm>
#include <cstdio>
#include <functional>
#include <string>
#include <vector>

#include "tandem/tandem.h"
#include "with_cmocka.h"

namespace {

constexpr int kWarmUp = 10, kCycles = 100;
// For a cycle with an engine, in addition to the memory that hwloc, oneDNN and libgomp keep without Tandem: 10 to 20 bytes
// were seen.
constexpr int64_t kMostBytes = 64;

void cycle(int32_t n_threads) {
  void* library = dlopen(TANDEM_LIBRARY, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) print_error("%s\n", dlerror());
  assert_non_null(library);
  if (n_threads > 0) {
    const auto create = reinterpret_cast<decltype(&tandem_engine_create)>(dlsym(library, "tandem_engine_create"));
    const auto release = reinterpret_cast<decltype(&tandem_engine_release)>(dlsym(library, "tandem_engine_release"));
    tandem_engine_options options = TANDEM_ENGINE_OPTIONS_INIT;
    options.n_threads = n_threads;
    options.matmul_rows = 64;  // set, because measuring takes time
    tandem_engine* engine = nullptr;
    assert_int_equal(create(&engine, &options, nullptr), TANDEM_OK);
    release(engine);
  }
  assert_int_equal(dlclose(library), 0);
  assert_null(dlopen(TANDEM_LIBRARY, RTLD_NOW | RTLD_NOLOAD));  // the library is unloaded
}

// Returns the files of the currently loaded libraries.
std::vector<std::string> loaded() {
  std::vector<std::string> files;
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* to) {
        static_cast<std::vector<std::string>*>(to)->emplace_back(info->dlpi_name);
        return 0;
      },
      &files);
  return files;
}

// Returns the libraries that the library loads.
std::vector<std::string> libraries_below() {
  const std::vector<std::string> before = loaded();
  void* library = dlopen(TANDEM_LIBRARY, RTLD_NOW | RTLD_LOCAL);
  assert_non_null(library);
  std::vector<std::string> below;
  for (const std::string& file : loaded())
    if (std::find(before.begin(), before.end(), file) == before.end() && file.find("libtandem") == std::string::npos)
      below.push_back(file);
  assert_int_equal(dlclose(library), 0);
  return below;
}

// Uses the libraries as little as an engine would: a topology and a product.
void use_library(void* library) {
  const auto init = reinterpret_cast<int (*)(void**)>(dlsym(library, "hwloc_topology_init"));
  const auto load = reinterpret_cast<int (*)(void*)>(dlsym(library, "hwloc_topology_load"));
  const auto destroy = reinterpret_cast<void (*)(void*)>(dlsym(library, "hwloc_topology_destroy"));
  void* topology = nullptr;
  if (init != nullptr && init(&topology) == 0) {
    load(topology);
    destroy(topology);
  }
  using Sgemm = int (*)(char, char, int64_t, int64_t, int64_t, float, const float*, int64_t, const float*, int64_t, float,
                        float*, int64_t);
  const auto sgemm = reinterpret_cast<Sgemm>(dlsym(library, "dnnl_sgemm"));
  if (sgemm == nullptr) return;
  // The threads of a team would outlive libgomp.
  reinterpret_cast<void (*)(int)>(dlsym(library, "omp_set_num_threads"))(1);
  static float a[64 * 64], b[64 * 64], c[64 * 64];
  sgemm('N', 'N', 64, 64, 64, 1.0f, a, 64, b, 64, 0.0f, c, 64);
  sgemm('N', 'T', 64, 64, 64, 1.0f, a, 64, b, 64, 0.0f, c, 64);
}

void open_and_close(const std::vector<std::string>& files, bool use) {
  std::vector<void*> libraries;
  for (const std::string& file : files) {
    libraries.push_back(dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL));
    if (use && libraries.back() != nullptr) use_library(libraries.back());
  }
  for (void* library : libraries)
    if (library != nullptr) dlclose(library);
}

int64_t bytes_kept(const std::function<void()>& once) {
  for (int i = 0; i < kWarmUp; ++i) once();
  const auto before = static_cast<int64_t>(mallinfo2().uordblks);
  for (int i = 0; i < kCycles; ++i) once();
  return static_cast<int64_t>(mallinfo2().uordblks) - before;
}

void keeps_nothing(int32_t n_threads) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  skip();  // sanitizers replace the heap that is measured
#endif
  const std::vector<std::string> below = libraries_below();
  assert_false(below.empty());
  const int64_t below_kept = bytes_kept([&] { open_and_close(below, n_threads > 0); });
  const int64_t kept = bytes_kept([&] { cycle(n_threads); });
  print_message("%d threads: %lld bytes kept in %d cycles, %lld by the libraries below alone\n", n_threads,
                static_cast<long long>(kept), kCycles, static_cast<long long>(below_kept));
  assert_true(kept <= below_kept + (n_threads == 0 ? 0 : kMostBytes * kCycles));
}

void test_opened_and_closed(void**) { keeps_nothing(0); }
void test_with_an_engine(void**) { keeps_nothing(1); }

}  // namespace

int main() {
  setvbuf(stdout, nullptr, _IONBF, 0);
  const CMUnitTest tests[] = {cmocka_unit_test(test_opened_and_closed), cmocka_unit_test(test_with_an_engine)};
  return cmocka_run_group_tests(tests, nullptr, nullptr);
}
