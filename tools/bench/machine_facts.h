// SPDX-License-Identifier: MIT
// What the probes need to know of the machine, from /proc and /sys.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace tools {

// CPUs of the affinity mask: one of each core first, then the second threads of the same cores.
std::vector<int32_t> cpus_by_core();

// As the system names the processor; "unknown" where the system does not.
std::string processor_name(const std::string& root = "");

// Sum over the distinct last-level caches of these CPUs; 32 MiB where the system does not say.
int64_t last_level_cache_bytes(const std::vector<int32_t>& cpus);

// What may be allocated without pushing anything out: MemAvailable, or less where the process's cgroup (v1 or v2) or one
// above it has a limit. root: put before /proc and /sys; tests keep a tree of their own there.
int64_t available_memory_bytes(const std::string& root = "");

}  // namespace tools
