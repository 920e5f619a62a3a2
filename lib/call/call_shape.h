// SPDX-License-Identifier: MIT
// The shape of a call on device tensors: numbers only. A call, a layer of a planned step and a line of a memory plan are all
// shapes. A function that computes memory or a number of pieces gets only a shape and the session's terms. So the memory
// plan and the calls cannot differ (lib/call/reserve.h).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "lib/call/key_route.h"
#include "lib/call/ticket.h"
#include "lib/machine/device_owner.h"
#include "lib/pieces/device_window.h"
#include "lib/pieces/route_options.h"
#include "lib/pieces/stream_pieces.h"
#include "lib/policy/policy.h"
#include "lib/policy/streaming_heads.h"
#include "lib/store/page_store.h"

namespace tandem {

inline constexpr int32_t kMostListRows = 64;  // query rows per query and KV head that every kernel with key lists takes

struct SequenceShape {
  int64_t q_len = 0;
  int64_t length = 0;        // tokens, new ones included; the queries are the last q_len tokens
  int64_t window_begin = 0;  // first token of the window before the call
  int64_t first_seen = 0;    // first token that the first query sees; above 0 in layers with a sliding window
  int64_t window_pages = 0;  // current size of the window's ring, in pages
  int64_t n_runs = 1;        // runs of tokens outside the window with consecutive positions
  bool has_gaps = false;     // some positions are not consecutive

  int64_t first_query() const { return length - q_len; }
};

struct CallShape {
  const Layer* layer = nullptr;
  size_t layer_idx = 0;
  std::span<const SequenceShape> sequences;
  int64_t most_queries = 0;  // of one sequence in one chunk
  // Sequences that planned steps already have room for. A step's kernels are launched for so many.
  int64_t held_sequences = 0;
  bool appends = true;           // the call brings K and V
  bool is_speculative = false;   // each query is described as a sequence of its own
  bool is_partial = false;       // single queries may also append a part of a prompt
  bool has_room_to_step = true;  // planned steps of the same sequences get room too, if the route allows them
  // Where the caller names keys: per query, the heads with indices of their own, and the indices of each such head.
  int64_t idx_heads = 0, n_idx = 0;
  int32_t idx_unit_shift = 0;               // an index names 2^this tokens
  bool may_be_long = false;                 // the queries may share chunks longer than a ticket, with lists of tiles
  bool has_host_idx = false;                // the indices are in host memory
  int64_t most_tokens = kMostTicketTokens;  // of a chunk

  int64_t n_tokens() const;
  int64_t max_q_len() const;
  int64_t longest() const;  // tokens of the longest sequence
};

// Returns the shape of a planned sequence, as if one session had attended it from the start. Windows are evicted in whole
// blocks from token 0 on, so a window_begin of 0 suffices to find the window.
SequenceShape planned_sequence(const Layer& layer, int64_t kv_len, int64_t q_len);

// Returns the tokens outside the window for a query that is added to a sequence of `length` tokens. They begin with the
// first token that the call's first query sees.
TokenRange outside_of(const PolicyOptions& options, int64_t page_len, const SequenceShape& sequence, int64_t length);

// What sizes depend on besides a call's shape: the session's options and the objects that it works on.
struct SizeTerms {
  const Device* device = nullptr;
  const std::vector<Layer>& layers;
  const StoreGeometry& store;
  const LayerPolicies& policies;
  const PolicyOptions& options;
  const RouteOptions& routes;
  std::span<const HeadKinds> heads;       // [n_layers]; empty: there are no streaming heads
  const Routes& key_routes;               // null where the session cannot use one
  std::span<const StreamLayout> layouts;  // of pieces of K and V, [n_layers]; empty: no pieces are ever sent
  const WindowGeometry* window = nullptr;
  int64_t most_long_bytes = INT64_MAX;  // limit of the memory that long appends take

  // Returns whether calls of layer l may name keys in planned steps.
  bool names_in_steps(size_t l) const {
    return options.selection_len > 0 && kinds(l) == nullptr && policies[l].host_keys(false) == HostKeys::kAll &&
           layers[l].group_size <= kMostListRows;
  }
  const HeadKinds* kinds(size_t l) const { return kinds_of_layer(heads, l); }
  // Returns the entries of a sequence's key lists and granules, for streaming heads or for head patterns in decode calls.
  int64_t n_lists(size_t l) const;
  int64_t most_of_chunk() const;  // most tokens of an append that has one ticket
  bool takes_single_queries(const CallShape& shape) const;
  int64_t wanted_queries(const CallShape& shape) const;  // of a sequence in a chunk, if the device has kernels for so many
  // Returns the tokens outside the window that the last chunk of the call may attend.
  TokenRange streamed(const CallShape& shape, const SequenceShape& sequence) const;
};

}  // namespace tandem
