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

// "32768K", "30M", "1073741824": bytes; 0 for anything else ("max", no such file).
int64_t parse_bytes(const std::string& value) {
  int64_t bytes = 0;
  size_t i = 0;
  for (; i < value.size() && value[i] >= '0' && value[i] <= '9' && bytes < (INT64_C(1) << 58); ++i)
    bytes = bytes * 10 + (value[i] - '0');
  if (i < value.size() && value[i] == 'K') bytes <<= 10;
  if (i < value.size() && value[i] == 'M') bytes <<= 20;
  return bytes;
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

int64_t last_level_cache_bytes(const std::vector<int32_t>& cpus) {
  std::map<std::string, int64_t> caches;  // shared_cpu_list -> bytes
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

int64_t available_memory_bytes() {
  int64_t available = INT64_MAX;
  std::ifstream meminfo("/proc/meminfo");
  for (std::string key, unit; meminfo >> key;) {
    int64_t kib = 0;
    meminfo >> kib;
    std::getline(meminfo, unit);
    if (key == "MemAvailable:") available = kib * 1024;
  }
  const int64_t limit = parse_bytes(first_line("/sys/fs/cgroup/memory.max"));
  const int64_t current = parse_bytes(first_line("/sys/fs/cgroup/memory.current"));
  if (limit > 0) available = std::min(available, std::max<int64_t>(limit - current, 0));
  return available;
}

}  // namespace tools
