// SPDX-License-Identifier: MIT
// Saves a sequence's state under "hgca": averages, selected tokens, and queries that wait to be counted. After loading, rows
// are copied from the store again, in one block for each head.
#include <algorithm>

#include "lib/select/hgca.h"

namespace tandem {

Status Maw::visit(StateVisitor& visitor, int32_t n_q_heads, int64_t n_tokens) const {
  for (int32_t h = 0; h < n_q_heads; ++h)
    for (int64_t t = 0; t < n_tokens; t += kBlock)
      TANDEM_TRY(visitor.bytes(at(h, t), std::min(kBlock, n_tokens - t) * static_cast<int64_t>(sizeof(float))));
  return {};
}

Status HeadSelection::visit(StateVisitor& visitor, int64_t sink_len, int64_t window_begin) {
  int64_t n = n_tokens;
  auto* idx = token_idx.as<int32_t>();
  TANDEM_TRY(visitor.number(&n, 0, std::max<int64_t>(0, window_begin - sink_len), "n_selected_tokens"));
  TANDEM_TRY(visitor.bytes(idx, n * static_cast<int64_t>(sizeof(int32_t))));
  if (!visitor.is_loading()) return {};
  for (int64_t i = 0, least = sink_len; i < n; least = idx[i++] + int64_t{1})
    if (idx[i] < least || idx[i] >= window_begin) return visitor.corrupt("selected tokens do not ascend before the window");
  n_tokens = n;
  return {};
}

Status HeldQueries::visit(StateVisitor& visitor, const Layer& layer, int64_t most, int64_t length) {
  int64_t n_saved = n;
  TANDEM_TRY(visitor.number(&n_saved, 0, length, "n_held_queries"));
  if (n_saved > most)
    return fail(TANDEM_ERROR_INVALID_ARGUMENT, "session",
                "session: by its alpha the last %lld queries count, the file has %lld to be counted",
                static_cast<long long>(most), static_cast<long long>(n_saved));
  if (n_saved == 0) return {};
  if (visitor.is_loading()) reserve(layer, most);
  const int64_t group = layer.group_size, capacity = std::ssize(begin), f32 = sizeof(float);
  TANDEM_TRY(visitor.number(&n_skipped, 0, INT64_MAX, "n_skipped_queries"));
  TANDEM_TRY(visitor.number(&end_token, 0, length, "end_of_counting"));
  for (int64_t h = 0; h < layer.n_kv_heads; ++h) {
    TANDEM_TRY(visitor.bytes(q.data() + h * capacity * group * layer.k_head_dim, n_saved * group * layer.k_head_dim * f32));
    TANDEM_TRY(visitor.bytes(lse.data() + h * capacity * group, n_saved * group * f32));
  }
  for (int64_t i = 0; i < n_saved; ++i) {
    TANDEM_TRY(visitor.number(&end[static_cast<size_t>(i)], 0, length, "end of a held query"));
    TANDEM_TRY(visitor.number(&begin[static_cast<size_t>(i)], 0, end[static_cast<size_t>(i)], "begin of a held query"));
  }
  n = n_saved;
  return {};
}

Status HgcaState::visit(StateVisitor& visitor, const Sequence& sequence, int64_t window_begin) {
  const Layer& layer = hgca.layer();
  const int64_t length = sequence.lengths[static_cast<size_t>(hgca.layer_idx())], sink_len = hgca.options().sink_len;
  TANDEM_TRY(visitor.same("sink_tokens", sink_len));
  TANDEM_TRY(visitor.flag(&is_unjudged, "is_unjudged"));
  TANDEM_TRY(visitor.flag(&due, "due"));
  TANDEM_TRY(held.visit(visitor, layer, hgca.n_counted(), length));
  TANDEM_TRY(maw.visit(visitor, layer.n_q_heads, length));
  for (HeadSelection& head : heads) TANDEM_TRY(head.visit(visitor, sink_len, window_begin));
  if (visitor.is_loading()) copy_loaded(*this, sequence, window_begin);
  return {};
}

}  // namespace tandem
