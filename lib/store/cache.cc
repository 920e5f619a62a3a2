// SPDX-License-Identifier: MIT
#include "lib/store/cache.h"

#include <algorithm>
#include <mutex>
#include <string>

#include "lib/machine/placement.h"
#include "lib/store/cache_options.h"
#include "lib/store/cache_rows.h"

namespace tandem {

Status Cache::create(std::shared_ptr<Engine> engine, std::shared_ptr<const Model> model, const tandem_cache_options& options,
                     std::shared_ptr<Cache>* cache) {
  std::vector<Layer> layers = model->layers();
  int64_t page_len = 0;
  TANDEM_TRY(resolve_cache_options(options, &layers, &page_len));
  const int64_t extent_bytes = make_store_geometry(layers, page_len, n_nodes(engine->cpu())).extent_bytes;
  if (options.host_cap_bytes > 0 && options.host_cap_bytes < extent_bytes)
    return fail(TANDEM_ERROR_CAPACITY, "host_cap_bytes",
                "host_cap_bytes = %lld is less than one extent of pages, %lld bytes",
                static_cast<long long>(options.host_cap_bytes), static_cast<long long>(extent_bytes));
  *cache = std::shared_ptr<Cache>(new Cache(std::move(engine), std::move(model), std::move(layers), page_len, options));
  return {};
}

std::unique_lock<std::shared_mutex> Cache::lock_settled(const CacheListener* but_for) {
  std::unique_lock lock(mutex_);
  for (CacheListener* listener : listeners_)
    if (listener != but_for) settle(*listener);
  return lock;
}

std::shared_lock<std::shared_mutex> Cache::lock_settled() const {
  for (;;) {
    std::shared_lock lock(mutex_);
    const auto is_settled = [](const CacheListener* listener) { return listener->is_settled(); };
    if (std::all_of(listeners_.begin(), listeners_.end(), is_settled)) return lock;
    lock.unlock();
    const_cast<Cache*>(this)->lock_settled();
  }
}

// Restores windows first: listeners that fetch attention weights before a cut fetch them for tokens behind the window's
// begin.
void Cache::settle(CacheListener& listener) {
  if (listener.is_settled()) return;
  listener.settle();
  listener.for_rollbacks([&](const Rollback& rollback) { listener.restore_window(rollback); });
  listener.for_rollbacks([this, &listener](const Rollback& rollback) {
    Sequence* sequence = find(rollback.sequence);
    if (sequence == nullptr) return;
    const auto l = static_cast<size_t>(rollback.layer_idx);
    cut_layer(listener, *sequence, l, rollback.length);
    sequence->speculative[l] = 0;  // part of the guess is lost
    const auto is_none = [](int64_t n) { return n == 0; };
    if (sequence->speculator == &listener &&
        std::all_of(sequence->speculative.begin(), sequence->speculative.end(), is_none))
      sequence->forget_speculation();
  });
  listener.on_settled();
}

void Cache::cut_layer(CacheListener& listener, Sequence& sequence, size_t layer_idx, int64_t length) {
  int64_t& own = sequence.lengths[layer_idx];
  listener.on_cut(sequence, layer_idx, std::min(own, length));
  own = std::min(own, length);
}

// Called before the sequence's pages are released or its positions move: a refresh in the background may still read them.
void Cache::quiesce(const Sequence& sequence) {
  for (CacheListener* listener : listeners_) {
    settle(*listener);
    listener->quiesce(sequence);
  }
}

Status Cache::create_sequence(int64_t* id) {
  std::unique_lock lock(mutex_);
  auto made = create_unlisted();
  made->id = next_id_;
  sequences_.emplace(next_id_, std::move(made));
  *id = next_id_++;
  return {};
}

std::unique_ptr<Sequence> Cache::create_unlisted() const {
  auto made = std::make_unique<Sequence>();
  made->lengths.assign(layers_.size(), 0);
  made->speculative.assign(layers_.size(), 0);
  return made;
}

Status Cache::grow_unlisted(Sequence& sequence, int64_t n_tokens, std::vector<std::byte*>* extents) {
  std::unique_lock lock(mutex_);
  const int64_t n_pages = (n_tokens + page_len() - 1) / page_len(), n_held = std::ssize(sequence.pages);
  TANDEM_TRY(make_writable(sequence, n_held, std::max<int64_t>(0, n_pages - n_held)));
  *extents = store_.bases();
  return {};
}

Status Cache::list(std::unique_ptr<Sequence>& sequence, const std::function<void(int64_t)>& adopt, int64_t* listed_id) {
  std::unique_lock lock(mutex_);
  const int64_t id = sequence->id = next_id_;
  // Listeners forget the sequence again unless it is listed, also when one of them throws.
  const auto forget = [this, id](void*) {
    for (CacheListener* listener : listeners_) listener->on_drop(id);
  };
  std::unique_ptr<void, decltype(forget)> unlisted(this, forget);
  adopt(id);
  for (CacheListener* listener : listeners_) TANDEM_TRY(listener->on_reserve(*sequence, sequence->longest(), {}));
  sequences_.emplace(id, nullptr).first->second = std::move(sequence);
  unlisted.release();
  *listed_id = next_id_++;
  return {};
}

void Cache::drop_unlisted(std::unique_ptr<Sequence> sequence, int64_t host_bytes) {
  const auto lock = lock_settled();
  for (const int32_t page : sequence->pages) store_.release(page);
  if (host_tier_.used(Use::kKv) > host_bytes) store_.trim();
}

// Makes room for n_new_pages more pages and gives the sequence its own copy of every shared page from first_page on. On
// failure nothing has changed.
Status Cache::make_writable(Sequence& sequence, int64_t first_page, int64_t n_new_pages) {
  const auto n_pages = static_cast<int64_t>(sequence.pages.size());
  int64_t n_copies = 0;
  for (int64_t p = first_page; p < n_pages; ++p) n_copies += store_.shared(sequence.pages[static_cast<size_t>(p)]);
  if (n_copies + n_new_pages == 0) return {};
  sequence.pages.reserve(static_cast<size_t>(n_pages + n_new_pages));
  TANDEM_TRY(store_.make_free(n_copies + n_new_pages));
  if (n_copies > 0) quiesce(sequence);
  for (int64_t p = first_page; p < n_pages && n_copies > 0; ++p) {
    int32_t& page = sequence.pages[static_cast<size_t>(p)];
    if (!store_.shared(page)) continue;
    const int32_t copy = store_.take(p > 0 ? sequence.pages[static_cast<size_t>(p - 1)] : -1);
    store_.copy_page(page, copy, page_len());
    store_.release(page);
    page = copy;
    --n_copies;
  }
  for (int64_t i = 0; i < n_new_pages; ++i)
    sequence.pages.push_back(store_.take(sequence.pages.empty() ? -1 : sequence.pages.back(), n_new_pages - i));
  return {};
}

Status Cache::ensure(Sequence& sequence, int64_t n_tokens, const char* field, const Watch& watch) {
  TANDEM_TRY(hold_room(sequence, n_tokens, field, watch));
  // The extent of the last of these tokens, and the extent a quarter further on if the sequence has pages there.
  const int64_t last = std::ssize(sequence.pages) - 1, extent_pages = store_.geometry().pages_per_extent;
  const int64_t page = std::min((n_tokens - 1) / page_len(), last);
  if (page < 0) return {};
  const int64_t ahead = std::min(page + std::max<int64_t>(1, extent_pages / 4), last);
  for (const int64_t p : {page, ahead}) store_.populate(sequence.pages[static_cast<size_t>(p)], engine_->worker());
  return {};
}

Status Cache::hold_room(Sequence& sequence, int64_t n_tokens, const char* field, const Watch& watch) {
  if (n_tokens > INT32_MAX || sequence.position(n_tokens) > INT32_MAX)
    return fail(TANDEM_ERROR_CAPACITY, field, "%s: a sequence of %lld tokens is longer than 2^31 - 1", field,
                static_cast<long long>(n_tokens));
  if (!sequence.positions.empty() && sequence.positions.capacity() < static_cast<size_t>(n_tokens)) {
    quiesce(sequence);
    sequence.positions.reserve(static_cast<size_t>(n_tokens));
  }
  const int64_t n_pages = (n_tokens + page_len() - 1) / page_len();
  const int64_t n_new = std::max<int64_t>(0, n_pages - static_cast<int64_t>(sequence.pages.size()));
  for (CacheListener* listener : listeners_) TANDEM_TRY(listener->on_reserve(sequence, n_tokens, watch));
  return make_writable(sequence, sequence.shortest() / page_len(), n_new);
}

Status Cache::fork(int64_t id, int64_t* fork_id) {
  const auto lock = lock_settled();
  Sequence* from = nullptr;
  TANDEM_TRY(find_even(id, &from));
  const int64_t length = from->lengths[0], whole = length / page_len();
  auto made = std::make_unique<Sequence>();
  made->id = next_id_;
  made->lengths = from->lengths;
  made->speculative = from->speculative;
  made->positions = from->positions;
  made->pages.reserve(static_cast<size_t>(whole + 1));
  if (length % page_len() != 0) TANDEM_TRY(store_.make_free(1));
  sequences_.reserve(sequences_.size() + 1);
  size_t n_prepared = 0;
  Status status;
  try {
    for (; n_prepared < listeners_.size() && status.ok(); ++n_prepared)
      status = listeners_[n_prepared]->prepare_fork(*from, next_id_);
    if (status.ok()) sequences_.emplace(next_id_, nullptr);
  } catch (...) {
    for (CacheListener* listener : listeners_) listener->on_drop(next_id_);
    throw;
  }
  if (!status.ok()) {
    for (CacheListener* listener : listeners_) listener->on_drop(next_id_);
    return status;
  }
  // Whole pages are shared. The page that both sequences would go on writing is copied now, so that the reservations of both
  // remain sufficient.
  for (int64_t p = 0; p < whole; ++p) {
    made->pages.push_back(from->pages[static_cast<size_t>(p)]);
    store_.retain(made->pages.back());
  }
  if (length % page_len() != 0) {
    const int32_t copy = store_.take(made->pages.empty() ? -1 : made->pages.back());
    store_.copy_page(from->pages[static_cast<size_t>(whole)], copy, length % page_len());
    made->pages.push_back(copy);
  }
  sequences_[next_id_] = std::move(made);
  *fork_id = next_id_++;
  return {};
}

Status Cache::drop(int64_t id) {
  const auto lock = lock_settled();
  Sequence* sequence = nullptr;
  TANDEM_TRY(find_free(id, nullptr, &sequence));
  for (CacheListener* listener : listeners_) listener->on_drop(id);
  for (const int32_t page : sequence->pages) store_.release(page);
  sequences_.erase(id);
  return {};
}

int64_t Cache::trim() {
  const auto lock = lock_settled();
  return store_.trim();
}

std::vector<int64_t> Cache::list_sequences() const {
  const std::shared_lock lock(mutex_);
  std::vector<int64_t> ids;
  ids.reserve(sequences_.size());
  for (const auto& [id, sequence] : sequences_) ids.push_back(id);
  std::sort(ids.begin(), ids.end());
  return ids;
}

Status Cache::reserve(int64_t id, int64_t n_tokens) {
  std::unique_lock lock(mutex_);
  Sequence* sequence = nullptr;
  TANDEM_TRY(find_free(id, nullptr, &sequence));
  if (n_tokens < 0 || n_tokens > INT32_MAX)
    return fail(TANDEM_ERROR_INVALID_ARGUMENT, "n_tokens", "n_tokens = %lld is not in 0 to 2^31 - 1",
                static_cast<long long>(n_tokens));
  const int64_t total = sequence->longest() + n_tokens;
  TANDEM_TRY(hold_room(*sequence, total, "n_tokens", {}));
  sequence->reserved = std::max(sequence->reserved, total);
  return {};
}

void Cache::truncate_locked(Sequence& sequence, int64_t n_tokens, int64_t reserved) {
  for (CacheListener* listener : listeners_)
    for (size_t l = 0; l < layers_.size(); ++l) listener->on_cut(sequence, l, n_tokens);
  std::fill(sequence.lengths.begin(), sequence.lengths.end(), n_tokens);
  std::fill(sequence.speculative.begin(), sequence.speculative.end(), 0);
  sequence.parents.clear();
  sequence.speculator = nullptr;
  if (static_cast<int64_t>(sequence.positions.size()) > n_tokens) sequence.positions.resize(static_cast<size_t>(n_tokens));
  sequence.reserved = std::max(n_tokens, reserved);
  const auto keep = static_cast<size_t>((sequence.reserved + page_len() - 1) / page_len());
  while (sequence.pages.size() > keep) {
    store_.release(sequence.pages.back());
    sequence.pages.pop_back();
  }
}

Status Cache::truncate(int64_t id, int64_t n_tokens) {
  const auto lock = lock_settled();
  Sequence* sequence = nullptr;
  TANDEM_TRY(find_free(id, nullptr, &sequence));
  if (n_tokens < 0 || n_tokens > sequence->shortest())
    return fail(TANDEM_ERROR_INVALID_ARGUMENT, "n_tokens",
                "n_tokens = %lld is not in 0 to %lld, the shortest layer's length", static_cast<long long>(n_tokens),
                static_cast<long long>(sequence->shortest()));
  truncate_locked(*sequence, n_tokens);
  return {};
}

Status Cache::remove(int64_t id, int64_t first, int64_t n_tokens, bool shift_positions) {
  const auto lock = lock_settled();
  Sequence* sequence = nullptr;
  TANDEM_TRY(find_even(id, &sequence));
  const int64_t length = sequence->lengths[0];
  if (first < 0 || first > length)
    return fail(TANDEM_ERROR_INVALID_ARGUMENT, "first", "first = %lld is not in 0 to %lld, the sequence's length",
                static_cast<long long>(first), static_cast<long long>(length));
  if (n_tokens < 0 || n_tokens > length - first)
    return fail(TANDEM_ERROR_INVALID_ARGUMENT, "n_tokens", "n_tokens = %lld is not in 0 to %lld, what follows first",
                static_cast<long long>(n_tokens), static_cast<long long>(length - first));
  for (size_t l = 0; shift_positions && l < layers_.size(); ++l)
    if (layers_[l].rope == nullptr)
      return fail(TANDEM_ERROR_UNSUPPORTED, "shift_positions",
                  "shift_positions = 1: the keys of layer %zu were rotated by the caller and carry their position", l);
  if (n_tokens == 0) return {};
  for (CacheListener* listener : listeners_) TANDEM_TRY(listener->flush(*sequence));
  std::vector<int32_t> positions;
  const bool tail = first + n_tokens == length;
  if (!tail && (!shift_positions || !sequence->positions.empty())) {
    positions.reserve(static_cast<size_t>(std::max(length, sequence->reserved) - n_tokens));
    for (int64_t t = 0; t < length; ++t) {
      if (t >= first && t < first + n_tokens) continue;
      const int64_t moved = shift_positions && t >= first ? n_tokens : 0;
      positions.push_back(static_cast<int32_t>(sequence->position(t) - moved));
    }
  } else if (!sequence->positions.empty()) {
    positions.assign(sequence->positions.begin(), sequence->positions.begin() + first);
  }
  if (!tail) TANDEM_TRY(make_writable(*sequence, first / page_len(), 0));
  for (size_t l = 0; l < layers_.size(); ++l)
    for (int64_t t = first + n_tokens; t < length; ++t) move_row(*this, *sequence, static_cast<int32_t>(l), t, t - n_tokens);
  for (CacheListener* listener : listeners_) listener->on_erase(*sequence, first, n_tokens);
  sequence->positions.swap(positions);
  // Pages from `first` on now belong to the sequence alone, so its reservation beyond the length is still sufficient. If a
  // tail was removed, the last page may be shared.
  truncate_locked(*sequence, length - n_tokens, tail ? 0 : sequence->reserved - n_tokens);
  return {};
}

Status Cache::append(int64_t id, int32_t layer_idx, const AppendedRows& rows) {
  const auto lock = lock_settled();
  Sequence* sequence = nullptr;
  TANDEM_TRY(find_free(id, nullptr, &sequence));
  const auto l = static_cast<size_t>(layer_idx);
  if (sequence->speculative[l] != 0)
    return fail(TANDEM_ERROR_INVALID_STATE, "sequence", "sequence = %lld has speculative tokens in layer %d",
                static_cast<long long>(id), layer_idx);
  const int64_t first = sequence->lengths[l];
  TANDEM_TRY(ensure(*sequence, std::max(sequence->longest(), first + rows.n_rows), "k.shape[0]"));
  write_rows(*this, *sequence, layer_idx, first, rows);
  sequence->set_length(l, first + rows.n_rows);
  return {};
}

// Does not wait: tokens count from their call on, until they are known to be lost.
Status Cache::length(int64_t id, int32_t layer_idx, int64_t* n_tokens) const {
  std::shared_lock lock(mutex_);
  const auto has_lost = [](const CacheListener* listener) { return listener->has_lost(); };
  if (std::any_of(listeners_.begin(), listeners_.end(), has_lost)) {
    lock.unlock();
    {
      std::unique_lock to_change(mutex_);
      for (CacheListener* listener : listeners_)
        if (has_lost(listener)) const_cast<Cache*>(this)->settle(*listener);
    }
    lock.lock();
  }
  const Sequence* sequence = find(id);
  if (sequence == nullptr)
    return fail(TANDEM_ERROR_NOT_FOUND, "sequence", "sequence = %lld is not in this cache", static_cast<long long>(id));
  *n_tokens = sequence->lengths[static_cast<size_t>(layer_idx)];
  return {};
}

void Cache::detach(CacheListener* listener) {
  std::erase(listeners_, listener);
  give_up(listener);
}

void Cache::give_up(const CacheListener* listener) {
  for (auto& [id, sequence] : sequences_) {
    if (sequence->writer == listener) sequence->writer = nullptr;
    if (sequence->speculator == listener) sequence->forget_speculation();
  }
}

Status Cache::attach(CacheListener* listener) {
  std::unique_lock lock(mutex_);
  for (const auto& [id, sequence] : sequences_)
    if (sequence->shortest() < sequence->reserved) TANDEM_TRY(listener->on_reserve(*sequence, sequence->reserved, {}));
  listeners_.push_back(listener);
  return {};
}

void Cache::stats(tandem_cache_stats* stats) const {
  std::shared_lock lock(mutex_);
  stats->n_sequences = static_cast<int64_t>(sequences_.size());
  stats->n_pages_used = store_.n_used();
  stats->n_pages_shared = store_.n_shared();
  stats->host_kv_bytes = host_tier_.used(Use::kKv);
  stats->host_session_bytes = host_tier_.used(Use::kSession);
  stats->selection_bytes = host_tier_.used(Use::kSelection);
  stats->host_peak_bytes = host_tier_.peak();
  stats->device_window_bytes = device_tier_.used(Use::kKv);
  stats->device_work_bytes = device_tier_.used(Use::kSession);
  stats->device_peak_bytes = device_tier_.peak();
  stats->device_stream_bytes = device_tier_.used(Use::kStream);
  stats->device_weights_bytes = device_tier_.used(Use::kWeights);
  stats->pinned_bytes = store_.pinned_bytes();
}

}  // namespace tandem
