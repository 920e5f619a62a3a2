// SPDX-License-Identifier: MIT
// Compares the nodes that the jobs of a session claim for their keys with the placement of that memory, on machines of
// several nodes. The CPU backend of the test claims to have these nodes and inspects its jobs.
#include "lib/machine/placement.h"

#include <memory>
#include <mutex>
#include <set>
#include <vector>

#include "lib/attend/session.h"
#include "with_cmocka.h"

namespace tandem {
namespace {

struct Placed {
  const std::byte* begin;
  int64_t bytes;
  int32_t node;
};

// Record of events since the last clear(). Tables are plain functions, so the record is global.
struct Watch {
  const BackendTable* real = nullptr;
  int32_t n_nodes = 1;
  std::vector<Placed> placed;
  std::set<int32_t> job_nodes, weight_nodes;
  int64_t n_right = 0, n_wrong = 0;
  int64_t n_copies = 0;  // runs of copied keys among the correct ones

  const Placed* find(const void* data) const {
    const auto* row = static_cast<const std::byte*>(data);
    for (size_t i = placed.size(); i-- > 0;)  // newest first, because addresses are reused
      if (row >= placed[i].begin && row < placed[i].begin + placed[i].bytes) return &placed[i];
    return nullptr;
  }
  void check(const KvRun& run, int32_t node) {
    if (run.n_tokens == 0) return;
    for (const void* data : {run.k, run.v}) {
      const Placed* found = find(data);
      const bool right = found != nullptr && found->node == node;
      ++(right ? n_right : n_wrong);
      n_copies += right && run.token_idx < 0;
    }
  }
};
Watch watch;

Status attend(void* self, const AttendJob* jobs, int32_t n_jobs) {
  for (int32_t i = 0; i < n_jobs; ++i) {
    watch.job_nodes.insert(jobs[i].node);
    for (int32_t r = 0; r < jobs[i].n_runs; ++r) watch.check(jobs[i].runs[r], jobs[i].node);
  }
  return watch.real->attend(self, jobs, n_jobs);
}

void attn_weights(void* self, const WeightJob* jobs, int32_t n_jobs) {
  for (int32_t i = 0; i < n_jobs; ++i) {
    watch.weight_nodes.insert(jobs[i].node);
    watch.check(jobs[i].runs[0], jobs[i].node);
  }
  watch.real->attn_weights(self, jobs, n_jobs);
}

void record(void*, void* data, int64_t bytes, int32_t node) {
  static std::mutex mutex;  // workers place the copies of their heads
  const std::lock_guard lock(mutex);
  watch.placed.push_back({static_cast<std::byte*>(data), bytes, node});
}

BackendTable watching(const BackendTable& real) {
  BackendTable table = real;
  table.attend = attend;
  table.attn_weights = attn_weights;
  table.place = record;
  table.n_nodes = [](void*) { return watch.n_nodes; };
  return table;
}

constexpr int64_t kDim = 128, kTokens = 5000;

struct TokenRows {
  std::vector<float> values;
  TensorView view;

  TokenRows(int64_t n_tokens, int64_t n_heads) : values(static_cast<size_t>(n_tokens * n_heads * kDim)) {
    for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i % 31) * 0.01f;
    constexpr int64_t kRow = kDim * int64_t{sizeof(float)};
    view = {reinterpret_cast<std::byte*>(values.data()), TANDEM_F32, n_tokens, n_heads, kDim, n_heads * kRow, kRow};
  }
};

tandem_layer_options layer_options(int32_t n_kv_heads) {
  tandem_layer_options layer = TANDEM_LAYER_OPTIONS_INIT;
  layer.n_q_heads = 6, layer.n_kv_heads = n_kv_heads, layer.k_head_dim = kDim;
  return layer;
}

// With beta = 0 every attended key is selected, so that thousands of rows are copied.
struct World {
  BackendTable table;
  std::shared_ptr<Engine> engine;
  std::shared_ptr<Cache> cache;
  std::unique_ptr<Session> session;
  int64_t sequence = 0;

  explicit World(int32_t n_nodes) {
    Backend cpu;
    assert_true(create_cpu_backend({.n_threads = 2}, &cpu).ok());
    watch = {};
    watch.real = cpu.table;
    watch.n_nodes = n_nodes;
    table = watching(*cpu.table);
    const tandem_engine_options engine_options = TANDEM_ENGINE_OPTIONS_INIT;
    assert_true(Engine::create_on({&table, cpu.self}, engine_options, &engine).ok());
    std::shared_ptr<const Model> model;
    assert_true(Model::create({layer_options(6), layer_options(1)}, &model).ok());
    tandem_cache_options cache_options = TANDEM_CACHE_OPTIONS_INIT;
    cache_options.k_type = TANDEM_F32;
    assert_true(Cache::create(engine, model, cache_options, &cache).ok());
    tandem_session_options options = TANDEM_SESSION_OPTIONS_INIT;
    options.policy = "hgca";
    options.window_tokens = 16, options.sink_tokens = 4, options.beta = 0.0f;
    assert_true(Session::create(cache, options, &session).ok());
    assert_true(cache->create_sequence(&sequence).ok());
    for (const int32_t layer : {0, 1}) {
      const TokenRows rows(kTokens, layer == 0 ? 6 : 1);
      assert_true(cache->append(sequence, layer, {&rows.view, &rows.view, nullptr, 0, rows.view.n_tokens}).ok());
    }
  }
  void attend(int32_t layer, int64_t q_len) {
    const TokenRows q(q_len, 6), o(q_len, 6), kv(q_len, layer == 0 ? 6 : 1);
    AttendArgs args;
    args.layer_idx = layer;
    args.n_sequences = 1;
    args.sequences = &sequence;
    args.q_lens = &q_len;
    args.q = q.view;
    args.o = o.view;
    args.k = args.v = &kv.view;
    assert_true(session->attend(args).ok());
  }
};

void assert_all_right() {
  assert_int_equal(watch.n_wrong, 0);
  assert_true(watch.n_right > 0);
}

void jobs_are_where_their_keys_are(void**) {
  for (const int32_t n_nodes : {2, 3}) {
    World world(n_nodes);
    world.attend(0, 2);  // an append: weights of all tokens, then copies
    assert_all_right();
    std::set<int32_t> all;
    for (int32_t node = 0; node < n_nodes; ++node) all.insert(node);
    assert_true(watch.job_nodes == all);
    assert_true(watch.weight_nodes == all);
    assert_int_equal(watch.n_copies, 0);
    world.attend(0, 1);  // reads the copies
    assert_all_right();
    assert_int_equal(watch.n_copies, 2 * 6);
  }
}

void a_single_head_is_everybodys(void**) {
  World world(2);
  world.attend(1, 2);
  world.attend(1, 1);
  assert_all_right();
  assert_int_equal(watch.n_copies, 2);
  assert_true(watch.job_nodes == std::set<int32_t>{kAllNodes});
  assert_true(watch.weight_nodes == std::set<int32_t>{kAllNodes});
}

void one_node_places_nothing(void**) {
  World world(1);
  world.attend(0, 2);
  world.attend(0, 1);
  assert_true(watch.placed.empty());
  assert_true(watch.job_nodes == std::set<int32_t>{0});
}

}  // namespace
}  // namespace tandem

int main() {
  const CMUnitTest tests[] = {
      cmocka_unit_test(tandem::jobs_are_where_their_keys_are),
      cmocka_unit_test(tandem::a_single_head_is_everybodys),
      cmocka_unit_test(tandem::one_node_places_nothing),
  };
  return cmocka_run_group_tests(tests, nullptr, nullptr);
}
