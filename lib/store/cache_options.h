// SPDX-License-Identifier: MIT
// Options of a cache: defaults filled in and checked.
#pragma once

#include <cstdint>
#include <vector>

#include "lib/base/status.h"
#include "lib/model/layer.h"

namespace tandem {

// Layers get their storage types. INVALID_ARGUMENT, UNSUPPORTED, naming the field.
Status resolve_cache_options(const tandem_cache_options& options, std::vector<Layer>* layers, int64_t* page_len);

}  // namespace tandem
