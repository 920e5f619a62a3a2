// SPDX-License-Identifier: MIT
// Whether the ggml that loads the module is the one that the module was compiled for.
#pragma once

#include <ggml-backend-impl.h>

#include <string>

namespace tandem_ggml_module {

// "" or why not. A backend fills in structs of ggml's private header, which change between versions without a change of
// the backend interface's own version. So versions must be equal. The functions of the loading ggml must also find the
// members of `reg`, whose one device is asked for, where they are.
std::string layout_mismatch(ggml_backend_reg_t reg);

}  // namespace tandem_ggml_module
