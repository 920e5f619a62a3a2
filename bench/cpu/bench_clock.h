// SPDX-License-Identifier: MIT
// Measures the time of stretches of work.
#pragma once

#include <time.h>

#include <algorithm>
#include <chrono>
#include <vector>

namespace tandem::test {

inline double now_ns() {
  return static_cast<double>(std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1));
}

// Wall and processor time of a stretch of work.
struct Stretch {
  double wall = -now_ns(), cpu = -cpu_ns();
  static double cpu_ns() {
    timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return static_cast<double>(t.tv_sec) * 1e9 + static_cast<double>(t.tv_nsec);
  }
  void end() { wall += now_ns(), cpu += cpu_ns(); }
  // True if each thread had a core to itself all the time.
  bool was_undisturbed(int32_t n_threads) const { return cpu > 0.97 * wall * n_threads; }
};

inline double median(std::vector<double> x) {
  std::nth_element(x.begin(), x.begin() + static_cast<std::ptrdiff_t>(x.size() / 2), x.end());
  return x[x.size() / 2];
}

}  // namespace tandem::test
