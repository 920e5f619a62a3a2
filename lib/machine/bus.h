// SPDX-License-Identifier: MIT
// The bus from the host to a device. Pieces of sessions and offloaded weights share it. A piece of keys or hidden states is
// sent when a buffer is free, and the device works on it as soon as it arrives. Weights may cross at any time before they
// are used. If all weights of a layer were sent as soon as they fit, the device would wait for its next piece. Afterwards
// the bus would idle while the device works on pieces. So weights take turns behind pieces:
//
//   all at once   | weights of the next layer       | piece |       | piece |       | piece | ...
//   in turns      | piece | weights | piece | weights | piece | weights | ...
//
// The weights decide how many bytes are due behind a piece (lib/weights/weights.h).
#pragma once

#include <cstdint>
#include <mutex>
#include <vector>

namespace tandem {

// Implemented by offloaded weights, which are told of each piece.
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
  // A piece of `bytes` bytes has been sent. It has arrived once `event` has happened.
  void sent(int64_t bytes, void* event);
  // True if weights share the bus. The time of a piece then says little about the bus.
  bool has_weights() const;

 private:
  mutable std::mutex mutex_;
  std::vector<BusFollower*> weights_;
};

}  // namespace tandem
