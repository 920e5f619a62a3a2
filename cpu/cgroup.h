// SPDX-License-Identifier: MIT
// The CPU quota that the process runs under (containers, systemd slices, batch systems).
//
// A quota is processor time per period, not a set of processors. Under a quota of 8, all of 64 threads run at first and are
// then all stopped for the rest of the period. So a pool must never have more busy threads than the quota has whole
// processors.
#pragma once

#include <cstdint>
#include <string>

namespace tandem::cpu {

struct CgroupPaths {
  std::string proc = "/proc/self";  // folder with the files `cgroup` and `mountinfo`
  std::string root;                 // prefix of every mount point; tests use their own tree
};

// Returns the tightest quota between the process's cgroup and the root (v1 and v2) in whole processors, rounded down but at
// least 1. 0 means no limit. A file that cannot be read or parsed counts as "no limit".
int32_t cpu_quota(const CgroupPaths& paths = {});

}  // namespace tandem::cpu
