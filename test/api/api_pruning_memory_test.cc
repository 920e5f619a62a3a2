// SPDX-License-Identifier: MIT
// Host memory of policy "hip", which holds bounds: planned, capped, and refused by the caller's allocator.
#include <atomic>
#include <cstdlib>

#include "pruned_world.h"

using namespace tandem_test;

namespace {

constexpr int64_t kBlock = 2048;  // tokens whose bounds are allocated together

std::vector<tandem_pruning_stage> some_stages() {
  return {stage_of(TANDEM_JUDGE_BOUNDS, 64, 512, 4), stage_of(TANDEM_JUDGE_BOUNDS, 16, 160, 2),
          stage_of(TANDEM_JUDGE_EXACT, 8, 64)};
}

std::vector<tandem_layer_options> some_layers() {
  std::vector<tandem_layer_options> layers(3, plain_layer());
  layers[1].sliding_window_tokens = 200;
  layers[2].n_kv_heads = 1;
  layers[2].k_head_dim = 96;
  return layers;
}

tandem_memory_plan plan_of(const Machine& machine, const tandem_session_options& session, const std::vector<int64_t>& lens,
                           tandem_cache_options cache = short_pages()) {
  tandem_memory_plan plan = TANDEM_MEMORY_PLAN_INIT;
  OK(tandem_plan_memory, &plan, machine.engine, machine.model, &cache, &session, lens.data(), std::ssize(lens));
  return plan;
}

tandem_cache_stats stats_of(const Keeper& keeper) {
  tandem_cache_stats stats = TANDEM_CACHE_STATS_INIT;
  OK(tandem_cache_get_stats, &stats, keeper.cache);
  return stats;
}

void assert_held(const Keeper& keeper, const tandem_memory_plan& plan) {
  const tandem_cache_stats stats = stats_of(keeper);
  assert_int_equal(stats.host_session_bytes, plan.host_session_bytes);
  assert_int_equal(stats.host_kv_bytes, plan.host_kv_bytes);
  assert_int_equal(stats.selection_bytes, 0);
}

void plans_what_is_held(void**) {
  const Machine machine(some_layers());
  const Pruned pruned(64, 160, some_stages()), exact(64, 160, {stage_of(TANDEM_JUDGE_EXACT, 8, 64)});
  tandem_session_options by_preset = TANDEM_SESSION_OPTIONS_INIT;
  by_preset.policy = "hip";
  for (const tandem_session_options& options : {pruned.options, exact.options, by_preset})
    for (const std::vector<int64_t>& lens :
         {std::vector<int64_t>{1, 100}, {kBlock, 1}, {kBlock + 1, kBlock - 1}, {5000, 3 * kBlock}}) {
      const tandem_memory_plan plan = plan_of(machine, options, lens);
      assert_true((plan.host_session_bytes == 0) == (options.pruning == &exact.pruning));
      Keeper reserving(machine, options, short_pages(), 2), appending(machine, options, short_pages(), 2);
      for (size_t i = 0; i < 2; ++i) OK(tandem_sequence_reserve, reserving.cache, reserving.ids[i], lens[i]);
      assert_held(reserving, plan);
      for (size_t i = 0; i < 2; ++i) appending.append(appending.ids[i], lens[i] - 1, 10);
      (void)appending.turn({1, 1}, 20);
      assert_held(appending, plan);
      int64_t fork = 0;
      OK(tandem_sequence_fork, &fork, appending.cache, appending.ids[0]);
      const int64_t of_fork = stats_of(appending).host_session_bytes - plan.host_session_bytes;
      assert_int_equal(of_fork, plan_of(machine, options, {lens[0]}).host_session_bytes);
      OK(tandem_sequence_drop, appending.cache, fork);
      assert_int_equal(stats_of(appending).host_session_bytes, plan.host_session_bytes);
      for (const int64_t id : appending.ids) OK(tandem_sequence_drop, appending.cache, id);
      assert_int_equal(stats_of(appending).host_session_bytes, 0);
    }
}

// Makes an append of one layer twice. Both calls must be refused.
void refuse_append(const Keeper& keeper, int64_t id, int64_t n, const char* value) {
  const uint64_t before = keeper.digest(id);
  const tandem_session_stats stats = keeper.stats();
  const std::vector<int64_t> listed = keeper.listed(id);
  Batch batch(keeper.machine, 0, {{id, n}}, 7);
  const std::vector<float> untouched = batch.answers();
  const Refused refused = {
      "append",         "tandem_attend", TANDEM_ERROR_CAPACITY,
      "host_cap_bytes", value,           [&](tandem_error** e) { return tandem_attend(keeper.session, &batch.args, e); }};
  assert_int_equal(check_refused(refused), 0);
  assert_same_bits(batch.answers(), untouched, "outputs of a refused call");
  assert_true(before == keeper.digest(id) && listed == keeper.listed(id));
  const tandem_session_stats after = keeper.stats();
  assert_memory_equal(&stats, &after, sizeof stats);
}

// One sequence holds the room that the other needs next.
void keeps_to_the_cap(void**) {
  const Machine machine;
  const Pruned pruned(64, 160, some_stages());
  tandem_cache_options capped = short_pages();
  const tandem_memory_plan plan = plan_of(machine, pruned.options, {kBlock, 100});
  capped.host_cap_bytes = plan.host_kv_bytes + plan.host_session_bytes;
  const std::string cap = std::to_string(capped.host_cap_bytes);
  const Keeper keeper(machine, pruned.options, capped, 2), twin(machine, pruned.options, short_pages(), 2);
  const auto both = [&](const std::vector<int64_t>& q_lens, int64_t seed) {
    assert_same_bits(keeper.turn(q_lens, seed), twin.turn(q_lens, seed), "call " + std::to_string(seed));
  };
  both({kBlock - 3, 100}, 10);
  refuse_append(keeper, keeper.ids[0], 4, cap.c_str());
  for (int i = 0; i < 3; ++i) both({1, 0}, 20 + 10 * i);
  assert_held(keeper, plan);
  for (const int64_t n : {1, 2, 3000}) refuse_append(keeper, keeper.ids[0], n, cap.c_str());
  int64_t fork = 0;
  const Refused forked = {
      "fork", "tandem_sequence_fork", TANDEM_ERROR_CAPACITY, "host_cap_bytes", cap.c_str(), [&](tandem_error** e) {
        return tandem_sequence_fork(&fork, keeper.cache, keeper.ids[0], e);
      }};
  assert_int_equal(check_refused(forked), 0);
  assert_held(keeper, plan);
  OK(tandem_sequence_drop, keeper.cache, keeper.ids[1]);
  for (int i = 0; i < 6; ++i) both({1, 0}, 100 + 10 * i);
  assert_true(stats_of(keeper).host_peak_bytes <= capped.host_cap_bytes);
}

// A session that is created later needs room for all tokens that sequences have reserved.
void a_later_session_keeps_to_the_cap(void**) {
  const Machine machine;
  const Pruned pruned(64, 160, some_stages());
  tandem_cache_options capped = short_pages();
  capped.host_cap_bytes = plan_of(machine, dense_options(), {2 * kBlock}).host_kv_bytes +
                          plan_of(machine, pruned.options, {2 * kBlock}).host_session_bytes - 1;
  const std::string cap = std::to_string(capped.host_cap_bytes);
  const Keeper keeper(machine, dense_options(), capped);
  OK(tandem_sequence_reserve, keeper.cache, keeper.ids[0], 2 * kBlock);
  tandem_session* second = nullptr;
  const Refused made = {
      "session", "tandem_session_create", TANDEM_ERROR_CAPACITY, "host_cap_bytes", cap.c_str(), [&](tandem_error** e) {
        return tandem_session_create(&second, keeper.cache, &pruned.options, e);
      }};
  assert_int_equal(check_refused(made), 0);
  assert_int_equal(stats_of(keeper).host_session_bytes, 0);
  OK(tandem_sequence_drop, keeper.cache, keeper.ids[0]);
  OK(tandem_session_create, &second, keeper.cache, &pruned.options);
  tandem_session_release(second);
}

// ---- the caller's allocator ----------------------------------------------------------------------------------------------

struct Heap {
  std::atomic<int64_t> left{-1};  // requests until one is refused; -1: never
  std::atomic<int64_t> n_blocks{0};

  static void* take(size_t bytes, size_t alignment, void* user) {
    Heap& heap = *static_cast<Heap*>(user);
    if (heap.left >= 0 && heap.left-- == 0) return nullptr;
    ++heap.n_blocks;
    void* const data = std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
    assert_non_null(data);
    return std::memset(data, 0xff, bytes);
  }
  static void give(void* data, size_t, void* user) {
    --static_cast<Heap*>(user)->n_blocks;
    std::free(data);
  }
};

// Refuses the n-th request of each call, for all n.
void survives_an_allocator_that_refuses(void**) {
  Heap heap;
  {
    tandem_engine_options options = small_engine_options();
    options.alloc = Heap::take;
    options.free = Heap::give;
    options.alloc_user = &heap;
    const Machine machine({plain_layer()}, 2, &options);
    const Pruned pruned(64, 160, some_stages());
    const Keeper keeper(machine, pruned.options, short_pages(), 2), twin(machine, pruned.options, short_pages(), 2);
    int n_refused = 0;
    int64_t seed = 0;
    for (const auto& q_lens :
         std::vector<std::vector<int64_t>>{{kBlock - 2, 30}, {1, 1}, {1, 0}, {1, kBlock}, {200, 1}, {1, 1}}) {
      std::vector<std::pair<int64_t, int64_t>> parts;
      for (size_t i = 0; i < 2; ++i)
        if (q_lens[i] > 0) parts.emplace_back(keeper.ids[i], q_lens[i]);
      Batch batch(machine, 0, parts, seed += 10);
      const uint64_t before[] = {keeper.digest(keeper.ids[0]), keeper.digest(keeper.ids[1])};
      for (int64_t n = 0;; ++n) {
        heap.left = n;
        const int32_t status = tandem_attend(keeper.session, &batch.args, nullptr);
        heap.left = -1;
        if (status == TANDEM_OK) break;
        assert_int_equal(status, TANDEM_ERROR_OUT_OF_MEMORY);
        ++n_refused;
        for (size_t i = 0; i < 2; ++i) assert_true(before[i] == keeper.digest(keeper.ids[i]));
      }
      assert_same_bits(batch.answers(), twin.turn(q_lens, seed), "call " + std::to_string(seed));
      for (size_t i = 0; i < 2; ++i) assert_true(keeper.listed(keeper.ids[i], 1) == twin.listed(twin.ids[i], 1));
    }
    print_message("%d calls were refused\n", n_refused);
    assert_true(n_refused > 4);
  }
  assert_int_equal(heap.n_blocks, 0);
}

}  // namespace

int main() {
  const CMUnitTest tests[] = {
      cmocka_unit_test(plans_what_is_held),
      cmocka_unit_test(keeps_to_the_cap),
      cmocka_unit_test(a_later_session_keeps_to_the_cap),
      cmocka_unit_test(survives_an_allocator_that_refuses),
  };
  return cmocka_run_group_tests(tests, nullptr, nullptr);
}
