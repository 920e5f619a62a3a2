// SPDX-License-Identifier: MIT
// The way from the host to a device, which the pieces of sessions and offloaded weights share. A piece of keys or hidden
// states is sent when a buffer is free for it, and the device has work as soon as it is there; weights may cross at any time
// before they are used. Sent as soon as there is room for them, all weights of a layer would keep the device waiting for its
// next piece, and the bus would wait afterwards while pieces are worked on. So weights take turns behind pieces:
//
//   all at once   | weights of the next layer       | piece |       | piece |       | piece | ...
//   in turns      | piece | weights | piece | weights | piece | weights | ...
//
// How much of them is due behind a piece is theirs to know (lib/weights/weights.h).
#pragma once

#include <cstdint>
#include <mutex>
#include <vector>

namespace tandem {

// Of offloaded weights: told of each piece.
class BusFollower {
 public:
  virtual void follow(int64_t bytes, void* event) = 0;

 protected:
  ~BusFollower() = default;
};

class Bus {
 public:
  void join(BusFollower* weights);
  void leave(BusFollower* weights);
  // A piece of so many bytes has been sent, and has come when `event` has happened.
  void sent(int64_t bytes, void* event);
  // What a piece takes says little of the bus then.
  bool has_weights() const;

 private:
  mutable std::mutex mutex_;
  std::vector<BusFollower*> weights_;
};

}  // namespace tandem
