// SPDX-License-Identifier: MIT
// Heads whose rows lie side by side are attended in bands, a block of each head in turn. The bits must equal those of
// attending one head after another, for any number of workers.
#include <cmath>
#include <cstring>
#include <vector>

#include "cpu/attend_case.h"
#include "cpu/attend_plan.h"
#include "cpu/isa_backends.h"
#include "with_cmocka.h"

namespace tandem::test {
namespace {

constexpr int32_t kHeads = 3, kGroup = 3, kDim = 64;
constexpr int64_t kKeys = 9001;

// One decode over token-major K and V. The memory after the last key is NaN.
struct TokenMajor {
  Layer layer;
  std::vector<uint8_t> k, v;
  std::vector<float> q, o, lse;
  std::vector<KvRun> runs;
  std::vector<AttendJob> jobs;

  explicit TokenMajor(int32_t type) {
    layer.n_kv_heads = kHeads, layer.group_size = kGroup, layer.n_q_heads = kHeads * kGroup;
    layer.k_head_dim = layer.v_head_dim = kDim, layer.k_type = layer.v_type = type, layer.sm_scale = 0.125f;
    const int64_t bytes = row_bytes(type, kDim);
    layer.k_stride = layer.v_stride = kHeads * bytes;
    fill(&k, 1), fill(&v, 2);
    Random random{3};
    for (int32_t i = 0; i < kHeads * kGroup * kDim; ++i)
      q.push_back(static_cast<float>(random.below(2001)) / 1000.0f - 1.0f);
    runs.resize(kHeads), jobs.resize(kHeads);
    for (int32_t h = 0; h < kHeads; ++h) {
      runs[h].k = k.data() + h * bytes, runs[h].v = v.data() + h * bytes, runs[h].n_tokens = kKeys;
      jobs[h].layer = &layer, jobs[h].n_rows = kGroup, jobs[h].q = q.data() + h * kGroup * kDim;
      jobs[h].runs = &runs[h], jobs[h].n_runs = 1, jobs[h].n_keys = kKeys;
    }
  }

  // Writes f16 numbers from 0.06 to 0.12, also as scales and codes of blocks. After the end, the numbers are NaN in f16 and
  // bf16.
  void fill(std::vector<uint8_t>* rows, uint64_t seed) const {
    Random random{seed};
    rows->assign(static_cast<size_t>((kKeys + 300) * layer.k_stride), 0xff);
    for (size_t i = 0; i + 1 < static_cast<size_t>(kKeys * layer.k_stride); i += 2) {
      const auto bits = static_cast<uint16_t>(0x2c00 + random.below(1024));
      std::memcpy(rows->data() + i, &bits, sizeof bits);
    }
  }

  std::vector<float> attend(const Backend& backend) {
    o.assign(kHeads * kGroup * kDim, NAN), lse.assign(kHeads * kGroup, NAN);
    for (int32_t h = 0; h < kHeads; ++h) jobs[h].o = o.data() + h * kGroup * kDim, jobs[h].lse = lse.data() + h * kGroup;
    assert_true(backend.table->attend(backend.self, jobs.data(), kHeads).ok());
    std::vector<float> all = o;
    all.insert(all.end(), lse.begin(), lse.end());
    return all;
  }
};

int32_t heads_of_first_unit(const TokenMajor& call, int32_t n_workers) {
  cpu::AttendPlan plan;
  assert_true(plan.make(call.jobs.data(), kHeads, n_workers, {}).ok());
  return plan.unit(0).n_heads;
}

void bands_need_rows_side_by_side_and_few_workers(void**) {
  TokenMajor call(TANDEM_F16);
  assert_int_equal(heads_of_first_unit(call, 1), kHeads);
  assert_int_equal(heads_of_first_unit(call, 16), 1);  // else a head has one band and waits for the other heads' last
  call.runs[1].k = static_cast<const uint8_t*>(call.runs[1].k) + 2;
  assert_int_equal(heads_of_first_unit(call, 1), 1);
  TokenMajor gap(TANDEM_F16);
  gap.layer.k_stride += 2;
  assert_int_equal(heads_of_first_unit(gap, 1), 1);
  TokenMajor uneven(TANDEM_F16);
  uneven.jobs[2].n_keys = uneven.runs[2].n_tokens = kKeys - 1;
  assert_int_equal(heads_of_first_unit(uneven, 1), 1);
}

// A task holds whole bands, and the tasks of a plan hold all units.
void tasks_hold_whole_bands(void**) {
  const TokenMajor call(TANDEM_F16);
  for (const int32_t n_workers : {1, 2}) {
    cpu::AttendPlan plan;
    assert_true(plan.make(call.jobs.data(), kHeads, n_workers, {}).ok());
    for (int64_t task = 0; task <= plan.n_tasks(); ++task) assert_int_equal(plan.task_begin(task) % kHeads, 0);
    for (int64_t i = 0; i < plan.n_units(); ++i) {
      assert_int_equal(plan.unit(i).job_idx, i % kHeads);
      assert_int_equal(plan.unit(i).key_begin, plan.unit(i - i % kHeads).key_begin);
    }
  }
}

void same_bits_as_head_by_head(void**) {
  for (const int32_t type : {int32_t{TANDEM_F32}, int32_t{TANDEM_F16}, int32_t{TANDEM_BF16}, kQ8_0Blocks, kQ4_0Blocks}) {
    TokenMajor call(type);
    for (int32_t i = 0; const cpu::KernelTable* table = cpu::isa_table(i); ++i) {
      if (!cpu::isa_available(*table) || !cpu::enable_isa(*table)) continue;
      IsaBackend one(*table, 1), two(*table, 2), many(*table, 16);
      const std::vector<float> by_head = call.attend(many.backend);
      for (const float x : by_head) assert_true(std::isfinite(x));
      for (const IsaBackend* isa : {&one, &two}) {
        const std::vector<float> in_bands = call.attend(isa->backend);
        assert_memory_equal(in_bands.data(), by_head.data(), by_head.size() * sizeof(float));
      }
    }
  }
}

}  // namespace
}  // namespace tandem::test

int main() {
  using namespace tandem::test;
  const CMUnitTest tests[] = {
      cmocka_unit_test(bands_need_rows_side_by_side_and_few_workers),
      cmocka_unit_test(tasks_hold_whole_bands),
      cmocka_unit_test(same_bits_as_head_by_head),
  };
  return cmocka_run_group_tests(tests, nullptr, nullptr);
}
