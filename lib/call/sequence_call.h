// SPDX-License-Identifier: MIT
// One sequence of an attend call: which of its keys the call attends, and who does. And what the host part of a call on
// device tensors has of it.
#pragma once

#include <algorithm>
#include <cstdint>
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
struct SequenceCall {
  Sequence* sequence = nullptr;
  LayerState* state = nullptr;
  DeviceWindow* window = nullptr;  // of a call on device tensors
  CacheListener* writer_before = nullptr;
  int64_t q_len = 0;
  int64_t first_row = 0;       // in the caller's tensors
  int64_t first_query = 0;     // token index
  int64_t length = 0;          // tokens of the layer with the new ones
  bool is_append = false;      // several committed queries: everything is attended and re-evaluated
  bool observes = false;       // a decode query whose weights go into the MAW
  int64_t window_begin = 0;    // before the call's own rows
  int64_t dense_begin = 0;     // keys [dense_begin, length) are what policy "all" would attend
  int64_t resident_begin = 0;  // keys [resident_begin, length)
  int64_t first_job_key = 0;   // of the resident part's job: before resident_begin where it does the host part as well
  int64_t host_begin = 0;      // keys [host_begin, host_end), and the selected ones
  int64_t host_end = 0;
  int64_t rebuilt_end = 0;  // of these the first, up to here, are made of hidden states; 0: none
  bool has_host = false;
  int64_t cpu_begin = 0;   // of the host's keys, those before it go to the device (lib/attend/split.h)
  int64_t kept_begin = 0;  // of the call's keys, what the window has after it begins no sooner
  bool selected = false;
  // On a device, where MAW are kept. Tokens [found_begin, resident_begin) were there before the session looked, and the host
  // has them; [resident_begin, evict_end) leave the window with the call.
  int64_t found_begin = 0, evict_end = 0, first_evicted = 0;
  bool flushes = false;  // appends before it wait to be judged
  // The first of these that the host attends beside the others.
  int64_t first_found() const { return selected ? std::max(found_begin, host_end) : resident_begin; }
  struct StreamingHeads {  // of a layer that has any
    SinksAndNewest keys;
    Visibility visibility;
    size_t visibility_at = 0;
  } streaming_heads;
  bool only_counts = false;    // its queries have been attended
  bool gives_queries = false;  // to the host, whether this attends any of their keys or not
  bool is_on_device() const { return window != nullptr; }
  bool streams() const { return cpu_begin > host_begin; }
  bool has_cpu_part() const {
    return has_host && !only_counts &&
           (gives_queries || streaming_heads.keys.sink_end > 0 || !(streams() && cpu_begin == host_end));
  }
  bool counts_on_host() const { return has_host && (is_append || found_begin < resident_begin); }
  Visibility visibility;
  size_t visibility_at = 0;  // index into begin and end; trees into tree_bits
  size_t tree_at = 0;
  size_t positions_at = 0;                  // positions of a tree's tokens
  const int32_t* tree_positions = nullptr;  // these
  // f32 rows, in work space; of a call on a device in the ticket's slot, which has no states of the window's part. o and lse
  // are those of the window's part, and then the result's.
  float *q = nullptr, *o = nullptr, *lse = nullptr, *host_o = nullptr, *host_lse = nullptr, *logits = nullptr;
};

// A copy of what a ticket's host part needs of a sequence, as it was when the call was prepared: the sequence may grow
// before the ticket arrives.
struct LateCall {
  KeyRuns keys;                    // where keys are judged
  std::vector<int32_t> pages;      // the sequence's
  std::vector<int32_t> positions;  // likewise, where the library rotates
};

// A ticket's part of the memory that host and device share.
struct HostSlot {
  std::byte* data = nullptr;  // null: tensors are in host memory
  DeviceExchange exchange;
};

}  // namespace tandem
