// SPDX-License-Identifier: MIT
// Engines that compute on ggml's threads.
//
// ggml's CPU backend computes each piece of a graph in a parallel region of OpenMP. Pieces of the same graph that Tandem
// computes run in regions of the same runtime and the same size, so that both find the same threads awake. Where ggml was
// built without OpenMP its threads cannot be lent, and the engine has a pool of its own.
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

  // The engine of so many threads, made by the first call. llama.cpp changes between two numbers, for prompts and for
  // tokens.
  int32_t find(tandem_engine** engine, int n_threads, tandem_error** error);

 private:
  std::map<int, tandem_engine*> engines_;
};

// Whether engines compute on ggml's threads.
bool ggml_lends_threads();

}  // namespace tandem_ggml_module
