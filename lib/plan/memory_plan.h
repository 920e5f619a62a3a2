// SPDX-License-Identifier: MIT
// Predicts the memory of a cache and its session before anything is allocated.
#pragma once

#include <span>
#include <vector>

#include "lib/base/status.h"
#include "lib/machine/engine.h"
#include "lib/model/layer.h"

namespace tandem {

// layers: a model's, without storage types. session may be null. kv_lens: the length of each sequence. Fills *plan (except
// for struct_size) even if a cap is exceeded and TANDEM_ERROR_CAPACITY is returned.
Status plan_memory(const Engine& engine, std::vector<Layer> layers, const tandem_cache_options& cache,
                   const tandem_session_options* session, std::span<const int64_t> kv_lens, tandem_memory_plan* plan);

}  // namespace tandem
