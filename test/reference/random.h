// SPDX-License-Identifier: MIT
// Random numbers that are the same on every machine, so that a failure can be repeated from its seed.
#pragma once

#include <cmath>
#include <cstdint>
#include <initializer_list>

namespace reference {

class Random {
 public:
  explicit Random(uint64_t seed) : state_(mix(seed + 1)) {}  // mixed, because neighbouring seeds would share their stream

  uint64_t bits() { return mix(state_ += 0x9E3779B97F4A7C15u); }  // splitmix64
  // Returns an integer in [low, high].
  int64_t integer(int64_t low, int64_t high) {
    return low + static_cast<int64_t>(bits() % static_cast<uint64_t>(high - low + 1));
  }
  double uniform() { return static_cast<double>(bits() >> 11) * 0x1p-53; }
  bool chance(double p) { return uniform() < p; }
  double normal() {  // not a sum of uniforms, because the tails matter
    const double radius = std::sqrt(-2.0 * std::log(1.0 - uniform()));
    return radius * std::cos(6.283185307179586 * uniform());
  }
  template <typename T>
  T pick(std::initializer_list<T> values) {
    return values.begin()[integer(0, static_cast<int64_t>(values.size()) - 1)];
  }

 private:
  static uint64_t mix(uint64_t z) {
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
  }
  uint64_t state_;
};

}  // namespace reference
