// SPDX-License-Identifier: MIT
// What differs between calls by where their tensors are: one lane for host memory, one for a device. lib/attend/executor.h
// has the order in which their functions are called.
#pragma once

#include <optional>

#include "lib/attend/call.h"

namespace tandem {

// How far a call has been cut into chunks.
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
  std::optional<CutArgs> args;
  std::optional<Call> own;
  Call* call = nullptr;
  ChunkWork* work = nullptr;
};

class Lane : public ChunkWork {
 public:
  // What may be refused at once. A call of the next layer of a planned step is launched: *was_launched.
  virtual Status start(Call& call, bool* was_launched) = 0;
  // Of the whole call. Background work that it needs; the cache's mutex is not held.
  virtual Status join(Call&) { return {}; }
  virtual Status reserve(Call&) { return {}; }  // memory for all chunks
  // The next rows of the call; the place moves behind them.
  virtual Status next_chunk(Call& call, ChunkPlace* place, Chunk* chunk) = 0;
  // After a failure: takes back what the call has appended. Returns the error to report.
  virtual Status take_back(Call&, Status why) { return why; }
};

}  // namespace tandem
