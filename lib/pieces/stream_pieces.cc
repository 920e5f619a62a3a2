// SPDX-License-Identifier: MIT
#include "lib/pieces/stream_pieces.h"

#include <algorithm>
#include <utility>

namespace tandem {
namespace {

constexpr int32_t kLeastPage = 64;  // tokens; the least that kernels take

int64_t count_groups(const StreamLayout& layout, std::span<const HeadRun> heads) {
  int64_t n = 0;
  for (const HeadRun& run : heads) n += (run.n + layout.n_heads - 1) / layout.n_heads;
  return n;
}

// A buffer has room for at least one page of one head.
StreamLayout layout_of(const Layer& layer, int32_t page_len, int64_t buffer_bytes, int32_t most_heads) {
  StreamLayout made;
  made.page_len = page_len;
  made.buffer_bytes = buffer_bytes;
  made.most_heads = most_heads;
  const int64_t n_fit = buffer_bytes / (page_len * plane_bytes(layer).total());
  const int64_t n_at_once = std::min(n_fit, int64_t{most_heads}), n_kv_heads = layer.n_kv_heads;
  const int64_t n_groups = (n_kv_heads + n_at_once - 1) / n_at_once;
  made.n_heads = static_cast<int32_t>((n_kv_heads + n_groups - 1) / n_groups);
  made.page_bytes = made.lay_out(layer, made.n_heads, page_len);
  made.n_pages = buffer_bytes / made.page_bytes;
  return made;
}

}  // namespace

Status make_stream_layout(const Layer& layer, int64_t extent_len, int64_t buffer_bytes, StreamLayout* layout,
                          int32_t most_heads) {
  const int64_t row_bytes = plane_bytes(layer).total();
  auto page_len = static_cast<int32_t>(extent_len);  // a power of two, like pages of the store
  while (page_len > kLeastPage && page_len * row_bytes > buffer_bytes) page_len /= 2;
  if (page_len * row_bytes > buffer_bytes)
    return fail(TANDEM_ERROR_INVALID_ARGUMENT, "stream_buffer_bytes",
                "stream_buffer_bytes = %lld (up to a multiple of 256) is less than the %lld bytes of %d tokens of a KV head",
                static_cast<long long>(buffer_bytes), static_cast<long long>(kLeastPage * row_bytes), kLeastPage);
  *layout = layout_of(layer, page_len, buffer_bytes, most_heads);
  return {};
}

StreamLayout shorten_pages(const Layer& layer, const StreamLayout& layout, int64_t longest) {
  int32_t page_len = layout.page_len;
  while (page_len > kLeastPage && page_len / 2 >= longest) page_len /= 2;
  return page_len < layout.page_len ? layout_of(layer, page_len, layout.buffer_bytes, layout.most_heads) : layout;
}

Status make_stream_layouts(const std::vector<Layer>& layers, const LayerPolicies& policies, int64_t extent_len,
                           const RouteOptions& routes, std::vector<StreamLayout>* layouts) {
  bool streams = false;
  for (size_t l = 0; l < layers.size(); ++l)
    streams = streams || (layers[l].rope == nullptr && can_stream(policies[l], true));
  if (!streams) return {};
  for (const Layer& layer : layers)
    TANDEM_TRY(make_stream_layout(layer, extent_len, routes.buffer_bytes, &layouts->emplace_back(),
                                  routes.piece_heads > 0 ? routes.piece_heads : layer.n_kv_heads));
  return {};
}

int64_t count_pieces(const StreamLayout& layout, std::span<const HeadRun> heads, int64_t begin, int64_t end) {
  if (begin >= end) return 0;
  const int64_t length = layout.piece_len();
  return count_groups(layout, heads) * ((end + length - 1) / length - begin / length);
}

void cut_pieces(const StreamLayout& layout, std::span<const HeadRun> heads, size_t call, TokenRange tokens,
                std::vector<StreamPiece>* pieces) {
  const int64_t length = layout.piece_len();
  for (const HeadRun& run : heads)
    for (int32_t h = 0; h < run.n; h += layout.n_heads)
      for (int64_t t = tokens.begin; t < tokens.end; t = (t / length + 1) * length)
        pieces->push_back(
            {call, run.first + h, std::min(layout.n_heads, run.n - h), t, std::min((t / length + 1) * length, tokens.end)});
}

void CopyList::add(std::byte* to, const RowRun& from) {
  if (std::exchange(piece_, from.piece) != from.piece) cut();
  add(to, from.data, from.bytes);
}

void CopyList::add(const RowRun& to, const std::byte* from) {
  if (std::exchange(piece_, to.piece) != to.piece) cut();
  add(to.data, from, to.bytes);
}

// Adjacent rows become one longer row. Rows of one length at a constant distance become one strided copy.
void CopyList::add(std::byte* to, const std::byte* from, int64_t bytes) {
  if (!std::exchange(is_cut_, false) && !copies_.empty()) {
    StridedCopy& last = copies_.back();
    const int64_t to_stride = to - static_cast<std::byte*>(last.to),
                  from_stride = from - static_cast<const std::byte*>(last.from);
    if (last.n_rows == 1 && to_stride == last.row_bytes && from_stride == last.row_bytes) {
      last.row_bytes += bytes;
      return;
    }
    if (last.row_bytes == bytes) {
      if (last.n_rows == 1 && to_stride >= bytes && from_stride >= bytes) {
        last.to_stride = to_stride;
        last.from_stride = from_stride;
        last.n_rows = 2;
        return;
      }
      if (last.n_rows > 1 && to_stride == last.n_rows * last.to_stride && from_stride == last.n_rows * last.from_stride) {
        ++last.n_rows;
        return;
      }
    }
  }
  copies_.push_back({to, from, bytes, 1, bytes, bytes});
}

}  // namespace tandem
