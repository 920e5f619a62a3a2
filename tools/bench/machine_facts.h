// SPDX-License-Identifier: MIT
// Facts about the machine for the probes, from /proc and /sys.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace tools {

// Returns the CPUs of the affinity mask: first one of each core, then the second threads of the same cores.
std::vector<int32_t> cpus_by_core();

// Returns the system's name of the processor, or "unknown".
std::string processor_name(const std::string& root = "");

// Returns the sum over the distinct last-level caches of these CPUs; 32 MiB if the system does not tell.
int64_t last_level_cache_bytes(const std::vector<int32_t>& cpus);

// Returns the bytes that can be allocated without swapping: MemAvailable, or less if the process's cgroup (v1 or v2) or one
// above it has a limit. root: prefix of /proc and /sys; tests use their own tree.
int64_t available_memory_bytes(const std::string& root = "");

}  // namespace tools
