// SPDX-License-Identifier: MIT
#include "lib/call/key_runs.h"

#include <iterator>

#include "lib/store/cache.h"

namespace tandem {

void KeyRuns::fill(const Cache& cache, const Sequence& sequence, int32_t layer_idx, int64_t first, int64_t end) {
  const Layer& layer = cache.layers()[static_cast<size_t>(layer_idx)];
  const StoreView view = cache.view(sequence);
  runs.clear();
  for (int32_t h = 0; h < layer.n_kv_heads; ++h)
    for (int64_t t = first; t < end; t += runs.back().n_tokens)
      runs.push_back(keys_of(view, layer, layer_idx, key_tokens(view, layer, {t, end}), h));
  n_runs = std::ssize(runs) / layer.n_kv_heads;
  begin = first;
  length = end;
  keeps_positions = layer.rope != nullptr && !sequence.positions.empty();
}

}  // namespace tandem
