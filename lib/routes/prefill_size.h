// SPDX-License-Identifier: MIT
// Sizes of long appends: appends with more tokens than a ticket has. All queries of a chunk, thousands of them, meet a key
// at once.
//
// Keys outside the window are streamed, except if head patterns choose among all keys of the layer: then all keys come to
// the device. If keys are streamed, all queries meet a piece while it is on the device, so the keys cross the bus once per
// chunk. One group of KV heads goes through all of its keys before the next begins, so states are kept for one group only.
// If the queries see no key outside the window, nothing is streamed and there are no states.
//
// If a chunk is longer than its window's ring, its keys are in pages of the session's work space until the chunk is done.
// These pages have one layer, each laid out as the layer's part of a window's page. The rows of a chunk leave for the host
// from one of two buffers, which take turns (lib/attend/chunk_rows.h).
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
  int64_t n_tokens = 0;     // maximum of a chunk; 0: the layer has no long chunks
  int64_t room_tokens = 0;  // tokens to make room for; in a memory plan, the longest chunk of any append
  StreamLayout layout;      // layout of pieces; no heads if nothing is streamed
  // True if the first group's pieces take about as long as the chunk's rows take to the host. The rows then take only what
  // the pieces leave of the device. Otherwise the rows get a part of the device for themselves.
  bool rows_have_time = false;
  bool copies_rows = false;  // rows leave by copies instead of tickets; the call decides
  double assumed_ns = 0.0;   // assumed time of pieces and rows by which the layout was chosen
  // Offsets and sizes in the area, in bytes.
  int64_t o_at = 0, lse_at = 0, area_bytes = 0;
  int64_t row_lse_at = 0;               // of all heads, [room_tokens, n_q_heads]; 0: the policy does not need it
  int64_t q_at = 0;                     // f32 [room_tokens, n_q_heads, k_head_dim], if the layer rotates queries
  int64_t tiles_at = 0;                 // if keys are named: lists, then tiles, of one launch
  int64_t rows_at = 0, rows_bytes = 0;  // two buffers of rows, side by side

  // Number of tokens for which all keys of the layer come to the device, so that the chunks' queries may choose among them
  // (lib/attend/whole_layer.h). 0: no keys are brought, as the window has them.
  int64_t whole_tokens = 0;

  bool streams() const { return layout.n_heads > 0; }
  bool brings_layer() const { return whole_tokens > 0; }
};

// Inputs to the sizes of a layer's long appends.
struct PrefillTerms {
  int64_t extent_len = 0, buffer_bytes = 0;
  int32_t n_multiprocessors = 0;
  int32_t piece_heads = 0;       // limit of KV heads of a piece; 0: the number that takes the least time
  int64_t append_tokens = 0;     // maximum of a chunk; 0: kMostAppend
  int64_t layer_page_bytes = 0;  // the layer's part of a window's page
  bool keeps_lse = false;        // the lse of all queries are kept, as the last queries are counted
  bool streams = true;           // keys outside the window are streamed
  // If keys are named: units of a query in each of its lists, tiles of a unit, KV heads with lists.
  int64_t n_units = 0, tiles_of_unit = 0, most_tiles = 0;  // most_tiles: of any sequence
  int32_t n_list_heads = 0;
  int64_t most_bytes = INT64_MAX;  // limit of the area, as far as groups of fewer KV heads can meet it
  // true: all chunks but the last fill the room. false: chunks have about equal lengths.
  bool has_full_chunks = false;
};
inline constexpr int64_t kMostAppend = 16384;
// All tickets of a chunk have their tasks filled before the first task is posted. So a chunk has at most kLeastTasks
// tickets.
inline constexpr int64_t kLongestChunk = kLeastTasks * kMostTicketTokens;

// Numbers of keys outside the window in a long append: for its first query, and at its end. A chunk's own keys are in the
// work space.
struct KeysOfAppend {
  int64_t first = 0, end = 0;
};

KeysOfAppend keys_of_append(const PolicyOptions& options, int64_t page_len, const SequenceShape& sequence);

// Sizes an append of n_queries tokens. Chunks are equally long, except with has_full_chunks, and laid out for the keys that
// they find on average. If append_tokens is given, as for a plan of memory, chunks are laid out like the last chunk of
// append_tokens tokens would be, so that they take no more memory.
Status size_prefill(const Layer& layer, const PrefillTerms& terms, int64_t n_queries, const KeysOfAppend& keys,
                    PrefillSize* size);

PrefillTerms prefill_terms(const SizeTerms& terms, size_t layer_idx);
// Sizes the long appends of a call; size->n_tokens is 0 if it has none. streams: keys outside the window may cross the bus.
// If false, chunks are long only where their queries see no such keys. Sizes do not check whether there are such keys, as
// the appends of a memory plan may begin anywhere in a sequence.
Status size_long(const SizeTerms& terms, const CallShape& shape, bool streams, PrefillSize* size);

// Tokens to make room for, with some spare, so that a sequence of n_tokens need not grow with each append.
int64_t whole_layer_tokens(int64_t n_tokens);
// Bytes of one buffer if each of the StreamBuffers::kBuffers buffers holds all keys of a layer.
int64_t whole_layer_bytes(const WindowGeometry::LayerPlanes& planes, int64_t n_tokens);

// Returns the nanoseconds of a chunk over n_keys, as far as they depend on the layout of its pieces. tile_ns: time of a
// block's step. Sizes use an assumed time, as memory is planned before anything is measured.
double prefill_ns(const Layer& layer, const StreamLayout& layout, int64_t n_queries, int64_t n_keys,
                  int32_t n_multiprocessors, double tile_ns);
double assumed_tile_ns(const Layer& layer);
double tile_ns_of_wave(double ns, int64_t n_keys);                         // ns: the time of a piece of n_keys
int64_t queries_of_a_wave(const Layer& layer, int32_t n_multiprocessors);  // queries that fill the device once

}  // namespace tandem
