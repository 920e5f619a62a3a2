// SPDX-License-Identifier: MIT
// Which keys a range of query tokens may see, gathered from the runs of a job into tiles.
//
// A tile holds up to kTileKv keys, in the job's order, out of as many runs as it takes; keys that no token of the range
// sees are left out, so that sinks and a sliding window far behind them meet in one tile. Columns are counted within a tile.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/kernels/kernels.h"
#include "lib/tables/backend.h"

namespace tandem::cpu {

// Consecutive rows of one run.
struct KeySegment {
  const KvRun* run = nullptr;
  int64_t row = 0;        // of the run
  int64_t key_idx = 0;    // of the job
  int64_t token_idx = 0;  // of the first key, or -1: everyone sees them
  int32_t column = 0;     // of the tile
  int32_t n_keys = 0;
};

struct KeyTile {
  KeySegment* segments = nullptr;  // [max_keys]
  int32_t n_segments = 0;
  int32_t n_keys = 0;
};

// Query tokens first..last, both included.
struct TokenRange {
  int64_t first = 0;
  int64_t last = 0;
};

class KeyWalker {
 public:
  // Keys of the span that the tokens may see; without visibility every one.
  KeyWalker(const Span& span, TokenRange tokens);
  // Fills tile->segments with up to max_keys keys; false when there are none left.
  bool next(KeyTile* tile, int32_t max_keys);

 private:
  bool refill();

  struct Piece {
    int64_t row, n_keys;
  };
  const AttendJob& job_;
  int64_t begin_ = 0, end_ = INT64_MAX, sink_end_ = INT64_MAX;
  int64_t key_begin_, key_end_;  // of the span in the job
  int64_t run_idx_;              // the current run
  int64_t first_key_ = 0;        // its first key in the job
  int64_t next_key_;             // that of the run behind it
  int32_t n_pieces_ = 0;         // of the current run, still to be taken, last first
  Piece pieces_[2] = {};
};

// What a range of tokens sees of a tile: the columns in [begin, end) contain all that any of them sees; nothing is
// hidden from any of them when `all` is set.
struct TileView {
  int32_t begin = 0;
  int32_t end = 0;
  bool all = false;
};
TileView view_of(const Visibility* visibility, const KeyTile& tile, TokenRange tokens);

// Whether query token t sees key token_idx (-1: everyone does).
bool sees(const Visibility* visibility, int64_t t, int64_t token_idx);

// visible[c] = ~0 or 0 for the columns [begin, end), as token t sees them. Columns past n_keys are hidden.
void visible_columns(const Visibility* visibility, const KeyTile& tile, int64_t t, int32_t begin, int32_t end,
                     uint32_t* visible);

}  // namespace tandem::cpu
