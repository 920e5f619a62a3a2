// SPDX-License-Identifier: MIT
// Speculation on device tensors. What is a guess stays out of windows: its rows go to the host alone, beyond the sequence's
// length, and the host attends to them, as its kernels know trees. The device attends to what is committed:
//
//   tokens    0 ... | window ... first_query | the guess ...
//             host  | device                 | host
//
// There every query sees its keys to the end, whatever the tree, and with a window of its own begins at its own: each is
// described as a sequence of one query. What is kept at the end is committed in the store, as for host tensors, and comes
// into the window with the next call. Where MAW are kept, queries and lse stay with the session, whose CPU counts the
// weights of those that are kept (lib/session_step.cc).
#include <algorithm>

#include "lib/attend_call.h"

namespace tandem {

Status AttendCall::check_guess() const {
  if (session_.plan_.is_open)
    return fail(TANDEM_ERROR_INVALID_STATE, "flags",
                "flags: TANDEM_ATTEND_SPECULATIVE in a step that was begun on a stream: such steps are planned without");
  if (args_.q.n_tokens <= DeviceSession::kMostTokens) return {};
  return fail(TANDEM_ERROR_UNSUPPORTED, "q_lens",
              "q_lens: %lld speculative tokens in a call on device tensors: at most %lld",
              static_cast<long long>(args_.q.n_tokens), static_cast<long long>(DeviceSession::kMostTokens));
}

// Descriptors of each query, and positions, half as long as a page table's entry. Nothing of a guess leaves a window.
void reserve_guess(const SizeTerms& terms, const CallShape& shape, Reservation* needs) {
  const int64_t n_queries = shape.n_tokens(), n_all = n_queries + static_cast<int64_t>(shape.sequences.size());
  needs->add_descriptors(n_queries, (n_queries + 1) / 2);
  needs->workspace_bytes = workspace_bytes(*terms.device, *shape.layer, n_all, shape.most_queries);
  needs->n_evicted = 0;
}

void AttendCall::leave_guess_to_host(SequenceCall* call) {
  call->resident_begin = std::min(call->resident_begin, call->first_query);
  call->host_end = std::min(call->host_end, call->first_query);
  call->has_host = true;
}

// Behind the sequences' own, which have no resident keys; positions behind `bytes` bytes. Returns how many there are then.
int64_t AttendCall::describe_guess(std::byte* upload, int64_t bytes, const DeviceSequences& sequences) {
  const DeviceSession& device = *session_.device_;
  auto* own = reinterpret_cast<DeviceSequence*>(upload);
  DeviceSequence* query = own + scratch_.calls.size();
  auto* position = reinterpret_cast<int32_t*>(upload + bytes);
  for (const SequenceCall& call : scratch_.calls) {
    own->begin = own->end;
    for (int64_t t = 0; t < call.q_len; ++t, ++query, ++position) {
      const auto at = static_cast<size_t>(t);
      *query = *own;
      query->q_len = 1;
      query->first_row += static_cast<int32_t>(t);
      query->end = std::max<int64_t>(call.first_query, 1);  // a query is a token
      query->begin = call.first_query == 0
                         ? 1
                         : std::clamp(scratch_.begin[call.visibility_at + at], call.resident_begin, call.first_query);
      *position = call.visibility.tree_words > 0 ? call.tree_positions[t]
                                                 : static_cast<int32_t>(call.sequence->position(call.first_query + t));
    }
    ++own;
  }
  guess_.queries = sequences;
  guess_.queries.sequences = sequences.sequences + scratch_.calls.size();
  guess_.queries.n_sequences = static_cast<int32_t>(args_.q.n_tokens);
  guess_.queries.max_q_len = 1;
  guess_.positions = reinterpret_cast<const int32_t*>(device.descriptors() + bytes);
  return bytes + args_.q.n_tokens * static_cast<int64_t>(sizeof(int32_t));
}

void AttendCall::keep_guess(const SequenceCall& call) {
  call.window->extend(layer_idx_, call.resident_begin, call.first_query);
  guess_tokens(call);
  count_bytes(call);
  call.state->selection->committed(call, true);
}

}  // namespace tandem
