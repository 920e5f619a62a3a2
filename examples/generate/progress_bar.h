// SPDX-License-Identifier: MIT
#ifndef EXAMPLES_GENERATE_PROGRESS_BAR_H_
#define EXAMPLES_GENERATE_PROGRESS_BAR_H_

#include <chrono>
#include <cstdint>
#include <string>

namespace generate {

// Shows "prefill [########        ]  50 %  8192 tokens  2100 tokens/s  4 s left" on stderr. It appears on a terminal that
// can erase a line, after one second of work, or at once when forced. The destructor erases it.
class ProgressBar {
 public:
  // An empty label means no bar.
  ProgressBar(std::string label, int64_t n_units, const char* unit, bool forced = false);
  ~ProgressBar();
  ProgressBar(const ProgressBar&) = delete;
  ProgressBar& operator=(const ProgressBar&) = delete;
  void show(int64_t n_done);

 private:
  std::string label_;
  int64_t n_units_;
  const char* unit_;
  bool forced_, is_shown_ = false, is_active_ = false, is_terminal_ = false;
  std::chrono::steady_clock::time_point start_, last_;
};

// Returns "9 s", "2 min 5 s" or "3 h 20 min".
std::string duration_text(double seconds);

// Erases the line of a bar that is on the terminal now, drawn by any thread.
void erase_progress();

}  // namespace generate

#endif  // EXAMPLES_GENERATE_PROGRESS_BAR_H_
