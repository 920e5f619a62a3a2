// SPDX-License-Identifier: MIT
// Translates the records of a pruning policy (lib/policy/pruning.h) to a device's description of a search
// (lib/tables/search.h), and computes the device memory of searches.
#pragma once

#include <cstdint>
#include <vector>

#include "lib/model/layer.h"
#include "lib/policy/pruning.h"
#include "lib/tables/device.h"

namespace tandem {

// Returns the distinct lengths of the chunks that the layer's stages judge by bounds.
std::vector<int64_t> bounded_lengths(const PruningOfLayer& pruning);
inline int64_t n_key_lists(const Layer& layer, const Pruning& pruning) {
  return pruning.shares_lists ? 1 : layer.n_kv_heads;
}
// Describes the record's stages, sinks and window. Returns the bytes of a query block's lists.
int64_t describe_record(const PruningRecord& record, const std::vector<int64_t>& bounded, int64_t n_lists,
                        DeviceSearch* search);
// Returns the maximum number of granules in a key list of a sequence of up to n_tokens tokens: those of the sinks, and those
// of the stage that keeps the most.
int64_t most_granules(const PruningRecord& record, int64_t n_tokens);
// True if every stage keeps all of its candidates for queries of the first n_tokens tokens. Those queries attend all keys.
bool keeps_all(const PruningRecord& record, int64_t n_tokens, bool overlaps);
// True if the query blocks of all stages have the same length, as searches on a device require.
bool has_one_query_block(const PruningRecord& record);

}  // namespace tandem
