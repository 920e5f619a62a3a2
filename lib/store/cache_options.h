// SPDX-License-Identifier: MIT
// Fills in the defaults of a cache's options and checks them.
#pragma once

#include <cstdint>
#include <vector>

#include "lib/base/status.h"
#include "lib/model/layer.h"

namespace tandem {

// Sets the layers' storage types. Fails with INVALID_ARGUMENT or UNSUPPORTED, naming the field.
Status resolve_cache_options(const tandem_cache_options& options, std::vector<Layer>* layers, int64_t* page_len);

}  // namespace tandem
