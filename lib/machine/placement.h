// SPDX-License-Identifier: MIT
// Places each KV head on a NUMA node: its rows, and the jobs over them.
//
// Each node has consecutive heads, so that its part of an extent (lib/store/page_store.h) is one range of memory. The
// reason: the kernel keeps a mapping for every range with its own memory policy. A process may have 65,530 mappings, and no
// huge page lies in two of them. If a layer has fewer KV heads than there are nodes (MQA, MLA), its rows are spread over all
// nodes page by page, and any node may take its jobs.
#pragma once

#include <cstdint>

#include "lib/base/memory.h"
#include "lib/tables/backend.h"

namespace tandem {

inline int32_t n_nodes(const Backend& cpu) { return cpu.table->n_nodes(cpu.self); }

inline int32_t node_of_head(int32_t kv_head, int32_t n_kv_heads, int32_t n_nodes) {
  return n_kv_heads < n_nodes ? kAllNodes : static_cast<int32_t>(int64_t{kv_head} * n_nodes / n_kv_heads);
}

// Best effort. Places only the tier's own mappings: a policy on the caller's memory would outlive its free().
inline void place(const Backend& cpu, const Tier& tier, void* data, int64_t bytes, int32_t node) {
  if (n_nodes(cpu) > 1 && tier.maps()) cpu.table->place(cpu.self, data, bytes, node);
}

}  // namespace tandem
