// SPDX-License-Identifier: MIT
// The CPU of each worker, on synthetic machines and on this one.
#include "cpu/topology.h"

#include <errno.h>
#include <sched.h>
#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "lib/tables/backend.h"
#include "with_cmocka.h"

namespace {

using tandem::cpu::Seat;
using tandem::cpu::Topology;

std::unique_ptr<Topology> load(const char* synthetic, const char* allowed = "") {
  std::unique_ptr<Topology> topology;
  assert_true(Topology::load({synthetic, allowed}, &topology).ok());
  assert_non_null(topology.get());
  return topology;
}

void assert_cpus(const Topology& topology, const std::vector<int32_t>& cpus) {
  assert_int_equal(topology.n_cpus(), cpus.size());
  for (size_t i = 0; i < cpus.size(); ++i) assert_int_equal(topology.seats()[i].cpu, cpus[i]);
}

void every_core_before_any_sibling_and_nodes_in_turn(void**) {
  const auto topology = load("numa:2 core:4 pu:2");
  assert_int_equal(topology->n_cores(), 8);
  assert_int_equal(topology->n_nodes(), 2);
  assert_false(topology->this_system());
  assert_cpus(*topology, {0, 8, 2, 10, 4, 12, 6, 14, 1, 9, 3, 11, 5, 13, 7, 15});
  for (const Seat& seat : topology->seats()) {
    assert_int_equal(seat.core, seat.cpu / 2);
    assert_int_equal(seat.smt, seat.cpu % 2);
    assert_int_equal(seat.node, seat.cpu / 8);
  }
}

void shared_caches_in_turn(void**) {
  assert_cpus(*load("pack:1 l3:2 core:3 pu:1"), {0, 3, 1, 4, 2, 5});
  assert_cpus(*load("numa:2 l3:2 core:2 pu:1"), {0, 4, 2, 6, 1, 5, 3, 7});
}

void a_cpuset_restricts(void**) {
  const auto topology = load("pack:1 core:4 pu:2", "1-3,6");
  assert_cpus(*topology, {1, 2, 6, 3});
  assert_int_equal(topology->n_cores(), 3);
  assert_int_equal(topology->seats()[0].smt, 0);  // the first allowed CPU of its core
  assert_int_equal(topology->seats()[3].smt, 1);
  assert_string_equal(topology->allowed_list().c_str(), "1-3,6");
}

void nodes_without_an_allowed_cpu_do_not_count(void**) {
  const auto topology = load("numa:4 core:2 pu:1", "2,6-7");
  assert_int_equal(topology->n_nodes(), 2);
  assert_int_equal(topology->node_os_idx(0), 1);
  assert_int_equal(topology->node_os_idx(1), 3);
  assert_cpus(*topology, {2, 6, 7});
}

// Pools of any size number their nodes without gaps.
void the_first_seats_are_on_the_first_nodes(void**) {
  for (const char* allowed : {"0-31", "0-7,9,30", "5,12-15,31", "31", "0,8,16,24"}) {
    const auto topology = load("numa:4 l3:2 core:2 pu:2", allowed);
    std::set<int32_t> nodes;
    std::set<int32_t> cores;
    for (int32_t i = 0; i < topology->n_cpus(); ++i) {
      nodes.insert(topology->seats()[i].node);
      cores.insert(topology->seats()[i].core);
      assert_int_equal(nodes.size(), std::min(i + 1, topology->n_nodes()));
      assert_int_equal(*nodes.rbegin(), nodes.size() - 1);
      assert_int_equal(cores.size(), std::min(i + 1, topology->n_cores()));
    }
  }
}

void what_hwloc_does_not_know_is_refused(void**) {
  std::unique_ptr<Topology> topology;
  assert_int_equal(Topology::load({"banana:2", ""}, &topology).code(), TANDEM_ERROR_INVALID_ARGUMENT);
  assert_int_equal(Topology::load({"core:2 pu:1", "9"}, &topology).code(), TANDEM_ERROR_INVALID_ARGUMENT);
  assert_null(topology.get());
}

void hwloc_environment_is_honoured(void**) {
  setenv("HWLOC_SYNTHETIC", "numa:2 core:3 pu:1", 1);
  const auto synthetic = load("");
  unsetenv("HWLOC_SYNTHETIC");
  assert_int_equal(synthetic->n_cpus(), 6);
  assert_int_equal(synthetic->n_nodes(), 2);
  assert_false(synthetic->this_system());
  assert_true(synthetic->n_real_cpus() <= 6);
}

void a_recorded_machine_is_honoured(void**) {
  char path[] = "/tmp/tandem-topology-XXXXXX";
  assert_true(mkstemp(path) >= 0);
  std::ofstream(path) << R"(<?xml version="1.0" encoding="UTF-8"?>
<!DOCTYPE topology SYSTEM "hwloc2.dtd">
<topology version="2.0">
 <object type="Machine" os_index="0" cpuset="0xf" complete_cpuset="0xf" allowed_cpuset="0xd" nodeset="0x1"
   complete_nodeset="0x1" allowed_nodeset="0x1" gp_index="1">
  <object type="NUMANode" os_index="0" cpuset="0xf" complete_cpuset="0xf" nodeset="0x1" complete_nodeset="0x1" gp_index="10"
    local_memory="1073741824"><page_type size="4096" count="262144"/></object>
  <object type="Core" os_index="0" cpuset="0x5" complete_cpuset="0x5" nodeset="0x1" complete_nodeset="0x1" gp_index="2">
   <object type="PU" os_index="0" cpuset="0x1" complete_cpuset="0x1" nodeset="0x1" complete_nodeset="0x1" gp_index="3"/>
   <object type="PU" os_index="2" cpuset="0x4" complete_cpuset="0x4" nodeset="0x1" complete_nodeset="0x1" gp_index="4"/>
  </object>
  <object type="Core" os_index="1" cpuset="0xa" complete_cpuset="0xa" nodeset="0x1" complete_nodeset="0x1" gp_index="5">
   <object type="PU" os_index="1" cpuset="0x2" complete_cpuset="0x2" nodeset="0x1" complete_nodeset="0x1" gp_index="6"/>
   <object type="PU" os_index="3" cpuset="0x8" complete_cpuset="0x8" nodeset="0x1" complete_nodeset="0x1" gp_index="7"/>
  </object>
 </object>
</topology>
)";
  setenv("HWLOC_XMLFILE", path, 1);
  const auto topology = load("");
  unsetenv("HWLOC_XMLFILE");
  unlink(path);
  assert_cpus(*topology, {0, 3, 2});  // CPU 1 is not allowed. 0 and 2 are siblings, and so are 1 and 3.
  assert_int_equal(topology->n_cores(), 2);
}

void the_threads_affinity_mask_restricts(void**) {
  const auto all = load("");
  assert_true(all->this_system());
  cpu_set_t before, one, after;
  assert_int_equal(sched_getaffinity(0, sizeof before, &before), 0);
  assert_int_equal(all->n_cpus(), CPU_COUNT(&before));
  const int32_t cpu = all->seats().back().cpu;
  CPU_ZERO(&one);
  CPU_SET(cpu, &one);
  assert_int_equal(sched_setaffinity(0, sizeof one, &one), 0);
  const auto restricted = load("");
  assert_int_equal(sched_setaffinity(0, sizeof before, &before), 0);
  assert_cpus(*restricted, {cpu});

  int error = -1;
  std::thread([&] {
    error = all->bind_this_thread(all->seats().back());
    sched_getaffinity(0, sizeof after, &after);
  }).join();
  assert_int_equal(error, 0);
  assert_true(CPU_EQUAL(&after, &one));
}

void nothing_is_bound_on_another_machine(void**) {
  cpu_set_t before, after;
  sched_getaffinity(0, sizeof before, &before);
  const auto topology = load("core:2 pu:1");
  assert_int_equal(topology->bind_this_thread(topology->seats()[0]), ENOTSUP);
  sched_getaffinity(0, sizeof after, &after);
  assert_true(CPU_EQUAL(&before, &after));
}

void binding_memory_keeps_its_content(void**) {
  const auto topology = load("");
  std::vector<unsigned char> data(1 << 20);
  for (size_t i = 0; i < data.size(); ++i) data[i] = static_cast<unsigned char>(i * 7);
  const int error = topology->bind_memory(data.data() + 5, static_cast<int64_t>(data.size()) - 9, 0);
  assert_true(error == 0 || error == ENOSYS || error == EPERM);
  assert_int_equal(topology->bind_memory(data.data() + 5, static_cast<int64_t>(data.size()) - 9, tandem::kAllNodes), error);
  for (size_t i = 0; i < data.size(); ++i) assert_int_equal(data[i], static_cast<unsigned char>(i * 7));
  assert_int_equal(topology->bind_memory(data.data() + 1, 16, 0), 0);  // contains no whole page
  assert_int_equal(topology->bind_memory(data.data(), 1 << 20, -2), EINVAL);
  assert_int_equal(topology->bind_memory(data.data(), 1 << 20, topology->n_nodes()), EINVAL);
  assert_int_equal(topology->bind_memory(data.data(), -1, 0), EINVAL);
}

}  // namespace

int main() {
  const CMUnitTest tests[] = {
      cmocka_unit_test(every_core_before_any_sibling_and_nodes_in_turn),
      cmocka_unit_test(shared_caches_in_turn),
      cmocka_unit_test(a_cpuset_restricts),
      cmocka_unit_test(nodes_without_an_allowed_cpu_do_not_count),
      cmocka_unit_test(the_first_seats_are_on_the_first_nodes),
      cmocka_unit_test(what_hwloc_does_not_know_is_refused),
      cmocka_unit_test(hwloc_environment_is_honoured),
      cmocka_unit_test(a_recorded_machine_is_honoured),
      cmocka_unit_test(the_threads_affinity_mask_restricts),
      cmocka_unit_test(nothing_is_bound_on_another_machine),
      cmocka_unit_test(binding_memory_keeps_its_content),
  };
  return cmocka_run_group_tests(tests, nullptr, nullptr);
}
