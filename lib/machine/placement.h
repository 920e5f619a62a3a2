// SPDX-License-Identifier: MIT
// Which NUMA node has a KV head: its rows, and the jobs over them.
//
// Each node has consecutive heads, so that all it has of an extent (lib/store/page_store.h) can be one piece. For the kernel
// keeps a mapping for every stretch of memory with a policy of its own, of which a process may have 65,530, and no huge page
// lies in two. Where a layer has fewer KV heads than there are nodes (MQA, MLA), its rows are spread over all of them page
// by page, and its jobs are anybody's.
#pragma once

#include <cstdint>

#include "lib/base/memory.h"
#include "lib/tables/backend.h"

namespace tandem {

inline int32_t n_nodes(const Backend& cpu) { return cpu.table->n_nodes(cpu.self); }

inline int32_t node_of_head(int32_t kv_head, int32_t n_kv_heads, int32_t n_nodes) {
  return n_kv_heads < n_nodes ? kAllNodes : static_cast<int32_t>(int64_t{kv_head} * n_nodes / n_kv_heads);
}

// Best effort. A mapping of the tier's own alone: the policy of the caller's memory would outlive its free().
inline void place(const Backend& cpu, const Tier& tier, void* data, int64_t bytes, int32_t node) {
  if (n_nodes(cpu) > 1 && tier.maps()) cpu.table->place(cpu.self, data, bytes, node);
}

}  // namespace tandem
