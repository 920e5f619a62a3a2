// SPDX-License-Identifier: MIT
// Holds back every signal of this thread while oneDNN computes f32 products.
//
// oneDNN's f32 gemm kernels ("gemm:jit", AVX2 and AVX-512) point the stack pointer into a heap buffer when the inner
// dimension is long (oneDNN issue 4845; fixed in 3.11.2 and 3.12; Debian 12 ships 2.6.3). The operating system's kernel
// writes the frame of a signal handler below the stack pointer. So a handler that runs during such a product overwrites the
// heap.
//
// The thread may be the caller's, with the caller's handlers, or a worker. Workers block the program's signals, but glibc
// sends its own (33) to every thread when a program changes its user or groups, and pthread_sigmask() refuses to block
// signal 33. So this class sets the mask by the system call itself.
//
// Cost: two system calls (0.2 us; 0.9 us in some virtual machines) for a tile of 512 keys, whose products take 20 us to some
// milliseconds. A signal waits for one tile at most. Alternatives cost more. If the inner dimension is kept short enough
// (64) for oneDNN's kernel to stay on the stack, products take 1.05 to 1.6 times as long. A thread that computes in place of
// the caller takes 4 to 8 us a call to wake and wait for, 2 to 4 % of a short append, and would not keep glibc's signal out.
#pragma once

#include <sys/syscall.h>
#include <unistd.h>

#include <csignal>
#include <cstdint>

namespace tandem::cpu {

class SignalsHeld {
 public:
  explicit SignalsHeld(bool needed = true) : needed_(needed) {
    if (needed_) syscall(SYS_rt_sigprocmask, SIG_SETMASK, &kAll, &before_, sizeof kAll);
  }
  ~SignalsHeld() {
    if (needed_) syscall(SYS_rt_sigprocmask, SIG_SETMASK, &before_, nullptr, sizeof before_);
  }
  SignalsHeld(const SignalsHeld&) = delete;
  SignalsHeld& operator=(const SignalsHeld&) = delete;

 private:
  using Mask = uint64_t;  // the Linux kernel's mask: a bit for each of 64 signals
  // A fault in the product itself must reach the program's crash handler at once.
  static constexpr Mask kFaults = Mask{1} << (SIGSEGV - 1) | Mask{1} << (SIGBUS - 1) | Mask{1} << (SIGFPE - 1) |
                                  Mask{1} << (SIGILL - 1) | Mask{1} << (SIGTRAP - 1) | Mask{1} << (SIGSYS - 1);
  static constexpr Mask kAll = ~kFaults;
  const bool needed_;
  Mask before_ = 0;
};

}  // namespace tandem::cpu
