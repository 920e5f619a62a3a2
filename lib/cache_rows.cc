// SPDX-License-Identifier: MIT
// The rows of a cache: writing, moving, reading back and hashing them.
#include <algorithm>
#include <cstring>
#include <mutex>

#include "lib/cache.h"
#include "lib/convert.h"

namespace tandem {

bool Cache::pin(const Sequence& sequence, int64_t end) {
  const std::span<const int32_t> pages(sequence.pages);
  return store_.pin(pages.first(static_cast<size_t>((end + page_len() - 1) / page_len())), *engine_->device());
}

TokenRun Cache::key_tokens(const Sequence& sequence, TokenRange tokens, int32_t layer_idx) const {
  TokenRun run = view(sequence).run_at(tokens.begin, tokens.end);
  if (layers_[static_cast<size_t>(layer_idx)].rope != nullptr) run.n = consecutive(sequence.positions, run.token, run.n);
  return run;
}

KvRun Cache::keys(const Sequence& sequence, const TokenRun& at, int32_t layer_idx, int32_t kv_head) const {
  KvRun run;
  point_run(store_.planes(layer_idx).rows(at, kv_head), layers_[static_cast<size_t>(layer_idx)], &run);
  run.n_tokens = at.n;
  run.token_idx = at.token;
  run.first_position = sequence.position(at.token);
  return run;
}

int64_t Cache::first_within(const Sequence& sequence, int64_t position, int64_t distance) const {
  const int64_t least = position - distance + 1;
  if (sequence.positions.empty()) return std::max<int64_t>(0, least);
  const auto known =
      std::lower_bound(sequence.positions.begin(), sequence.positions.end(), least) - sequence.positions.begin();
  if (known < static_cast<std::ptrdiff_t>(sequence.positions.size())) return known;
  return std::max<int64_t>(known, known + least - sequence.position(known));
}

namespace {

constexpr int64_t kRowsPerTask = 32;

struct WriteTask {
  const Cache* cache;
  const Sequence* sequence;
  int32_t layer_idx;
  int64_t first;
  AppendedRows rows;
};

StoredRow stored_k(const Layer& layer, const Rows& rows) {
  return {layer.k_type, rows.of[kPlaneK], rows.of[kPlaneKScales], layer.k_rotation};
}
StoredRow stored_v(const Layer& layer, const Rows& rows) { return {layer.v_type, rows.v(layer), rows.v_scales(layer)}; }

void write_task(void* context, int64_t task_idx, int32_t) {
  const auto& task = *static_cast<const WriteTask*>(context);
  const AppendedRows& rows = task.rows;
  if (rows.watch.is_cancelled()) return;
  const Cache& cache = *task.cache;
  const Layer& layer = cache.layers()[static_cast<size_t>(task.layer_idx)];
  const LayerPlanes& planes = cache.store().planes(task.layer_idx);
  const Backend& cpu = cache.engine().cpu();
  const int64_t end = std::min(rows.n_rows, (task_idx + 1) * kRowsPerTask);
  for (int64_t i = task_idx * kRowsPerTask; i < end; ++i) {
    const TokenRun at = cache.view(*task.sequence).run_at(task.first + i, task.first + i + 1);
    if (rows.x != nullptr)
      store_hidden(cpu, rows.x->dtype, rows.x->row(rows.first_row + i, 0), layer.x_type,
                   planes.planes[kPlaneHidden].row(at, 0), layer.hidden_dim());
    for (int32_t h = 0; h < layer.n_kv_heads; ++h) {
      const Rows to = planes.rows(at, h);
      store_row(cpu, rows.k->dtype, rows.k->row(rows.first_row + i, h), stored_k(layer, to), layer.k_head_dim);
      if (!layer.v_aliases_k)
        store_row(cpu, rows.v->dtype, rows.v->row(rows.first_row + i, h), stored_v(layer, to), layer.v_head_dim);
    }
  }
}

// Not cryptographic: tells contents apart, at memory speed.
class Hash {
 public:
  void add(uint64_t value) {
    state_ = (state_ ^ value) * 0x9e3779b97f4a7c15u;
    state_ ^= state_ >> 29;
  }
  void add(const std::byte* data, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 8) {
      uint64_t word = 0;
      std::memcpy(&word, data + i, static_cast<size_t>(std::min<int64_t>(8, bytes - i)));
      add(word);
    }
  }
  uint64_t value() const { return state_; }

 private:
  uint64_t state_ = 0x6a09e667f3bcc908u;
};

}  // namespace

void Cache::write_rows(const Sequence& sequence, int32_t layer_idx, int64_t first, const AppendedRows& rows) const {
  WriteTask task{this, &sequence, layer_idx, first, rows};
  const int64_t n_tasks = (rows.n_rows + kRowsPerTask - 1) / kRowsPerTask;
  if (n_tasks <= 1) {
    if (rows.n_rows > 0) write_task(&task, 0, 0);
    return;
  }
  const Backend& cpu = engine_->cpu();
  cpu.table->run(cpu.self, n_tasks, write_task, &task);
}

void Cache::extend_positions(Sequence& sequence, int64_t length) const {
  if (sequence.positions.empty()) return;
  for (auto t = static_cast<int64_t>(sequence.positions.size()); t < length; ++t)
    sequence.positions.push_back(sequence.positions.back() + 1);
}

void Cache::set_length(Sequence& sequence, int32_t layer_idx, int64_t length) const {
  extend_positions(sequence, length);
  sequence.lengths[static_cast<size_t>(layer_idx)] = length;
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
  write_rows(*sequence, layer_idx, first, rows);
  set_length(*sequence, layer_idx, first + rows.n_rows);
  return {};
}

Status Cache::find_stored(int64_t id, const Sequence** sequence) const {
  const Sequence* found = find(id);
  if (found == nullptr)
    return fail(TANDEM_ERROR_NOT_FOUND, "sequence", "sequence = %lld is not in this cache", static_cast<long long>(id));
  if (found->writer != nullptr && found->writer->has_open_step())
    return fail(TANDEM_ERROR_BUSY, "sequence", "sequence = %lld is in flight in a step on a device",
                static_cast<long long>(id));
  *sequence = found;
  return {};
}

// The sequence of n tokens of one layer that are to be read.
Status Cache::find_tokens(int64_t id, int32_t layer_idx, int64_t first, int64_t n, const Sequence** sequence) const {
  TANDEM_TRY(find_stored(id, sequence));
  const int64_t length = (*sequence)->lengths[static_cast<size_t>(layer_idx)];
  if (first >= 0 && first <= length && n <= length - first) return {};
  return fail(TANDEM_ERROR_INVALID_ARGUMENT, "first", "first = %lld with %lld tokens is not within the layer's %lld",
              static_cast<long long>(first), static_cast<long long>(n), static_cast<long long>(length));
}

Status Cache::read_x(int64_t id, int32_t layer_idx, int64_t first, const TensorView& x) const {
  const auto lock = lock_settled();
  const Sequence* sequence = nullptr;
  TANDEM_TRY(find_tokens(id, layer_idx, first, x.n_tokens, &sequence));
  const Layer& layer = layers_[static_cast<size_t>(layer_idx)];
  RowCursor rows(view(*sequence), layer_idx, {}, {first, first + x.n_tokens}, kHiddenPlane, RowOrder::kByHead);
  rows.stop_at_multiples(1);
  for (RowRun run; rows.next(&run);)
    load_hidden(engine_->cpu(), layer.x_type, run.data, x.dtype, x.row(run.token - first, 0), layer.hidden_dim());
  return {};
}

Status Cache::read(int64_t id, int32_t layer_idx, int64_t first, const TensorView* k, const TensorView* v) const {
  const auto lock = lock_settled();
  const Sequence* sequence = nullptr;
  const Layer& layer = layers_[static_cast<size_t>(layer_idx)];
  const int64_t n = k ? k->n_tokens : v ? v->n_tokens : 0;
  TANDEM_TRY(find_tokens(id, layer_idx, first, n, &sequence));
  for (int64_t t = first; t < first + n; ++t)
    for (int32_t h = 0; h < layer.n_kv_heads; ++h) {
      const Rows rows = store_.planes(layer_idx).rows(view(*sequence).run_at(t, t + 1), h);
      if (k != nullptr) load_row(engine_->cpu(), stored_k(layer, rows), k->dtype, k->row(t - first, h), layer.k_head_dim);
      if (v != nullptr) load_row(engine_->cpu(), stored_v(layer, rows), v->dtype, v->row(t - first, h), layer.v_head_dim);
    }
  return {};
}

// Waits for nothing: tokens count from their call on, until it is known that they are lost.
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

Status Cache::digest(int64_t id, uint64_t* digest) const {
  const auto lock = lock_settled();
  const Sequence* sequence = nullptr;
  TANDEM_TRY(find_stored(id, &sequence));
  Hash hash;
  for (size_t l = 0; l < layers_.size(); ++l) {
    const int64_t length = sequence->lengths[l];
    hash.add(static_cast<uint64_t>(length));
    RowCursor rows(view(*sequence), static_cast<int32_t>(l), {0, layers_[l].n_kv_heads}, {0, length}, kAllPlanes,
                   RowOrder::kByHead);
    for (RowRun run; rows.next(&run);) hash.add(run.data, run.bytes);
  }
  const int64_t length = *std::max_element(sequence->lengths.begin(), sequence->lengths.end());  // committed tokens alone
  for (int64_t t = 0; t < length; ++t) hash.add(static_cast<uint64_t>(sequence->position(t)));
  *digest = hash.value();
  return {};
}

}  // namespace tandem
