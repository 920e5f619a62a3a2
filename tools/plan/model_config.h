// SPDX-License-Identifier: MIT
// Reads the geometry from a Hugging Face config.json.
#pragma once

#include "tools/plan/plan_options.h"

namespace tools {

// Sets layers, heads and head_dim from model_dir/config.json. Refuses a file that lacks one of them and names it.
Result read_model_config(const std::string& model_dir, PlanOptions* options);

}  // namespace tools
