// SPDX-License-Identifier: MIT
// What a thread must have while it runs tasks, and gives back afterwards. A worker has it for life, a caller during run().
//
// OpenMP: oneDNN is built on it, and would start a team of its own in every worker.
// Floating point: the default modes, so that a task gives the same bits on whichever worker it lands, also when
// the caller flushes denormals to zero or traps on exceptions.
#pragma once

#include <omp.h>

#include <cstdint>

namespace tandem::cpu {

class TaskModes {
 public:
  TaskModes() : n_omp_threads_(omp_get_max_threads()), fp_modes_(fp_modes()) {
    if (n_omp_threads_ != 1) omp_set_num_threads(1);
    set_fp_modes(kDefaultFpModes);
  }
  ~TaskModes() {
    set_fp_modes(fp_modes_);
    if (n_omp_threads_ != 1) omp_set_num_threads(n_omp_threads_);
  }
  TaskModes(const TaskModes&) = delete;
  TaskModes& operator=(const TaskModes&) = delete;

 private:
#if defined(__x86_64__)
  static constexpr uint32_t kDefaultFpModes = 0x1f80;  // MXCSR: nearest even, all exceptions masked, denormals kept
  static uint64_t fp_modes() { return __builtin_ia32_stmxcsr(); }
  static void set_fp_modes(uint64_t modes) { __builtin_ia32_ldmxcsr(static_cast<uint32_t>(modes)); }
#elif defined(__aarch64__)
  static constexpr uint64_t kDefaultFpModes = 0;  // FPCR
  static uint64_t fp_modes() {
    uint64_t modes;
    asm volatile("mrs %0, fpcr" : "=r"(modes));
    return modes;
  }
  static void set_fp_modes(uint64_t modes) { asm volatile("msr fpcr, %0" : : "r"(modes)); }
#else
  static constexpr uint64_t kDefaultFpModes = 0;
  static uint64_t fp_modes() { return 0; }
  static void set_fp_modes(uint64_t) {}
#endif

  int n_omp_threads_;
  uint64_t fp_modes_;
};

}  // namespace tandem::cpu
