// SPDX-License-Identifier: MIT
// One problem for the numerics gate: a layer, a batch of sequences and one attend call, compared with the oracle.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "lib/harness.h"
#include "reference/gate.h"

namespace harness {

// Distribution of the numbers. Peaked and rising logits change a kernel's running maximum by more than exp can represent.
enum class Data { kNormal, kPeaked, kDiffuse, kRising, kFalling };

// Keys that the caller names (tandem_selection).
struct NamedCase {
  int64_t unit = 0;  // tokens; 0: the caller names no keys
  int64_t n_idx = 0;
  double share = 0.5;  // of a row's indices that name a unit; the others are pads
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
  bool no_append = false;  // k and v are NULL; the queries belong to tokens that are already stored
  bool want_lse = true;
  bool one_layer = false;  // false: an empty layer of another shape comes before the layer
  NamedCase named;
  bool shift = false;  // first removes a range; later positions are shifted (library RoPE) or kept
};

std::string describe(const GateCase& gate_case);
// Draws a case from all allowed combinations. The caller overrides the members that it sweeps. max_flops limits the cost of
// the truth.
GateCase random_case(uint64_t seed, double max_flops);
// Cuts the batch and q_lens until the truth costs at most max_flops.
void limit_flops(GateCase* gate_case, double max_flops);
void keep_to_common_scopes(GateCase* gate_case);
// Runs the case. On failure stops the test and prints the case, its seed and the first bad element.
reference::GateShares run_case(const GateCase& gate_case, tandem_engine* engine);

// Attends the sequences in one call, and copies of them one by one. Both must return the same bits.
void check_batch_mates(const GateCase& gate_case, tandem_engine* engine);

}  // namespace harness
