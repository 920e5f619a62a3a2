// SPDX-License-Identifier: MIT
// A pool on threads that the caller lends. It starts no worker, and none spins or sleeps here.
#pragma once

#include <cstdint>
#include <memory>

#include "cpu/pool.h"
#include "tandem/tandem.h"

namespace tandem::cpu {

struct LentThreads {
  tandem_run_fn run = nullptr;
  void* user = nullptr;
  int32_t n_threads = 1;
};

std::unique_ptr<Pool> make_lent_pool(const LentThreads& threads);

}  // namespace tandem::cpu
