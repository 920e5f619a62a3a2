// SPDX-License-Identifier: MIT
// Assignment for memory that threads pass to each other. A cache line that is not written stays in the caches of both cores.
#pragma once

namespace tandem {

template <typename T>
void set_if_other(T& to, const T& value) {
  if (!(to == value)) to = value;
}

}  // namespace tandem
