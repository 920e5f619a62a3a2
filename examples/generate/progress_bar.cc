// SPDX-License-Identifier: MIT
#include "progress_bar.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

namespace generate {
namespace {

constexpr double kSilence = 1, kInterval = 0.1;  // seconds before the first line, and between two lines
constexpr char kErase[] = "\r\033[K";

std::atomic<bool> is_on_terminal = false;

bool can_erase() {
  const char* terminal = std::getenv("TERM");
  return isatty(STDERR_FILENO) != 0 && terminal != nullptr && std::strcmp(terminal, "dumb") != 0;
}

size_t terminal_columns() {
  winsize size = {};
  return ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 1 ? size.ws_col : 80;
}

double seconds_between(std::chrono::steady_clock::time_point begin, std::chrono::steady_clock::time_point end) {
  return std::chrono::duration<double>(end - begin).count();
}

}  // namespace

std::string duration_text(double seconds) {
  const auto whole = static_cast<long long>(std::ceil(seconds));
  char text[64];
  if (whole < 60)
    std::snprintf(text, sizeof text, "%lld s", whole);
  else if (whole < 3600)
    std::snprintf(text, sizeof text, "%lld min %lld s", whole / 60, whole % 60);
  else
    std::snprintf(text, sizeof text, "%lld h %lld min", whole / 3600, whole % 3600 / 60);
  return text;
}

void erase_progress() {
  if (is_on_terminal && write(STDERR_FILENO, kErase, sizeof kErase - 1) < 0) return;
}

ProgressBar::ProgressBar(std::string label, int64_t n_units, const char* unit, bool forced)
    : label_(std::move(label)), n_units_(n_units), unit_(unit), forced_(forced), start_(std::chrono::steady_clock::now()) {
  is_terminal_ = can_erase();
  is_active_ = !label_.empty() && n_units > 0 && (is_terminal_ || forced);
}

ProgressBar::~ProgressBar() {
  if (!is_shown_) return;
  is_on_terminal = false;
  std::fputs(is_terminal_ ? kErase : "\n", stderr);
}

void ProgressBar::show(int64_t n_done) {
  if (!is_active_) return;
  const auto now = std::chrono::steady_clock::now();
  const double seconds = seconds_between(start_, now);
  if (!forced_ && (seconds < kSilence || (is_shown_ && seconds_between(last_, now) < kInterval))) return;
  is_shown_ = true;
  is_on_terminal = is_terminal_;
  last_ = now;
  const double per_second = seconds > 0 ? static_cast<double>(n_done) / seconds : 0;
  char counts[128];
  std::snprintf(counts, sizeof counts, " %3lld %%  %lld %s  %.*f %s/s", static_cast<long long>(100 * n_done / n_units_),
                static_cast<long long>(n_done), unit_, per_second < 10 ? 1 : 0, per_second, unit_);
  std::string end = counts;
  const int64_t n_left = n_units_ - n_done;
  if (n_left > 0 && n_done > 0) end += "  " + duration_text(static_cast<double>(n_left) / per_second) + " left";
  // A line longer than the terminal's width could not be erased.
  const size_t most = is_terminal_ ? terminal_columns() - 1 : 1000, used = label_.size() + end.size() + 3;
  std::string line = label_;
  if (used + 4 <= most) {
    const auto width = static_cast<int64_t>(std::min<size_t>(32, most - used));
    line += " [";
    for (int64_t i = 0; i < width; ++i) line += i * n_units_ < n_done * width ? '#' : ' ';
    line += ']';
  }
  std::fprintf(stderr, "\r%s%s", (line + end).substr(0, most).c_str(), is_terminal_ ? "\033[K" : " ");
  std::fflush(stderr);
}

}  // namespace generate
