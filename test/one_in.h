// SPDX-License-Identifier: MIT
// Reduces long tests: TANDEM_TEST_ONE_IN=n runs one of n cases. An emulated processor is about 20 times slower, sanitizers
// about 10 times.
#pragma once

#include <cstdint>
#include <cstdlib>

namespace tandem::test {

// Returns n of TANDEM_TEST_ONE_IN. A prime n visits all values of a test's nested loops in turn.
inline int64_t one_in() {
  const char* text = std::getenv("TANDEM_TEST_ONE_IN");
  const int64_t n = text != nullptr ? std::atoll(text) : 1;
  return n > 1 ? n : 1;
}

// Returns a share of n cases, at least one.
inline int64_t some_of(int64_t n) { return (n + one_in() - 1) / one_in(); }

// Counts cases. Returns true for the first case and every n-th one after it.
class TakesOneIn {
 public:
  bool operator()() { return n_++ % one_in() == 0; }

 private:
  int64_t n_ = 0;
};

}  // namespace tandem::test
