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

// Returns Highway's number of the instruction set of the kernel that attended last, as the kernel itself recorded it.
int64_t target_used(const Backend& backend);

}  // namespace tandem::cpu
