// SPDX-License-Identifier: MIT
// Checks that a stage kept the right chunks, although it may round its scores.
#pragma once

#include <string>
#include <vector>

#include "device/plain_search.h"

namespace tandem::test {

// Chunks that must be kept because of their scores, and chunks that a search with rounding may keep in place of others.
struct RightChunks {
  Chunks sure, open;
  bool is_strict() const { return open.empty(); }
};
RightChunks find_right(const Chunks& candidates, const std::vector<ChunkScore>& scores, int64_t n_best);

// Returns an error text about the list of chunks that a stage kept of its candidates, or "" if it is right. *n_open: number
// of chunks that rounding may have kept or dropped.
std::string check_kept(const PlainSearch& search, size_t stage, int32_t list, const Chunks& candidates, const Chunks& kept,
                       size_t* n_open);

}  // namespace tandem::test
