// SPDX-License-Identifier: MIT
// Appends of more tokens than a ticket has: all queries of a chunk, thousands of them, meet a key at once. What decides
// about sizes.
//
// Keys outside the window are streamed, unless head patterns choose among all keys of the layer, which come to the device
// then. Where keys are streamed, all queries meet a piece while it is on the device, so that the keys cross the bus
// once a chunk. A group of KV heads goes through all of its keys before the next one begins, so there are states of one
// group. Where the queries see no key outside the window, nothing is streamed and there are no states.
//
// The keys of a chunk that is longer than its window's ring are in pages of the session's work space until the chunk is
// done: of one layer alone, each as the layer's part of a window's page. The rows of a chunk leave for the host from one of
// two buffers, which take turns (lib/attend/chunk_rows.h).
//
//   area   pages of the chunk | o, lse of a group's heads | lse of all heads | rotated queries | lists of tiles | rows |
//   rows
#pragma once

#include <cstdint>

#include "lib/call/call_shape.h"
#include "lib/call/ticket.h"
#include "lib/pieces/stream_pieces.h"

namespace tandem {

struct PrefillSize {
  int64_t n_tokens = 0;     // of a chunk, at most; 0: there are no such chunks
  int64_t room_tokens = 0;  // what memory is taken for: where that is planned, the longest chunk that appends may have
  StreamLayout layout;      // of its pieces; without heads where nothing is streamed
  // The pieces of the first group take about as long as the chunk's rows to the host, which then leave them the device.
  bool rows_have_time = false;
  bool copies_rows = false;  // rows leave by copies; the call decides
  double assumed_ns = 0.0;   // by which it was chosen: pieces, and what rows add
  // In the area, bytes.
  int64_t o_at = 0, lse_at = 0, area_bytes = 0;
  int64_t row_lse_at = 0;               // of all heads, [room_tokens, n_q_heads]; 0: the policy does not need them
  int64_t q_at = 0;                     // f32 [room_tokens, n_q_heads, k_head_dim], where the layer rotates queries
  int64_t tiles_at = 0;                 // where keys are named: lists, then tiles, of one launch
  int64_t rows_at = 0, rows_bytes = 0;  // the two buffers of rows lie side by side

  // Tokens of which all keys of the layer come to the device, so that the chunks' queries may choose among them
  // (lib/attend/whole_layer.h); 0: the window has them.
  int64_t whole_tokens = 0;

  bool streams() const { return layout.n_heads > 0; }
  bool brings_layer() const { return whole_tokens > 0; }
};

// What the sizes of a layer's long appends depend on.
struct PrefillTerms {
  int64_t extent_len = 0, buffer_bytes = 0;
  int32_t n_multiprocessors = 0;
  int32_t piece_heads = 0;       // KV heads of a piece, at most; 0: as many as take least time
  int64_t append_tokens = 0;     // of a chunk, at most; 0: kMostAppend
  int64_t layer_page_bytes = 0;  // of a window's page
  bool keeps_lse = false;        // of all queries: those of the last ones are counted
  bool streams = true;           // keys outside the window
  // Where keys are named: units of a query in each of its lists, tiles of a unit, KV heads that have lists.
  int64_t n_units = 0, tiles_of_unit = 0, most_tiles = 0;  // most_tiles: that any sequence has
  int32_t n_list_heads = 0;
  int64_t most_bytes = INT64_MAX;  // of the area, as far as groups of fewer KV heads keep to that
  // true: all chunks but the last are as long as there is room for. false: they are about as long as each other.
  bool has_full_chunks = false;
};
inline constexpr int64_t kMostAppend = 16384;
// Tasks of all of a chunk's tickets are filled before the first of them is posted.
inline constexpr int64_t kLongestChunk = kLeastTasks * kMostTicketTokens;

// Keys outside the window of a long append: of its first queries, and by its end. A chunk's own are in the work space.
struct KeysOfAppend {
  int64_t first = 0, end = 0;
};

KeysOfAppend keys_of_append(const PolicyOptions& options, int64_t page_len, const SequenceShape& sequence);

// Of an append of n_queries tokens. Chunks are equally long, and laid out for as many keys as they find on average; where
// append_tokens is given, by which memory is planned, as the last of so many tokens would be, so that they take no more.
Status size_prefill(const Layer& layer, const PrefillTerms& terms, int64_t n_queries, const KeysOfAppend& keys,
                    PrefillSize* size);

PrefillTerms prefill_terms(const SizeTerms& terms, size_t layer_idx);
// The long appends of a call; size->n_tokens is 0 where it has none. streams: its keys outside the window may cross the bus.
// Where they do not, long chunks are those whose queries see no such keys: sizes do not ask whether there are any, as the
// appends that a memory plan is for begin anywhere in a sequence.
Status size_long(const SizeTerms& terms, const CallShape& shape, bool streams, PrefillSize* size);

// Room for a sequence of n_tokens: some more, so that it need not grow with each append.
int64_t whole_layer_tokens(int64_t n_tokens);
// Of one of the StreamBuffers::kBuffers buffers that have all keys of a layer.
int64_t whole_layer_bytes(const WindowGeometry::LayerPlanes& planes, int64_t n_tokens);

// Nanoseconds of a chunk over n_keys, as far as they depend on the layout of its pieces. tile_ns: of a block's step; sizes
// go by what is assumed, as memory is planned before anything is measured.
double prefill_ns(const Layer& layer, const StreamLayout& layout, int64_t n_queries, int64_t n_keys,
                  int32_t n_multiprocessors, double tile_ns);
double assumed_tile_ns(const Layer& layer);
double tile_ns_of_wave(double ns, int64_t n_keys);                         // where that is what a piece of n_keys takes
int64_t queries_of_a_wave(const Layer& layer, int32_t n_multiprocessors);  // whose tiles fill the device once

}  // namespace tandem
