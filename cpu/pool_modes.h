// SPDX-License-Identifier: MIT
// Thread settings that hold while a thread runs tasks and are restored afterwards. A worker has them for life, a caller
// during run().
//
// OpenMP: oneDNN is built on it and would start a team of its own in every worker.
// Floating point: the default modes, so that a task gives the same bits on every worker.
#pragma once

#include <omp.h>

#include "lib/base/fp_modes.h"

namespace tandem::cpu {

// While an object lives, OpenMP regions of this thread run on this thread alone. Its destructor restores the caller's
// setting.
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
