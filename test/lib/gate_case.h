// SPDX-License-Identifier: MIT
// One problem for the numerics gate: a layer, a batch of sequences, one attend call, compared with the oracle.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "lib/harness.h"
#include "reference/gate.h"

namespace harness {

// What the numbers look like. Peaked and rising logits move the running maximum of a kernel by more than exp can carry.
enum class Data { kNormal, kPeaked, kDiffuse, kRising, kFalling };

// Keys that the caller names (tandem_selection).
struct NamedCase {
  int64_t unit = 0;  // tokens; 0: none are named
  int64_t n_idx = 0;
  double share = 0.5;  // of the indices of a row; the others are pads
  bool shared = false, any_order = false, plus_window = false;
};

struct GateCase {
  uint64_t seed = 0;
  reference::RefLayer layer;
  reference::Scope scope;
  Data data = Data::kNormal;
  int32_t page_tokens = 0;
  std::vector<int64_t> kv_lens;  // tokens before the call
  std::vector<int64_t> q_lens;
  int32_t q_type = TANDEM_F32, o_type = TANDEM_F32, k_in_type = TANDEM_F32, v_in_type = TANDEM_F32;
  bool tree = false;       // speculative, random parents
  bool chain = false;      // speculative without parents
  bool no_append = false;  // k and v NULL: queries are tokens already there
  bool want_lse = true;
  bool one_layer = false;  // else an empty layer of another shape stands before it
  NamedCase named;
  bool shift = false;  // removes a range first, positions shifted (library RoPE) or kept
};

std::string describe(const GateCase& gate_case);
// A case drawn from everything that is allowed together; the caller overrides what it sweeps. max_flops bounds the truth.
GateCase random_case(uint64_t seed, double max_flops);
// Cuts the batch and q_lens until the truth costs at most max_flops.
void limit_flops(GateCase* gate_case, double max_flops);
void keep_to_common_scopes(GateCase* gate_case);
// Runs it; stops the test with the case, its seed and the first bad element.
reference::GateShares run_case(const GateCase& gate_case, tandem_engine* engine);

// Attends the sequences in one call, and copies of them one by one: bits must be the same.
void check_batch_mates(const GateCase& gate_case, tandem_engine* engine);

}  // namespace harness
