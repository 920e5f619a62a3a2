// SPDX-License-Identifier: MIT
// What a thread must have while it runs tasks, and gives back afterwards. A worker has it for life, a caller during run().
//
// OpenMP: oneDNN is built on it, and would start a team of its own in every worker.
// Floating point: the default modes, so that a task gives the same bits on whichever worker it lands.
#pragma once

#include <omp.h>

#include "lib/fp_modes.h"

namespace tandem::cpu {

class TaskModes {
 public:
  TaskModes() : n_omp_threads_(omp_get_max_threads()) {
    if (n_omp_threads_ != 1) omp_set_num_threads(1);
  }
  ~TaskModes() {
    if (n_omp_threads_ != 1) omp_set_num_threads(n_omp_threads_);
  }
  TaskModes(const TaskModes&) = delete;
  TaskModes& operator=(const TaskModes&) = delete;

 private:
  DefaultFpModes fp_modes_;
  int n_omp_threads_;
};

}  // namespace tandem::cpu
