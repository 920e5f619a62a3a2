// SPDX-License-Identifier: MIT
// The worker pool on several NUMA nodes: the order in which a worker takes tasks, and the placement of memory.
#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "cpu/pool_case.h"

namespace tandem::cpu {
namespace {

// Returns a machine whose threads count as bound, with the caller on CPU 0.
PoolSeams bound_on_machine(const char* synthetic) {
  PoolSeams seams = on_machine(synthetic);
  seams.bind_this_thread = [](const Seat&) { return 0; };
  seams.current_cpu = [] { return 0; };
  return seams;
}

// Checks the order: tasks of the worker's own node, then tasks of no node, then tasks of the other node. Returns the number
// of tasks.
int64_t check_order(const std::vector<int64_t>& order, const std::vector<int32_t>& nodes, int32_t own) {
  int64_t n_foreign = 0;
  int last = 0;
  for (int64_t i : order) {
    const bool of_a_node = nodes[i] == 0 || nodes[i] == 1;
    const int rank = nodes[i] == own ? 0 : of_a_node ? 2 : 1;
    assert_true(rank >= last);
    last = rank;
    n_foreign += rank == 2;
  }
  return n_foreign;
}

void tasks_go_to_workers_of_their_node_first(void**) {
  const auto pool = make_pool(4, 0, bound_on_machine("numa:2 core:2 pu:1"));
  assert_int_equal(pool->n_nodes(), 2);
  const auto report = nlohmann::json::parse(pool->report());
  assert_true(report["prefers_nodes"].get<bool>());
  int64_t n_foreign = 0;
  for (int round = 0; round < 200; ++round) {
    const int64_t n_tasks = round * 3;
    std::vector<int32_t> nodes(n_tasks);
    uint32_t random = static_cast<uint32_t>(round) * 2654435761u;
    for (int32_t& node : nodes) node = static_cast<int32_t>((random = random * 1664525u + 1013904223u) >> 31);
    if (round % 10 == 0) std::fill(nodes.begin(), nodes.end(), 1);
    if (round % 10 == 1) std::fill(nodes.begin(), nodes.end(), -3);  // no such node: for any worker
    if (round % 10 == 2) std::fill(nodes.begin(), nodes.begin() + n_tasks / 2, 2);
    if (round % 10 == 3) std::fill(nodes.begin(), nodes.begin() + n_tasks / 3, kAllNodes);
    Tally tally(n_tasks, 4);
    pool->run(n_tasks, Tally::task, &tally, nodes.data());
    tally.assert_each_once();
    for (int32_t worker = 0; worker < 4; ++worker) {
      const int32_t own = report["workers"][worker]["node"];
      n_foreign += check_order(tally.order[worker], nodes, own);
    }
  }
  assert_true(n_foreign > 0);
  Meeting meeting(4);
  const int32_t all_on_one[4] = {1, 1, 1, 1};
  pool->run(4, Meeting::task, &meeting, all_on_one);  // the workers of node 0 take tasks as well
  assert_int_equal(meeting.n_here.load(), 4);
}

std::atomic<int> cpu_of_caller{0};

void the_caller_is_where_it_runs(void**) {
  PoolSeams seams = bound_on_machine("numa:2 core:2 pu:1");
  seams.current_cpu = [] { return cpu_of_caller.load(); };
  const auto pool = make_pool(2, 0, seams);
  std::vector<int32_t> nodes(60);
  for (size_t i = 0; i < nodes.size(); ++i) nodes[i] = static_cast<int32_t>(i % 3) - 1;
  for (int round = 0; round < 200; ++round) {
    const auto [cpu, node] = std::array{std::pair{0, 0}, std::pair{3, 1}, std::pair{2, 1}, std::pair{1, 0}}[round % 4];
    cpu_of_caller = cpu;
    Tally tally(60, 2);
    pool->run(60, Tally::task, &tally, nodes.data());
    tally.assert_each_once();
    check_order(tally.order[0], nodes, node);
  }
  for (const int cpu : {-1, 4, 1 << 20}) {  // CPUs that the machine does not have
    cpu_of_caller = cpu;
    Tally tally(60, 2);
    pool->run(60, Tally::task, &tally, nodes.data());
    tally.assert_each_once();
  }
}

// Threads that the system may move have no node. They take tasks in order.
void nobody_prefers_a_node_unless_all_are_bound(void**) {
  PoolSeams failing = bound_on_machine("numa:2 core:2 pu:1");
  failing.bind_this_thread = [](const Seat& seat) { return seat.cpu == 1 ? EPERM : 0; };
  const PoolSeams bound = bound_on_machine("numa:2 core:2 pu:1");
  const std::vector<std::pair<PoolOptions, const PoolSeams*>> cases = {
      {{4, 0, true}, &failing}, {{4, 0, false}, &bound}, {{5, 0, true}, &bound}};
  for (const auto& [options, seams] : cases) {
    std::unique_ptr<Pool> pool;
    assert_true(create_pool(options, *seams, &pool).ok());
    assert_int_equal(pool->n_nodes(), 2);
    assert_false(nlohmann::json::parse(pool->report())["prefers_nodes"].get<bool>());
    std::vector<int32_t> nodes(60);
    for (size_t i = 0; i < nodes.size(); ++i) nodes[i] = static_cast<int32_t>(i % 2);
    for (int round = 0; round < 50; ++round) {
      Tally tally(60, pool->n_workers());
      pool->run(60, Tally::task, &tally, nodes.data());
      tally.assert_each_once();
      for (const auto& order : tally.order) assert_true(std::is_sorted(order.begin(), order.end()));
    }
  }
}

void one_node_ignores_the_preference(void**) {
  const auto pool = make_pool(2);
  const std::vector<int32_t> nodes(100, 7);
  Tally tally(100, 2);
  if (pool->n_nodes() == 1) pool->run(100, Tally::task, &tally, nodes.data());
  if (pool->n_nodes() == 1) tally.assert_each_once();
}

void placing_is_best_effort(void**) {
  const auto pool = make_pool(2, 0, on_machine("numa:2 core:1 pu:1"));
  std::vector<char> data(1 << 16, 3);
  for (int32_t node : {-1, 0, 1, 2}) pool->place(data.data(), static_cast<int64_t>(data.size()), node);
  pool->place(nullptr, 100, 0);
  pool->place(data.data(), -1, 0);
  assert_int_equal(nlohmann::json::parse(pool->report())["n_unplaced"].get<int>(), 2);  // node 2, -1 bytes
  assert_int_equal(std::count(data.begin(), data.end(), 3), data.size());
}

}  // namespace
}  // namespace tandem::cpu

int main() {
  using namespace tandem::cpu;
  const CMUnitTest tests[] = {
      cmocka_unit_test(tasks_go_to_workers_of_their_node_first),
      cmocka_unit_test(the_caller_is_where_it_runs),
      cmocka_unit_test(nobody_prefers_a_node_unless_all_are_bound),
      cmocka_unit_test(one_node_ignores_the_preference),
      cmocka_unit_test(placing_is_best_effort),
  };
  return cmocka_run_group_tests(tests, nullptr, nullptr);
}
