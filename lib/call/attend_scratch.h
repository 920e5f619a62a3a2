// SPDX-License-Identifier: MIT
// Work space of attend calls, kept between calls. After the first call of a shape, calls allocate nothing.
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
  std::vector<SequenceShape> shapes;  // [n_calls], for calls on device tensors
  CallPlan plan;                      // of these sequences
  std::vector<int64_t> pinned_ends;   // for each entry of plan.keys(): where the pinned tokens end
  std::array<std::vector<KeyPart>, kMostRoutes> parts;
  std::vector<int64_t> begin, end;  // [begin, end) of the tokens that each query sees
  std::vector<int64_t> capped_end;  // where each query's capped keys end: tokens
  std::vector<uint64_t> tree_bits;
  std::vector<int32_t> depths;
  std::vector<int32_t> tree_positions;
  // Where the caller names keys: rows in ascending order. Their indices are the caller's own or those in named_idx.
  NamedKeys named;
  std::vector<int32_t> named_idx, brought_idx;  // copies of indices: sorted, and as read from a device
  HostPart host;                                // for `calls`
};

}  // namespace tandem
