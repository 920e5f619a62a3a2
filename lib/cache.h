// SPDX-License-Identifier: MIT
// K and V of many sequences for one model.
//
// A change goes in two steps: first everything that can fail (looking up, reserving pages and session state), then the
// change itself, which cannot. Structure (sequences, pages, references) is guarded by mutex(): exclusive to change,
// shared while an attend reads. Listeners keep data of sequences that follow each change.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>
#include <vector>

#include "lib/cache_listener.h"
#include "lib/engine.h"
#include "lib/model.h"
#include "lib/page_store.h"
#include "lib/tensor_view.h"

namespace tandem {

class ProjectionsOnDevice;

struct Sequence {
  int64_t id = 0;
  std::vector<int32_t> pages;           // page table; may hold more than the lengths need (reserved)
  int64_t reserved = 0;                 // tokens in all for which appends are promised memory, in every session
  std::vector<int64_t> lengths;         // [n_layers] committed tokens
  std::vector<int64_t> speculative;     // [n_layers] tokens beyond, until commit
  std::vector<int32_t> parents;         // of the speculative tokens; empty: a chain
  CacheListener* speculator = nullptr;  // whose they are
  std::vector<int32_t> positions;       // [longest layer]; empty: token i has position i
  CacheListener* writer = nullptr;      // has it in flight: a step, or an attend that appends
  int32_t n_readers = 0;                // attends in progress

  int64_t total(size_t layer_idx) const { return lengths[layer_idx] + speculative[layer_idx]; }
  int64_t longest() const;   // of any layer, speculative tokens included
  int64_t shortest() const;  // committed tokens of the shortest layer
  int64_t position(int64_t token) const { return position_of(positions, token); }
};

// Consecutive rows of an append's K, V and hidden states.
struct AppendedRows {
  const TensorView* k;
  const TensorView* v;  // null where V aliases K
  const TensorView* x;  // null where the layer keeps none
  int64_t first_row;
  int64_t n_rows;
  Watch watch = {};  // once cancelled, no more rows are written
};

class Cache {
 public:
  static Status create(std::shared_ptr<Engine> engine, std::shared_ptr<const Model> model,
                       const tandem_cache_options& options, std::shared_ptr<Cache>* cache);

  Status create_sequence(int64_t* id);
  Status fork(int64_t id, int64_t* fork_id);
  Status drop(int64_t id);
  Status reserve(int64_t id, int64_t n_tokens);
  Status truncate(int64_t id, int64_t n_tokens);
  Status remove(int64_t id, int64_t first, int64_t n_tokens, bool shift_positions);
  // rows: all of its tensors'.
  Status append(int64_t id, int32_t layer_idx, const AppendedRows& rows);
  Status read(int64_t id, int32_t layer_idx, int64_t first, const TensorView* k, const TensorView* v) const;
  Status read_x(int64_t id, int32_t layer_idx, int64_t first, const TensorView& x) const;
  Status length(int64_t id, int32_t layer_idx, int64_t* n_tokens) const;
  Status digest(int64_t id, uint64_t* digest) const;
  void stats(tandem_cache_stats* stats) const;

  // For sessions. The caller holds mutex(), exclusively unless the function is const.
  std::shared_mutex& mutex() const { return mutex_; }
  Sequence* find(int64_t id) const;
  // field: what the caller of the library calls the argument that names the sequence, or asks for tokens.
  Status find_free(int64_t id, const CacheListener* by, Sequence** sequence,
                   const char* field = "sequence") const;  // NOT_FOUND, BUSY
  Status check_even(const Sequence& sequence, const char* field = "sequence") const;
  Status find_stored(int64_t id, const Sequence** sequence) const;  // whose tokens are all in the store; NOT_FOUND, BUSY
  // Room for n_tokens tokens in all, writable from the shortest layer's end on, in the store and in every session.
  // CANCELLED: what has been made so far stays, as reserved.
  Status ensure(Sequence& sequence, int64_t n_tokens, const char* field, const Watch& watch = {});
  // To tokens first, first + 1, ...; needs no exclusive lock: nobody reads tokens beyond the length.
  void write_rows(const Sequence& sequence, int32_t layer_idx, int64_t first, const AppendedRows& rows) const;
  void move_row(const Sequence& sequence, int32_t layer_idx, int64_t from, int64_t to) const {
    copy_tokens(view(sequence), from, view(sequence), to, layer_idx, 1);
  }
  void extend_positions(Sequence& sequence, int64_t length) const;  // these two cannot fail after ensure()
  void set_length(Sequence& sequence, int32_t layer_idx, int64_t length) const;
  // reserved: tokens in all that stay reserved.
  void truncate_locked(Sequence& sequence, int64_t n_tokens, int64_t reserved = 0);
  StoreView view(const Sequence& sequence) const { return store_.view(sequence.pages, sequence.positions, store_.bases()); }
  // Pins what tokens [0, end) lie in, for streams to the engine's device; false where it refuses.
  bool pin(const Sequence& sequence, int64_t end);
  // The first of `tokens`, as many as lie side by side and, where the library rotates, have positions that follow each
  // other: the same for all heads. And the keys of one head there, as kernels read them.
  TokenRun key_tokens(const Sequence& sequence, TokenRange tokens, int32_t layer_idx) const;
  KvRun keys(const Sequence& sequence, const TokenRun& at, int32_t layer_idx, int32_t kv_head) const;
  // The first token whose position is above `position` - `distance`.
  int64_t first_within(const Sequence& sequence, int64_t position, int64_t distance) const;
  // Takes mutex() itself. Tells the listener what sequences have reserved, as later appends do not ask for any.
  Status attach(CacheListener* listener);
  void give_up(const CacheListener* listener);  // what it has in flight, and its speculation
  void detach(CacheListener* listener);
  void settle(CacheListener& listener);  // what it has under way has ended, and what of it was lost is rolled back
  void cut_layer(CacheListener& listener, Sequence& sequence, size_t layer_idx, int64_t length);  // to that at most

  Engine& engine() const { return *engine_; }
  const std::vector<Layer>& layers() const { return layers_; }
  const PageStore& store() const { return store_; }
  int64_t page_len() const { return store_.page_len(); }
  Tier& host_tier() { return host_tier_; }
  Tier& device_tier() { return device_tier_; }
  // Of the route that needs them, which makes them; shared by sessions. mutex() held exclusively.
  std::shared_ptr<ProjectionsOnDevice>& projections() { return projections_; }
  // mutex(), when every token within the lengths is in the store: none is still on its way from a device.
  // but_for: a listener whose own do not matter, as it does all in order.
  std::unique_lock<std::shared_mutex> lock_settled(const CacheListener* but_for = nullptr);
  std::shared_lock<std::shared_mutex> lock_settled() const;

 private:
  Cache(std::shared_ptr<Engine> engine, std::shared_ptr<const Model> model, std::vector<Layer> layers, int64_t page_len,
        const tandem_cache_options& options);
  Status make_writable(Sequence& sequence, int64_t first_page, int64_t n_new_pages);
  void quiesce(const Sequence& sequence);
  static void forget_speculation(Sequence& sequence);
  Status find_even(int64_t id, Sequence** sequence) const;
  Status find_tokens(int64_t id, int32_t layer_idx, int64_t first, int64_t n, const Sequence** sequence) const;

  std::shared_ptr<Engine> engine_;
  std::shared_ptr<const Model> model_;
  std::vector<Layer> layers_;  // the model's, with storage types
  mutable std::shared_mutex mutex_;
  Tier host_tier_, device_tier_;
  std::shared_ptr<ProjectionsOnDevice> projections_;
  PageStore store_;
  std::unordered_map<int64_t, std::unique_ptr<Sequence>> sequences_;
  std::vector<CacheListener*> listeners_;
  int64_t next_id_ = 1;
};

// Defaults filled in and checked; layers get their storage types.
Status resolve_cache_options(const tandem_cache_options& options, std::vector<Layer>* layers, int64_t* page_len);

}  // namespace tandem
