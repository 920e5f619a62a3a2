// SPDX-License-Identifier: MIT
// Intel AMX for bf16. Linux lets a process use it on request. After the request every alternate signal stack of the process
// must hold 8 KiB more, for the tiles (sigaltstack() refuses smaller ones). So the request is made only before AMX is used.
#pragma once

namespace tandem::cpu {

// True if the processor and the Linux kernel support AMX. Changes nothing.
bool have_matrix_unit();
// Requests AMX for the process; once granted it stays. Returns false if Linux refuses, for example because a thread has a
// small signal stack.
bool request_matrix_unit();

}  // namespace tandem::cpu
