// SPDX-License-Identifier: MIT
// K and V of many sequences for one model.
//
// A change has two steps. The first does everything that can fail: look-ups, and reserving pages and session state. The
// second makes the change and cannot fail. mutex() guards structure (sequences, pages, references): exclusive to change it,
// shared while an attend reads. Listeners keep data of sequences and follow each change.
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
  // rows: all rows of its tensors.
  Status append(int64_t id, int32_t layer_idx, const AppendedRows& rows);
  Status length(int64_t id, int32_t layer_idx, int64_t* n_tokens) const;
  void stats(tandem_cache_stats* stats) const;
  int64_t trim();                               // returns the bytes of host memory that it has given back
  std::vector<int64_t> list_sequences() const;  // ascending

  // Loading a sequence. create_unlisted() makes a sequence that is in no table until list(); the caller fills its pages from
  // the start of the page table. grow_unlisted() gives it pages for n_tokens tokens, and the extents as of then. list()
  // takes an id, passes it to `adopt`, which hands a listener its data of the sequence, and then adds the sequence; if
  // list() fails, the sequence stays unlisted. drop_unlisted() releases the pages. If the cache uses more than host_bytes,
  // its use before the load, drop_unlisted() also frees unused extents.
  std::unique_ptr<Sequence> create_unlisted() const;
  Status grow_unlisted(Sequence& sequence, int64_t n_tokens, std::vector<std::byte*>* extents);
  Status list(std::unique_ptr<Sequence>& sequence, const std::function<void(int64_t)>& adopt, int64_t* id);
  void drop_unlisted(std::unique_ptr<Sequence> sequence, int64_t host_bytes);

  // For sessions. The caller holds mutex(), exclusively.
  // Reserves memory for n_tokens tokens in all, before a call that will have them, in the store and in every session. Pages
  // are writable from the end of the shortest layer on. After CANCELLED, pages and state that exist so far stay reserved.
  Status ensure(Sequence& sequence, int64_t n_tokens, const char* field, const Watch& watch = {});
  // reserved: the number of tokens that stay reserved.
  void truncate_locked(Sequence& sequence, int64_t n_tokens, int64_t reserved = 0);
  // Takes mutex() itself. Tells the listener how much each sequence has reserved, as later appends do not ask for that
  // again.
  Status attach(CacheListener* listener);
  void give_up(const CacheListener* listener);  // ends the listener's writes and speculation
  void detach(CacheListener* listener);
  void settle(CacheListener& listener);  // waits until its work has ended, and rolls back lost work
  // Shortens a layer to at most `length` tokens.
  void cut_layer(CacheListener& listener, Sequence& sequence, size_t layer_idx, int64_t length);

  // Locks mutex() once every token within the lengths is in the store, and none is still on its way from a device. but_for:
  // the session that calls, as a listener. Its own tokens may still be on their way, as its work follows them in order.
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
