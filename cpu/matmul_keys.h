// SPDX-License-Identifier: MIT
// Gathers the keys that a range of query tokens may see, from the runs of a job into tiles.
//
// A tile holds up to kTileKv keys, in the job's order, from as many runs as needed. Keys that no token of the range sees are
// left out, so sinks and a sliding window far behind them share a tile. Columns are counted within a tile.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/kernels/kernels.h"
#include "lib/tables/backend.h"

namespace tandem::cpu {

// Consecutive rows of one run.
struct KeySegment {
  const KvRun* run = nullptr;
  int64_t row = 0;        // first row, counted in the run
  int64_t key_idx = 0;    // first key, counted in the job
  int64_t token_idx = 0;  // of the first key; -1: every query sees the keys
  int32_t column = 0;     // first column, counted in the tile
  int32_t n_keys = 0;
};

struct KeyTile {
  KeySegment* segments = nullptr;  // [max_keys]
  int32_t n_segments = 0;
  int32_t n_keys = 0;
};

// The query tokens first to last, both included.
struct TokenRange {
  int64_t first = 0;
  int64_t last = 0;
};

class KeyWalker {
 public:
  // Walks through the keys of the span that the tokens may see. Without visibility the tokens see every key.
  KeyWalker(const Span& span, TokenRange tokens);
  // Fills tile->segments with up to max_keys keys. Returns false if no keys are left.
  bool next(KeyTile* tile, int32_t max_keys);

 private:
  bool refill();

  struct Piece {
    int64_t row, n_keys;
  };
  const AttendJob& job_;
  int64_t begin_ = 0, end_ = INT64_MAX, sink_end_ = INT64_MAX;
  int64_t key_begin_, key_end_;  // the span's keys, counted in the job
  int64_t run_idx_;              // the current run
  int64_t first_key_ = 0;        // index of its first key in the job
  int64_t next_key_;             // index in the job of the next run's first key
  int32_t n_pieces_ = 0;         // pieces of the current run that are left; the last one is taken first
  Piece pieces_[2] = {};
};

// The part of a tile that a range of tokens sees. The columns [begin, end) contain all keys that any of the tokens sees.
// `all` means that every token sees all of them.
struct TileView {
  int32_t begin = 0;
  int32_t end = 0;
  bool all = false;
};
TileView view_of(const Visibility* visibility, const KeyTile& tile, TokenRange tokens);

// True if query token t sees key token_idx (-1: every query sees it).
bool sees(const Visibility* visibility, int64_t t, int64_t token_idx);

// Sets visible[c] to ~0 or 0 for the columns [begin, end): ~0 if token t sees the column. Columns past n_keys are hidden.
void visible_columns(const Visibility* visibility, const KeyTile& tile, int64_t t, int32_t begin, int32_t end,
                     uint32_t* visible);

}  // namespace tandem::cpu
