// SPDX-License-Identifier: MIT
// XXH3 (64 bits, seed 0) of bytes that are added piece by piece.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tandem {

class Checksum {
 public:
  Checksum();
  void start();  // starts a new checksum
  void add(const void* data, int64_t bytes);
  uint64_t value() const;

 private:
  alignas(64) std::byte state_[640];
};

uint64_t checksum_of(const void* data, int64_t bytes);

}  // namespace tandem
