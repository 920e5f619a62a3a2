// SPDX-License-Identifier: MIT
#include "lib/base/checksum.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <new>

namespace tandem {
namespace {

XXH3_state_t* state_in(std::byte* bytes) { return std::launder(reinterpret_cast<XXH3_state_t*>(bytes)); }
const XXH3_state_t* state_in(const std::byte* bytes) { return std::launder(reinterpret_cast<const XXH3_state_t*>(bytes)); }

}  // namespace

Checksum::Checksum() {
  static_assert(sizeof(XXH3_state_t) <= sizeof state_ && alignof(XXH3_state_t) <= alignof(Checksum));
  new (state_) XXH3_state_t;
  start();
}

void Checksum::start() { XXH3_64bits_reset(state_in(state_)); }

void Checksum::add(const void* data, int64_t bytes) {
  if (bytes > 0) XXH3_64bits_update(state_in(state_), data, static_cast<size_t>(bytes));
}

uint64_t Checksum::value() const { return XXH3_64bits_digest(state_in(state_)); }

uint64_t checksum_of(const void* data, int64_t bytes) { return XXH3_64bits(data, static_cast<size_t>(bytes)); }

}  // namespace tandem
