// SPDX-License-Identifier: MIT
#include "lib/routes/prefill_size.h"

#include <algorithm>

namespace tandem {
namespace {

constexpr int64_t kMostStates = int64_t{64} << 20;  // bytes of a group's o
constexpr int64_t kTicket = DeviceSession::kMostTokens;
// What long appends over bf16 take on an H200.
constexpr int64_t kTileRows = 128, kTileKeys = 128;  // of a block's step
constexpr double kTileNs = 1650.0;                   // of that, for heads of 128 dims
constexpr double kStateNs = 8500.0;   // of a tile of rows: to begin and to end a block, with the states of those before
constexpr double kPieceNs = 7000.0;   // of a piece, between its first block and the last one of the piece before
constexpr double kBusBytes = 54.0;    // in a nanosecond
constexpr double kCopyNs = 5000.0;    // of a copy
constexpr double kRowsNs = 300000.0;  // of a ticket's rows, to the host beside other calls

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t o_bytes(const Layer& layer, int64_t n_heads, int64_t n_tokens) {
  return n_tokens * n_heads * layer.group_size * layer.v_head_dim * 4;
}

}  // namespace

double prefill_ns(const Layer& layer, const StreamLayout& layout, int64_t n_queries, int64_t n_keys,
                  int32_t n_multiprocessors) {
  const double tile_ns = kTileNs * static_cast<double>(layer.k_head_dim + layer.v_head_dim) / 256.0;
  const int64_t n_blocks = std::max(n_multiprocessors, 1), n_tiles = ceil_div(n_queries * layer.group_size, kTileRows);
  const auto n_pieces = static_cast<double>(ceil_div(n_keys, layout.piece_len()));
  const double n_steps = static_cast<double>(n_keys) / kTileKeys;
  double ns = 0.0;
  for (int64_t h = 0; h < layer.n_kv_heads; h += layout.n_heads) {
    const int64_t n_heads = std::min<int64_t>(layout.n_heads, layer.n_kv_heads - h), n_items = n_heads * n_tiles;
    const int64_t n_sharing = n_blocks / n_items;  // where items are fewer than blocks: those that share an item's keys
    const double n_waves =
        n_items > n_blocks ? static_cast<double>(ceil_div(n_items, n_blocks)) : 1.0 / static_cast<double>(n_sharing);
    const double compute = n_waves * (n_steps * tile_ns + n_pieces * kStateNs) + n_pieces * kPieceNs;
    const double n_copies = 2.0 * static_cast<double>(ceil_div(n_keys, layout.page_len));  // K and V of a page
    const double bus = static_cast<double>(n_keys * n_heads * layout.row_bytes.total()) / kBusBytes + n_copies * kCopyNs;
    ns += std::max(compute, bus);
  }
  return ns;
}

// Of groups that take equally long the largest: fewer, longer copies.
Status size_prefill(const Layer& layer, const PrefillTerms& terms, int64_t n_queries, int64_t n_keys, PrefillSize* size) {
  PrefillSize made;
  const int64_t wanted = terms.append_tokens > 0 ? terms.append_tokens : kMostAppend;
  const int64_t unit = std::min(kTicket, wanted);
  const int64_t most = std::max(unit, std::min(wanted, kMostStates / o_bytes(layer, 1, 1)) / unit * unit);
  made.n_tokens = ceil_div(ceil_div(n_queries, ceil_div(n_queries, most)), unit) * unit;
  double least = 0.0;
  for (int32_t n = terms.piece_heads > 0 ? terms.piece_heads : layer.n_kv_heads; n > 0; --n) {
    const bool is_last = n == 1 || terms.piece_heads > 0;
    StreamLayout layout;
    TANDEM_TRY(make_stream_layout(layer, terms.extent_len, terms.buffer_bytes, &layout, n));
    const double ns = prefill_ns(layer, layout, std::min(made.n_tokens, n_queries), n_keys, terms.n_multiprocessors);
    if (is_last || o_bytes(layer, layout.n_heads, made.n_tokens) <= kMostStates)
      if (least == 0.0 || ns < least) {
        least = ns;
        made.layout = layout;
      }
    if (is_last) break;
  }
  const double group_ns = least * made.layout.n_heads / layer.n_kv_heads;
  made.rows_have_time = group_ns > kRowsNs * static_cast<double>(tickets_of(std::min(made.n_tokens, n_queries)));
  made.page_bytes = terms.layer_page_bytes;
  made.o_at = ceil_div(made.n_tokens, kDevicePageLen) * made.page_bytes;
  const int64_t o = device_aligned(o_bytes(layer, made.layout.n_heads, made.n_tokens));
  const int64_t lse = device_aligned(made.n_tokens * made.layout.n_heads * layer.group_size * 4);
  made.lse_at = made.o_at + o;
  made.area_bytes = made.lse_at + lse;
  *size = made;
  return {};
}

DeviceLimits prefill_limits(const Device& device, const Layer& layer, const PrefillSize& size, int64_t n_pieces,
                            int64_t n_pages) {
  DeviceLimits limits = device_limits(
      device, layer, {kTicket, 1, size.n_tokens, n_pages, 0, n_pieces + tickets_of(size.n_tokens), size.layout.n_pages});
  limits.prefill_bytes = size.area_bytes;
  return limits;
}

}  // namespace tandem
