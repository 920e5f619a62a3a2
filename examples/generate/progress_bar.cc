// SPDX-License-Identifier: MIT
#include "progress_bar.h"

#include <unistd.h>

#include <cstdio>

namespace generate {

ProgressBar::ProgressBar(const char* label, int64_t n_tokens, bool forced)
    : label_(label ? label : ""), n_tokens_(n_tokens), start_(std::chrono::steady_clock::now()) {
  terminal_ = isatty(STDERR_FILENO) != 0;
  active_ = label != nullptr && n_tokens > 0 && (terminal_ || forced);
}

ProgressBar::~ProgressBar() {
  if (!shown_) return;
  if (terminal_)
    std::fprintf(stderr, "\r\033[K");
  else
    std::fputc('\n', stderr);
}

void ProgressBar::show(int64_t n_done) {
  constexpr int kWidth = 32;
  if (!active_) return;
  shown_ = true;
  char bar[kWidth + 1] = {};
  for (int i = 0; i < kWidth; ++i) bar[i] = i * n_tokens_ < n_done * kWidth ? '#' : ' ';
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  std::fprintf(stderr, "\r%s [%s] %3lld %%  %lld tokens  %.0f tokens/s ", label_.c_str(), bar,
               static_cast<long long>(100 * n_done / n_tokens_), static_cast<long long>(n_done),
               seconds > 0 ? static_cast<double>(n_done) / seconds : 0.0);
  std::fflush(stderr);
}

}  // namespace generate
