// SPDX-License-Identifier: MIT
// The sequences of a cache, and the store that has their rows.
#pragma once

#include <cstdint>
#include <memory>
#include <shared_mutex>
#include <unordered_map>
#include <vector>

#include "lib/machine/engine.h"
#include "lib/model/model.h"
#include "lib/store/cache_listener.h"
#include "lib/store/page_store.h"

namespace tandem {

class ProjectionsOnDevice;

struct Sequence {
  int64_t id = 0;
  std::vector<int32_t> pages;           // page table; may have more pages than the lengths need (reserved)
  int64_t reserved = 0;                 // tokens, counted from the first, for which appends have memory, in every session
  std::vector<int64_t> lengths;         // [n_layers] committed tokens
  std::vector<int64_t> speculative;     // [n_layers] tokens after these, until commit
  std::vector<int32_t> parents;         // parents of the speculative tokens; empty: each follows the one before
  CacheListener* speculator = nullptr;  // owner of the speculative tokens; null: there are none
  std::vector<int32_t> positions;       // [longest layer]; empty: token i has position i
  CacheListener* writer = nullptr;      // has the sequence in flight: a step, or an attend that appends
  int32_t n_readers = 0;                // attends and saves in progress
  bool is_being_saved = false;          // no attend may change the sessions' data of the sequence

  int64_t total(size_t layer_idx) const { return lengths[layer_idx] + speculative[layer_idx]; }
  int64_t longest() const;   // longest layer, speculative tokens included
  int64_t shortest() const;  // committed tokens of the shortest layer
  int64_t position(int64_t token) const { return position_of(positions, token); }
  int64_t first_within(int64_t position, int64_t distance) const;  // the first token less than `distance` before `position`
  // These two cannot fail if the cache has ensured room for as many tokens.
  void extend_positions(int64_t length);
  void set_length(size_t layer_idx, int64_t length);
  void forget_speculation();  // drops speculative tokens that can no longer be committed
};

class SequenceTable {
 public:
  SequenceTable(const SequenceTable&) = delete;

  // Guards structure (sequences, pages, references): exclusive to change, shared while an attend reads.
  std::shared_mutex& mutex() const { return mutex_; }
  Sequence* find(int64_t id) const;
  // field: name of the caller's argument that names the sequence. Fails with NOT_FOUND or BUSY.
  Status find_free(int64_t id, const CacheListener* by, Sequence** sequence, const char* field = "sequence") const;
  Status check_even(const Sequence& sequence, const char* field = "sequence") const;
  StoreView view(const Sequence& sequence) const { return store_.view(sequence.pages, sequence.positions, store_.bases()); }
  // Pins the rows that these tokens have in a layer, for copies to the engine's device, and waits for that. Returns false if
  // the device refuses.
  bool pin(const Sequence& sequence, int32_t layer_idx, TokenRange tokens);
  // Does the same in the background. Rows of tokens before `end` are pinned. missing_ns: the time that pinning the rest
  // takes.
  struct PinnedTokens {
    int64_t end = 0;
    double missing_ns = 0.0;
    bool is_refused = false;
  };
  PinnedTokens pin_ahead(const Sequence& sequence, int32_t layer_idx, TokenRange tokens);

  Engine& engine() const { return *engine_; }
  const std::vector<Layer>& layers() const { return layers_; }
  const PageStore& store() const { return store_; }
  int64_t page_len() const { return store_.page_len(); }
  Tier& host_tier() { return host_tier_; }
  Tier& device_tier() { return device_tier_; }
  // Made by the route that needs them and shared by sessions. The caller holds mutex() exclusively.
  std::shared_ptr<ProjectionsOnDevice>& projections() { return projections_; }

 private:
  std::span<const int32_t> pages_of(const Sequence& sequence, TokenRange tokens) const;
  Pinner pinner() const { return {*engine_->device(), engine_->pinner()}; }

 protected:
  SequenceTable(std::shared_ptr<Engine> engine, std::shared_ptr<const Model> model, std::vector<Layer> layers,
                int64_t page_len, const tandem_cache_options& options);
  ~SequenceTable() = default;
  Status find_even(int64_t id, Sequence** sequence) const;

  std::shared_ptr<Engine> engine_;
  std::shared_ptr<const Model> model_;
  std::vector<Layer> layers_;  // the model's, with storage types
  mutable std::shared_mutex mutex_;
  Tier host_tier_, device_tier_;
  std::shared_ptr<ProjectionsOnDevice> projections_;
  PageStore store_;
  std::unordered_map<int64_t, std::unique_ptr<Sequence>> sequences_;
};

}  // namespace tandem
