// SPDX-License-Identifier: MIT
// Weights that are larger than the device. Blocks lie in host memory and cross the bus shortly before they are used, in the
// order in which a model uses them, over and over.
//
//   create    copies every block, to the device if the block stays there, else to pinned host memory; sends the first ones
//   use       returns a block's address, valid once `stream` has passed this point; mostly the block is already there
//   done      frees the block's place once `stream` has passed this point; the next block then fills it
//
// Blocks go through one buffer, a ring of bytes. A block gets its place as soon as there is room behind the block before,
// however far ahead that is. It is sent at once, or behind pieces of sessions that cross the same bus (lib/machine/bus.h):
// with each piece as many bytes as are needed for the block to arrive before its use. So a layer's MLP matrices cross the
// bus while its attention computes, and the next layer's attention matrices during the MLP. This needs no knowledge of
// layers. The resident blocks are chosen once, evenly over the order, so that the bus has the same load everywhere.
//
//   ring:   [ block 7, in use | block 8, arrived | block 9, in flight | free ... ]
//            ^ front                                                    ^ next
//
// A block's place is written again when all work up to its done() has finished; the copies wait for an event. Places are
// reused in the order of sending. A block that is used out of order is sent again. A block that was sent but not used is
// overwritten.
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
  // options: complete. Fails with UNSUPPORTED (no device), INVALID_ARGUMENT, OUT_OF_MEMORY, or the device's errors.
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
  // Called when a session has sent a piece, which has arrived when `event` has happened. Sends the bytes of blocks that are
  // due behind the piece. After a failure use() sends them again.
  void follow(int64_t bytes, void* event) override;

 private:
  struct Block {
    Buffer host;               // empty if the block stays on the device
    int64_t pinned_bytes = 0;  // from the first byte on
    int64_t bytes = 0;
    int64_t resident_at = -1;  // offset in resident_; -1: streamed
    int64_t n_held = 0;        // uses without done()
    // Bytes of sessions' pieces that were sent between the block's placing and its use, the last time.
    int64_t others = 0;
  };
  // A block in the ring.
  struct Place {
    int32_t block_idx = 0;
    int64_t begin = 0, end = 0;  // bytes
    size_t events = 0;           // index in events_
    bool was_used = false, is_free = false;
    int64_t others_at = 0;   // n_others_ when the place was taken
    int64_t sent_bytes = 0;  // bytes of the block that have been sent
    bool is_sent = false;
    // Indices in events_ of places that were freed before. The copies wait for these uses to end.
    std::vector<size_t> behind = {};
  };

  struct Due {
    int64_t bytes = 0;
    bool is_last_call = false;  // some of these bytes are used before another piece comes
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
  void* stream_ = nullptr;  // stream of the copies
  bool has_stream_ = false;
  // Uses end on a few streams. On a stream that is recorded again, the later event covers the earlier use.
  struct Events {
    static constexpr size_t kStreams = 2;
    void *filled = nullptr, *freed[kStreams] = {}, *streams[kStreams] = {};
    size_t n_streams = 0;
  };
  std::vector<Events> events_;
  std::vector<size_t> free_events_;

  mutable std::mutex mutex_;       // guards the members below, and n_held
  std::deque<Place> places_;       // in the order of sending
  std::vector<size_t> done_with_;  // indices in events_ of places that were freed since the last place was taken
  int32_t last_placed_ = -1;
  int64_t n_others_ = 0;      // bytes of pieces that sessions have sent
  int64_t n_unfollowed_ = 0;  // the part of n_others_ behind which no block bytes have been sent yet
  int64_t n_uses_ = 0, n_streamed_uses_ = 0, n_ahead_ = 0, streamed_bytes_ = 0;
};

// Blocks in use by later work on a stream, until done() or, if that is not called, until the destructor.
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
