// SPDX-License-Identifier: MIT
// Work space of attend calls, kept between them: after the first call of a shape nothing is allocated.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "lib/call_shape.h"
#include "lib/host_part.h"
#include "lib/routes/call_plan.h"
#include "lib/routes/key_route.h"
#include "lib/scratch_floats.h"
#include "lib/sequence_call.h"

namespace tandem {

struct AttendScratch : FloatRows {
  std::vector<SequenceCall> calls;
  std::vector<SequenceShape> shapes;  // [n_calls] of a call on device tensors
  CallPlan plan;                      // of these
  std::array<std::vector<KeyPart>, kMostRoutes> parts;
  std::vector<int64_t> begin, end;  // of the keys that each query sees
  std::vector<uint64_t> tree_bits;
  std::vector<int32_t> depths;
  std::vector<int32_t> tree_positions;
  HostPart host;  // of the calls
};

}  // namespace tandem
