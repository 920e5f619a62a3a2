// SPDX-License-Identifier: MIT
// The instruction sets of this build, best first, and the choice among them.
//
// The choice depends on what the processor reports, and each backend keeps its own. Highway's dispatch state, which the
// whole process shares, is neither used nor changed.
#pragma once

#include "cpu/kernels/kernels.h"
#include "lib/base/status.h"

namespace tandem::cpu {

// Returns the table of an index, best first; null past the end.
const KernelTable* isa_table(int32_t idx);
bool isa_available(const KernelTable& table);
// Must succeed before the kernels of `table` are used. Requests what the operating system grants only on request
// (cpu/matrix_unit.h).
bool enable_isa(const KernelTable& table);
// Chooses the instruction set called `name`. If `name` is null, takes $TANDEM_CPU_ISA if set, else the best one. The message
// of NOT_FOUND has the name and those that are available.
Status choose_isa(const char* name, const KernelTable** table);

}  // namespace tandem::cpu
