// SPDX-License-Identifier: MIT
// Extents of the store get memory before a token needs it, and no other extents do.
#include "lib/store/store_population.h"

#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <thread>
#include <vector>

#include "lib/base/memory.h"
#include "lib/store/cache.h"
#include "with_cmocka.h"

namespace tandem {
namespace {

// Counts the system's pages that have memory.
int64_t n_resident(const std::byte* data, int64_t bytes) {
  std::vector<unsigned char> pages(static_cast<size_t>((bytes + kPageBytes - 1) / kPageBytes));
  assert_int_equal(mincore(const_cast<std::byte*>(data), static_cast<size_t>(bytes), pages.data()), 0);
  return std::count_if(pages.begin(), pages.end(), [](unsigned char page) { return (page & 1) != 0; });
}

// Waits until n pages have memory, at most 20 s. drain() does not wait for the thread that populates them.
void wait_until(const std::byte* data, int64_t bytes, int64_t n) {
  for (int i = 0; i < 20'000 && n_resident(data, bytes) < n; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

void an_extent_is_populated_once_asked_for(void**) {
  constexpr int64_t kBytes = (int64_t{20} << 20) + 5000;  // several slices and a part of a page
  Tier tier("host_cap_bytes", 0, {});
  std::vector<Buffer> extents(3);
  for (Buffer& extent : extents) assert_true(Buffer::create(tier, kBytes, Use::kKv, &extent).ok());
  std::unique_ptr<Worker> worker;
  assert_true(Worker::create("test", false, &worker).ok());
  StorePopulation population(*worker);
  population.grow(extents.size());
  extents[1].data()[7] = std::byte{42};
  for (int i = 0; i < 2; ++i) population.ask(1, extents[1].data(), kBytes);
  wait_until(extents[1].data(), kBytes, (kBytes + kPageBytes - 1) / kPageBytes);
  assert_true(worker->drain(-1));
  assert_int_equal(n_resident(extents[0].data(), kBytes), 0);
  assert_int_equal(n_resident(extents[1].data(), kBytes), (kBytes + kPageBytes - 1) / kPageBytes);
  assert_int_equal(n_resident(extents[2].data(), kBytes), 0);
  assert_true(extents[1].data()[7] == std::byte{42});  // existing content stays
}

void an_end_waits_for_no_more_than_a_slice(void**) {
  constexpr int64_t kBytes = int64_t{64} << 20;
  Tier tier("host_cap_bytes", 0, {});
  std::vector<Buffer> extents(4);
  for (Buffer& extent : extents) assert_true(Buffer::create(tier, kBytes, Use::kKv, &extent).ok());
  std::unique_ptr<Worker> worker;
  assert_true(Worker::create("test", false, &worker).ok());
  {
    StorePopulation population(*worker);
    population.grow(extents.size());
    for (size_t i = 0; i < extents.size(); ++i) population.ask(i, extents[i].data(), kBytes);
  }
  int64_t n = 0;
  for (const Buffer& extent : extents) n += n_resident(extent.data(), kBytes);
  assert_true(n < 4 * kBytes / kPageBytes);
}

// A cache of two layers with 3 reserved extents.
struct Reserved {
  std::shared_ptr<Engine> engine;
  std::shared_ptr<Cache> cache;
  int64_t id = 0;

  Reserved() {
    tandem_engine_options of_engine = TANDEM_ENGINE_OPTIONS_INIT;
    of_engine.n_threads = 1;
    assert_true(Engine::create(of_engine, &engine).ok());
    tandem_layer_options layer = TANDEM_LAYER_OPTIONS_INIT;
    layer.n_q_heads = layer.n_kv_heads = 4;
    layer.k_head_dim = 128;
    std::shared_ptr<const Model> model;
    assert_true(Model::create(std::vector<tandem_layer_options>(2, layer), &model).ok());
    assert_true(Cache::create(engine, model, TANDEM_CACHE_OPTIONS_INIT, &cache).ok());
    assert_true(cache->create_sequence(&id).ok());
    assert_true(cache->reserve(id, 3 * extent_len()).ok());
  }
  int64_t extent_len() const { return cache->store().geometry().extent_len(); }
  int64_t n_resident_of(size_t extent) const {
    return n_resident(cache->store().bases()[extent], cache->store().geometry().extent_bytes);
  }
  void wait_for(size_t extent) const {
    const int64_t bytes = cache->store().geometry().extent_bytes;
    wait_until(cache->store().bases()[extent], bytes, bytes / kPageBytes);
  }
  // Prepares a call that appends up to n_tokens.
  void ensure(int64_t n_tokens) {
    const auto lock = cache->lock_settled();
    assert_true(cache->ensure(*cache->find(id), n_tokens, "q_lens").ok());
  }
};

void extents_ahead_are_populated_and_no_more(void**) {
  Reserved of;
  const int64_t all = of.cache->store().geometry().extent_bytes / kPageBytes;
  assert_int_equal(of.n_resident_of(0) + of.n_resident_of(1) + of.n_resident_of(2), 0);  // only reserved
  of.ensure(1);
  of.wait_for(0);
  assert_int_equal(of.n_resident_of(0), all);
  assert_int_equal(of.n_resident_of(1), 0);
  of.ensure(of.extent_len() / 2);
  std::this_thread::sleep_for(std::chrono::milliseconds(20));  // enough time for the thread to begin
  assert_int_equal(of.n_resident_of(1), 0);
  of.ensure(of.extent_len());  // the next token is in the next extent
  of.wait_for(1);
  assert_int_equal(of.n_resident_of(1), all);
  assert_int_equal(of.n_resident_of(2), 0);
}

}  // namespace
}  // namespace tandem

int main() {
  const CMUnitTest tests[] = {
      cmocka_unit_test(tandem::an_extent_is_populated_once_asked_for),
      cmocka_unit_test(tandem::an_end_waits_for_no_more_than_a_slice),
      cmocka_unit_test(tandem::extents_ahead_are_populated_and_no_more),
  };
  return cmocka_run_group_tests(tests, nullptr, nullptr);
}
