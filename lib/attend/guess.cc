// SPDX-License-Identifier: MIT
#include "lib/attend/guess.h"

#include <algorithm>

namespace tandem {

Status check_guess(const Call& call) {
  if (call.session.step.is_planned)
    return fail(TANDEM_ERROR_INVALID_STATE, "flags",
                "flags: TANDEM_ATTEND_SPECULATIVE in a step that was begun on a stream: such steps are planned without");
  if (call.args.q.n_tokens <= kMostTicketTokens) return {};
  return fail(TANDEM_ERROR_UNSUPPORTED, "q_lens",
              "q_lens: %lld speculative tokens in a call on device tensors: at most %lld",
              static_cast<long long>(call.args.q.n_tokens), static_cast<long long>(kMostTicketTokens));
}

// Reserves descriptors of each query, and positions, half the size of a page table's entry. Speculative tokens evict none.
void reserve_guess(const SizeTerms& terms, const CallShape& shape, Reservation* needs) {
  const int64_t n_queries = shape.n_tokens(), n_all = n_queries + static_cast<int64_t>(shape.sequences.size());
  needs->add_descriptors(n_queries, (n_queries + 1) / 2);
  needs->workspace_bytes = workspace_bytes(*terms.device, *shape.layer, n_all, shape.most_queries);
  needs->n_evicted = 0;
}

void leave_guess_to_host(SequenceCall* of) {
  of->resident_begin = std::min(of->resident_begin, of->first_query);
  of->host_end = std::min(of->host_end, of->first_query);
  of->has_host = true;
}

int64_t describe_guess(Call& chunk, std::byte* upload, int64_t bytes) {
  auto* own = reinterpret_cast<DeviceSequence*>(upload);
  auto* position = reinterpret_cast<int32_t*>(upload + bytes);
  for (const SequenceCall& of : chunk.calls()) {
    own->begin = own->end;
    ++own;
    for (int64_t t = 0; t < of.q_len; ++t)
      *position++ = of.visibility.tree_words > 0 ? of.tree_positions[t]
                                                 : static_cast<int32_t>(of.sequence->position(of.first_query + t));
  }
  chunk.positions = reinterpret_cast<const int32_t*>(chunk.device().work().descriptors() + bytes);
  return bytes + chunk.args.q.n_tokens * static_cast<int64_t>(sizeof(int32_t));
}

}  // namespace tandem
