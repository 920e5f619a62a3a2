// SPDX-License-Identifier: MIT
// The instruction sets of this build, best first, and the choice among them.
//
// The choice is made from what the processor reports and kept by each backend. Highway's own dispatch state, which the whole
// process shares, is neither used nor changed.
#pragma once

#include "cpu/kernels/kernels.h"
#include "lib/base/status.h"

namespace tandem::cpu {

// Table by index, best first; null past the end.
const KernelTable* isa_table(int32_t idx);
bool isa_available(const KernelTable& table);
// Before its kernels are used: asks the operating system for what it wants to be asked for (cpu/matrix_unit.h).
bool enable_isa(const KernelTable& table);
// name: exactly this one, or null for $TANDEM_CPU_ISA where that is set, else the best. NOT_FOUND names it and what there
// is.
Status choose_isa(const char* name, const KernelTable** table);

}  // namespace tandem::cpu
