// SPDX-License-Identifier: MIT
#pragma once

namespace tandem::cpu {

// Whether this processor has Intel AMX for bf16 and the kernel lets this process use it, which is asked for once: tiles are
// 8 KiB of state for each thread that touches them.
bool have_matrix_unit();

}  // namespace tandem::cpu
