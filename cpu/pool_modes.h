// SPDX-License-Identifier: MIT
// What a thread must have while it runs tasks, and gives back afterwards. A worker has it for life, a caller during run().
//
// OpenMP: oneDNN is built on it, and would start a team of its own in every worker.
// Floating point: the default modes, so that a task gives the same bits on whichever worker it lands.
#pragma once

#include <omp.h>

#include "lib/base/fp_modes.h"

namespace tandem::cpu {

// While it lives, OpenMP regions of this thread run on this thread alone; the caller's setting comes back after.
class SingleThread {
 public:
  SingleThread() : before_(omp_get_max_threads()) {
    if (before_ != 1) omp_set_num_threads(1);
  }
  ~SingleThread() {
    if (before_ != 1) omp_set_num_threads(before_);
  }
  SingleThread(const SingleThread&) = delete;
  SingleThread& operator=(const SingleThread&) = delete;

 private:
  int before_;
};

class TaskModes {
 private:
  DefaultFpModes fp_modes_;
  SingleThread single_thread_;
};

}  // namespace tandem::cpu
