// SPDX-License-Identifier: MIT
// Calls whose tensors are in host memory: one chunk, whose work the calling thread does with the pool.
//
// clang-format off
//   join       waits for background work that the previous call of this layer has posted
//   reserve    checks the keys that the caller names, and sorts them if they may be in any order
//   prepare    memory, which keys, where they are; changes nothing that others see
//   fill       writes K and V rows, rounded to the storage type, after the length, so readers do not see them yet
//   launch     queries to f32, grouped by KV head, rotated where the library applies RoPE or stored keys are rotated (all later
//              steps use these queries) | selections | attention over window and host part, one state each; merge, with the
//              learned sinks last | o and lse in the caller's types | selectors observe
//   commit     lengths, eviction; earlier steps may fail if the call is cancelled or there is no memory for selected keys
//   finish     selectors do the call's remaining work
// clang-format on
//
// A call with a cancel flag checks the flag at least every few milliseconds, in every step up to the outputs: prepare checks
// between pieces of memory, the others between a few rows or one tile of keys. After the outputs the call cannot be undone.
// Long work of a selector is then left to the engine's thread, and the next call that needs it waits for it.
#pragma once

#include "lib/attend/lane.h"

namespace tandem {

class HostLane final : public Lane {
 public:
  Status start(Call& call, bool* was_launched) override;
  Status join(Call& call) override;
  Status reserve(Call& call) override;
  Status next_chunk(Call& call, ChunkPlace* place, Chunk* chunk) override;
  Status prepare(Call& call) override;
  Status fill(Call& call) override;
  Status launch(Call& call) override;
  Status commit(Call& call) override;
  void finish(Call& call) override;
};

}  // namespace tandem
