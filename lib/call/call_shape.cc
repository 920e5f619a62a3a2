// SPDX-License-Identifier: MIT
#include "lib/call/call_shape.h"

#include <algorithm>

#include "lib/call/ticket.h"

namespace tandem {

int64_t CallShape::n_tokens() const {
  int64_t n = 0;
  for (const SequenceShape& sequence : sequences) n += sequence.q_len;
  return n;
}

int64_t CallShape::max_q_len() const {
  int64_t longest = 1;
  for (const SequenceShape& sequence : sequences) longest = std::max(longest, sequence.q_len);
  return longest;
}

int64_t CallShape::longest() const {
  int64_t longest = 0;
  for (const SequenceShape& sequence : sequences) longest = std::max(longest, sequence.length);
  return longest;
}

SequenceShape planned_sequence(const Layer& layer, int64_t kv_len, int64_t q_len) {
  SequenceShape sequence;
  sequence.q_len = q_len;
  sequence.length = kv_len;
  if (layer.sliding_window > 0) sequence.first_seen = std::max<int64_t>(0, kv_len - q_len + 1 - layer.sliding_window);
  return sequence;
}

TokenRange outside_of(const PolicyOptions& options, int64_t page_len, const SequenceShape& sequence, int64_t length) {
  const int64_t end = outside_window(options.window_len, page_len, length, sequence.window_begin);
  return {std::min(sequence.first_seen, end), end};
}

int64_t SizeTerms::most_of_chunk() const {
  const bool is_asked_for = routes.append_tokens > 0 && !layouts.empty();
  return is_asked_for ? std::min(routes.append_tokens, kMostTicketTokens) : kMostTicketTokens;
}

// Returns whether the call takes its queries one by one. Kernels for several queries need a window that is not empty, and
// tell the queries' windows apart by token index. A sliding window reaches back in positions.
bool SizeTerms::takes_single_queries(const CallShape& shape) const {
  const bool has_gaps =
      std::any_of(shape.sequences.begin(), shape.sequences.end(), [](const auto& s) { return s.has_gaps; });
  return shape.is_speculative || exact_window(policies[shape.layer_idx], options) == 0 ||
         (!heads.empty() && options.window_len == 0) || (shape.layer->sliding_window > 0 && has_gaps);
}

int64_t SizeTerms::wanted_queries(const CallShape& shape) const {
  return takes_single_queries(shape) ? 1 : std::min(shape.max_q_len(), most_of_chunk());
}

TokenRange SizeTerms::streamed(const CallShape& shape, const SequenceShape& sequence) const {
  if (!can_stream(policies[shape.layer_idx], sequence.q_len > 1)) return {};
  const bool is_whole = sequence.q_len <= shape.most_queries && shape.n_tokens() <= kMostTicketTokens;
  return outside_of(options, store.page_len, sequence, is_whole ? sequence.first_query() : sequence.length - 1);
}

int64_t SizeTerms::n_lists(size_t l) const {
  if (kinds(l) != nullptr) return layers[l].n_kv_heads;
  if (!policies[l].follows_patterns || !options.patterns[l].narrows_decode()) return 0;
  return layers[l].n_kv_heads + options.patterns[l].most_sink_units();
}

}  // namespace tandem
