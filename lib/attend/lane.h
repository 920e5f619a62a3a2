// SPDX-License-Identifier: MIT
// The parts of a call that depend on where its tensors are: one lane for host memory, one for a device.
// lib/attend/executor.h has the order in which the functions are called.
#pragma once

#include <optional>

#include "lib/attend/call.h"

namespace tandem {

// The place where the next chunk of a call begins.
struct ChunkPlace {
  size_t call = 0;    // index among the call's sequences
  int64_t query = 0;  // index among that sequence's queries
};

// The work of a chunk. The functions are called in this order. prepare() and commit() run with the cache's mutex held
// exclusively, fill() shared, the others without it.
class ChunkWork {
 public:
  virtual ~ChunkWork() = default;
  virtual Status prepare(Call& chunk) = 0;
  virtual Status fill(Call& chunk) = 0;
  virtual Status launch(Call& chunk) = 0;
  virtual Status commit(Call& chunk) = 0;
  virtual void finish(Call&) {}
};

// Some rows of a call, as a call of their own, or the whole call.
struct Chunk {
  std::optional<CutArgs> args;
  std::optional<Call> own;
  Call* call = nullptr;
  ChunkWork* work = nullptr;
};

class Lane : public ChunkWork {
 public:
  // Refuses what can be refused at once. Launches a call of the next layer of a planned step and sets *was_launched.
  virtual Status start(Call& call, bool* was_launched) = 0;
  // Waits for background work that the whole call needs. The cache's mutex is not held.
  virtual Status join(Call&) { return {}; }
  virtual Status reserve(Call&) { return {}; }  // memory for all chunks
  // Makes the chunk of the next rows and advances *place.
  virtual Status next_chunk(Call& call, ChunkPlace* place, Chunk* chunk) = 0;
  // Rolls back, after a failure, the tokens that the call has appended. Returns the error to report.
  virtual Status take_back(Call&, Status why) { return why; }
};

}  // namespace tandem
