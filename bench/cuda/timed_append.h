// SPDX-License-Identifier: MIT
// Appends the same tokens repeatedly behind the keys of a cache. Measures how long an append takes, and how far its last
// outputs are from the CPU's for the same queries over the host store.
#pragma once

#include "cuda/hybrid_case.h"

namespace tandem::test {

inline tandem_tensor last_rows(tandem_tensor of, int64_t n) {
  of.data = static_cast<std::byte*>(of.data) + (of.shape[0] - n) * of.shape[1] * of.shape[2] * 2;
  of.shape[0] = n;
  return of;
}

class TimedAppend {
 public:
  // n_checked: number of queries whose outputs are compared.
  TimedAppend(const HybridCache& cache, const tandem_session_options& options, Call& call, int64_t n_checked)
      : session_(cache, options), call_(call), n_(call.host_view[0].shape[0]), n_checked_(n_checked) {}

  // Returns the median of n_calls calls, after an untimed one.
  double us(int n_calls) {
    std::vector<double> times;
    for (int i = -1; i < n_calls; ++i) {
      begin_anew(session_.on.length);
      session_.wait();
      const auto begin = Clock::now();
      append(n_, call_.device_view, true);
      session_.wait();
      if (i >= 0) times.push_back(us_since(begin));
    }
    return median(times);
  }
  // Returns NaN if either side has written nothing.
  double error() {
    const std::vector<__nv_bfloat16> all = call_.device_output();
    const auto n_last = static_cast<size_t>(n_checked_ * kQHeads * kDim);
    const std::vector<__nv_bfloat16> got(all.end() - static_cast<std::ptrdiff_t>(n_last), all.end());
    begin_anew(session_.on.length + n_ - n_checked_);
    tandem_tensor views[4];
    for (int i = 0; i < 4; ++i) views[i] = last_rows(call_.host_view[i], n_checked_);
    append(n_checked_, views, false);
    return distance(got, {call_.o.end() - static_cast<std::ptrdiff_t>(n_last), call_.o.end()});
  }
  tandem_session_stats stats() const { return session_.stats(); }

 private:
  void begin_anew(int64_t length) { TANDEM(tandem_sequence_truncate, session_.on.cache, session_.on.sequences[0], length); }
  void append(int64_t n, const tandem_tensor* views, bool on_device) {
    session_.q_lens[0] = n;
    session_.attend(0, views, true, on_device);
  }

  HybridSession session_;
  Call& call_;
  int64_t n_, n_checked_;
};

}  // namespace tandem::test
