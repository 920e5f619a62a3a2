// SPDX-License-Identifier: MIT
// Is what was timed also right? A few rows of the outputs against attention in double precision.
//
// The truth is computed on K and V as stored, read back through the library. A plain computation in f32 over the same
// rows says how far f32 can get. The gate, over all rows looked at:
//
//   max |o - truth| <= 2 max |plain - truth| + 1e-5
//   |o - truth| <= 4 eps sum_k p_k |v_k|         eps of the coarser of both storage types, times max(1, largest |logit|)
//                                                for f32, whose logits are not exact to eps
//   |lse - truth| <= 1e-5 (1 + |lse|)
//
// Where a call has so many query rows of a KV head that the engine goes through matrix products, and bf16 queries meet bf16
// values, the plain computation rounds its weights to bf16 before they meet the values, as matrix units do; sum and lse are
// of the weights before that. Rotated queries, by RoPE or before keys are stored, are f32, and so are their weights. Outputs
// in bf16 may add half a unit in the last place.
//
// Which keys a query attends is worked out here from the policy's rules. Keys that were chosen by attention weights (under
// "hgca", and by heads of "patterns" that search) are those that the library says.
#pragma once

#include <string>

#include "tools/bench/workload.h"
#include "tools/common/engine_report.h"

namespace tools {

// Runs one step (grown by q_len tokens; the caller truncates or lets it be) and looks at rows of the first and last
// layer and sequence. Fills *verdict with "ok" or "failed: ..."; a failing Result is about calls that failed.
Result check_outputs(Workload* workload, const MatmulRows& matmul_rows, std::string* verdict);

// Query `token` of a call, of a sequence that has kv_len tokens after it.
struct QueryOfCall {
  int64_t kv_len = 0, q_len = 1, token = 0, q_head = 0;
};
// Keys that it sees under the session's policy; under "patterns", where the head's keys are known ahead.
VisibleRange visible_range(const BenchOptions& options, const QueryOfCall& query);

}  // namespace tools
