// SPDX-License-Identifier: MIT
// Intel AMX for bf16. Linux lets a process use it on request. From then on every alternate signal stack of the process must
// hold 8 KiB of tiles more (sigaltstack() refuses smaller ones), so nothing is requested before it is used.
#pragma once

namespace tandem::cpu {

// Whether processor and kernel have it. Changes nothing.
bool have_matrix_unit();
// Asks for it; once granted it stays. False where it is refused, by a thread with a small signal stack, say.
bool request_matrix_unit();

}  // namespace tandem::cpu
