// SPDX-License-Identifier: MIT
// Whether a stage has kept the right chunks, where it may round its scores.
#pragma once

#include <string>
#include <vector>

#include "device/plain_search.h"

namespace tandem::test {

// Chunks that are certainly kept because of their scores, and chunks that a rounded search may keep in place of others.
struct RightChunks {
  Chunks sure, open;
  bool is_strict() const { return open.empty(); }
};
RightChunks find_right(const Chunks& candidates, const std::vector<ChunkScore>& scores, int64_t n_best);

// What is wrong with a list of chunks that a stage has kept of its candidates; "": nothing. *n_open: chunks that it might as
// well have kept, or not.
std::string check_kept(const PlainSearch& search, size_t stage, int32_t list, const Chunks& candidates, const Chunks& kept,
                       size_t* n_open);

}  // namespace tandem::test
