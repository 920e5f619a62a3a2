// SPDX-License-Identifier: MIT
#include "lib/store/cache_read.h"

#include <algorithm>
#include <cstring>

namespace tandem {

namespace {

// Not cryptographic. Tells contents apart at memory speed.
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

// Finds a sequence whose tokens are all in the store.
Status find_stored(const Cache& cache, int64_t id, const Sequence** sequence) {
  const Sequence* found = cache.find(id);
  if (found == nullptr)
    return fail(TANDEM_ERROR_NOT_FOUND, "sequence", "sequence = %lld is not in this cache", static_cast<long long>(id));
  if (found->writer != nullptr && found->writer->has_open_step())
    return fail(TANDEM_ERROR_BUSY, "sequence", "sequence = %lld is in flight in a step on a device",
                static_cast<long long>(id));
  *sequence = found;
  return {};
}

// Finds the sequence and checks that n tokens of the layer can be read from `first` on.
Status find_tokens(const Cache& cache, int64_t id, int32_t layer_idx, int64_t first, int64_t n, const Sequence** sequence) {
  TANDEM_TRY(find_stored(cache, id, sequence));
  const int64_t length = (*sequence)->lengths[static_cast<size_t>(layer_idx)];
  if (first >= 0 && first <= length && n <= length - first) return {};
  return fail(TANDEM_ERROR_INVALID_ARGUMENT, "first", "first = %lld with %lld tokens is not within the layer's %lld",
              static_cast<long long>(first), static_cast<long long>(n), static_cast<long long>(length));
}

}  // namespace

Status read_hidden(const Cache& cache, int64_t id, int32_t layer_idx, int64_t first, const TensorView& x) {
  const auto lock = cache.lock_settled();
  const Sequence* sequence = nullptr;
  TANDEM_TRY(find_tokens(cache, id, layer_idx, first, x.n_tokens, &sequence));
  const Layer& layer = cache.layers()[static_cast<size_t>(layer_idx)];
  RowCursor rows(cache.view(*sequence), layer_idx, {}, {first, first + x.n_tokens}, kHiddenPlane, RowOrder::kByHead);
  rows.stop_at_multiples(1);
  for (RowRun run; rows.next(&run);)
    load_hidden(cache.engine().cpu(), layer.x_type, run.data, x.dtype, x.row(run.token - first, 0), layer.hidden_dim());
  return {};
}

Status read_rows(const Cache& cache, int64_t id, int32_t layer_idx, int64_t first, const TensorView* k,
                 const TensorView* v) {
  const auto lock = cache.lock_settled();
  const Sequence* sequence = nullptr;
  const Layer& layer = cache.layers()[static_cast<size_t>(layer_idx)];
  const int64_t n = k ? k->n_tokens : v ? v->n_tokens : 0;
  TANDEM_TRY(find_tokens(cache, id, layer_idx, first, n, &sequence));
  for (int64_t t = first; t < first + n; ++t)
    for (int32_t h = 0; h < layer.n_kv_heads; ++h) {
      const Rows rows = cache.store().planes(layer_idx).rows(cache.view(*sequence).run_at(t, t + 1), h);
      if (k != nullptr)
        load_row(cache.engine().cpu(), stored_k(layer, rows), k->dtype, k->row(t - first, h), layer.k_head_dim);
      if (v != nullptr)
        load_row(cache.engine().cpu(), stored_v(layer, rows), v->dtype, v->row(t - first, h), layer.v_head_dim);
    }
  return {};
}

Status hash_rows(const Cache& cache, int64_t id, uint64_t* digest) {
  const auto lock = cache.lock_settled();
  const Sequence* sequence = nullptr;
  TANDEM_TRY(find_stored(cache, id, &sequence));
  Hash hash;
  for (size_t l = 0; l < cache.layers().size(); ++l) {
    const int64_t length = sequence->lengths[l];
    hash.add(static_cast<uint64_t>(length));
    RowCursor rows(cache.view(*sequence), static_cast<int32_t>(l), {0, cache.layers()[l].n_kv_heads}, {0, length},
                   kAllPlanes, RowOrder::kByHead);
    for (RowRun run; rows.next(&run);) hash.add(run.data, run.bytes);
  }
  const int64_t length = *std::max_element(sequence->lengths.begin(), sequence->lengths.end());  // committed tokens only
  for (int64_t t = 0; t < length; ++t) hash.add(static_cast<uint64_t>(sequence->position(t)));
  *digest = hash.value();
  return {};
}

}  // namespace tandem
