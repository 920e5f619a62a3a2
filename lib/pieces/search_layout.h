// SPDX-License-Identifier: MIT
// From the records of a policy that prunes (lib/policy/pruning.h) to what a device is told of a search
// (lib/tables/search.h), and what that takes in device memory.
#pragma once

#include <cstdint>
#include <vector>

#include "lib/model/layer.h"
#include "lib/policy/pruning.h"
#include "lib/tables/device.h"

namespace tandem {

// Lengths of the chunks that stages of the layer judge by bounds, each once.
std::vector<int64_t> bounded_lengths(const PruningOfLayer& pruning);
inline int64_t n_key_lists(const Layer& layer, const Pruning& pruning) {
  return pruning.shares_lists ? 1 : layer.n_kv_heads;
}
// Stages, sinks and window of the record. Returns how many bytes the lists of a query block take.
int64_t describe_record(const PruningRecord& record, const std::vector<int64_t>& bounded, int64_t n_lists,
                        DeviceSearch* search);
// The most granules of a key list of a sequence of up to n_tokens tokens: sinks, and what the last stage that is there
// keeps.
int64_t most_granules(const PruningRecord& record, int64_t n_tokens);
// Whether every stage keeps all of its candidates, for queries of the first n_tokens tokens: these attend all keys.
bool keeps_all(const PruningRecord& record, int64_t n_tokens, bool overlaps);
// Whether the query blocks of all stages have one length, as searches on a device take them.
bool has_one_query_block(const PruningRecord& record);

}  // namespace tandem
