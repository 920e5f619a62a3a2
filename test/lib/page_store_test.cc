// SPDX-License-Identifier: MIT
// Pages, references, caps and the layout of extents; background jobs.
#include "lib/page_store.h"

#include <atomic>
#include <cstring>
#include <set>
#include <thread>

#include "lib/worker.h"
#include "with_cmocka.h"

namespace tandem {
namespace {

const BackendTable kOneNode = [] {
  BackendTable table = {};
  table.n_nodes = [](void*) -> int32_t { return 1; };
  return table;
}();
const Backend kCpu = {&kOneNode, nullptr};

std::vector<Layer> two_layers() {
  Layer first;
  first.n_kv_heads = 2;
  first.k_head_dim = 64;
  first.v_head_dim = 80;
  first.k_type = TANDEM_F16;
  first.v_type = TANDEM_Q4_64;
  Layer alias;
  alias.n_kv_heads = 1;
  alias.k_head_dim = 128;
  alias.v_head_dim = 64;
  alias.v_aliases_k = true;
  alias.k_type = alias.v_type = TANDEM_Q8_0;
  return {first, alias};
}

void rows_do_not_overlap(void**) {
  const std::vector<Layer> layers = two_layers();
  Tier tier("host_cap_bytes", 0, {});
  PageStore store(layers, 64, tier, kCpu);
  assert_int_equal(store.geometry().token_bytes, 2 * (64 * 2 + 80 / 2 + 2 * 2 * 2) + 128 + 4 * 2);
  assert_int_equal(store.geometry().extent_bytes, 2048 * store.geometry().token_bytes);
  assert_true(store.make_free(40).ok());  // two extents of 32 pages
  assert_int_equal(tier.used(Use::kKv), 2 * store.geometry().extent_bytes);
  std::set<std::pair<const std::byte*, const std::byte*>> rows;
  const int32_t first = store.take(-1), second = store.take(first);
  assert_true(store.adjacent(first, second));
  for (const int32_t page : {first, second})
    for (int64_t slot = 0; slot < 64; ++slot) {
      for (int32_t h = 0; h < 2; ++h) {
        const Rows slots = store.rows(page, slot, 0, h);
        rows.insert({slots.of[kPlaneK], slots.of[kPlaneK] + 128});
        rows.insert({slots.of[kPlaneV], slots.of[kPlaneV] + 40});
        rows.insert({slots.of[kPlaneVScales], slots.of[kPlaneVScales] + 8});
        assert_null(slots.of[kPlaneKScales]);
      }
      const Rows slots = store.rows(page, slot, 1, 0);
      rows.insert({slots.of[kPlaneK], slots.of[kPlaneK] + 128});
      rows.insert({slots.of[kPlaneKScales], slots.of[kPlaneKScales] + 8});
      assert_null(slots.of[kPlaneV]);
      assert_ptr_equal(slots.v(layers[1]), slots.of[kPlaneK]);
      assert_ptr_equal(slots.v_scales(layers[1]), slots.of[kPlaneKScales]);
    }
  assert_int_equal(rows.size(), 128 * 8);
  const std::byte* last = nullptr;
  for (const auto& [begin, end] : rows) {
    assert_true(begin >= last);
    last = end;
  }
  // Adjacent pages continue each other.
  assert_ptr_equal(store.rows(first, 63, 0, 1).of[kPlaneK] + 128, store.rows(second, 0, 0, 1).of[kPlaneK]);
}

void references_and_gaps(void**) {
  const std::vector<Layer> layers = two_layers();
  Tier tier("host_cap_bytes", 0, {});
  PageStore store(layers, 128, tier, kCpu);
  assert_true(store.make_free(16).ok());
  const int32_t a = store.take(-1), b = store.take(-1);
  assert_false(store.adjacent(a, b));  // room between them: both can grow in place
  assert_int_equal(store.take(a), a + 1);
  assert_int_equal(store.take(b), b + 1);
  store.retain(a);
  assert_true(store.shared(a));
  assert_int_equal(store.n_shared(), 1);
  store.release(a);
  assert_false(store.shared(a));
  assert_int_equal(store.n_used(), 4);
  store.release(a);
  assert_int_equal(store.n_used(), 3);
  for (int i = 0; i < 13; ++i) store.take(-1);
  assert_int_equal(store.n_used(), 16);
  assert_int_equal(tier.used(Use::kKv), store.geometry().extent_bytes);
}

void caps_hold(void**) {
  const std::vector<Layer> layers = two_layers();
  const int64_t extent = make_store_geometry(layers, 128).extent_bytes;
  Tier tier("host_cap_bytes", 2 * extent, {});
  PageStore store(layers, 128, tier, kCpu);
  assert_true(store.make_free(32).ok());
  const Status status = store.make_free(33);
  assert_int_equal(status.code(), TANDEM_ERROR_CAPACITY);
  assert_string_equal(status.info().field.c_str(), "host_cap_bytes");
  assert_int_equal(tier.total(), 2 * extent);
  assert_int_equal(tier.peak(), 2 * extent);
}

void jobs_run_once_and_are_joined(void**) {
  std::unique_ptr<Worker> worker;
  assert_true(Worker::create(&worker).ok());
  static std::atomic<int> n_runs;
  n_runs = 0;
  Job jobs[50];
  for (int round = 0; round < 100; ++round) {
    for (Job& job : jobs) {
      job.run = [](void*) { ++n_runs; };
      worker->post(job);
    }
    for (Job& job : jobs) worker->join(job);
    assert_int_equal(n_runs, 50 * (round + 1));
  }
  Job slow;
  slow.run = [](void*) { std::this_thread::sleep_for(std::chrono::milliseconds(100)); };
  worker->post(slow);
  assert_false(worker->drain(1'000'000));
  assert_true(worker->drain(-1));
  assert_int_equal(worker->join(slow), 0);
}

}  // namespace
}  // namespace tandem

int main() {
  const CMUnitTest tests[] = {
      cmocka_unit_test(tandem::rows_do_not_overlap),
      cmocka_unit_test(tandem::references_and_gaps),
      cmocka_unit_test(tandem::caps_hold),
      cmocka_unit_test(tandem::jobs_run_once_and_are_joined),
  };
  return cmocka_run_group_tests(tests, nullptr, nullptr);
}
