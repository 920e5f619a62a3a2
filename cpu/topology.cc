// SPDX-License-Identifier: MIT
#include "cpu/topology.h"

#include <hwloc.h>
#include <omp.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <tuple>
#include <utility>

#include "lib/tables/backend.h"

namespace tandem::cpu {
namespace {

// Numbers things in the order in which they are first seen, from 0 for each parent.
class Ranks {
 public:
  int32_t of(int64_t parent, const void* thing) {
    const auto [entry, is_new] = ranks_.try_emplace({parent, thing}, 0);
    if (is_new) entry->second = counts_[parent]++;
    return entry->second;
  }

 private:
  std::map<std::pair<int64_t, const void*>, int32_t> ranks_;
  std::map<int64_t, int32_t> counts_;
};

struct RankedSeat {
  Seat seat;
  int32_t cache = 0;  // rank among the shared caches of its node
  int32_t core_of_cache = 0;

  auto order() const { return std::make_tuple(seat.smt, core_of_cache, cache, seat.node, seat.cpu); }
};

hwloc_obj_t first_node(hwloc_topology_t topology, hwloc_obj_t pu) {
  const int os_idx = hwloc_bitmap_first(pu->nodeset);
  hwloc_obj_t node = os_idx < 0 ? nullptr : hwloc_get_numanode_obj_by_os_index(topology, static_cast<unsigned>(os_idx));
  return node != nullptr ? node : hwloc_get_obj_by_type(topology, HWLOC_OBJ_NUMANODE, 0);
}

// hwloc asks for the affinity mask with ever larger sets until the call succeeds. If a sandbox refuses the call, that never
// ends. So this checks the call first.
Status check_affinity_call() {
  constexpr size_t kMostCpus = size_t{1} << 20;  // far more than Linux can be built for
  int error = EINVAL;                            // EINVAL: the set is too small
  for (size_t n_cpus = 1024; n_cpus <= kMostCpus && error == EINVAL; n_cpus *= 4) {
    std::vector<unsigned long> mask(n_cpus / (8 * sizeof(unsigned long)));
    error = sched_getaffinity(0, n_cpus / 8, reinterpret_cast<cpu_set_t*>(mask.data())) == 0 ? 0 : errno;
  }
  if (error == 0) return {};
  return fail_system(TANDEM_ERROR_SYSTEM, error, "topology", "sched_getaffinity is refused to this process (topology): %s",
                     std::strerror(error));
}

// Limits hwloc's discovery to the objects that seats need. That saves a third of its allocations, many of which end the
// process if they fail (docs/memory-failures.md). hwloc's x86 part binds the calling thread to one CPU after another. It is
// left out if the system's files tell the same.
void ask_for_little(hwloc_topology_t topology) {
  hwloc_topology_set_cache_types_filter(topology, HWLOC_TYPE_FILTER_KEEP_NONE);
  hwloc_topology_set_type_filter(topology, HWLOC_OBJ_L3CACHE, HWLOC_TYPE_FILTER_KEEP_ALL);
#if HWLOC_API_VERSION >= 0x00020800
  hwloc_topology_set_flags(
      topology, HWLOC_TOPOLOGY_FLAG_NO_DISTANCES | HWLOC_TOPOLOGY_FLAG_NO_MEMATTRS | HWLOC_TOPOLOGY_FLAG_NO_CPUKINDS);
#endif
  if (access("/sys/devices/system/cpu/cpu0/topology", R_OK) == 0)
    hwloc_topology_set_components(topology, HWLOC_TOPOLOGY_COMPONENTS_FLAG_BLACKLIST, "x86");
}

std::string plural(int n, const char* one) { return std::to_string(n) + ' ' + one + (n == 1 ? "" : "s"); }

}  // namespace

Topology::~Topology() {
  if (allowed_ != nullptr) hwloc_bitmap_free(allowed_);
  if (topology_ != nullptr) hwloc_topology_destroy(topology_);
}

Status Topology::load(const TopologyOptions& options, std::unique_ptr<Topology>* topology) {
  if (options.synthetic.empty()) TANDEM_TRY(check_affinity_call());
  std::unique_ptr<Topology> made(new Topology);
  if (hwloc_topology_init(&made->topology_) != 0) {
    made->topology_ = nullptr;
    return fail_system(TANDEM_ERROR_SYSTEM, errno, "topology", "hwloc_topology_init failed");
  }
  if (!options.synthetic.empty() && hwloc_topology_set_synthetic(made->topology_, options.synthetic.c_str()) != 0) {
    return fail(TANDEM_ERROR_INVALID_ARGUMENT, "topology", "topology = \"%s\" is not a synthetic machine that hwloc knows",
                options.synthetic.c_str());
  }
  ask_for_little(made->topology_);
  errno = 0;
  if (hwloc_topology_load(made->topology_) != 0) {
    return fail_system(TANDEM_ERROR_SYSTEM, errno, "topology", "hwloc could not load the machine's topology");
  }
  made->this_system_ = hwloc_topology_is_thissystem(made->topology_) != 0;
  TANDEM_TRY(made->find_allowed(options.allowed));
  made->find_seats();
  const int64_t online = sysconf(_SC_NPROCESSORS_ONLN);
  made->n_real_cpus_ =
      made->this_system_ ? made->n_cpus() : std::clamp<int32_t>(static_cast<int32_t>(online), 1, made->n_cpus());
  *topology = std::move(made);
  return {};
}

namespace {

// If OpenMP binds threads (OMP_PROC_BIND, OMP_PLACES, GOMP_CPU_AFFINITY), it has bound the initial thread to its place,
// perhaps one core, before any engine is created. Such a mask does not tell which CPUs the process may use. All places
// together do.
void widen_place_of_openmp(hwloc_bitmap_t mask) {
  const int n_places = omp_get_num_places();
  hwloc_bitmap_t all = hwloc_bitmap_alloc(), place = hwloc_bitmap_alloc();
  bool is_place = false;
  for (int i = 0; i < n_places && all != nullptr && place != nullptr; ++i) {
    std::vector<int> cpus(static_cast<size_t>(omp_get_place_num_procs(i)));
    omp_get_place_proc_ids(i, cpus.data());
    hwloc_bitmap_zero(place);
    for (const int cpu : cpus) hwloc_bitmap_set(place, static_cast<unsigned>(cpu));
    hwloc_bitmap_or(all, all, place);
    is_place = is_place || hwloc_bitmap_isequal(place, mask) != 0;
  }
  if (is_place) hwloc_bitmap_copy(mask, all);
  hwloc_bitmap_free(all);
  hwloc_bitmap_free(place);
}

}  // namespace

// hwloc has already left out the CPUs that cgroup cpusets forbid. The mask is that of the calling thread, not of the main
// thread. A thread started here would inherit it, and a program uses it to give each of several engines its own part.
Status Topology::find_allowed(const std::string& allowed) {
  hwloc_const_cpuset_t all = hwloc_topology_get_allowed_cpuset(topology_);
  allowed_ = hwloc_bitmap_alloc();
  if (allowed_ == nullptr) return fail(TANDEM_ERROR_OUT_OF_MEMORY, "topology", "hwloc_bitmap_alloc failed");
  if (!allowed.empty()) {
    if (hwloc_bitmap_list_sscanf(allowed_, allowed.c_str()) != 0 || !hwloc_bitmap_intersects(allowed_, all)) {
      return fail(TANDEM_ERROR_INVALID_ARGUMENT, "allowed", "allowed = \"%s\" names no CPU of the machine", allowed.c_str());
    }
    hwloc_bitmap_and(allowed_, allowed_, all);
    return {};
  }
  const bool known = this_system_ && hwloc_get_cpubind(topology_, allowed_, HWLOC_CPUBIND_THREAD) == 0;
  if (known) widen_place_of_openmp(allowed_);
  if (known && hwloc_bitmap_intersects(allowed_, all)) {
    hwloc_bitmap_and(allowed_, allowed_, all);
  } else {
    hwloc_bitmap_copy(allowed_, all);
  }
  return {};
}

void Topology::find_seats() {
  Ranks cores, nodes, siblings, caches, cores_of_cache;
  std::vector<RankedSeat> ranked;
  for (hwloc_obj_t pu = nullptr; (pu = hwloc_get_next_obj_by_type(topology_, HWLOC_OBJ_PU, pu)) != nullptr;) {
    if (!hwloc_bitmap_isset(allowed_, pu->os_index)) continue;
    hwloc_obj_t core = hwloc_get_ancestor_obj_by_type(topology_, HWLOC_OBJ_CORE, pu);
    if (core == nullptr) core = pu;
    hwloc_obj_t node = first_node(topology_, pu);
    RankedSeat entry;
    entry.seat.cpu = static_cast<int32_t>(pu->os_index);
    entry.seat.core = cores.of(0, core);
    entry.seat.node = nodes.of(0, node);
    entry.seat.smt = siblings.of(entry.seat.core, pu);
    entry.cache = caches.of(entry.seat.node, hwloc_get_ancestor_obj_by_type(topology_, HWLOC_OBJ_L3CACHE, pu));
    entry.core_of_cache = cores_of_cache.of((static_cast<int64_t>(entry.seat.node) << 32) + entry.cache, core);
    if (entry.seat.node == n_nodes()) node_os_idx_.push_back(node == nullptr ? 0 : static_cast<int32_t>(node->os_index));
    n_cores_ = std::max(n_cores_, entry.seat.core + 1);
    ranked.push_back(entry);
  }
  std::sort(ranked.begin(), ranked.end(), [](const RankedSeat& a, const RankedSeat& b) { return a.order() < b.order(); });
  for (const RankedSeat& entry : ranked) {
    const Seat& seat = seats_.emplace_back(entry.seat);
    cpu_nodes_.resize(std::max(cpu_nodes_.size(), static_cast<size_t>(seat.cpu) + 1), -1);
    cpu_nodes_[static_cast<size_t>(seat.cpu)] = seat.node;
  }
}

int32_t Topology::node_of_cpu(int32_t cpu) const {
  return cpu >= 0 && static_cast<size_t>(cpu) < cpu_nodes_.size() ? cpu_nodes_[static_cast<size_t>(cpu)] : -1;
}

std::string Topology::allowed_list() const {
  char* text = nullptr;
  if (hwloc_bitmap_list_asprintf(&text, allowed_) < 0) return {};
  std::string list(text);
  std::free(text);
  return list;
}

std::string Topology::summary() const {
  const auto count = [this](hwloc_obj_type_t type) { return std::max(0, hwloc_get_nbobjs_by_type(topology_, type)); };
  return plural(count(HWLOC_OBJ_PACKAGE), "package") + ", " + plural(count(HWLOC_OBJ_NUMANODE), "NUMA node") + ", " +
         plural(count(HWLOC_OBJ_L3CACHE), "L3 cache") + ", " + plural(count(HWLOC_OBJ_CORE), "core") + ", " +
         plural(count(HWLOC_OBJ_PU), "PU");
}

// Uses glibc, not hwloc_set_cpubind(): hwloc 2.8 does not check whether it got memory for the set of CPUs. A thread that
// starts while memory is short would end the process.
int Topology::bind_this_thread(const Seat* seats, size_t n_seats) const {
  if (!this_system_) return ENOTSUP;
  int32_t last_cpu = 0;
  for (size_t i = 0; i < n_seats; ++i) last_cpu = std::max(last_cpu, seats[i].cpu);
  cpu_set_t* const cpus = CPU_ALLOC(static_cast<size_t>(last_cpu) + 1);
  if (cpus == nullptr) return ENOMEM;
  const size_t bytes = CPU_ALLOC_SIZE(static_cast<size_t>(last_cpu) + 1);
  CPU_ZERO_S(bytes, cpus);
  for (size_t i = 0; i < n_seats; ++i) CPU_SET_S(static_cast<size_t>(seats[i].cpu), bytes, cpus);
  const int error = sched_setaffinity(0, bytes, cpus) == 0 ? 0 : errno;  // 0: the calling thread
  CPU_FREE(cpus);
  return error;
}

// Without HWLOC_MEMBIND_STRICT the node is preferred, not forced: a full node spills to other nodes instead of failing.
// Pages shared with a neighbour are left alone. Pages that have been written already are moved.
int Topology::bind_memory(void* data, int64_t bytes, int32_t node) const {
  const int64_t page_bytes = sysconf(_SC_PAGESIZE);
  const int64_t address = static_cast<int64_t>(reinterpret_cast<uintptr_t>(data));
  const int64_t begin = (address + page_bytes - 1) / page_bytes * page_bytes;
  const int64_t end = (address + bytes) / page_bytes * page_bytes;
  if (node < kAllNodes || node >= n_nodes() || bytes <= 0) return EINVAL;
  if (begin >= end) return 0;
  hwloc_bitmap_t nodeset = hwloc_bitmap_alloc();
  if (nodeset == nullptr) return ENOMEM;
  for (int32_t i = 0; i < n_nodes(); ++i)
    if (node == kAllNodes || node == i) hwloc_bitmap_set(nodeset, static_cast<unsigned>(node_os_idx_[i]));
  const hwloc_membind_policy_t policy = node == kAllNodes ? HWLOC_MEMBIND_INTERLEAVE : HWLOC_MEMBIND_BIND;
  errno = 0;
  const int rc = hwloc_set_area_membind(topology_, reinterpret_cast<void*>(begin), static_cast<size_t>(end - begin), nodeset,
                                        policy, HWLOC_MEMBIND_BYNODESET | HWLOC_MEMBIND_MIGRATE);
  const int error = rc == 0 ? 0 : (errno != 0 ? errno : EINVAL);
  hwloc_bitmap_free(nodeset);
  return error;
}

}  // namespace tandem::cpu
