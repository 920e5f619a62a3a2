// SPDX-License-Identifier: MIT
// What a session knows of one sequence: where the window of each layer begins, what has been selected of the tokens before
// it, and the window in device memory.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "lib/call/named_keys.h"
#include "lib/pieces/device_window.h"
#include "lib/policy/selector.h"

namespace tandem {

// Where the keys are that a selector has named on the device for a sequence's last query.
enum class NamedOnDevice : uint8_t {
  kNone,       // nowhere: the query was not attended there, or the sequence has changed
  kAll,        // the query attended all keys
  kKept,       // in the sequence's own lists
  kGone,       // in lists that the next call takes the place of
  kByPattern,  // the query's head pattern says them
};

struct LayerState {
  int64_t window_begin = 0;
  std::unique_ptr<SelectState> selection;
  // What the last call has named for its last query; empty: it has named no keys. Of calls on device tensors the thread that
  // meets the device writes this.
  NotedKeys named{};
  NamedOnDevice on_device = NamedOnDevice::kNone;
  int64_t named_end = 0;     // of a query attended there: tokens that it sees
  int64_t named_block = -1;  // of kByPattern: the token of the first query of its block; -1: it was a decode call's
};

struct SequenceState {
  std::vector<LayerState> layers;
  DeviceWindow window;  // no pages without a device
};

}  // namespace tandem
