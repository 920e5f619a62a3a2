// SPDX-License-Identifier: MIT
// Ctrl-C and SIGTERM as a flag that long work looks at, so that a program ends in order: with the statistics so far, files
// closed, and no half a line on the terminal.
//
// A thread of its own waits for the signals, which all other threads block. No handler runs on a thread that computes: it
// may be in a matrix product whose stack pointer is no stack's. Work that does not look at the flag for some seconds is
// ended all the same, and so it is by a second Ctrl-C.
#ifndef EXAMPLES_GENERATE_INTERRUPT_H_
#define EXAMPLES_GENERATE_INTERRUPT_H_

#include <cstdint>

namespace generate {

// Once, before other threads are made: they inherit what is blocked. A signal that is ignored (nohup, a shell's "&") stays
// so.
void catch_interrupts();

// 0 until a signal has come. The address is for tandem_attend_args::cancel.
const int32_t* interrupt_flag();
bool is_interrupted();

// As shells count: 130 for Ctrl-C, 143 for SIGTERM.
int interrupt_exit_code();

}  // namespace generate

#endif  // EXAMPLES_GENERATE_INTERRUPT_H_
