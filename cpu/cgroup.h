// SPDX-License-Identifier: MIT
// The CPU quota that the process runs under (containers, systemd slices, batch systems).
//
// A quota is processor time per period, not a set of processors: 64 threads under a quota of 8 all run, then are all stopped
// for the rest of the period. A pool must therefore never have more busy threads than the quota has whole processors.
#pragma once

#include <cstdint>
#include <string>

namespace tandem::cpu {

struct CgroupPaths {
  std::string proc = "/proc/self";  // folder of the files `cgroup` and `mountinfo`
  std::string root;                 // put before every mount point; tests keep a tree of their own there
};

// Whole processors of the tightest quota between the process's cgroup and the root, v1 and v2, rounded down but at least
// 1; 0: no limit. What cannot be read or understood is no limit.
int32_t cpu_quota(const CgroupPaths& paths = {});

}  // namespace tandem::cpu
