// SPDX-License-Identifier: MIT
// Versions of the library and of its dependencies.
#pragma once

#include "tools/common/engine_report.h"

namespace tools {

// {"tandem": ..., "header": ..., "abi_fingerprint": ..., "compiler": ..., "hwloc": ..., ...}
Json build_versions();

}  // namespace tools
