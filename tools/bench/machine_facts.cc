// SPDX-License-Identifier: MIT
#include "tools/bench/machine_facts.h"

#include <sched.h>

#include <algorithm>
#include <fstream>
#include <map>
#include <string>

namespace tools {
namespace {

std::string first_line(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

// Parses "32768K", "30M", "1073741824" to bytes. Returns 0 for anything else ("max", no such file).
int64_t parse_bytes(const std::string& value) {
  int64_t bytes = 0;
  size_t i = 0;
  for (; i < value.size() && value[i] >= '0' && value[i] <= '9' && bytes < (INT64_C(1) << 58); ++i)
    bytes = bytes * 10 + (value[i] - '0');
  if (i < value.size() && value[i] == 'K') bytes <<= 10;
  if (i < value.size() && value[i] == 'M') bytes <<= 20;
  return bytes;
}

// Returns the bytes that the limits of a group and of the groups above it leave. A container may see its own group as the
// root. Then the folders of the path do not exist.
int64_t left_in_groups(const std::string& mount, std::string group, const char* limit_name, const char* used_name) {
  int64_t left = INT64_MAX;
  for (;; group.resize(group.rfind('/'))) {
    while (!group.empty() && group.back() == '/') group.pop_back();
    const int64_t limit = parse_bytes(first_line(mount + group + "/" + limit_name));
    const int64_t used = parse_bytes(first_line(mount + group + "/" + used_name));
    if (limit > 0) left = std::min(left, std::max<int64_t>(limit - used, 0));
    if (group.find('/') == group.npos) return left;
  }
}

std::string cpu_folder(int32_t cpu) { return "/sys/devices/system/cpu/cpu" + std::to_string(cpu); }

}  // namespace

std::vector<int32_t> cpus_by_core() {
  cpu_set_t mask;
  CPU_ZERO(&mask);
  sched_getaffinity(0, sizeof mask, &mask);
  std::vector<int32_t> first, others;
  std::map<std::string, int32_t> seen;
  for (int32_t cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (!CPU_ISSET(cpu, &mask)) continue;
    const std::string siblings = first_line(cpu_folder(cpu) + "/topology/thread_siblings_list");
    const bool is_first = siblings.empty() || seen.emplace(siblings, cpu).second;
    (is_first ? first : others).push_back(cpu);
  }
  first.insert(first.end(), others.begin(), others.end());
  return first;
}

std::string processor_name(const std::string& root) {
  std::ifstream cpuinfo(root + "/proc/cpuinfo");
  for (std::string line; std::getline(cpuinfo, line);) {
    const size_t colon = line.find(": ");
    if (line.rfind("model name", 0) == 0 && colon != line.npos) return line.substr(colon + 2);
  }
  return "unknown";
}

int64_t last_level_cache_bytes(const std::vector<int32_t>& cpus) {
  std::map<std::string, int64_t> caches;  // key: shared_cpu_list, value: bytes
  for (const int32_t cpu : cpus) {
    std::string shared;
    int64_t bytes = 0, best_level = 0;
    for (int32_t i = 0; i < 8; ++i) {
      const std::string folder = cpu_folder(cpu) + "/cache/index" + std::to_string(i);
      const int64_t level = parse_bytes(first_line(folder + "/level"));
      if (level <= best_level || first_line(folder + "/type") == "Instruction") continue;
      best_level = level;
      bytes = parse_bytes(first_line(folder + "/size"));
      shared = first_line(folder + "/shared_cpu_list");
    }
    caches[shared] = bytes;
  }
  int64_t sum = 0;
  for (const auto& [shared, bytes] : caches) sum += bytes;
  return sum > 0 ? sum : INT64_C(32) << 20;
}

int64_t available_memory_bytes(const std::string& root) {
  int64_t available = INT64_MAX;
  std::ifstream meminfo(root + "/proc/meminfo");
  for (std::string key, unit; meminfo >> key;) {
    int64_t kib = 0;
    meminfo >> kib;
    std::getline(meminfo, unit);
    if (key == "MemAvailable:") available = kib * 1024;
  }
  std::ifstream groups(root + "/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (first == line.npos || second == line.npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1), group = line.substr(second + 1);
    if (controllers.empty())
      available = std::min(available, left_in_groups(root + "/sys/fs/cgroup", group, "memory.max", "memory.current"));
    if (controllers == "memory")
      available = std::min(available, left_in_groups(root + "/sys/fs/cgroup/memory", group, "memory.limit_in_bytes",
                                                     "memory.usage_in_bytes"));
  }
  return available;
}

}  // namespace tools
