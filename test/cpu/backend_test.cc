// SPDX-License-Identifier: MIT
// The backend around the kernels: choice of the instruction set, cutting into units, determinism, and calls from several
// threads.

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "cpu/attend_case.h"
#include "cpu/attend_plan.h"
#include "cpu/isa_backends.h"
#include "cpu/matmul_attend.h"
#include "one_in.h"
#include "with_cmocka.h"

namespace tandem::test {
namespace {

CaseOptions decode(int64_t n_keys, int32_t q_len, uint64_t seed) {
  CaseOptions o;
  o.k_type = o.v_type = TANDEM_BF16;
  o.group_size = 4, o.q_len = q_len, o.n_keys = n_keys, o.mask = Mask::kCausal, o.seed = seed;
  return o;
}

void forced_isa_is_used(void**) {
  for (int32_t i = 0; const char* name = cpu_isa_name(i); ++i) {
    const cpu::KernelTable* table = nullptr;
    const Status status = cpu::choose_isa(name, &table);
    assert_int_equal(status.ok(), cpu_isa_available(name));
    if (!status.ok()) continue;
    assert_string_equal(table->name, name);
    for (int32_t j = 0; j < i; ++j) {
      assert_true(cpu::isa_table(j)->target != table->target);
      assert_true(cpu::isa_table(j)->attend_span != table->attend_span);
    }
    IsaBackend isa(*table, 1);
    assert_true(cpu::target_used(isa.backend) == 0);
    assert_string_equal(AttendCase(decode(50, 1, 1)).check(isa.backend, false).c_str(), "");
    assert_true(cpu::target_used(isa.backend) == table->target);  // the kernel itself wrote target_used
    char report[200];
    assert_true(isa.backend.table->report(isa.backend.self, report, sizeof report) < 200);
    assert_non_null(std::strstr(report, name));
  }
}

void isa_from_environment(void**) {
  const char* set = std::getenv("TANDEM_CPU_ISA");
  const std::string before = set != nullptr ? set : "";
  const cpu::KernelTable* table = nullptr;
  const cpu::KernelTable* other = nullptr;
  for (int32_t i = 0; cpu::isa_table(i) != nullptr; ++i)
    if (cpu::isa_available(*cpu::isa_table(i))) other = cpu::isa_table(i);
  setenv("TANDEM_CPU_ISA", other->name, 1);
  assert_true(cpu::choose_isa(nullptr, &table).ok());
  assert_ptr_equal(table, other);
  setenv("TANDEM_CPU_ISA", "", 1);
  assert_true(cpu::choose_isa(nullptr, &table).ok());
  assert_true(cpu::isa_available(*table));
  setenv("TANDEM_CPU_ISA", "nonsense", 1);
  assert_int_equal(cpu::choose_isa(nullptr, &table).code(), TANDEM_ERROR_NOT_FOUND);
  assert_true(cpu::choose_isa(other->name, &table).ok());  // the option has priority over the environment
  setenv("TANDEM_CPU_ISA", before.c_str(), 1);
  const Status status = cpu::choose_isa("AVX9", &table);
  assert_int_equal(status.code(), TANDEM_ERROR_NOT_FOUND);
  assert_non_null(std::strstr(status.info().message.c_str(), "AVX9"));
  assert_non_null(std::strstr(status.info().message.c_str(), other->name));
  assert_null(cpu_isa_name(-1));
  assert_null(cpu_isa_name(100));
  assert_false(cpu_isa_available(nullptr));
  assert_false(cpu_isa_available("nonsense"));
}

// Returns a decode step with MLA: enough rows of one KV head for the matmul library, in pieces of the keys.
CaseOptions latent_decode(int64_t n_keys, int32_t k_type) {
  CaseOptions o = decode(n_keys, 1, static_cast<uint64_t>(n_keys));
  o.k_type = o.v_type = k_type;
  o.k_dim = 576, o.v_dim = 512, o.v_aliases_k = true, o.group_size = 128;
  return o;
}

struct Outputs {
  std::vector<float> o, lse;
};

// Attends the cases as jobs of one call, each with its own layer.
std::vector<Outputs> attend_all(const Backend& backend, const std::vector<AttendCase*>& cases) {
  std::vector<Outputs> out(cases.size());
  std::vector<AttendJob> jobs;
  for (size_t i = 0; i < cases.size(); ++i) {
    out[i].o.resize(static_cast<size_t>(cases[i]->n_rows * cases[i]->options.v_dim));
    out[i].lse.resize(static_cast<size_t>(cases[i]->n_rows));
    jobs.push_back(cases[i]->job(out[i].o.data(), out[i].lse.data(), nullptr));
  }
  assert_true(backend.table->attend(backend.self, jobs.data(), static_cast<int32_t>(jobs.size())).ok());
  return out;
}

bool same_bits(const Outputs& a, const Outputs& b) {
  return std::memcmp(a.o.data(), b.o.data(), a.o.size() * sizeof(float)) == 0 &&
         std::memcmp(a.lse.data(), b.lse.data(), a.lse.size() * sizeof(float)) == 0;
}

// Results are the same bit for bit, for any number of threads, any other jobs in the call, and every run.
void deterministic(void**) {
  std::vector<AttendCase> cases;
  for (const int64_t n_keys : {1, 300, 1023, 1024, 2048, 3000, 9000, 20000, 0, 17})
    cases.emplace_back(decode(n_keys, n_keys == 3000 ? 20 : 2, static_cast<uint64_t>(n_keys + 3)));
  cases.emplace_back(latent_decode(1600, TANDEM_BF16));
  cases.emplace_back(latent_decode(2049, TANDEM_Q8_0));
  std::vector<AttendCase*> all;
  for (AttendCase& one : cases) all.push_back(&one);
  const cpu::KernelTable* table = nullptr;
  assert_true(cpu::choose_isa(nullptr, &table).ok());
  IsaBackend one_thread(*table, 1);
  const std::vector<Outputs> want = attend_all(one_thread.backend, all);
  TakesOneIn takes_count;
  for (const int32_t n_threads : {7, 1, 2, 3}) {
    if (!takes_count()) continue;
    IsaBackend isa(*table, n_threads);
    for (int repeat = 0; repeat < some_of(5); ++repeat) {
      const std::vector<Outputs> got = attend_all(isa.backend, all);
      for (size_t i = 0; i < all.size(); ++i) assert_true(same_bits(want[i], got[i]));
    }
    for (size_t i = 0; i < all.size(); ++i) assert_true(same_bits(want[i], attend_all(isa.backend, {all[i]})[0]));
  }
  for (const AttendCase* one : all) {
    const std::string wrong = one->check(one_thread.backend, true);
    if (!wrong.empty()) fail_msg("%s", wrong.c_str());
  }
}

void concurrent_calls(void**) {
  const cpu::KernelTable* table = nullptr;
  assert_true(cpu::choose_isa(nullptr, &table).ok());
  IsaBackend isa(*table, 2);
  std::vector<AttendCase> cases;
  for (int i = 0; i < 4; ++i) cases.emplace_back(decode(1500 + 700 * i, 1 + i, static_cast<uint64_t>(i + 1)));
  std::vector<std::thread> threads;
  std::atomic<int> n_wrong{0};
  for (const AttendCase& one : cases)
    threads.emplace_back([&] {
      for (int64_t i = 0; i < some_of(20); ++i)
        if (!one.check(isa.backend, true).empty() || !one.check_weights(isa.backend).empty()) ++n_wrong;
    });
  for (std::thread& thread : threads) thread.join();
  assert_int_equal(n_wrong.load(), 0);
}

// A pool that runs nothing and records the nodes of the tasks.
class NodesPool final : public cpu::Pool {
 public:
  explicit NodesPool(std::vector<int32_t>* nodes) : nodes_(nodes) {}
  int32_t n_workers() const override { return 2; }
  int32_t n_nodes() const override { return 3; }
  void share(int64_t n_tasks, cpu::WorkFn, void*, const int32_t* task_node) override {
    assert_non_null(task_node);
    nodes_->assign(task_node, task_node + n_tasks);
  }
  void wake() override {}
  void rest() override {}
  void place(void*, int64_t, int32_t) override {}
  void keep_clear() override {}
  std::string report() const override { return "{}"; }

 private:
  std::vector<int32_t>* nodes_;
};

void tasks_have_the_nodes_of_their_jobs(void**) {
  const cpu::KernelTable* table = nullptr;
  assert_true(cpu::choose_isa(nullptr, &table).ok());
  std::vector<int32_t> nodes;
  Backend backend;
  assert_true(cpu::make_cpu_backend(*table, {}, std::make_unique<NodesPool>(&nodes), &backend).ok());
  Layer layer;
  layer.n_kv_heads = 4, layer.group_size = 1, layer.k_head_dim = layer.v_head_dim = 128;
  layer.k_type = layer.v_type = TANDEM_BF16;
  KvRun run;
  run.n_tokens = 400;  // a piece of its own, and a task of its own where the neighbours are on other nodes
  const std::vector<int32_t> want = {2, kAllNodes, 0, 1};
  std::vector<AttendJob> jobs(4);
  std::vector<WeightJob> weights(4);
  for (size_t i = 0; i < 4; ++i) {
    jobs[i].layer = &layer, jobs[i].n_rows = 1, jobs[i].n_runs = 1, jobs[i].runs = &run, jobs[i].n_keys = run.n_tokens;
    jobs[i].node = weights[i].node = want[i];
  }
  assert_true(backend.table->attend(backend.self, jobs.data(), 4).ok());
  assert_true(nodes == want);
  nodes.clear();
  backend.table->attn_weights(backend.self, weights.data(), 4);
  assert_true(nodes == want);
  backend.table->destroy(backend.self);
}

// Units tile the rows x keys of every job. Pieces are whole blocks, or multiples of 16 if there are few keys. Tasks tile
// the units.
void plans_tile(void**) {
  Random random{5};
  cpu::AttendPlan plan;
  LocalPool pool(3);
  for (int round = 0; round < 500; ++round) {
    // With so many runs that the pool searches for the start of pieces. Also runs of one key each.
    const int64_t most_run = round % 16 == 0 ? 8 : round % 16 == 1 ? 1 : 2000;
    Layer layer;
    layer.group_size = 1, layer.k_head_dim = layer.v_head_dim = 128, layer.k_type = layer.v_type = TANDEM_BF16;
    layer.n_kv_heads = static_cast<int32_t>(1 + random.below(2));
    std::vector<std::vector<KvRun>> runs;
    std::vector<AttendJob> jobs(static_cast<size_t>(random.below(12)));
    for (AttendJob& job : jobs) {
      const int64_t sizes[] = {0, 1, 500, 5000, 300000};
      job.layer = &layer, job.n_rows = static_cast<int32_t>(random.below(round % 3 ? 8 : round % 2 ? 90 : 1500));
      job.node = static_cast<int32_t>(random.below(2));
      job.n_keys = random.below(sizes[random.below(5)] + 1);
      runs.emplace_back();
      for (int64_t left = job.n_keys; left > 0; left -= runs.back().back().n_tokens) {
        runs.back().emplace_back();
        runs.back().back().n_tokens = std::min<int64_t>(left, most_run == 1 ? 1 : random.below(most_run));
      }
      job.runs = runs.back().data(), job.n_runs = static_cast<int32_t>(runs.back().size());
      job.runs_are_keys =
          std::all_of(runs.back().begin(), runs.back().end(), [](const KvRun& run) { return run.n_tokens == 1; });
    }
    const auto n_workers = static_cast<int32_t>(1 + random.below(8));
    assert_true(plan.make(jobs.data(), static_cast<int32_t>(jobs.size()), n_workers, {}, &pool).ok());
    std::vector<int64_t> covered(jobs.size());
    int64_t at = 0;
    for (int64_t task = 0; task < plan.n_tasks(); ++task) {
      assert_true(plan.task_begin(task) == at && plan.task_begin(task + 1) > at);
      for (; at < plan.task_begin(task + 1); ++at) {
        const cpu::AttendUnit& unit = plan.unit(at);
        const AttendJob& job = jobs[static_cast<size_t>(unit.job_idx)];
        assert_int_equal(plan.task_nodes()[task], job.node);
        assert_true(unit.by_matmul == cpu::use_matmul(job, {}));
        assert_true(unit.row_end > unit.row_begin);
        assert_true(unit.row_end - unit.row_begin <= (unit.by_matmul ? cpu::MatmulAttend::kTaskRows : cpu::kSpanRows));
        const int64_t step = job.n_keys < 2048 && !unit.by_matmul ? 16 : cpu::kBlockKeys;
        assert_true(unit.key_begin % step == 0);
        assert_true(unit.key_end == job.n_keys || unit.key_end % step == 0);
        covered[static_cast<size_t>(unit.job_idx)] += (unit.row_end - unit.row_begin) * (unit.key_end - unit.key_begin);
        int64_t key = unit.first.offset;
        for (int64_t run = 0; run < unit.first.run_idx; ++run) key += job.runs[run].n_tokens;
        assert_true(key == unit.key_begin);
      }
    }
    assert_true(at == plan.n_units() && (at == 0 || plan.n_tasks() > 0));
    for (size_t i = 0; i < jobs.size(); ++i) assert_true(covered[i] == jobs[i].n_rows * jobs[i].n_keys);
  }
}

// One sequence with one KV head occupies many workers, with one query or with several. A layer of many heads is not cut.
void latent_decode_has_units_for_all(void**) {
  cpu::AttendPlan plan;
  for (const int64_t n_keys : {8192, 131072}) {
    for (const int32_t q_len : {1, 4, 16}) {
      Layer layer;
      layer.n_kv_heads = 1, layer.group_size = layer.n_q_heads = 128, layer.k_head_dim = 576, layer.v_head_dim = 512;
      layer.v_aliases_k = true, layer.k_type = layer.v_type = TANDEM_BF16;
      KvRun run;
      run.n_tokens = n_keys;
      AttendJob job;
      job.layer = &layer, job.n_rows = 128 * q_len, job.n_runs = 1, job.runs = &run, job.n_keys = n_keys;
      assert_true(plan.make(&job, 1, 16, {}).ok());
      assert_true(plan.n_units() >= 16 && plan.n_units() <= 64);
      assert_true(plan.n_tasks() >= 16);
      for (int64_t i = 0; i < plan.n_units(); ++i) assert_true(plan.unit(i).by_matmul && plan.unit(i).key_begin % 512 == 0);
      layer.n_kv_heads = 64;
      assert_true(plan.make(&job, 1, 16, {}).ok());
      assert_true(plan.n_groups() == 0);
    }
  }
}

// A whole job, and its parts merged through the table, agree within rounding.
void merge_joins_parts(void**) {
  std::vector<IsaBackend> backends = isa_backends(2);
  for (IsaBackend& isa : backends) {
    const int64_t n_rows = 700;  // enough to be divided among workers
    constexpr int32_t kDim = 96;
    std::vector<float> o[3], lse[3], out(static_cast<size_t>(n_rows) * kDim), lse_out(static_cast<size_t>(n_rows));
    const float* o_at[3];
    const float* lse_at[3];
    Random random{8};
    for (int s = 0; s < 3; ++s) {
      for (int64_t i = 0; i < n_rows * kDim; ++i) o[s].push_back(static_cast<float>(random.normal()));
      for (int64_t i = 0; i < n_rows; ++i) lse[s].push_back(static_cast<float>(random.normal()));
      o_at[s] = o[s].data(), lse_at[s] = lse[s].data();
    }
    MergeJob jobs[2];
    jobs[0].n_rows = 300, jobs[0].head_dim = kDim, jobs[0].n_states = 3, jobs[0].o = o_at, jobs[0].lse = lse_at;
    jobs[0].o_out = out.data(), jobs[0].lse_out = lse_out.data();
    const float* o_rest[3] = {o_at[0] + 300 * kDim, o_at[1] + 300 * kDim, o_at[2] + 300 * kDim};
    const float* lse_rest[3] = {lse_at[0] + 300, lse_at[1] + 300, lse_at[2] + 300};
    jobs[1] = jobs[0];
    jobs[1].n_rows = 400, jobs[1].o = o_rest, jobs[1].lse = lse_rest;
    jobs[1].o_out = out.data() + 300 * kDim, jobs[1].lse_out = lse_out.data() + 300;
    assert_true(isa.backend.table->merge(isa.backend.self, jobs, 2).ok());
    for (size_t r = 0; r < static_cast<size_t>(n_rows); ++r) {
      double sum = 0.0, value = 0.0;
      for (int s = 0; s < 3; ++s) {
        sum += std::exp(static_cast<double>(lse[s][r]));
        value += std::exp(static_cast<double>(lse[s][r])) * static_cast<double>(o[s][r * kDim + 5]);
      }
      assert_true(std::fabs(static_cast<double>(out[r * kDim + 5]) - value / sum) < 1e-6);
      assert_true(std::fabs(static_cast<double>(lse_out[r]) - std::log(sum)) < 1e-6);
    }
  }
}

}  // namespace
}  // namespace tandem::test

int main() {
  using namespace tandem::test;
  const CMUnitTest tests[] = {
      cmocka_unit_test(forced_isa_is_used),
      cmocka_unit_test(isa_from_environment),
      cmocka_unit_test(deterministic),
      cmocka_unit_test(concurrent_calls),
      cmocka_unit_test(tasks_have_the_nodes_of_their_jobs),
      cmocka_unit_test(plans_tile),
      cmocka_unit_test(latent_decode_has_units_for_all),
      cmocka_unit_test(merge_joins_parts),
  };
  return cmocka_run_group_tests(tests, nullptr, nullptr);
}
