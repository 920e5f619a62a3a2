// SPDX-License-Identifier: MIT
// One sequence of an attend call: which keys it attends, and which processor attends them. Also the copies that a ticket's
// host part keeps of it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "lib/call/key_runs.h"
#include "lib/call/sequence_state.h"
#include "lib/policy/streaming_heads.h"
#include "lib/store/cache.h"
#include "lib/tables/backend.h"
#include "lib/tables/device.h"

namespace tandem {

// One sequence of a call. Query t is token first_query + t. Rows of q, o, lse and logits are ordered
// [n_kv_heads][q_len][group_size].
//
//   tokens    ... host_begin ... rebuilt_end ... cpu_begin ... host_end ... resident_begin ... first_query ... length
//                 | hidden states | K and V       | CPU         | selected    | window             | new tokens
struct SequenceCall {
  Sequence* sequence = nullptr;
  LayerState* state = nullptr;     // followed in memory by the states of the next layers
  DeviceWindow* window = nullptr;  // for calls on device tensors
  CacheListener* writer_before = nullptr;
  int64_t q_len = 0;
  int64_t first_row = 0;       // row in the caller's tensors
  int64_t first_query = 0;     // token index
  int64_t length = 0;          // tokens of the layer, new ones included
  bool is_append = false;      // several committed queries: all keys are attended and judged again
  bool by_q_head = false;      // rows are ordered [n_q_heads][q_len], and each query head has its own keys
  bool observes = false;       // a decode query whose weights are counted in the MAW
  int64_t window_begin = 0;    // window begin before the call's own rows
  int64_t dense_begin = 0;     // policy "all" would attend keys [dense_begin, length)
  int64_t resident_begin = 0;  // keys [resident_begin, length)
  int64_t first_job_key = 0;   // where the window's job begins; host_begin where that job covers the host part too
  int64_t host_begin = 0;      // the host part: keys [host_begin, host_end), and the selected ones
  int64_t host_end = 0;
  int64_t rebuilt_end = 0;  // keys [host_begin, rebuilt_end) are made of hidden states; 0: none
  bool has_host = false;
  int64_t cpu_begin = 0;   // host keys before it go to the device, the CPU attends the rest (lib/attend/split.h)
  int64_t kept_begin = 0;  // the window begins no earlier than this after the call
  bool selected = false;
  // For calls on a device with MAW. Tokens [foreign_begin, resident_begin) were appended without this session and never
  // entered its window; the host attends them. Tokens [resident_begin, evict_end) leave the window with this call.
  int64_t foreign_begin = 0, evict_end = 0, first_evicted = 0;
  bool flushes = false;  // earlier appends still wait to be judged
  // Returns the first of the tokens [foreign_begin, resident_begin) that the host attends besides its selected keys.
  int64_t first_foreign() const { return selected ? std::max(foreign_begin, host_end) : resident_begin; }
  struct StreamingHeads {  // for layers with streaming heads
    SinksAndNewest keys;
    Visibility visibility;
    size_t visibility_at = 0;
  } streaming_heads;
  // Capped keys: keys [0, capped.end[t]) are further from query t than max_distance of the layer's head patterns. Stored
  // keys are attended unrotated, by queries that are rotated by the largest distance.
  struct CappedKeys {
    bool any = false;  // some query has capped keys
    size_t end_at = 0;
    const int64_t* end = nullptr;                      // [q_len], never decreases
    float *q = nullptr, *o = nullptr, *lse = nullptr;  // like the call's own q, o and lse
    bool any_before(int64_t t) const { return any && end[t] > 0; }
  } capped;
  bool only_counts = false;    // attends nothing; counts queries that were attended before
  bool gives_queries = false;  // the slot gets the queries even where the CPU attends none of their keys
  bool is_on_device() const { return window != nullptr; }
  bool streams() const { return cpu_begin > host_begin; }
  bool has_cpu_part() const {
    return has_host && !only_counts &&
           (gives_queries || streaming_heads.keys.sink_end > 0 || !(streams() && cpu_begin == host_end));
  }
  bool counts_on_host() const { return has_host && (is_append || foreign_begin < resident_begin); }
  Visibility visibility;
  size_t visibility_at = 0;  // index into AttendScratch::begin and end; tree_at: into tree_bits
  size_t tree_at = 0;
  size_t positions_at = 0;                  // index of the positions of a tree's tokens
  const int32_t* tree_positions = nullptr;  // points to these positions
  // f32 rows, in work space for host tensors and in the ticket's slot for device tensors (which have no window states). o
  // and lse hold the window's states first, then the result.
  float *q = nullptr, *o = nullptr, *lse = nullptr, *host_o = nullptr, *host_lse = nullptr, *logits = nullptr;
};

inline bool has_cpu_part(std::span<const SequenceCall> calls) {
  return std::any_of(calls.begin(), calls.end(), [](const SequenceCall& call) { return call.has_cpu_part(); });
}

// Returns the first of `tokens` whose keys are contiguous, the same for every KV head. A run ends where the tokens of a tree
// begin, as these have positions of their own.
TokenRun first_tokens(const SequenceCall& call, const StoreView& view, const Layer& layer, TokenRange tokens);
// Returns the keys of one head in the run `at`.
KvRun run_of(const SequenceCall& call, const StoreView& view, const Layer& layer, int32_t layer_idx, const TokenRun& at,
             int32_t kv_head);

// Copies of a sequence's data for a ticket's host part, made when the call is prepared. The sequence may grow before the
// ticket arrives.
struct TicketCopy {
  KeyRuns keys;                    // where keys are judged
  std::vector<int32_t> pages;      // of the sequence
  std::vector<int32_t> positions;  // of the sequence, where the library rotates
};

// A ticket's slot in the memory that host and device share.
struct HostSlot {
  std::byte* data = nullptr;  // null: tensors are in host memory
  DeviceExchange exchange;

  bool operator==(const HostSlot& other) const = default;
};

}  // namespace tandem
