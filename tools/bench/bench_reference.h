// SPDX-License-Identifier: MIT
// Checks the outputs of the timed calls: compares a few rows with attention in double precision.
//
// The truth is computed on K and V as stored, read back through the library. A plain computation in f32 over the same rows
// shows the error that f32 allows. Every checked row must pass:
//
//   max |o - truth| <= 2 max |plain - truth| + 1e-5
//   |o - truth| <= 4 eps sum_k p_k |v_k|         eps of the coarser of both storage types, times max(1, largest |logit|)
//                                                for f32, whose logits are not exact to eps
//   |lse - truth| <= 1e-5 (1 + |lse|)
//
// If a call has so many query rows of a KV head that the engine uses matrix products, and bf16 queries meet bf16 values, the
// plain computation rounds its weights to bf16 before it multiplies them with values, as matrix units do. sum and lse use
// the unrounded weights. Rotated queries (by RoPE, or before keys are stored) are f32, and so are their weights. Outputs in
// bf16 may add half a unit in the last place.
//
// This file works out from the policy's rules which keys a query attends. For keys chosen by attention weights (under
// "hgca", and by heads of "patterns" that search) it takes the library's answer.
#pragma once

#include <string>

#include "tools/bench/workload.h"
#include "tools/common/engine_report.h"

namespace tools {

// Runs one step (the sequences grow by q_len tokens; the caller may truncate them) and checks rows of the first and last
// layer and sequence. Sets *verdict to "ok" or "failed: ...". Fails only if a call fails.
Result check_outputs(Workload* workload, const MatmulRows& matmul_rows, std::string* verdict);

// Query `token` of a call on a sequence that has kv_len tokens after the call.
struct QueryOfCall {
  int64_t kv_len = 0, q_len = 1, token = 0, q_head = 0;
};
// Returns the keys that the query sees under the session's policy. Under "patterns" only for heads that are known ahead.
VisibleRange visible_range(const BenchOptions& options, const QueryOfCall& query);

}  // namespace tools
