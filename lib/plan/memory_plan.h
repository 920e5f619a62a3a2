// SPDX-License-Identifier: MIT
// What a cache and its session will hold, before anything is allocated.
#pragma once

#include <span>
#include <vector>

#include "lib/base/status.h"
#include "lib/machine/engine.h"
#include "lib/model/layer.h"

namespace tandem {

// layers: a model's, storage types not yet set. session may be null. kv_lens: of each sequence. Fills *plan (but for
// struct_size) even where a cap is exceeded and TANDEM_ERROR_CAPACITY is returned.
Status plan_memory(const Engine& engine, std::vector<Layer> layers, const tandem_cache_options& cache,
                   const tandem_session_options* session, std::span<const int64_t> kv_lens, tandem_memory_plan* plan);

}  // namespace tandem
