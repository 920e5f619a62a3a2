// SPDX-License-Identifier: MIT
// The shape of a call on device tensors: numbers only. A call, a layer of a planned step and a line of a memory plan are all
// shapes. A function that computes memory, or a number of pieces, gets a shape and the session's terms, and nothing else. So
// the memory plan and the calls cannot differ (lib/call/reserve.h).
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

inline constexpr int32_t kMostListRows = 64;  // of a query and KV head: what every kernel with key lists takes

struct SequenceShape {
  int64_t q_len = 0;
  int64_t length = 0;        // tokens with the new ones; the queries are the last q_len tokens
  int64_t window_begin = 0;  // first token of the window before the call
  int64_t first_seen = 0;    // first token that the first query sees; above 0 in layers with a sliding window
  int64_t window_pages = 0;  // places of the window's ring, as it is
  int64_t n_runs = 1;        // runs of tokens outside the window whose positions follow each other
  bool has_gaps = false;     // positions do not follow each other everywhere

  int64_t first_query() const { return length - q_len; }
};

struct CallShape {
  const Layer* layer = nullptr;
  size_t layer_idx = 0;
  std::span<const SequenceShape> sequences;
  int64_t most_queries = 0;      // of a sequence in one chunk
  int64_t held_sequences = 0;    // that planned steps have room for already: kernels of a step are launched for so many
  bool appends = true;           // the call brings K and V
  bool is_speculative = false;   // each query is described as a sequence of its own
  bool is_partial = false;       // single queries append a part of a prompt, too
  bool has_room_to_step = true;  // planned steps of the same sequences get room too, if the route allows them
  // Where the caller names keys: of a query, the heads that have indices of their own, and indices of each.
  int64_t idx_heads = 0, n_idx = 0;
  int32_t idx_unit_shift = 0;               // each names 2^this tokens
  bool may_be_long = false;                 // their queries may share chunks longer than a ticket, with lists of tiles
  bool has_host_idx = false;                // they are in host memory
  int64_t most_tokens = kMostTicketTokens;  // of a chunk

  int64_t n_tokens() const;
  int64_t max_q_len() const;
  int64_t longest() const;  // tokens of a sequence
};

// A sequence in a plan. One session has always attended it: windows are evicted in whole blocks from token 0 on, so that a
// begin of 0 says where the window is.
SequenceShape planned_sequence(const Layer& layer, int64_t kv_len, int64_t q_len);

// Keys outside the window of a query that comes to a sequence of `length` tokens, as far back as the call's first query
// sees.
TokenRange outside_of(const PolicyOptions& options, int64_t page_len, const SequenceShape& sequence, int64_t length);

// What sizes depend on beside the shape of a call: the options of a session, and what it works on.
struct SizeTerms {
  const Device* device = nullptr;
  const std::vector<Layer>& layers;
  const StoreGeometry& store;
  const LayerPolicies& policies;
  const PolicyOptions& options;
  const RouteOptions& routes;
  std::span<const HeadKinds> heads;       // [n_layers]; empty: no head streams
  const Routes& key_routes;               // null where the session cannot use one
  std::span<const StreamLayout> layouts;  // of pieces of K and V, [n_layers]; empty: none are ever sent
  const WindowGeometry* window = nullptr;
  int64_t most_long_bytes = INT64_MAX;  // memory that long appends may take

  // Calls of the layer may name keys in planned steps.
  bool names_in_steps(size_t l) const {
    return options.selection_len > 0 && kinds(l) == nullptr && policies[l].host_keys(false) == HostKeys::kAll &&
           layers[l].group_size <= kMostListRows;
  }
  const HeadKinds* kinds(size_t l) const { return kinds_of_layer(heads, l); }
  // Entries of key lists and granules of a sequence: of streaming heads, or of head patterns in decode calls.
  int64_t n_lists(size_t l) const;
  int64_t most_of_chunk() const;  // tokens of an append that has one ticket
  bool takes_single_queries(const CallShape& shape) const;
  int64_t wanted_queries(const CallShape& shape) const;  // of a sequence in a chunk, if the device has kernels for so many
  // What the last chunk of the call may find outside the window.
  TokenRange streamed(const CallShape& shape, const SequenceShape& sequence) const;
};

}  // namespace tandem
