// SPDX-License-Identifier: MIT
// What differs between calls by where their tensors are: one lane for host memory, lanes for a device. lib/attend/executor.h
// has the order in which their functions are called.
#pragma once

#include <optional>

#include "lib/attend/call.h"

namespace tandem {

// What has been done so far of a call that goes in chunks.
struct ChunkPlace {
  size_t call = 0;    // of the call's sequences
  int64_t query = 0;  // of that sequence's
};

// The work of a chunk, in this order. prepare() and commit() hold the cache's mutex exclusively, fill() shared, the others
// not.
class ChunkWork {
 public:
  virtual ~ChunkWork() = default;
  virtual Status prepare(Call& chunk) = 0;
  virtual Status fill(Call& chunk) = 0;
  virtual Status launch(Call& chunk) = 0;
  virtual Status commit(Call& chunk) = 0;
  virtual void finish(Call&) {}
};

// Some rows of a call: a call of its own, unless it is the whole one.
struct Chunk {
  std::optional<CutArgs> cut;
  std::optional<Call> own;
  Call* call = nullptr;
  ChunkWork* work = nullptr;
};

class Lane : public ChunkWork {
 public:
  // What may be refused at once. *is_done: the call was the next layer of a planned step, and all of it has been launched.
  virtual Status check(Call& call, bool* is_done) = 0;
  // Of the whole call. Background work that it needs; the cache's mutex is not held.
  virtual Status join(Call&) { return {}; }
  virtual Status reserve(Call&) { return {}; }  // memory for all chunks
  // The next rows of the call; the place moves behind them.
  virtual Status next_chunk(Call& call, ChunkPlace* place, Chunk* chunk) = 0;
  // After a failure: no layer has grown. Returns the call's error.
  virtual Status take_back(Call&, Status why) { return why; }
};

}  // namespace tandem
