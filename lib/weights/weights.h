// SPDX-License-Identifier: MIT
// Weights that are larger than the device: blocks in host memory that cross the bus shortly before they are used, in the
// order in which a model uses them, over and over.
//
//   create    copies every block: to the device where it stays there, else to pinned host memory; the first are sent
//   use       a block's address, once `stream` has passed here: mostly it is there already
//   done      its place is free once `stream` has passed here, and is filled with the block that comes next
//
// Blocks go through one buffer, a ring of bytes: a block has its place as soon as there is room behind the one before it,
// however far ahead that is, and is sent at once, or behind pieces of sessions that cross the same bus (lib/machine/bus.h),
// so much with each as is due for it to be there when it is used. So a layer's matrices for the MLP cross the bus while its
// attention computes, and the next layer's for attention during the MLP; nothing is told about layers. Which blocks stay is
// decided once, evenly over the order, so that between two that stay the bus has as much to do everywhere.
//
//   ring:   [ block 7, in use | block 8, there | block 9, on its way | free ... ]
//            ^ front                                                  ^ next
//
// A block's place is written again when everything up to its done() has happened (an event that the copies wait for), in
// the order of sending: what is used out of order is sent anew, and what was sent in vain is overwritten.
#pragma once

#include <deque>
#include <memory>
#include <mutex>
#include <vector>

#include "lib/machine/engine.h"

namespace tandem {

struct WeightBlock {
  const void* data = nullptr;  // in host memory
  int64_t bytes = 0;
};

class Weights final : public BusFollower {
 public:
  // options: complete. Errors: UNSUPPORTED (no device), INVALID_ARGUMENT, OUT_OF_MEMORY, those of the device.
  static Status create(std::shared_ptr<Engine> engine, const std::vector<WeightBlock>& blocks,
                       const tandem_weights_options& options, std::shared_ptr<Weights>* weights);
  ~Weights();
  Weights(const Weights&) = delete;

  Status use(int32_t block_idx, void* stream, void** data);
  Status done(int32_t block_idx, void* stream);
  void get_stats(tandem_weights_stats* stats) const;
  int32_t n_blocks() const { return static_cast<int32_t>(blocks_.size()); }
  int64_t bytes_of(int32_t block_idx) const { return blocks_[static_cast<size_t>(block_idx)].bytes; }
  const Engine* engine() const { return engine_.get(); }
  // A piece of others' has been sent, and has come when `event` has happened: what is due of the blocks goes behind it. What
  // fails is tried again where the block is used.
  void follow(int64_t bytes, void* event) override;

 private:
  struct Block {
    Buffer host;               // empty where the block stays on the device
    int64_t pinned_bytes = 0;  // from the first on
    int64_t bytes = 0;
    int64_t resident_at = -1;  // in resident_; -1: streamed
    int64_t n_held = 0;        // uses that are not done
    int64_t others = 0;        // bytes of pieces that were sent between its place in the ring and its use, the last time
  };
  // A block in the ring.
  struct Place {
    int32_t block_idx = 0;
    int64_t begin = 0, end = 0;  // bytes
    size_t events = 0;           // of events_
    bool was_used = false, is_free = false;
    int64_t others_at = 0;   // n_others_ when the place was taken
    int64_t sent_bytes = 0;  // of the block
    bool is_sent = false;
    std::vector<size_t> behind = {};  // events_ of places that were done with before: its copies wait for these
  };

  struct Due {
    int64_t bytes = 0;
    bool is_last_call = false;  // something of it is used before another piece comes
  };

  Weights(std::shared_ptr<Engine> engine, const tandem_weights_options& options);
  void pin(Block* block);
  Status copy_blocks(const std::vector<WeightBlock>& blocks);
  Status make_events();
  Place* find(int32_t block_idx);
  bool find_room(const std::deque<Place>& places, int64_t bytes, int64_t* at) const;
  Status check(int32_t block_idx, void* stream) const;
  int32_t next_streamed(int32_t block_idx) const;
  void place(int32_t block_idx, int64_t at);
  Status send(Place* place, int64_t most);
  Due due_behind(int64_t piece_bytes) const;
  Status send_due(int64_t bytes);
  Status send_ahead();
  void try_ahead() noexcept;
  Status place_now(int32_t block_idx);
  Status note_use_ends(Place* place, void* stream);
  Status wait_for_uses(std::vector<size_t>* places);
  void free(Place* place);
  void retire();
  std::string held() const;

  std::shared_ptr<Engine> engine_;
  const Device& device_;
  Tier host_tier_, device_tier_;
  std::vector<Block> blocks_;
  Buffer resident_, ring_;
  void* stream_ = nullptr;  // of the copies
  bool has_stream_ = false;
  // Uses end on streams, a few of them: who comes back to one says that the later use has ended.
  struct Events {
    static constexpr size_t kStreams = 2;
    void *filled = nullptr, *freed[kStreams] = {}, *streams[kStreams] = {};
    size_t n_streams = 0;
  };
  std::vector<Events> events_;
  std::vector<size_t> free_events_;

  mutable std::mutex mutex_;       // guards what follows, and n_held
  std::deque<Place> places_;       // in the order of sending
  std::vector<size_t> done_with_;  // events_ of places that were done with since the last was taken
  int32_t last_placed_ = -1;
  int64_t n_others_ = 0;      // bytes of pieces that others have sent
  int64_t n_unfollowed_ = 0;  // of these, what nothing has been sent behind yet
  int64_t n_uses_ = 0, n_streamed_uses_ = 0, n_ahead_ = 0, streamed_bytes_ = 0;
};

// Blocks in use for what follows on a stream: until done(), or where that was not reached, the end of this.
class WeightsInUse {
 public:
  explicit WeightsInUse(void* stream) : stream_(stream) {}
  ~WeightsInUse();
  WeightsInUse(const WeightsInUse&) = delete;

  Status use(const std::shared_ptr<Weights>& weights, int32_t block_idx, const void** data);
  Status done();
  bool any() const { return !held_.empty(); }

 private:
  struct Held {
    std::shared_ptr<Weights> weights;
    int32_t block_idx;
  };
  void* stream_;
  std::vector<Held> held_;
};

}  // namespace tandem
