// SPDX-License-Identifier: MIT
// Scratch memory aligned to cache lines.
#pragma once

#include <cstddef>
#include <memory>

#include "lib/base/status.h"

namespace tandem::cpu {

struct AlignedFree {
  void operator()(void* data) const;
};
using AlignedBytes = std::unique_ptr<std::byte, AlignedFree>;
Status allocate_aligned(size_t bytes, AlignedBytes* data);

}  // namespace tandem::cpu
