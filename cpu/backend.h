// SPDX-License-Identifier: MIT
// Builds the CPU backend from its parts.
#pragma once

#include <memory>

#include "cpu/crossover.h"
#include "cpu/kernels/kernels.h"
#include "cpu/pool.h"
#include "lib/tables/backend.h"

namespace tandem::cpu {

Status make_cpu_backend(const KernelTable& kernels, const Crossover& crossover, std::unique_ptr<Pool> pool,
                        Backend* backend);

// Returns the KernelTable::target that a kernel recorded when it ran: of the first worker whose scratch has one. 0: no
// kernel has run.
int64_t target_used(const Backend& backend);

}  // namespace tandem::cpu
