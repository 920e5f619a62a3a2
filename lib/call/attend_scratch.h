// SPDX-License-Identifier: MIT
// Work space of attend calls, kept between them: after the first call of a shape nothing is allocated.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "lib/base/scratch_floats.h"
#include "lib/call/call_plan.h"
#include "lib/call/call_shape.h"
#include "lib/call/host_part.h"
#include "lib/call/key_route.h"
#include "lib/call/sequence_call.h"

namespace tandem {

struct AttendScratch : FloatRows {
  std::vector<SequenceCall> calls;
  std::vector<SequenceShape> shapes;  // [n_calls] of a call on device tensors
  CallPlan plan;                      // of these
  std::vector<int64_t> pinned_ends;   // of the plan's keys: tokens
  std::array<std::vector<KeyPart>, kMostRoutes> parts;
  std::vector<int64_t> begin, end;  // of the keys that each query sees
  std::vector<int64_t> capped_end;  // likewise, of those that are further than RoPE is to see
  std::vector<uint64_t> tree_bits;
  std::vector<int32_t> depths;
  std::vector<int32_t> tree_positions;
  NamedKeys named;                              // where the caller names keys: rows that ascend, the caller's or these
  std::vector<int32_t> named_idx, brought_idx;  // copies of indices: in order, and as a device had them
  HostPart host;                                // of the calls
};

}  // namespace tandem
