// SPDX-License-Identifier: MIT
// What tests tell the stand-in of ggml (abi/ggml.h), and ask it.
#pragma once

#include <ggml-backend-impl.h>

#include <string>
#include <vector>

struct ggml_backend_buffer {};
struct ggml_cgraph {
  std::vector<ggml_tensor*> nodes;
};

namespace stand_in_ggml {

struct State {
  std::string version = "1.2.3";  // as the module is compiled for, in CMakeLists.txt
  std::string log;                // all that the module has logged
  bool has_openmp = true;         // what the CPU backend says of itself
  bool moves_reg = false;         // ggml looks for a device's registration elsewhere: its structs are others
};
State& state();

}  // namespace stand_in_ggml

// The module's.
extern "C" ggml_backend_reg_t ggml_backend_init(void);
