// SPDX-License-Identifier: MIT
// Cost of a call of the pool: an empty task for every worker, from the call to its return. Workers still spin after the
// previous call, or sleep. Not a test.
//
//   pool_bench [threads]
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "cpu/pool.h"

namespace {

double now_us() {
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void do_nothing(void*, int64_t, int32_t) {}

// Prints the median and the 90th percentile of n calls, each after the pause.
void measure(tandem::cpu::Pool& pool, const char* name, std::chrono::microseconds pause, int n) {
  std::vector<double> us;
  for (int i = 0; i < n; ++i) {
    if (pause.count() > 0) std::this_thread::sleep_for(pause);
    const double begin = now_us();
    pool.run(pool.n_workers(), do_nothing, nullptr);
    us.push_back(now_us() - begin);
  }
  std::sort(us.begin(), us.end());
  std::printf("%d workers, %-28s median %6.2f us, 90 %% within %6.2f us\n", pool.n_workers(), name, us[us.size() / 2],
              us[us.size() * 9 / 10]);
}

}  // namespace

int main(int argc, char** argv) {
  tandem::cpu::PoolOptions options;
  options.n_threads = argc > 1 ? std::atoi(argv[1]) : 0;
  std::unique_ptr<tandem::cpu::Pool> pool;
  if (!tandem::cpu::Pool::create(options, &pool).ok()) return 1;
  measure(*pool, "spinning", std::chrono::microseconds(0), 20000);
  pool->wake();
  measure(*pool, "awake, 200 us later", std::chrono::microseconds(200), 2000);
  pool->rest();
  measure(*pool, "asleep, 2 ms later", std::chrono::microseconds(2000), 500);
  return 0;
}
