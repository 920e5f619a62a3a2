// SPDX-License-Identifier: MIT
// One sequence of an attend call: which keys it attends and which processor attends them. And the copies that a ticket's
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

// One sequence of a call. Query t sits at token first_query + t; rows of q, o, lse and logits are ordered
// [n_kv_heads][q_len][group_size].
//
//   tokens    ... host_begin ... rebuilt_end ... cpu_begin ... host_end ... resident_begin ... first_query ... length
//                 | hidden states | K and V       | CPU         | selected    | window             | new tokens
struct SequenceCall {
  Sequence* sequence = nullptr;
  LayerState* state = nullptr;     // behind it are those of the layers that follow
  DeviceWindow* window = nullptr;  // of a call on device tensors
  CacheListener* writer_before = nullptr;
  int64_t q_len = 0;
  int64_t first_row = 0;       // in the caller's tensors
  int64_t first_query = 0;     // token index
  int64_t length = 0;          // tokens of the layer with the new ones
  bool is_append = false;      // several committed queries: everything is attended and re-evaluated
  bool by_q_head = false;      // rows are ordered [n_q_heads][q_len], and each query head has keys of its own
  bool observes = false;       // a decode query whose weights go into the MAW
  int64_t window_begin = 0;    // before the call's own rows
  int64_t dense_begin = 0;     // keys [dense_begin, length) are what policy "all" would attend
  int64_t resident_begin = 0;  // keys [resident_begin, length)
  int64_t first_job_key = 0;   // where the window's job begins: host_begin where that job covers the host part too
  int64_t host_begin = 0;      // keys [host_begin, host_end), and the selected ones
  int64_t host_end = 0;
  int64_t rebuilt_end = 0;  // keys [host_begin, rebuilt_end) are made of hidden states; 0: none
  bool has_host = false;
  int64_t cpu_begin = 0;   // host keys before this token go to the device, the CPU attends the rest (lib/attend/split.h)
  int64_t kept_begin = 0;  // the window begins no earlier than this after the call
  bool selected = false;
  // On a device, with MAW. Tokens [foreign_begin, resident_begin) were appended without this session and were never in its
  // window: the host attends them. Tokens [resident_begin, evict_end) leave the window with this call.
  int64_t foreign_begin = 0, evict_end = 0, first_evicted = 0;
  bool flushes = false;  // appends before it wait to be judged
  // The first of the tokens [foreign_begin, resident_begin) that the host attends beside its selected keys.
  int64_t first_foreign() const { return selected ? std::max(foreign_begin, host_end) : resident_begin; }
  struct StreamingHeads {  // of a layer that has any
    SinksAndNewest keys;
    Visibility visibility;
    size_t visibility_at = 0;
  } streaming_heads;
  // Keys [0, capped.end[t]) are further from query t than the layer's head patterns let RoPE see. They are attended as they
  // are stored, not rotated, by queries that are rotated by the largest distance.
  struct CappedKeys {
    bool any = false;  // of any query
    size_t end_at = 0;
    const int64_t* end = nullptr;                      // [q_len], never decreases
    float *q = nullptr, *o = nullptr, *lse = nullptr;  // as those of the call
    bool any_before(int64_t t) const { return any && end[t] > 0; }
  } capped;
  bool only_counts = false;    // attends nothing: its queries were attended before and are counted now
  bool gives_queries = false;  // the slot gets the queries even where the CPU attends none of their keys
  bool is_on_device() const { return window != nullptr; }
  bool streams() const { return cpu_begin > host_begin; }
  bool has_cpu_part() const {
    return has_host && !only_counts &&
           (gives_queries || streaming_heads.keys.sink_end > 0 || !(streams() && cpu_begin == host_end));
  }
  bool counts_on_host() const { return has_host && (is_append || foreign_begin < resident_begin); }
  Visibility visibility;
  size_t visibility_at = 0;  // index into begin and end; trees into tree_bits
  size_t tree_at = 0;
  size_t positions_at = 0;                  // positions of a tree's tokens
  const int32_t* tree_positions = nullptr;  // these
  // f32 rows: in work space for host tensors, in the ticket's slot for device tensors (without the window's states). o and
  // lse hold the window's part, then the result.
  float *q = nullptr, *o = nullptr, *lse = nullptr, *host_o = nullptr, *host_lse = nullptr, *logits = nullptr;
};

inline bool has_cpu_part(std::span<const SequenceCall> calls) {
  return std::any_of(calls.begin(), calls.end(), [](const SequenceCall& call) { return call.has_cpu_part(); });
}

// The first of `tokens` whose keys are contiguous, which are the same for every KV head. The tokens of a tree have positions
// of their own: a run ends where they begin.
TokenRun first_tokens(const SequenceCall& call, const StoreView& view, const Layer& layer, TokenRange tokens);
// The keys that one head has there.
KvRun run_of(const SequenceCall& call, const StoreView& view, const Layer& layer, int32_t layer_idx, const TokenRun& at,
             int32_t kv_head);

// A copy of what a ticket's host part needs of a sequence, as it was when the call was prepared: the sequence may grow
// before the ticket arrives.
struct TicketCopy {
  KeyRuns keys;                    // where keys are judged
  std::vector<int32_t> pages;      // the sequence's
  std::vector<int32_t> positions;  // likewise, where the library rotates
};

// A ticket's part of the memory that host and device share.
struct HostSlot {
  std::byte* data = nullptr;  // null: tensors are in host memory
  DeviceExchange exchange;

  bool operator==(const HostSlot& other) const = default;
};

}  // namespace tandem
