// SPDX-License-Identifier: MIT
// An emulated processor is some twenty times slower, sanitizers are ten: TANDEM_TEST_ONE_IN=n runs one of n cases of the
// long tests.
#pragma once

#include <cstdint>
#include <cstdlib>

namespace tandem::test {

// A prime takes its turn through all that a test's loops run over.
inline int64_t one_in() {
  const char* text = std::getenv("TANDEM_TEST_ONE_IN");
  const int64_t n = text != nullptr ? std::atoll(text) : 1;
  return n > 1 ? n : 1;
}

// The share of n cases, at least one of them.
inline int64_t some_of(int64_t n) { return (n + one_in() - 1) / one_in(); }

// Counts cases; true for the first, and one in n after it.
class TakesOneIn {
 public:
  bool operator()() { return n_++ % one_in() == 0; }

 private:
  int64_t n_ = 0;
};

}  // namespace tandem::test
