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
  // The keys that the last call has named for its last query, [1 or n_kv_heads]; empty: it has named none. Of calls on
  // device tensors the thread that meets the device writes them.
  std::vector<std::vector<TokenRange>> named{};
  bool named_on_device = false;  // a selector has named them on the device, where they are
};

struct SequenceState {
  std::vector<LayerState> layers;
  DeviceWindow window;  // no pages without a device
};

}  // namespace tandem
