// SPDX-License-Identifier: MIT
// The state of the stand-in of ggml (abi/ggml.h) that tests set and read.
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
  std::string version = "1.2.3";  // the version that the module is compiled for, in CMakeLists.txt
  std::string log;                // everything that the module has logged
  bool has_openmp = true;         // whether the CPU backend reports OpenMP
  bool moves_reg = false;  // true: ggml reads a device's registration at another offset, as if its structs had changed
};
State& state();

}  // namespace stand_in_ggml

// The module exports this function.
extern "C" ggml_backend_reg_t ggml_backend_init(void);
