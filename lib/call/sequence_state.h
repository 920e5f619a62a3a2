// SPDX-License-Identifier: MIT
// What a session knows of one sequence: where the window of each layer begins, what has been selected of the tokens before
// it, and the window in device memory.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "lib/pieces/device_window.h"
#include "lib/policy/selector.h"

namespace tandem {

struct LayerState {
  int64_t window_begin = 0;
  std::unique_ptr<SelectState> selection;
};

struct SequenceState {
  std::vector<LayerState> layers;
  DeviceWindow window;  // no pages without a device
};

}  // namespace tandem
