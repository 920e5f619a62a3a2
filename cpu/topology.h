// SPDX-License-Identifier: MIT
// The seats of the workers: hwloc's view of the machine, limited to the CPUs that this process may use.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "lib/base/status.h"

struct hwloc_topology;
struct hwloc_bitmap_s;

namespace tandem::cpu {

struct TopologyOptions {
  std::string synthetic;  // hwloc's description of a machine ("numa:2 core:4 pu:2"); empty: this machine, or the one that
                          // hwloc's environment variables (HWLOC_SYNTHETIC, HWLOC_XMLFILE) name
  std::string allowed;    // CPUs to use ("0-3,8"); empty: the affinity mask of the calling thread
};

// One CPU (hardware thread). Only cores and nodes with an allowed CPU are counted, in hwloc's order.
struct Seat {
  int32_t cpu = 0;  // the operating system's index
  int32_t core = 0;
  int32_t node = 0;
  int32_t smt = 0;  // 0: the first allowed CPU of its core
};

class Topology {
 public:
  static Status load(const TopologyOptions& options, std::unique_ptr<Topology>* topology);
  ~Topology();
  Topology(const Topology&) = delete;
  Topology& operator=(const Topology&) = delete;

  // Allowed CPUs in the order in which workers take them: one per core before any sibling. Among these the nodes and shared
  // caches take turns, because memory bandwidth limits few workers. The first n seats are on the nodes 0 to min(n,
  // n_nodes()) - 1.
  const std::vector<Seat>& seats() const { return seats_; }
  int32_t n_cpus() const { return static_cast<int32_t>(seats_.size()); }
  int32_t n_cores() const { return n_cores_; }
  int32_t n_nodes() const { return static_cast<int32_t>(node_os_idx_.size()); }
  int32_t node_of_cpu(int32_t cpu) const;  // -1: not an allowed CPU
  int32_t node_os_idx(int32_t node) const { return node_os_idx_[node]; }
  // Number of CPUs that can really run threads of this process. It is below n_cpus() on a synthetic machine.
  int32_t n_real_cpus() const { return n_real_cpus_; }
  bool this_system() const { return this_system_; }
  std::string allowed_list() const;  // "0-3,8"
  std::string summary() const;       // "1 package, 2 NUMA nodes, 8 cores, 16 PUs", including those not allowed

  // Binds the calling thread to the seat or to several. Returns 0 or an errno: ENOTSUP if the topology is not this
  // machine's, and then binds nothing.
  int bind_this_thread(const Seat& seat) const { return bind_this_thread(&seat, 1); }
  int bind_this_thread(const Seat* seats, size_t n_seats) const;
  // Requests that the whole pages inside [data, data + bytes) lie on the node, or on all nodes in turn (kAllNodes). Returns
  // 0 or an errno.
  int bind_memory(void* data, int64_t bytes, int32_t node) const;

 private:
  Topology() = default;
  Status find_allowed(const std::string& allowed);
  void find_seats();

  hwloc_topology* topology_ = nullptr;
  hwloc_bitmap_s* allowed_ = nullptr;
  std::vector<Seat> seats_;
  std::vector<int32_t> node_os_idx_;
  std::vector<int32_t> cpu_nodes_;  // [highest allowed CPU + 1]
  int32_t n_cores_ = 0;
  int32_t n_real_cpus_ = 1;
  bool this_system_ = false;
};

}  // namespace tandem::cpu
