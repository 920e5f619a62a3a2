// SPDX-License-Identifier: MIT
// Ranges of NVTX, for Nsight Systems, in builds with TANDEM_NVTX; else nothing. On the caller's thread they are the calls,
// and within one what is asked of the device's module; on a session's own thread its part. A range's name has the layer, and
// the route that the part takes.
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
  ~TraceRange() {}  // for the compiler a range is in use
#endif
  TraceRange(const TraceRange&) = delete;
};

}  // namespace tandem
