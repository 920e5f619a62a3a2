// SPDX-License-Identifier: MIT
// K and V of many sequences for one model.
//
// A change goes in two steps: first everything that can fail (looking up, reserving pages and session state), then the
// change itself, which cannot. Structure (sequences, pages, references) is guarded by mutex(): exclusive to change,
// shared while an attend reads. Listeners keep data of sequences that follow each change.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "lib/store/cache_rows.h"

namespace tandem {

class Cache final : public SequenceTable {
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
  Status length(int64_t id, int32_t layer_idx, int64_t* n_tokens) const;
  void stats(tandem_cache_stats* stats) const;
  int64_t trim();                               // returns how many bytes of the host's memory it has given back
  std::vector<int64_t> list_sequences() const;  // ascending

  // A sequence that nobody else sees until list(), to be filled from the page table's begin on. grow_unlisted(): pages for
  // n_tokens tokens, and the extents as they are then. list(): gives it its id; `adopt`, which gets that, comes first and
  // gives a listener what it has of the sequence; on failure the sequence is still unlisted. drop_unlisted(): gives its
  // pages back, and the memory of extents too where the cache has more than host_bytes, what it had before.
  std::unique_ptr<Sequence> create_unlisted() const;
  Status grow_unlisted(Sequence& sequence, int64_t n_tokens, std::vector<std::byte*>* extents);
  Status list(std::unique_ptr<Sequence>& sequence, const std::function<void(int64_t)>& adopt, int64_t* id);
  void drop_unlisted(std::unique_ptr<Sequence> sequence, int64_t host_bytes);

  // For sessions. The caller holds mutex(), exclusively.
  // Room for n_tokens tokens in all, which a call is about to have, writable from the shortest layer's end on, in the store
  // and in every session.
  // CANCELLED: what has been made so far stays, as reserved.
  Status ensure(Sequence& sequence, int64_t n_tokens, const char* field, const Watch& watch = {});
  // reserved: tokens in all that stay reserved.
  void truncate_locked(Sequence& sequence, int64_t n_tokens, int64_t reserved = 0);
  // Takes mutex() itself. Tells the listener what sequences have reserved, as later appends do not ask for any.
  Status attach(CacheListener* listener);
  void give_up(const CacheListener* listener);  // what it has in flight, and its speculation
  void detach(CacheListener* listener);
  void settle(CacheListener& listener);  // what it has under way has ended, and what of it was lost is rolled back
  void cut_layer(CacheListener& listener, Sequence& sequence, size_t layer_idx, int64_t length);  // to that at most

  // mutex(), when every token within the lengths is in the store: none is still on its way from a device.
  // but_for: a listener whose own do not matter, as it does all in order.
  std::unique_lock<std::shared_mutex> lock_settled(const CacheListener* but_for = nullptr);
  std::shared_lock<std::shared_mutex> lock_settled() const;

 private:
  using SequenceTable::SequenceTable;
  Status hold_room(Sequence& sequence, int64_t n_tokens, const char* field, const Watch& watch);
  Status make_writable(Sequence& sequence, int64_t first_page, int64_t n_new_pages);
  void quiesce(const Sequence& sequence);

  std::vector<CacheListener*> listeners_;
  int64_t next_id_ = 1;
};

}  // namespace tandem
