// SPDX-License-Identifier: MIT
// Named keys of a long chunk (lib/attend/long_append.h). All its queries attend a unit in the same launch. So the union of
// the named units crosses the bus, and lists of tiles (lib/call/key_tiles.h) tell kernels which query attends which keys.
// The host makes the lists of each launch just before it, while the device works on the launch before.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "lib/attend/call.h"
#include "lib/call/key_tiles.h"

namespace tandem {

// Where the keys of a launch are: a page table in host memory, in the format of DeviceSequences.
struct TilePages {
  const int64_t* table = nullptr;
  int32_t table_len = 0, page_len = 0;
};

class NamedTiles {
 public:
  // Begins a chunk. named: in host memory, sorted, row 0 is the chunk's first; null if its queries name no keys.
  void begin(const NamedKeys* named, const SequenceCall& of, const Layer& layer);
  bool any() const { return named_ != nullptr; }
  // Returns the ranges of `tokens` that any query of the chunk names for any of these heads, in order. Ranges do not touch.
  // Valid until the chunk ends, or until the next call of this function.
  std::span<const TokenRange> named_of(HeadRange heads, TokenRange tokens);
  // Copies the heads' lists of `tokens` to the device and makes the launch use them. The launch must be for these heads
  // only.
  Status send(const Call& chunk, HeadRange heads, TokenRange tokens, const TilePages& pages, DeviceAttend* launch);
  // Returns the keys that the chunk's last query attends; empty if its queries name no keys.
  NotedKeys of_last_query(const Call& chunk) const;

 private:
  const NamedKeys* named_ = nullptr;
  int64_t n_queries_ = 0, own_of_first_ = 0;
  int32_t group_size_ = 0;
  std::vector<uint64_t> units_;  // [n_heads][n_words_], one bit for each unit that a query names
  int64_t n_words_ = 0;
  std::vector<TokenRange> ranges_;
  TileMaker maker_;
  std::unique_ptr<std::byte[]> upload_;  // lists, then tiles
  int64_t upload_bytes_ = 0;
};

}  // namespace tandem
