// SPDX-License-Identifier: MIT
#include "lib/routes/prefill_size.h"

#include <algorithm>
#include <utility>

#include "lib/call/reserve.h"
#include "lib/call/ticket_rows.h"

namespace tandem {
namespace {

constexpr int64_t kMostStates = int64_t{96} << 20;    // bytes of a group's o
constexpr int64_t kMostRotated = int64_t{128} << 20;  // bytes of a chunk's rotated queries
constexpr int64_t kTicket = kMostTicketTokens;
// Times of long appends over bf16 on an H200.
constexpr int64_t kTileKeys = 128;   // keys of a block's step
constexpr double kTileNs = 1650.0;   // ns of a block's step, for heads of 128 dims
constexpr double kStateNs = 8500.0;  // ns per tile of rows: to begin and end a block, with the states of earlier pieces
constexpr double kPieceNs = 7000.0;  // ns per piece, from the last block of the piece before to its first block
constexpr double kBusBytes = 54.0;   // bytes per nanosecond
constexpr double kCopyNs = 5000.0;   // ns per copy, with its overheads; a smaller value makes slower groups win
// ns per ticket of rows that go to the host beside the pieces. kRowsNs: on what the pieces leave of the device.
// kRowsOnPartNs: on a part of the device that the pieces then lack, which makes them longer by kPartNs.
constexpr double kRowsNs = 300000.0, kRowsOnPartNs = 70000.0, kPartNs = 15000.0;

double n_tiles_of_keys(int64_t n_keys) { return static_cast<double>(n_keys) / kTileKeys; }
int64_t rotated_bytes(const Layer& layer) { return int64_t{layer.n_q_heads} * layer.k_head_dim * 4; }  // per token
int64_t o_bytes(const Layer& layer, int64_t n_heads, int64_t n_tokens) {
  return n_tokens * n_heads * layer.group_size * layer.v_head_dim * 4;
}

}  // namespace

double assumed_tile_ns(const Layer& layer) {
  return kTileNs * static_cast<double>(layer.k_head_dim + layer.v_head_dim) / 256.0;
}

double tile_ns_of_wave(double ns, int64_t n_keys) {
  return std::max(ns - kStateNs - kPieceNs, ns / 2) / n_tiles_of_keys(n_keys);
}

int64_t queries_of_a_wave(const Layer& layer, int32_t n_multiprocessors) {
  const int64_t n_tiles_of_head = std::max(n_multiprocessors / layer.n_kv_heads, 1);
  return std::max<int64_t>(n_tiles_of_head * kTileRows / layer.group_size, 1);
}

namespace {

// Returns the time of one group's pieces.
double group_ns(const StreamLayout& layout, int64_t n_heads, int64_t n_tiles, int64_t n_keys, int32_t n_multiprocessors,
                double tile_ns) {
  const int64_t n_blocks = std::max(n_multiprocessors, 1), n_items = n_heads * n_tiles;
  const auto n_pieces = static_cast<double>(ceil_div(n_keys, layout.piece_len()));
  const int64_t n_sharing = n_blocks / n_items;  // blocks that share an item's keys, if items are fewer than blocks
  const double n_waves =
      n_items > n_blocks ? static_cast<double>(ceil_div(n_items, n_blocks)) : 1.0 / static_cast<double>(n_sharing);
  const double compute = n_waves * (n_tiles_of_keys(n_keys) * tile_ns + n_pieces * kStateNs) + n_pieces * kPieceNs;
  const double n_copies = 2.0 * static_cast<double>(ceil_div(n_keys, layout.page_len));  // K and V of a page
  return std::max(compute,
                  static_cast<double>(n_keys * n_heads * layout.row_bytes.total()) / kBusBytes + n_copies * kCopyNs);
}

int64_t tiles_of(const Layer& layer, int64_t n_queries) { return ceil_div(n_queries * layer.group_size, kTileRows); }

// Returns the time that rows add to a chunk. The chunk's own keys wait for the rows, while the first group's pieces take
// first_group_ns.
double rows_ns(double first_group_ns, int64_t n_tickets, bool* have_time) {
  const auto n = static_cast<double>(n_tickets);
  const double on_rest = std::max(0.0, n * kRowsNs - first_group_ns);
  const double on_part = std::max(0.0, n * kRowsOnPartNs - first_group_ns) + n * kPartNs;
  *have_time = on_rest <= on_part;
  return std::min(on_rest, on_part);
}

// Returns the bytes of one launch's lists with their tiles (lib/call/key_tiles.h).
int64_t tile_bytes(const Layer& layer, const PrefillTerms& terms, int64_t n_tokens) {
  const int64_t n_lists = ceil_div(n_tokens * layer.group_size, kTileRows) * terms.n_list_heads;
  const int64_t n_queries = (kTileRows - 1) / layer.group_size + 2;  // maximum number of queries of a list
  const int64_t n_tiles = std::min(n_queries * terms.n_units * terms.tiles_of_unit, terms.most_tiles);
  const int64_t of_list = n_tiles * tile_words(layer.group_size, kByQuery);
  return device_aligned(n_lists * static_cast<int64_t>(sizeof(DeviceTiles))) +
         n_lists * of_list * static_cast<int64_t>(sizeof(KeyTile));
}

// The area for chunks of n_tokens and groups of n_heads KV heads.
struct Area {
  int64_t o_bytes, o_at, lse_at, row_lse_at, q_at, tiles_at, rows_at, rows_bytes, bytes;

  Area(const Layer& layer, const PrefillTerms& terms, int64_t n_heads, int64_t n_tokens)
      : o_bytes(tandem::o_bytes(layer, n_heads, n_tokens)),
        o_at(ceil_div(n_tokens, kDevicePageLen) * terms.layer_page_bytes),
        lse_at(o_at + device_aligned(o_bytes)),
        row_lse_at(lse_at + device_aligned(n_tokens * n_heads * layer.group_size * 4)),
        q_at(row_lse_at + (terms.keeps_lse ? device_aligned(n_tokens * layer.n_q_heads * 4) : 0)),
        tiles_at(device_aligned(q_at + (rotates_queries(layer) ? n_tokens * rotated_bytes(layer) : 0))),
        rows_at(tiles_at + device_aligned(tile_bytes(layer, terms, n_tokens))),
        rows_bytes(NewRowsLayout(layer, n_tokens).end),
        bytes(rows_at + 2 * rows_bytes) {}
};

// Returns the maximum number of tokens of a chunk.
int64_t most_tokens(const Layer& layer, int64_t wanted, int64_t unit) {
  int64_t most = std::min(wanted, kMostStates / o_bytes(layer, 1, 1));
  if (rotates_queries(layer)) most = std::min(most, kMostRotated / rotated_bytes(layer));
  return std::max(unit, most / unit * unit);
}

}  // namespace

double prefill_ns(const Layer& layer, const StreamLayout& layout, int64_t n_queries, int64_t n_keys,
                  int32_t n_multiprocessors, double tile_ns) {
  double ns = 0.0;
  for (int64_t h = 0; h < layer.n_kv_heads; h += layout.n_heads)
    ns += group_ns(layout, std::min<int64_t>(layout.n_heads, layer.n_kv_heads - h), tiles_of(layer, n_queries), n_keys,
                   n_multiprocessors, tile_ns);
  return ns;
}

KeysOfAppend keys_of_append(const PolicyOptions& options, int64_t page_len, const SequenceShape& sequence) {
  const TokenRange all = outside_of(options, page_len, sequence, sequence.length - 1);
  const int64_t first_end = outside_of(options, page_len, sequence, sequence.first_query()).end;
  return {std::max(all.begin, first_end) - all.begin, all.end - all.begin};
}

namespace {

// Chooses the layout that takes the least time. Among equally fast ones, the largest groups win, as their copies are fewer
// and longer. n_chunk: number of tokens for which there is memory. n_at_once: how many of them meet n_keys at a time.
Status choose_layout(const Layer& layer, const PrefillTerms& terms, int64_t n_chunk, int64_t n_at_once, int64_t n_keys,
                     PrefillSize* made) {
  const double tile_ns = assumed_tile_ns(layer);
  for (int32_t n = terms.piece_heads > 0 ? terms.piece_heads : layer.n_kv_heads; n > 0; --n) {
    const bool is_last = n == 1 || terms.piece_heads > 0;
    StreamLayout layout;
    TANDEM_TRY(make_stream_layout(layer, terms.extent_len, terms.buffer_bytes, &layout, n));
    bool have_time = false;
    const double first_ns =
        group_ns(layout, layout.n_heads, tiles_of(layer, n_at_once), n_keys, terms.n_multiprocessors, tile_ns);
    const double ns = prefill_ns(layer, layout, n_at_once, n_keys, terms.n_multiprocessors, tile_ns) +
                      rows_ns(first_ns, tickets_of(n_at_once), &have_time);
    const Area area(layer, terms, layout.n_heads, n_chunk);
    if (is_last || (area.o_bytes <= kMostStates && area.bytes <= terms.most_bytes))
      if (made->assumed_ns == 0.0 || ns < made->assumed_ns) {
        made->assumed_ns = ns;
        made->layout = layout;
        made->rows_have_time = have_time;
      }
    if (is_last) break;
  }
  return {};
}

}  // namespace

Status size_prefill(const Layer& layer, const PrefillTerms& terms, int64_t n_queries, const KeysOfAppend& keys,
                    PrefillSize* size) {
  PrefillSize made;
  const int64_t wanted = terms.append_tokens > 0 ? std::min(terms.append_tokens, kLongestChunk) : kMostAppend;
  const int64_t unit = std::min(kTicket, wanted), most = most_tokens(layer, wanted, unit);
  const int64_t of_chunk =
      terms.has_full_chunks ? std::min(most, n_queries) : ceil_div(n_queries, ceil_div(n_queries, most));
  made.n_tokens = ceil_div(of_chunk, unit) * unit;
  const bool is_planned = terms.append_tokens > 0 && n_queries >= most;
  const int64_t n_chunk = is_planned ? most : made.n_tokens, n_at_once = std::min(n_chunk, n_queries);
  const int64_t of_last = keys.end - n_chunk;
  const int64_t n_keys = std::max<int64_t>(1, is_planned ? of_last : (keys.first + std::max(keys.first, of_last)) / 2);
  if (terms.streams) TANDEM_TRY(choose_layout(layer, terms, n_chunk, n_at_once, n_keys, &made));
  const Area area(layer, terms, made.layout.n_heads, n_chunk);
  made.room_tokens = n_chunk;
  made.o_at = area.o_at;
  made.lse_at = area.lse_at;
  made.area_bytes = area.bytes;
  made.row_lse_at = terms.keeps_lse ? area.row_lse_at : 0;
  made.q_at = area.q_at;
  made.tiles_at = area.tiles_at;
  made.rows_at = area.rows_at;
  made.rows_bytes = area.rows_bytes;
  *size = made;
  return {};
}

PrefillTerms prefill_terms(const SizeTerms& terms, size_t layer_idx) {
  return {.extent_len = terms.store.extent_len(),
          .buffer_bytes = terms.routes.buffer_bytes,
          .n_multiprocessors = terms.device->info.n_multiprocessors,
          .piece_heads = terms.routes.piece_heads,
          .append_tokens = terms.routes.append_tokens,
          .layer_page_bytes = terms.window != nullptr ? terms.window->layers[layer_idx].bytes : 0,
          .keeps_lse = terms.policies[layer_idx].keeps_maw,
          .most_bytes = terms.most_long_bytes};
}

namespace {

// Returns how many tokens a chunk may have if a search chooses its keys (policy hip). Work space and lists grow with its
// query blocks, so their number is limited. Chunks have whole tickets, and so whole blocks. 0: chunks of one ticket are
// enough.
int64_t searched_tokens(const SizeTerms& terms, const CallShape& shape, int64_t append_tokens) {
  constexpr int64_t kMostBlocks = 32, kMostBytes = int64_t{512} << 20;
  static_assert(kTicket % kMostQueryBlock == 0);
  const int64_t block_len = terms.options.pruning.layers[shape.layer_idx].append.stages[0].query_block;
  const int64_t wanted = append_tokens > 0 ? append_tokens : kMostAppend;
  int64_t n_tickets = std::min(wanted, kMostBlocks * block_len) / kTicket;
  for (; n_tickets > 1; n_tickets /= 2) {
    Reservation needs;
    reserve_search(terms, shape, n_tickets * kTicket, &needs);
    if (needs.search_bytes <= kMostBytes) return n_tickets * kTicket;
  }
  return 0;
}

// Returns how many tokens a chunk may have if its heads follow patterns, in whole blocks. 0: chunks of one ticket are
// enough.
int64_t pattern_tokens(int64_t append_tokens, bool brings_layer) {
  const int64_t wanted = append_tokens > 0 ? std::min(append_tokens, kPatternChunk) : kPatternChunk;
  if (wanted <= kTicket && !brings_layer) return 0;
  return std::max(kPatternBlock, wanted / kPatternBlock * kPatternBlock);
}

// Returns for how many tokens all keys come to the device: the room for the call's longest append, if any keys lie outside
// the window. Otherwise 0. Only for layers that follow head patterns.
int64_t tokens_to_bring(const SizeTerms& terms, const CallShape& shape) {
  int64_t longest = 0;
  bool is_outside = false;
  for (const SequenceShape& sequence : shape.sequences) {
    if (sequence.q_len == 1 && !shape.is_partial) continue;
    longest = std::max(longest, sequence.length);
    is_outside = is_outside || outside_of(terms.options, terms.store.page_len, sequence, sequence.length - 1).end > 0;
  }
  return is_outside ? whole_layer_tokens(longest) : 0;
}

}  // namespace

int64_t whole_layer_tokens(int64_t n_tokens) {
  const int64_t step = std::max<int64_t>(kDevicePageLen, power_of_two(n_tokens) / 16);
  return ceil_div(n_tokens, step) * step;
}

int64_t whole_layer_bytes(const WindowGeometry::LayerPlanes& planes, int64_t n_tokens) {
  return device_aligned(ceil_div(n_tokens, kDevicePageLen) * planes.bytes);
}

// Sizes by the longest append, and among equally long ones by the one with the most keys.
Status size_long(const SizeTerms& terms, const CallShape& shape, bool streams, PrefillSize* size) {
  // Query rows. Up to this many, only kernels that add states may round weights. So an append with no more is not long.
  constexpr int64_t kFewRows = 64;
  const auto is_shorter = [](const SequenceShape& a, const SequenceShape& b) {
    return std::pair(a.q_len, a.length) < std::pair(b.q_len, b.length);
  };
  const SequenceShape& longest = *std::max_element(shape.sequences.begin(), shape.sequences.end(), is_shorter);
  const Layer& layer = *shape.layer;
  const Policy& policy = terms.policies[shape.layer_idx];
  *size = {};
  const bool names = shape.idx_heads > 0;
  const bool searches = policy.names_keys();  // then the window has all keys, or they are brought to the device
  if (!shape.appends || shape.is_speculative || (names && !shape.may_be_long) || !(can_stream(policy, true) || searches) ||
      shape.most_queries < std::min(longest.q_len, terms.most_of_chunk()))
    return {};
  streams = streams && !searches && !rotates_queries(layer) && terms.routes.appends_at_once();
  if (!streams && terms.kinds(shape.layer_idx) != nullptr) return {};  // the sinks of streaming heads would have to be sent
  // The queries whose weights count must fit into one ticket.
  if (policy.keeps_maw && counted_queries(terms.options.alpha) > kTicket) return {};
  PrefillTerms of_layer = prefill_terms(terms, shape.layer_idx);
  of_layer.streams = streams;
  const int64_t whole_tokens = policy.follows_patterns ? tokens_to_bring(terms, shape) : 0;
  if (searches) {
    // Decode calls end here, before any work space is computed.
    if (longest.q_len <= kTicket && whole_tokens == 0) return {};
    of_layer.append_tokens = policy.prunes ? searched_tokens(terms, shape, of_layer.append_tokens)
                                           : pattern_tokens(of_layer.append_tokens, whole_tokens > 0);
    if (of_layer.append_tokens == 0) return {};
    if (whole_tokens > 0) of_layer.layer_page_bytes = 0;  // the chunk's rows join the layer's other rows
    of_layer.has_full_chunks = policy.follows_patterns;   // the queries of a chunk choose their keys together
  }
  if (names) {
    of_layer.n_units = shape.n_idx;
    of_layer.tiles_of_unit = (int64_t{1} << shape.idx_unit_shift) / kTileTokens;
    for (const SequenceShape& sequence : shape.sequences)
      of_layer.most_tiles = std::max(of_layer.most_tiles, sequence.length / kTileTokens + 2);
    of_layer.n_list_heads = static_cast<int32_t>(shape.idx_heads);
  }
  PrefillSize made;
  TANDEM_TRY(
      size_prefill(layer, of_layer, longest.q_len, keys_of_append(terms.options, terms.store.page_len, longest), &made));
  made.whole_tokens = whole_tokens;
  const bool is_short = longest.q_len <= std::min(made.n_tokens, kTicket) || longest.q_len * layer.group_size <= kFewRows;
  if (is_short && !made.brings_layer()) return {};
  DeviceError ignored;
  const auto n_tokens = static_cast<int32_t>(made.n_tokens);
  if (terms.device->table->supports(terms.device->self, &layer, n_tokens, &ignored) == TANDEM_OK) *size = made;
  return {};
}

// Reserves descriptors of the chunk, its tickets and its pieces, key lists of the chunk, and page tables of pieces, window
// and chunk.
void reserve_long(const SizeTerms& terms, const CallShape& shape, const PrefillSize& size, Reservation* needs) {
  const HeadRuns runs = HeadRuns::all(terms.kinds(shape.layer_idx), *shape.layer);
  int64_t n_pieces = 0;
  for (const SequenceShape& sequence : shape.sequences) {
    int64_t n = 0;
    if (!size.streams()) break;
    for (const HeadRun& run : runs.get()) {
      const TokenRange tokens = run.streams ? TokenRange{0, terms.options.sink_len} : terms.streamed(shape, sequence);
      n += count_pieces(size.layout, {&run, 1}, tokens.begin, tokens.end);
    }
    n_pieces = std::max(n_pieces, n);
  }
  needs->add_lists(terms.n_lists(shape.layer_idx));
  needs->add_descriptors(1 + tickets_of(size.room_tokens) + n_pieces,
                         size.layout.n_pages + ring_pages(terms.options, terms.store.page_len, size.room_tokens) +
                             size.whole_tokens / kDevicePageLen);
  needs->workspace_bytes = workspace_bytes(*terms.device, *shape.layer, 1, size.room_tokens);
  needs->prefill_bytes = size.area_bytes;
}

}  // namespace tandem
