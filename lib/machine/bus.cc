// SPDX-License-Identifier: MIT
#include "lib/machine/bus.h"

#include <algorithm>

namespace tandem {

void Bus::join(BusFollower* weights) {
  const std::lock_guard lock(mutex_);
  weights_.push_back(weights);
}

void Bus::leave(BusFollower* weights) {
  const std::lock_guard lock(mutex_);
  std::erase(weights_, weights);
}

bool Bus::has_weights() const {
  const std::lock_guard lock(mutex_);
  return !weights_.empty();
}

void Bus::sent(int64_t bytes, void* event) {
  const std::lock_guard lock(mutex_);
  for (BusFollower* weights : weights_) weights->follow(bytes, event);
}

}  // namespace tandem
