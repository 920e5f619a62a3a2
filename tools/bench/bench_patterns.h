// SPDX-License-Identifier: MIT
// Policy "patterns" in tandem-bench: one layer of a file of head patterns, which all layers of the benchmark use. The rules
// of patterns.h are implemented here apart from the library, and the library's outputs and counts are compared with them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tools/common/result.h"

namespace tools {

struct BenchPatterns {
  std::string path;                        // of the file of head patterns; empty: another policy
  int64_t layer_idx = 0;                   // layer of the file
  std::vector<tandem_head_pattern> heads;  // [n_q_heads] of that layer
};

struct LayerHeads {
  int64_t n_q_heads = 0, n_kv_heads = 0;
};

// Fills patterns->heads. Refuses a file whose layers have another number of heads, or that lacks the layer.
Result read_bench_patterns(const LayerHeads& layer, BenchPatterns* patterns);

// The keys that a query attends: [0, sink_end) and [begin, end).
struct VisibleRange {
  int64_t sink_end = 0, begin = 0, end = 0;
  int64_t n_keys() const { return sink_end + end - begin; }
};

// A query of a call.
struct PatternQuery {
  int64_t q_head = 0, group_size = 1;
  int64_t first_query = 0;  // token of the sequence's first query in the call
  int64_t q_len = 1;        // queries of the sequence in the call
  int64_t token = 0;        // index of the query, counted from first_query
};

// True if positions alone determine the keys that the head attends in calls of q_len queries. With q_len = 1 that holds for
// all heads.
bool is_known_ahead(const tandem_head_pattern& head, int64_t q_len);

// Returns the keys of a query. Only for heads that are known ahead.
VisibleRange pattern_range(const std::vector<tandem_head_pattern>& heads, const PatternQuery& query);

// Returns the first query of the block that ends a call of q_len queries. All later queries attend the same keys, up to
// their own.
int64_t last_block(int64_t q_len);

// Returns the least number of keys that a call of q_len queries reads for a KV head, on average. A head that searches for
// its keys reads more; that number is not known before the call.
int64_t least_keys(const std::vector<tandem_head_pattern>& heads, int64_t group_size, int64_t q_len, int64_t kv_len);

}  // namespace tools
