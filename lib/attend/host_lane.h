// SPDX-License-Identifier: MIT
// Calls whose tensors are in host memory: one chunk, whose work the calling thread does with the pool.
//
// clang-format off
//   join       the background work that the previous call of this layer has posted
//   reserve    keys that the caller names are checked, and put in order where they may stand in any
//   prepare    memory, which keys, where they are; changes nothing that others see
//   fill       K and V rows, rounded to the storage type, beyond the length: nobody sees them yet
//   launch     queries to f32, grouped by KV head, rotated where the library applies RoPE or stored keys are rotated (what
//              follows sees no others) | selections | attention to window and host part, one state each; merge, with the
//              learned sinks last | o and lse in the caller's types | selectors observe
//   commit     lengths, eviction; what comes before may fail where the call is cancelled or there is no memory for selected keys
//   finish     selectors do what the call has left to do
// clang-format on
//
// A call that is given a flag to cancel it looks at the flag at least every few milliseconds, in every step up to the
// outputs: prepare between pieces of memory, the others between some rows or one tile of keys. After the outputs the call
// cannot be undone; long work of a selector is then left to the engine's thread, where the next call that needs it waits for
// it.
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
