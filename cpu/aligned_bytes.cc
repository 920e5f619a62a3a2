// SPDX-License-Identifier: MIT
#include "cpu/aligned_bytes.h"

#include <new>

namespace tandem::cpu {
namespace {
constexpr std::align_val_t kAlignment{64};
}  // namespace

void AlignedFree::operator()(void* data) const { ::operator delete(data, kAlignment); }

Status allocate_aligned(size_t bytes, AlignedBytes* data) {
  void* made = ::operator new(bytes, kAlignment, std::nothrow);
  if (made == nullptr) return fail(TANDEM_ERROR_OUT_OF_MEMORY, "", "no memory for %zu bytes of scratch", bytes);
  data->reset(static_cast<std::byte*>(made));
  return {};
}

}  // namespace tandem::cpu
