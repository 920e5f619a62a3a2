// SPDX-License-Identifier: MIT
#include "lib/attend/device_chunk.h"

#include <algorithm>

#include "lib/attend/commit.h"
#include "lib/attend/search_call.h"
#include "lib/attend/session_states.h"

namespace tandem {

void evict_before(const Call& chunk, SequenceCall* of) {
  of->foreign_begin = of->state->window_begin;
  of->window_begin = chunk.session.evicted_to(of->foreign_begin, of->first_query);
  if (of->window_begin > of->foreign_begin && chunk.facts.policy.keeps_maw) chunk.session.states->fetch_maw(*of->sequence);
}

void prepare_selection(const Call& chunk) {
  int64_t n_evicted = 0;
  HostPart& host = chunk.scratch.host;
  for (size_t i = 0; i < chunk.calls().size(); ++i) {
    SequenceCall& of = chunk.calls()[i];
    of.state->selection->prepare_on_device(&of, chunk.args.speculative, &host.keep_copy(i, of.selected), &n_evicted);
  }
}

void commit_sequences(Call& chunk) {
  const size_t l = chunk.facts.idx;
  for (SequenceCall& of : chunk.calls()) {
    if (chunk.args.speculative) {
      of.window->extend(l, of.resident_begin, of.first_query);
      guess_tokens(chunk, of);
    } else {
      of.window->extend(l, std::max(of.resident_begin, of.kept_begin), of.length);
      commit_tokens(chunk, of);
      if (chunk.facts.policy.keeps_maw) of.window->set_maw(l, of.window_begin);
    }
    commit_search(chunk, of);
    of.state->selection->committed(of, chunk.args.speculative);
    count_bytes(chunk, of);
  }
}

}  // namespace tandem
