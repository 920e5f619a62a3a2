// SPDX-License-Identifier: MIT
// Shapes of known models, for measuring with random weights.
#ifndef EXAMPLES_GENERATE_MODEL_SHAPES_H_
#define EXAMPLES_GENERATE_MODEL_SHAPES_H_

#include <string>
#include <vector>

#include "failure.h"
#include "llama_config.h"

namespace generate {

std::vector<std::string> model_shape_names();
// Finds the shapes with this name. The failure lists the known names.
Failure find_model_shapes(ModelConfig* config, const std::string& name);

}  // namespace generate

#endif  // EXAMPLES_GENERATE_MODEL_SHAPES_H_
