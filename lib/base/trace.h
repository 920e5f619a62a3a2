// SPDX-License-Identifier: MIT
// NVTX ranges for Nsight Systems, in builds with TANDEM_NVTX; empty in other builds. On the caller's thread there is a range
// for each call and, inside it, one for each request to the device's module. On a session's own thread there is a range for
// each host part. A range's name has the layer and the route of the part.
#pragma once

#include <cstdint>

#ifdef TANDEM_NVTX
#include <nvtx3/nvToolsExt.h>

#include <cstdio>
#endif

namespace tandem {

class TraceRange {
 public:
#ifdef TANDEM_NVTX
  TraceRange(const char* what, int32_t layer_idx, const char* route) {
    char name[64];
    std::snprintf(name, sizeof name, "tandem %s, layer %d, %s", what, layer_idx, route);
    nvtxRangePushA(name);
  }
  ~TraceRange() { nvtxRangePop(); }
#else
  TraceRange(const char*, int32_t, const char*) {}
  ~TraceRange() {}  // keeps the compiler from calling a range unused
#endif
  TraceRange(const TraceRange&) = delete;
};

}  // namespace tandem
