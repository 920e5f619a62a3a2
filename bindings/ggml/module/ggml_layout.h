// SPDX-License-Identifier: MIT
// Checks that the ggml that loads the module is the one that the module was compiled for.
#pragma once

#include <ggml-backend-impl.h>

#include <string>

namespace tandem_ggml_module {

// Returns "" if the ggml that loads the module has the layout that the module was compiled for. Otherwise returns how they
// differ. A backend fills in structs of ggml's private header. These change between versions without a change of the backend
// interface's own version, so ggml's versions must be equal. The check also asks for the one device of `reg`, to see that
// the loading ggml's functions find the members of `reg`.
std::string layout_mismatch(ggml_backend_reg_t reg);

}  // namespace tandem_ggml_module
