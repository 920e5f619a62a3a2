// SPDX-License-Identifier: MIT
// Engines that compute on ggml's threads.
//
// ggml's CPU backend computes each part of a graph in a parallel region of OpenMP. Tandem's parts of the same graph run in
// regions of the same runtime and the same size, so both find the same threads awake. A ggml without OpenMP cannot lend its
// threads. Then the engine has its own pool.
#pragma once

#include <map>

#include "tandem/tandem.h"

namespace tandem_ggml_module {

class LentEngines {
 public:
  LentEngines() = default;
  ~LentEngines();
  LentEngines(const LentEngines&) = delete;
  LentEngines& operator=(const LentEngines&) = delete;

  // Returns the engine with n_threads threads, which the first call makes. llama.cpp alternates between two numbers, for
  // prompts and for single tokens.
  int32_t find(tandem_engine** engine, int n_threads, tandem_error** error);

 private:
  std::map<int, tandem_engine*> engines_;
};

// Returns whether engines compute on ggml's threads.
bool ggml_lends_threads();

}  // namespace tandem_ggml_module
