// SPDX-License-Identifier: MIT
// Pages, references, caps, the layout of extents, and background jobs.
#include "lib/store/page_store.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <set>
#include <utility>

#include "lib/machine/device_memory.h"
#include "lib/machine/worker.h"
#include "with_cmocka.h"

namespace tandem {
namespace {

const BackendTable kOneNode = [] {
  BackendTable table = {};
  table.n_nodes = [](void*) -> int32_t { return 1; };
  return table;
}();
const Backend kCpu = {&kOneNode, nullptr};

// A machine of several nodes that records placements.
struct Placed {
  const std::byte* begin;
  int64_t bytes;
  int32_t node;
};
struct Nodes {
  int32_t n = 2;
  std::vector<Placed> placed;
};
const BackendTable kNodes = [] {
  BackendTable table = {};
  table.n_nodes = [](void* self) { return static_cast<Nodes*>(self)->n; };
  table.place = [](void* self, void* data, int64_t bytes, int32_t node) {
    static_cast<Nodes*>(self)->placed.push_back({static_cast<std::byte*>(data), bytes, node});
  };
  return table;
}();

std::vector<Layer> two_layers() {
  Layer first;
  first.n_kv_heads = 2;
  first.k_head_dim = 64;
  first.v_head_dim = 80;
  first.k_type = TANDEM_F16;
  first.v_type = TANDEM_Q4_0;
  Layer alias;
  alias.n_kv_heads = 1;
  alias.k_head_dim = 128;
  alias.v_head_dim = 64;
  alias.v_aliases_k = true;
  alias.k_type = alias.v_type = TANDEM_Q8_0;
  return {first, alias};
}

std::vector<Layer> eight_heads(size_t n_layers) {
  Layer layer;
  layer.n_kv_heads = 8;
  layer.k_head_dim = layer.v_head_dim = 128;
  layer.k_type = TANDEM_BF16;
  layer.v_type = TANDEM_Q4_0;
  return std::vector<Layer>(n_layers, layer);
}

Rows rows_of(const PageStore& store, int32_t page, int64_t slot, int32_t layer_idx, int32_t kv_head) {
  return store.planes(layer_idx).rows(store.view({&page, 1}, {}, store.bases()).run_at(slot, slot + 1), kv_head);
}
std::byte* hidden_of(const PageStore& store, int32_t page, int64_t slot, int32_t layer_idx) {
  return store.planes(layer_idx).planes[kPlaneHidden].row(store.view({&page, 1}, {}, store.bases()).run_at(slot, slot + 1),
                                                          0);
}

// An extent is pinned as a whole, so it has at most 1 GiB.
void large_models_have_short_extents(void**) {
  constexpr int64_t kGiB = int64_t{1} << 30;
  Layer layer;
  layer.k_head_dim = layer.v_head_dim = 128;
  for (const int32_t type : {TANDEM_BF16, TANDEM_F32}) {
    layer.k_type = layer.v_type = type;
    for (const int32_t n_heads : {8, 40, 72}) {
      layer.n_kv_heads = n_heads;
      for (const int64_t page_len : {16, 128, 1024, 4096})
        for (const int32_t n_nodes : {1, 2}) {
          const StoreGeometry geometry = make_store_geometry(std::vector<Layer>(64, layer), page_len, n_nodes);
          const int64_t tokens = geometry.extent_len();
          const bool is_least = tokens == std::max<int64_t>(page_len, 128);
          assert_true(geometry.extent_bytes <= kGiB || is_least);
          assert_true((tokens & (tokens - 1)) == 0 && tokens >= std::max<int64_t>(page_len, 128));
          if (2048 * geometry.token_bytes <= kGiB) assert_true(tokens == std::max<int64_t>(page_len, 2048));
          if (2048 * geometry.token_bytes > kGiB && page_len < 2048) assert_true(tokens < 2048);
        }
    }
  }
}

void rows_do_not_overlap(void**) {
  const std::vector<Layer> layers = two_layers();
  Tier tier("host_cap_bytes", 0, {});
  PageStore store(layers, 64, tier, kCpu);
  assert_int_equal(store.geometry().token_bytes, 2 * (64 * 2 + 80 / 2 + 3 * 2) + 128 + 4 * 2);
  assert_int_equal(store.geometry().extent_bytes, 2048 * store.geometry().token_bytes);
  assert_true(store.make_free(40).ok());  // two extents of 32 pages
  assert_int_equal(tier.used(Use::kKv), 2 * store.geometry().extent_bytes);
  std::set<std::pair<const std::byte*, const std::byte*>> rows;
  const int32_t first = store.take(-1), second = store.take(first);
  assert_true(store.adjacent(first, second));
  for (const int32_t page : {first, second})
    for (int64_t slot = 0; slot < 64; ++slot) {
      for (int32_t h = 0; h < 2; ++h) {
        const Rows slots = rows_of(store, page, slot, 0, h);
        rows.insert({slots.of[kPlaneK], slots.of[kPlaneK] + 128});
        rows.insert({slots.of[kPlaneV], slots.of[kPlaneV] + 40});
        rows.insert({slots.of[kPlaneVScales], slots.of[kPlaneVScales] + 6});
        assert_null(slots.of[kPlaneKScales]);
      }
      const Rows slots = rows_of(store, page, slot, 1, 0);
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
  // The heads of a plane are side by side. Planes follow each other.
  const std::byte* begin = rows_of(store, first, 0, 0, 0).of[kPlaneK];
  assert_ptr_equal(rows_of(store, first, 0, 0, 1).of[kPlaneK], begin + 2048 * 128);
  assert_ptr_equal(rows_of(store, first, 0, 0, 0).of[kPlaneV], begin + 2 * 2048 * 128);
  // Adjacent pages are contiguous.
  assert_ptr_equal(rows_of(store, first, 63, 0, 1).of[kPlaneK] + 128, rows_of(store, second, 0, 0, 1).of[kPlaneK]);
}

// Hidden states lie beside rows, on any number of nodes, in some of the layers.
void hidden_states_have_rows_of_their_own(void**) {
  Projection projection;
  projection.hidden_dim = 88;
  std::vector<Layer> layers = eight_heads(3);
  for (const size_t l : {0, 2}) {
    layers[l].projection = &projection;
    layers[l].x_type = TANDEM_F16;
  }
  for (const int32_t n : {1, 2, 3}) {
    Nodes nodes;
    nodes.n = n;
    Tier tier("host_cap_bytes", 0, {});
    PageStore store(layers, 64, tier, {&kNodes, &nodes});
    assert_int_equal(store.geometry().x_token_bytes, 2 * 176);
    assert_int_equal(store.planes(1).planes[kPlaneHidden].row_bytes, 0);
    assert_true(store.make_free(40).ok());
    const int32_t first = store.take(-1), second = store.take(first);
    std::set<std::pair<const std::byte*, const std::byte*>> rows;
    for (const int32_t page : {first, second})
      for (int64_t slot = 0; slot < 64; ++slot)
        for (int32_t l = 0; l < 3; ++l) {
          const PlaneBytes bytes = plane_bytes(layers[static_cast<size_t>(l)]);
          for (int32_t h = 0; h < 8; ++h)
            for (int32_t p = 0; p < kPlanes; ++p)
              if (bytes.of[p] > 0) {
                const std::byte* row = rows_of(store, page, slot, l, h).of[p];
                rows.insert({row, row + bytes.of[p]});
              }
          if (l != 1) rows.insert({hidden_of(store, page, slot, l), hidden_of(store, page, slot, l) + 176});
        }
    assert_int_equal(rows.size(), 128 * (3 * 8 * 3 + 2));
    const std::byte* last = nullptr;
    for (const auto& [begin, end] : rows) {
      assert_true(begin >= last);
      last = end;
    }
    assert_ptr_equal(hidden_of(store, first, 63, 2) + 176, hidden_of(store, second, 0, 2));
    for (int32_t i = 0; i < 176; ++i) hidden_of(store, first, 5, 2)[i] = static_cast<std::byte>(i);
    const int32_t copy = store.take(-1);
    store.copy_page(first, copy, 6);
    for (int32_t i = 0; i < 176; ++i) assert_true(hidden_of(store, copy, 5, 2)[i] == static_cast<std::byte>(i));
  }
}

void references_and_gaps(void**) {
  const std::vector<Layer> layers = two_layers();
  Tier tier("host_cap_bytes", 0, {});
  PageStore store(layers, 128, tier, kCpu);
  assert_true(store.make_free(16).ok());
  const int32_t a = store.take(-1), b = store.take(-1);
  assert_false(store.adjacent(a, b));  // they are apart, so both sequences can grow in place
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

// Pages of sequences of one length stay adjacent, and the sequences' first pages are at equal distances.
void pages_taken_together_lie_together(void**) {
  const std::vector<Layer> layers = two_layers();
  for (const int64_t n : {2, 3, 5}) {
    Tier tier("host_cap_bytes", 0, {});
    PageStore store(layers, 128, tier, kCpu);
    assert_true(store.make_free(16).ok());
    std::set<int64_t> firsts;
    for (int64_t i = 0; i < 16 / n; ++i) {
      int32_t page = store.take(-1, n);
      firsts.insert(page);
      for (int64_t left = n - 1; left > 0; --left) assert_int_equal(store.take(page, left), page + 1), ++page;
    }
    int64_t wanted = 0;
    for (const int64_t first : firsts) assert_int_equal(first, std::exchange(wanted, wanted + n));
    assert_int_equal(wanted, 16 / n * n);
  }
}

void caps_hold(void**) {
  const std::vector<Layer> layers = two_layers();
  const int64_t extent = make_store_geometry(layers, 128, 1).extent_bytes;
  Tier tier("host_cap_bytes", 2 * extent, {});
  PageStore store(layers, 128, tier, kCpu);
  assert_true(store.make_free(32).ok());
  const Status status = store.make_free(33);
  assert_int_equal(status.code(), TANDEM_ERROR_CAPACITY);
  assert_string_equal(status.info().field.c_str(), "host_cap_bytes");
  assert_int_equal(tier.total(), 2 * extent);
  assert_int_equal(tier.peak(), 2 * extent);
}

// A layer of 8 heads, and a layer of one head, which all nodes use.
void every_row_is_placed_once_on_the_node_of_its_jobs(void**) {
  const int32_t of_head[][8] = {{0, 0, 0, 0, 1, 1, 1, 1}, {0, 0, 0, 1, 1, 1, 2, 2}};
  for (const size_t n_layers : {1, 20}) {  // parts that begin on a page and on a huge page
    std::vector<Layer> layers = eight_heads(n_layers);
    layers.push_back(two_layers()[1]);
    for (const int32_t n_nodes : {2, 3}) {
      Nodes nodes{n_nodes, {}};
      Tier tier("host_cap_bytes", 0, {});
      PageStore store(layers, 64, tier, {&kNodes, &nodes});
      assert_true(store.make_free(40).ok());
      assert_int_equal(nodes.placed.size(), 2 * (n_nodes + 1));
      const auto node_of = [&](const std::byte* row) {
        int32_t node = -2;
        for (const Placed& one : nodes.placed) {
          if (row < one.begin || row >= one.begin + one.bytes) continue;
          assert_int_equal(node, -2);
          node = one.node;
        }
        return node;
      };
      for (int32_t page = 0; page < 64; ++page)
        for (int32_t l = 0; l < static_cast<int32_t>(layers.size()); ++l)
          for (int32_t h = 0; h < layers[static_cast<size_t>(l)].n_kv_heads; ++h)
            for (int32_t p = 0; p < kPlanes; ++p) {
              const int32_t want = layers[static_cast<size_t>(l)].n_kv_heads == 1 ? kAllNodes : of_head[n_nodes - 2][h];
              const std::byte* row = rows_of(store, page, 63, l, h).of[p];
              if (row == nullptr) continue;
              assert_int_equal(node_of(row), want);
              assert_int_equal(node_of(row + store.planes(l).planes[static_cast<size_t>(p)].row_bytes - 1), want);
            }
    }
  }
}

// The kernel keeps one mapping for each stretch of memory with one policy. A process can have 65,530 mappings.
void a_long_context_stays_within_the_mappings_of_a_process(void**) {
  const std::vector<Layer> layers = eight_heads(33);  // not a whole number of huge pages for each node
  Nodes nodes;
  Tier tier("host_cap_bytes", 0, {});
  PageStore store(layers, 128, tier, {&kNodes, &nodes});
  assert_true(store.make_free(1024).ok());  // 128K tokens in 64 extents
  int64_t n_mappings = 0, n_bytes = 0;
  const Placed* last = nullptr;
  for (const Placed& one : nodes.placed) {
    n_mappings += last == nullptr || one.begin != last->begin + last->bytes || one.node != last->node;
    n_bytes += one.bytes;
    last = &one;
    assert_int_equal(reinterpret_cast<uintptr_t>(one.begin) % kHugePageBytes, 0);
    assert_int_equal(one.bytes % kHugePageBytes, 0);
  }
  assert_int_equal(n_bytes, 64 * store.geometry().extent_bytes);
  assert_true(n_mappings <= 2 * 64);
}

void memory_of_the_caller_is_not_placed(void**) {
  const std::vector<Layer> layers = two_layers();
  Allocator allocator;
  allocator.alloc = [](size_t bytes, size_t alignment, void*) { return std::aligned_alloc(alignment, bytes); };
  allocator.free = [](void* data, size_t, void*) { std::free(data); };
  for (const bool own : {false, true}) {
    Nodes nodes;
    Tier tier("host_cap_bytes", 0, own ? Allocator{} : allocator);
    PageStore store(layers, 64, tier, {&kNodes, &nodes});
    assert_true(store.make_free(1).ok());
    assert_int_equal(nodes.placed.empty(), !own);
  }
}

// For any geometry, pieces are contiguous and page-aligned, none is small, and each row of a layer lies in a piece of that
// layer.
void pieces_end_where_layers_do(void**) {
  const int64_t least_before = std::exchange(least_pinned_bytes, int64_t{64} << 10);
  for (const int32_t n_nodes : {1, 2})
    for (const int32_t n_layers : {1, 2, 7}) {
      std::vector<Layer> layers;
      for (int32_t l = 0; l < n_layers; ++l) layers.push_back(two_layers()[static_cast<size_t>(l % 2)]);
      const StoreGeometry geometry = make_store_geometry(layers, 64, n_nodes);
      int64_t end = 0;
      for (const StoreGeometry::Piece& piece : geometry.pieces) {
        assert_int_equal(piece.offset, end);
        assert_int_equal(piece.offset % kPageBytes, 0);
        end += piece.bytes;
        if (end < geometry.extent_bytes) assert_true(piece.bytes >= least_pinned_bytes);
      }
      assert_int_equal(end, geometry.extent_bytes);
      if (n_layers == 7) assert_true(geometry.pieces.size() > 1);
      for (size_t l = 0; l < layers.size(); ++l)
        for (const StoredPlane& plane : geometry.layers[l].planes)
          for (size_t h = 0; h < plane.at.size() && plane.row_bytes > 0; ++h) {
            const auto holds = [&](size_t i) {
              const StoreGeometry::Piece& piece = geometry.pieces[i];
              return plane.piece[h] == piece.offset && plane.at[h] >= piece.offset &&
                     plane.at[h] + geometry.extent_len() * plane.row_bytes <= piece.offset + piece.bytes;
            };
            assert_int_equal(std::count_if(geometry.pieces_of[l].begin(), geometry.pieces_of[l].end(), holds), 1);
          }
    }
  least_pinned_bytes = least_before;
}

void jobs_run_once_and_are_joined(void**) {
  std::unique_ptr<Worker> worker;
  assert_true(Worker::create("tandem-bg", true, &worker).ok());
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
  static std::atomic<bool> goes_on;
  goes_on = false;
  slow.run = [](void*) { goes_on.wait(false); };
  worker->post(slow);
  assert_false(worker->drain(1'000'000));
  goes_on = true;
  goes_on.notify_all();
  assert_true(worker->drain(-1));
  assert_int_equal(worker->join(slow), 0);
}

// A job may be posted by itself or by another thread while it runs. It then runs once more, not twice. cancel() ends that.
void a_job_that_runs_may_be_posted(void**) {
  std::unique_ptr<Worker> worker;
  assert_true(Worker::create("tandem-bg", true, &worker).ok());
  struct Again {
    Worker& worker;
    Job job;
    int n_left;
    int n_runs = 0;
  } again{*worker, {}, 10};
  again.job.context = &again;
  again.job.run = [](void* context) {
    Again& self = *static_cast<Again*>(context);
    ++self.n_runs;
    if (self.n_left-- > 0)
      for (int i = 0; i < 2; ++i) self.worker.post(self.job);
  };
  worker->post(again.job);
  assert_true(worker->drain(-1));
  assert_int_equal(again.n_runs, 11);
  again.n_left = 0;
  worker->post(again.job);
  worker->cancel(again.job);
  assert_in_range(again.n_runs, 11, 12);
}

}  // namespace
}  // namespace tandem

int main() {
  const CMUnitTest tests[] = {
      cmocka_unit_test(tandem::large_models_have_short_extents),
      cmocka_unit_test(tandem::rows_do_not_overlap),
      cmocka_unit_test(tandem::hidden_states_have_rows_of_their_own),
      cmocka_unit_test(tandem::references_and_gaps),
      cmocka_unit_test(tandem::pages_taken_together_lie_together),
      cmocka_unit_test(tandem::caps_hold),
      cmocka_unit_test(tandem::every_row_is_placed_once_on_the_node_of_its_jobs),
      cmocka_unit_test(tandem::a_long_context_stays_within_the_mappings_of_a_process),
      cmocka_unit_test(tandem::memory_of_the_caller_is_not_placed),
      cmocka_unit_test(tandem::pieces_end_where_layers_do),
      cmocka_unit_test(tandem::jobs_run_once_and_are_joined),
      cmocka_unit_test(tandem::a_job_that_runs_may_be_posted),
  };
  return cmocka_run_group_tests(tests, nullptr, nullptr);
}
