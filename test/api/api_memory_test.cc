// SPDX-License-Identifier: MIT
// The caller's allocator refuses the N-th request, once or from then on, for every N, returns misaligned memory, and gets
// back exactly the memory that it gave. Also tests caps.
#include <atomic>
#include <cstdlib>
#include <mutex>

#include "api_scenario.h"

using namespace tandem_test;

namespace {

struct Heap {
  std::mutex mutex;
  std::map<void*, size_t> blocks;
  bool armed = false;
  bool for_ever = false;
  int64_t n_requests = 0;  // requests made while armed
  int64_t fails_at = 0;    // 0: never
  size_t skew = 0;
};

void* heap_alloc(size_t bytes, size_t alignment, void* user) {
  Heap& heap = *static_cast<Heap*>(user);
  const std::lock_guard lock(heap.mutex);
  if (heap.armed && heap.fails_at > 0) {
    ++heap.n_requests;
    if (heap.n_requests == heap.fails_at || (heap.for_ever && heap.n_requests > heap.fails_at)) return nullptr;
  }
  void* data = std::aligned_alloc(alignment, (bytes + 2 * alignment - 1) / alignment * alignment);
  assert_non_null(data);
  std::memset(data, 0xff, bytes);  // NaN wherever the library writes nothing
  data = static_cast<char*>(data) + heap.skew;
  heap.blocks[data] = bytes;
  return data;
}

void heap_free(void* data, size_t bytes, void* user) {
  Heap& heap = *static_cast<Heap*>(user);
  const std::lock_guard lock(heap.mutex);
  const auto found = heap.blocks.find(data);
  assert_true(found != heap.blocks.end() && found->second == bytes);
  heap.blocks.erase(found);
  std::free(static_cast<char*>(data) - heap.skew);
}

tandem_engine_options heap_options(Heap& heap) {
  tandem_engine_options options = small_engine_options();
  options.alloc = heap_alloc;
  options.free = heap_free;
  options.alloc_user = &heap;
  return options;
}

void run_all(bool for_ever) {
  Heap reference_heap;
  Scenario reference(heap_options(reference_heap), true);
  assert_int_equal(reference.run({[] {}, [] {}}), 0);
  int n_failing_runs = 0, n_runs = 0;
  for (int64_t n = 1;; ++n, ++n_runs) {
    Heap heap;
    heap.fails_at = n;
    heap.for_ever = for_ever;
    {
      Scenario scenario(heap_options(heap), true);
      const int n_failed = scenario.run({[&] {
                                           const std::lock_guard lock(heap.mutex);
                                           heap.armed = true;
                                         },
                                         [&] {
                                           const std::lock_guard lock(heap.mutex);
                                           heap.armed = false;
                                           if (heap.n_requests >= heap.fails_at) heap.fails_at = 0;  // it has failed
                                         }});
      expect_same_answers(reference, scenario);
      n_failing_runs += n_failed > 0;
      assert_true(n_failed <= 1);
    }
    assert_true(heap.blocks.empty());  // all memory was returned
    if (heap.fails_at != 0) break;     // the run made fewer requests than fails_at
  }
  print_message("%d requests failed one by one, %d of them refused a call\n", n_runs, n_failing_runs);
  assert_true(n_runs > 10);
  assert_true(n_failing_runs > 5);
}

void test_fails_once(void**) { run_all(false); }
void test_fails_from_then_on(void**) { run_all(true); }

void test_misaligned(void**) {
  Heap heap;
  heap.skew = 8;
  const tandem_engine_options options = heap_options(heap);
  tandem_engine* engine = nullptr;
  tandem_model* model = nullptr;
  tandem_cache* cache = nullptr;
  int64_t sequence = 0;
  OK(tandem_engine_create, &engine, &options);
  const tandem_layer_options layer = plain_layer();
  OK(tandem_model_create, &model, &layer, 1);
  OK(tandem_cache_create, &cache, engine, model, nullptr);
  OK(tandem_sequence_create, &sequence, cache);
  Tensor k({1, kKvHeads, kDim}), v({1, kKvHeads, kDim});
  check_refused({"skew", "tandem_sequence_append", TANDEM_ERROR_INVALID_ARGUMENT, "alloc", "not aligned",
                 [&](auto e) { return tandem_sequence_append(cache, sequence, 0, &k.view, &v.view, nullptr, e); }});
  tandem_cache_release(cache);
  tandem_model_release(model);
  tandem_engine_release(engine);
  assert_true(heap.blocks.empty());
}

// Growing beyond a cap is refused with the cap's name and changes nothing. Dropping a sequence makes room again.
void test_cap(void**) {
  World world;  // provides engine and model
  tandem_cache_options options = TANDEM_CACHE_OPTIONS_INIT;
  tandem_memory_plan plan = TANDEM_MEMORY_PLAN_INIT;
  const int64_t lens[] = {2000};
  OK(tandem_plan_memory, &plan, world.engine, world.model, &options, nullptr, lens, 1);
  options.host_cap_bytes = plan.host_kv_bytes;
  tandem_cache* cache = nullptr;
  int64_t first = 0, second = 0;
  OK(tandem_cache_create, &cache, world.engine, world.model, &options);
  OK(tandem_sequence_create, &first, cache);
  OK(tandem_sequence_create, &second, cache);
  OK(tandem_sequence_reserve, cache, first, 2000);
  uint64_t before = 0, after = 0;
  OK(tandem_sequence_digest, &before, cache, second);
  const std::string cap = std::to_string(options.host_cap_bytes);
  const Refused refused = {
      "cap", "tandem_sequence_reserve", TANDEM_ERROR_CAPACITY, "host_cap_bytes", cap.c_str(), [&](auto e) {
        return tandem_sequence_reserve(cache, second, 2000, e);
      }};
  assert_int_equal(check_refused(refused), 0);
  OK(tandem_sequence_digest, &after, cache, second);
  assert_true(before == after);
  tandem_cache_stats stats = TANDEM_CACHE_STATS_INIT;
  OK(tandem_cache_get_stats, &stats, cache);
  assert_true(stats.host_peak_bytes <= options.host_cap_bytes);
  OK(tandem_sequence_drop, cache, first);
  OK(tandem_sequence_reserve, cache, second, 2000);
  tandem_cache_release(cache);
}

}  // namespace

int main() {
  const CMUnitTest tests[] = {
      cmocka_unit_test(test_fails_once),
      cmocka_unit_test(test_fails_from_then_on),
      cmocka_unit_test(test_misaligned),
      cmocka_unit_test(test_cap),
  };
  return cmocka_run_group_tests(tests, nullptr, nullptr);
}
