// SPDX-License-Identifier: MIT
// An operation that stops a stream of the stand-in until the test opens it. A delay cannot replace it: the test's own thread
// may wait for a core longer than any delay.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <thread>

#include "device/stand_in.h"
#include "device/stand_in_stream.h"
#include "with_cmocka.h"

namespace stand_in {

// Opens by itself after a minute, so a test that waits for the stream fails in time.
class Gate {
 public:
  // stream: the stream to stop; null: the default stream.
  explicit Gate(const Controls& controls, void* stream = nullptr) {
    const Graph graph{[is_open = is_open_] {
      for (int i = 0; i < 60'000 && !*is_open; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      *is_open = true;
    }};
    if (!controls.launch(&graph, stream)) fail_msg("the stream takes no gate");
  }
  Gate(const Gate&) = delete;
  ~Gate() { open(); }

  void open() { *is_open_ = true; }
  bool is_open() const { return *is_open_; }

 private:
  std::shared_ptr<std::atomic<bool>> is_open_ = std::make_shared<std::atomic<bool>>(false);
};

}  // namespace stand_in
