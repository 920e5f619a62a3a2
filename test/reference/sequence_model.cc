// SPDX-License-Identifier: MIT
#include "reference/sequence_model.h"

#include <algorithm>

#include "reference/stored_row.h"

namespace reference {

bool rounds_p(const RefLayer& layer, int32_t q_type, int64_t q_len) {
  return q_type == TANDEM_BF16 && layer.v_type == TANDEM_BF16 && layer.rope == TANDEM_ROPE_CALLER &&
         q_len * layer.group_size() >= kMatmulRows;
}

int64_t SequenceModel::k_row(size_t layer) const {
  const RefLayer& geometry = (*layers_)[layer];
  return static_cast<int64_t>(geometry.n_kv_heads) * geometry.k_head_dim;
}

int64_t SequenceModel::v_row(size_t layer) const {
  const RefLayer& geometry = (*layers_)[layer];
  return geometry.v_aliases_k ? 0 : static_cast<int64_t>(geometry.n_kv_heads) * geometry.v_head_dim;
}

bool SequenceModel::even() const {
  return std::all_of(rows_.begin(), rows_.end(),
                     [&](const Rows& r) { return r.n_tokens == rows_[0].n_tokens && r.n_pending == rows_[0].n_pending; });
}

int64_t SequenceModel::shortest() const {
  int64_t n = rows_[0].n_tokens;
  for (const Rows& rows : rows_) n = std::min(n, rows.n_tokens);
  return n;
}

int64_t SequenceModel::longest() const {
  int64_t n = 0;
  for (const Rows& rows : rows_) n = std::max(n, rows.n_tokens);
  return n;
}

void SequenceModel::grow_positions() {
  while (static_cast<int64_t>(positions_.size()) < longest())
    positions_.push_back(positions_.empty() ? 0 : positions_.back() + 1);
}

namespace {

// Appends n elements, in rows of head_dim, rounded as they read back.
void push_rounded(int32_t dtype, int64_t head_dim, const double* x, int64_t n, std::vector<float>* out) {
  std::vector<double> row(static_cast<size_t>(head_dim));
  for (int64_t first = 0; first < n; first += head_dim) {
    std::copy_n(x + first, head_dim, row.begin());
    round_row(dtype, row.data(), head_dim);
    out->insert(out->end(), row.begin(), row.end());
  }
}

}  // namespace

void SequenceModel::push_rows(size_t layer, int64_t n_tokens, const double* k, const double* v) {
  const RefLayer& geometry = (*layers_)[layer];
  Rows& rows = rows_[layer];
  push_rounded(geometry.k_type, geometry.k_head_dim, k, n_tokens * k_row(layer), &rows.k);
  push_rounded(geometry.v_type, geometry.v_head_dim, v, n_tokens * v_row(layer), &rows.v);
}

void SequenceModel::append(size_t layer, int64_t n_tokens, const double* k, const double* v) {
  push_rows(layer, n_tokens, k, v);
  rows_[layer].n_tokens += n_tokens;
  grow_positions();
}

void SequenceModel::append_pending(size_t layer, int64_t n_tokens, const double* k, const double* v,
                                   const int32_t* parents) {
  const bool first_layer = std::all_of(rows_.begin(), rows_.end(), [](const Rows& r) { return r.n_pending == 0; });
  push_rows(layer, n_tokens, k, v);
  rows_[layer].n_pending = n_tokens;
  if (!first_layer) return;
  const auto base = static_cast<size_t>(rows_[layer].n_tokens);
  positions_.resize(base);
  for (int64_t t = 0; t < n_tokens; ++t) {
    const int32_t parent = parents ? parents[t] : static_cast<int32_t>(t) - 1;
    parents_.push_back(parent);
    const int64_t before = parent >= 0 ? positions_[base + static_cast<size_t>(parent)] : base ? positions_[base - 1] : -1;
    positions_.push_back(before + 1);
  }
}

void SequenceModel::cut(size_t layer, int64_t n_tokens) {
  Rows& rows = rows_[layer];
  rows.n_tokens = std::min(rows.n_tokens, n_tokens);
  rows.n_pending = 0;
  rows.k.resize(static_cast<size_t>(rows.n_tokens * k_row(layer)));
  rows.v.resize(static_cast<size_t>(rows.n_tokens * v_row(layer)));
}

void SequenceModel::drop_pending() {
  for (size_t layer = 0; layer < rows_.size(); ++layer) cut(layer, rows_[layer].n_tokens);
  parents_.clear();
  positions_.resize(static_cast<size_t>(longest()));
}

void SequenceModel::truncate(int64_t n_tokens) {
  drop_pending();
  for (size_t layer = 0; layer < rows_.size(); ++layer) cut(layer, n_tokens);
  positions_.resize(static_cast<size_t>(longest()));
}

void SequenceModel::roll_back(const std::vector<int64_t>& lengths) {
  drop_pending();
  for (size_t layer = 0; layer < rows_.size(); ++layer) cut(layer, lengths[layer]);
  positions_.resize(static_cast<size_t>(longest()));
}

void SequenceModel::commit(const std::vector<int64_t>& kept) {
  const int64_t base = rows_[0].n_tokens;
  for (size_t layer = 0; layer < rows_.size(); ++layer) {
    Rows& rows = rows_[layer];
    for (size_t i = 0; i < kept.size(); ++i) {
      const int64_t from = base + kept[i], to = base + static_cast<int64_t>(i);
      std::copy_n(rows.k.begin() + from * k_row(layer), k_row(layer), rows.k.begin() + to * k_row(layer));
      std::copy_n(rows.v.begin() + from * v_row(layer), v_row(layer), rows.v.begin() + to * v_row(layer));
    }
    rows.n_tokens += static_cast<int64_t>(kept.size());
    cut(layer, rows.n_tokens);
  }
  parents_.clear();
  positions_.resize(static_cast<size_t>(base));
  grow_positions();
}

void SequenceModel::remove(int64_t first, int64_t n_tokens, bool shift_positions) {
  for (size_t layer = 0; layer < rows_.size(); ++layer) {
    Rows& rows = rows_[layer];
    rows.k.erase(rows.k.begin() + first * k_row(layer), rows.k.begin() + (first + n_tokens) * k_row(layer));
    rows.v.erase(rows.v.begin() + first * v_row(layer), rows.v.begin() + (first + n_tokens) * v_row(layer));
    rows.n_tokens -= n_tokens;
  }
  positions_.erase(positions_.begin() + first, positions_.begin() + first + n_tokens);
  if (shift_positions)
    for (size_t i = static_cast<size_t>(first); i < positions_.size(); ++i) positions_[i] -= n_tokens;
}

int64_t SequenceModel::place(size_t layer, int64_t index) const {
  const int64_t base = rows_[layer].n_tokens;
  int64_t depth = index < base ? index : base;
  if (index >= base)
    for (int32_t p = parents_[static_cast<size_t>(index - base)]; p >= 0; p = parents_[static_cast<size_t>(p)]) ++depth;
  return depth;
}

void SequenceModel::visible(size_t layer, int64_t index, const Scope& scope, std::vector<int64_t>* keys) const {
  const RefLayer& geometry = (*layers_)[layer];
  const int64_t base = rows_[layer].n_tokens, own_place = place(layer, index);
  std::vector<int64_t> seen;
  for (int64_t j = 0; j < base && j <= index; ++j) seen.push_back(j);
  if (index >= base) {
    std::vector<int64_t> chain;
    for (auto p = static_cast<int32_t>(index - base); p >= 0; p = parents_[static_cast<size_t>(p)])
      chain.push_back(base + p);
    seen.insert(seen.end(), chain.rbegin(), chain.rend());
  }
  for (int64_t j : seen) {
    const int64_t key_place = place(layer, j);
    if (geometry.sliding_window > 0 && position(j) <= position(index) - geometry.sliding_window) continue;
    const int64_t sinks = geometry.sliding_window > 0 ? 0 : scope.sink_tokens;
    if (scope.streaming && key_place >= sinks && key_place <= own_place - scope.window_tokens) continue;
    keys->push_back(j);
  }
}

LayerRows SequenceModel::layer_rows(size_t layer) const {
  const RefLayer& geometry = (*layers_)[layer];
  const Rows& rows = rows_[layer];
  return {&geometry, rows.n_tokens + rows.n_pending, rows.k.data(), geometry.v_aliases_k ? nullptr : rows.v.data(),
          positions_.data()};
}

Truth SequenceModel::attend(size_t layer, int64_t q_len, const float* q, const Scope& scope, int64_t naive_rows,
                            const AttendHooks& hooks) const {
  const LayerRows rows = layer_rows(layer);
  const int64_t first = rows.n_tokens - q_len;
  Queries queries;
  queries.n_tokens = q_len;
  queries.q = q;
  queries.positions = positions_.data() + first;
  queries.visible = [&](int64_t t, int32_t kv_head, std::vector<int64_t>* keys) {
    visible(layer, first + t, hooks.named ? Scope() : scope, keys);
    if (hooks.named) {
      std::vector<int64_t> in_scope;
      if (hooks.plus_scope) visible(layer, first + t, scope, &in_scope);
      std::erase_if(*keys, [&](int64_t j) {
        return !hooks.named(t, kv_head, j) && !std::binary_search(in_scope.begin(), in_scope.end(), j);
      });
    }
    if (hooks.attended) std::erase_if(*keys, [&](int64_t j) { return !hooks.attended(kv_head, j); });
  };
  queries.observe = hooks.observe;
  queries.naive_rounds_p = hooks.naive_rounds_p;
  queries.naive_rows = naive_rows;
  return attend_reference(rows, queries);
}

std::string SequenceModel::content() const {
  std::string bytes;
  const auto put = [&bytes](const void* data, size_t n) { bytes.append(static_cast<const char*>(data), n); };
  for (const Rows& rows : rows_) {
    put(&rows.n_tokens, sizeof rows.n_tokens);
    put(positions_.data(), static_cast<size_t>(rows.n_tokens) * sizeof(int64_t));
    const auto layer = static_cast<size_t>(&rows - rows_.data());
    put(rows.k.data(), static_cast<size_t>(rows.n_tokens * k_row(layer)) * sizeof(float));
    put(rows.v.data(), static_cast<size_t>(rows.n_tokens * v_row(layer)) * sizeof(float));
  }
  return bytes;
}

}  // namespace reference
