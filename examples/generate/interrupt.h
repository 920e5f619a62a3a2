// SPDX-License-Identifier: MIT
// Ctrl-C and SIGTERM set a flag that long work polls. So a program ends in order: it prints the statistics so far, closes
// its files, and leaves no half line on the terminal.
//
// A separate thread waits for the signals, and all other threads block them. No handler may run on a computing thread: it
// may be in a matrix product whose stack pointer is not a stack's. If the work does not poll the flag for some seconds, or a
// second Ctrl-C comes, the program ends anyway.
#ifndef EXAMPLES_GENERATE_INTERRUPT_H_
#define EXAMPLES_GENERATE_INTERRUPT_H_

#include <cstdint>

namespace generate {

// Call once, before other threads are created, because they inherit the signal mask. An ignored signal (nohup, a shell's
// "&") stays ignored.
void catch_interrupts();

// Returns the flag, for tandem_attend_args::cancel. It is 0 until a signal comes.
const int32_t* interrupt_flag();
bool is_interrupted();

// Returns the exit code by the shells' convention: 130 for Ctrl-C, 143 for SIGTERM.
int interrupt_exit_code();

}  // namespace generate

#endif  // EXAMPLES_GENERATE_INTERRUPT_H_
