// SPDX-License-Identifier: MIT
#include "interrupt.h"

#include <pthread.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <thread>

#include "progress_bar.h"

namespace generate {
namespace {

using Clock = std::chrono::steady_clock;
constexpr auto kPatience = std::chrono::seconds(5);             // until work that does not poll is ended
constexpr auto kOneKeystroke = std::chrono::milliseconds(500);  // some parents send a signal twice
constexpr int kOfSignals = 128;                                 // exit codes of signals begin here

int32_t signal_that_came = 0;

void watch(sigset_t signals) {
  int signal = 0;
  while (sigwait(&signals, &signal) != 0) {
  }
  __atomic_store_n(&signal_that_came, signal, __ATOMIC_RELAXED);
  const auto begin = Clock::now();
  for (auto waited = Clock::duration(); waited < kPatience; waited = Clock::now() - begin) {
    const auto left = std::chrono::duration_cast<std::chrono::nanoseconds>(kPatience - waited).count();
    const timespec timeout = {static_cast<time_t>(left / 1000000000), static_cast<long>(left % 1000000000)};
    if (sigtimedwait(&signals, nullptr, &timeout) > 0 && Clock::now() - begin > kOneKeystroke) break;
  }
  erase_progress();
  _exit(kOfSignals + signal);
}

}  // namespace

void catch_interrupts() {
  sigset_t signals;
  sigemptyset(&signals);
  bool has_any = false;
  for (const int signal : {SIGINT, SIGTERM}) {
    struct sigaction before = {};
    if (sigaction(signal, nullptr, &before) != 0 || before.sa_handler == SIG_IGN) continue;
    sigaddset(&signals, signal);
    has_any = true;
  }
  if (!has_any || pthread_sigmask(SIG_BLOCK, &signals, nullptr) != 0) return;
  std::thread(watch, signals).detach();
}

const int32_t* interrupt_flag() { return &signal_that_came; }

bool is_interrupted() { return __atomic_load_n(&signal_that_came, __ATOMIC_RELAXED) != 0; }

int interrupt_exit_code() { return kOfSignals + __atomic_load_n(&signal_that_came, __ATOMIC_RELAXED); }

}  // namespace generate
