// SPDX-License-Identifier: MIT
// A session's state of one sequence: where each layer's window begins, the selection of older tokens, and the window in
// device memory.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "lib/call/named_keys.h"
#include "lib/pieces/device_window.h"
#include "lib/policy/selector.h"

namespace tandem {

// Where the device keeps the keys that a selector has named for a sequence's last query.
enum class NamedOnDevice : uint8_t {
  kNone,       // no keys are kept: the device did not attend the query, or the sequence has changed
  kAll,        // the query attended all keys
  kKept,       // in the sequence's own lists
  kGone,       // in lists that the next call overwrites
  kByPattern,  // given by the query's head pattern
};

struct LayerState {
  int64_t window_begin = 0;
  std::unique_ptr<SelectState> selection;
  // The keys that the last call has named for its last query; empty if the call named none. For calls on device tensors the
  // session's host thread writes this.
  NotedKeys named{};
  NamedOnDevice on_device = NamedOnDevice::kNone;
  int64_t named_end = 0;     // tokens that the last query attended on the device sees
  int64_t named_block = -1;  // for kByPattern: token of the first query of the last query's block; -1: a decode call
};

struct SequenceState {
  std::vector<LayerState> layers;
  DeviceWindow window;  // without pages if the session uses no device
};

}  // namespace tandem
