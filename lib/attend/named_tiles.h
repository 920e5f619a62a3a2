// SPDX-License-Identifier: MIT
// Named keys of a long chunk (lib/attend/long_append.h). All its queries meet a unit at once: what crosses the bus is the
// union of the units that they name, and lists of tiles (lib/call/key_tiles.h) tell the kernels which query attends what.
// The lists are made on the host, for each launch just before it, while the device is at work on the launch before.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "lib/attend/call.h"
#include "lib/call/key_tiles.h"

namespace tandem {

// Where the keys of a launch lie: a page table in host memory, as DeviceSequences have it.
struct TilePages {
  const int64_t* table = nullptr;
  int32_t table_len = 0, page_len = 0;
};

class NamedTiles {
 public:
  // Of the chunk that begins; null: its queries name no keys. named: in host memory, in order; row 0 is the chunk's first.
  void begin(const NamedKeys* named, const SequenceCall& of, const Layer& layer);
  bool any() const { return named_ != nullptr; }
  // Which of the tokens any query of the chunk names for any of these heads, in order; ranges do not touch. Valid until the
  // chunk ends, or the next call.
  std::span<const TokenRange> named_of(HeadRange heads, TokenRange tokens);
  // Copies the lists of these heads, as far as they name the tokens, to the device, and makes the launch use them. The
  // launch must be for these heads alone.
  Status send(const Call& chunk, HeadRange heads, TokenRange tokens, const TilePages& pages, DeviceAttend* launch);
  // The keys that the chunk's last query attends; empty where its queries name no keys.
  NotedKeys of_last_query(const Call& chunk) const;

 private:
  const NamedKeys* named_ = nullptr;
  int64_t n_queries_ = 0, own_of_first_ = 0;
  int32_t group_size_ = 0;
  std::vector<uint64_t> units_;  // [n_heads][n_words_], a bit for each unit that a query names
  int64_t n_words_ = 0;
  std::vector<TokenRange> ranges_;
  TileMaker maker_;
  std::unique_ptr<std::byte[]> upload_;  // lists, then tiles
  int64_t upload_bytes_ = 0;
};

}  // namespace tandem
