// SPDX-License-Identifier: MIT
#ifndef EXAMPLES_GENERATE_PROGRESS_BAR_H_
#define EXAMPLES_GENERATE_PROGRESS_BAR_H_

#include <chrono>
#include <cstdint>
#include <string>

namespace generate {

// "prefill [########        ]  50 %  8192 tokens  2100 tokens/s" on stderr: where that is a terminal, or when forced.
// Gone when the object goes.
class ProgressBar {
 public:
  ProgressBar(const char* label, int64_t n_tokens, bool forced);
  ~ProgressBar();
  ProgressBar(const ProgressBar&) = delete;
  ProgressBar& operator=(const ProgressBar&) = delete;
  void show(int64_t n_done);

 private:
  std::string label_;
  int64_t n_tokens_;
  bool shown_ = false, active_ = false, terminal_ = false;
  std::chrono::steady_clock::time_point start_;
};

}  // namespace generate

#endif  // EXAMPLES_GENERATE_PROGRESS_BAR_H_
