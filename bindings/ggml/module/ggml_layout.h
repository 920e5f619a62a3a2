// SPDX-License-Identifier: MIT
// Checks that the ggml that loads the module is the one that the module was compiled for.
#pragma once

#include <ggml-backend-impl.h>

#include <string>

namespace tandem_ggml_module {

// Returns "", or how the two differ. A backend fills in structs of ggml's private header. These change between versions
// without a change of the backend interface's own version, so ggml's versions must be equal. The loading ggml's functions
// must also find the members of `reg`, whose one device is asked for.
std::string layout_mismatch(ggml_backend_reg_t reg);

}  // namespace tandem_ggml_module
