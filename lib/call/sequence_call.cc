// SPDX-License-Identifier: MIT
#include "lib/call/sequence_call.h"

#include "lib/store/cache_rows.h"

namespace tandem {
namespace {

bool has_tree_positions(const SequenceCall& call, const Layer& layer) {
  return call.visibility.tree_words > 0 && layer.rope != nullptr;
}

}  // namespace

TokenRun first_tokens(const SequenceCall& call, const StoreView& view, const Layer& layer, TokenRange tokens) {
  if (has_tree_positions(call, layer) && tokens.begin < call.first_query)
    tokens.end = std::min(call.first_query, tokens.end);
  return key_tokens(view, layer, tokens);
}

KvRun run_of(const SequenceCall& call, const StoreView& view, const Layer& layer, int32_t layer_idx, const TokenRun& at,
             int32_t kv_head) {
  KvRun run = keys_of(view, layer, layer_idx, at, kv_head);
  if (has_tree_positions(call, layer) && at.token >= call.first_query)
    run.positions = call.tree_positions + (at.token - call.first_query);
  return run;
}

}  // namespace tandem
