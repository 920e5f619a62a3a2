// SPDX-License-Identifier: MIT
#include "lib/attend/whole_layer.h"

#include <algorithm>

#include "lib/base/trace.h"
#include "lib/machine/device_status.h"

namespace tandem {
namespace {

constexpr int64_t kPage = kDevicePageLen;

int64_t up_to_page(int64_t token) { return ceil_div(token, kPage) * kPage; }

const WindowGeometry::LayerPlanes& planes_of(const Call& chunk) { return chunk.device().geometry().layers[chunk.facts.idx]; }

// Returns the tokens before the chunk's own whose pages are complete in the ring, rounded to pages.
TokenRange in_ring(const Call& chunk, const SequenceCall& of) {
  const TokenRange valid = of.window->valid(chunk.facts.idx);
  const int64_t end = std::min(valid.end, of.first_query);
  const TokenRange pages{up_to_page(valid.begin), end == of.first_query ? end : end / kPage * kPage};
  return pages.begin < pages.end ? pages : TokenRange{of.first_query, of.first_query};
}

// Returns the tokens between sinks and window that the KV head does not attend, for queries from first_query on. Empty if
// some query head attends other keys than sinks and a window.
TokenRange not_attended(const PatternsOfLayer& patterns, int32_t kv_head, int64_t first_query) {
  const auto group_size = static_cast<size_t>(std::ssize(patterns.heads) / std::ssize(patterns.decode));
  TokenRange between{0, first_query};
  for (size_t g = 0; g < group_size; ++g) {
    const HeadPattern& head = patterns.heads[static_cast<size_t>(kv_head) * group_size + g];
    if (head.kinds != TANDEM_PATTERN_A_SHAPE) return {};
    between.begin = std::max(between.begin, pattern_units(head.sink_len) * kPatternUnit);
    between.end = std::min(between.end, first_query + 1 - head.window_len);
  }
  return between.begin < between.end ? between : TokenRange{};
}

}  // namespace

Status WholeLayer::reserve(const Call& call, int64_t n_tokens) {
  if (pages_ != nullptr) settle(call.args.stream);  // an earlier call has failed
  const int64_t bytes = whole_layer_bytes(planes_of(call), n_tokens);
  if (bytes <= buffer_bytes_) return {};
  if (buffers_ != nullptr) {
    call.session.hand_over().drain();
    settle(call.args.stream);
  }
  buffers_.reset();
  buffer_bytes_ = 0;
  TANDEM_TRY(
      StreamBuffers::create(call.device().device(), call.cache().device_tier(), bytes, StreamBuffers::kBuffers, &buffers_));
  buffer_bytes_ = bytes;
  return {};
}

void WholeLayer::list_from_store(const Call& chunk, int32_t kv_head, TokenRange tokens, std::byte* to) {
  const WindowGeometry::LayerPlanes& planes = planes_of(chunk);
  RowCursor rows(chunk.cache().view(*chunk.calls()[0].sequence), chunk.args.layer_idx, {kv_head, 1}, tokens, kHeadPlanes,
                 RowOrder::kByHead);
  rows.stop_at_multiples(kPage);
  for (RowRun run; rows.next(&run); n_bytes_ += run.bytes)
    from_store_.add(planes.row(to + run.token / kPage * planes.bytes - planes.at[0], run.plane, run.head, run.token % kPage),
                    run);
}

void WholeLayer::list(const Call& chunk) {
  from_store_.clear();
  from_ring_.clear();
  n_bytes_ = 0;
  if (pages_ != nullptr) return;
  const SequenceCall& of = chunk.calls()[0];
  const PatternsOfLayer& patterns = chunk.session.options.patterns[chunk.facts.idx];
  const WindowGeometry::LayerPlanes& planes = planes_of(chunk);
  const TokenRange ring = in_ring(chunk, of);
  std::byte* const to = buffers_->next();
  chunk.session.hand_over().wait_for_rows(of.sequence->id, chunk.args.layer_idx,
                                          ring.end < of.first_query ? of.first_query : ring.begin);
  for (int32_t h = 0; h < chunk.layer().n_kv_heads; ++h) {
    // Pages that stay in the window after the call must have all heads.
    TokenRange left_out = not_attended(patterns, h, of.first_query);
    left_out.end = std::min({left_out.end, of.window_begin / kPage * kPage, ring.begin});
    if (left_out.begin >= left_out.end) left_out = {};
    for (const TokenRange& tokens : {TokenRange{0, left_out.begin}, {left_out.end, ring.begin}, {ring.end, of.first_query}})
      if (tokens.begin < tokens.end) list_from_store(chunk, h, tokens, to);
  }
  for (int64_t t = ring.begin; t < ring.end; t += kPage) {
    const std::byte* const page = from_ring_.begin_page(*of.window, t, chunk.device().geometry().page_bytes);
    from_ring_.add(to + t / kPage * planes.bytes, page + planes.at[0], planes.bytes);
  }
}

Status WholeLayer::bring(const Call& chunk, std::byte** pages) {
  if (pages_ == nullptr) {
    const TraceRange range("load k v", chunk.args.layer_idx, "whole layer");
    TANDEM_TRY(buffers_->send(from_store_.copies()));
    chunk.session.sums.filled_kv_bytes += n_bytes_;
    TANDEM_TRY(buffers_->take(chunk.args.stream, &pages_));
  }
  *pages = pages_;
  for (const StridedCopy& copy : from_ring_.copies())
    TANDEM_TRY(call_device(chunk.device().device(), &DeviceTable::copy_strided, &copy, chunk.args.stream));
  return {};
}

Status WholeLayer::done(const Call& chunk, bool is_last) {
  if (!is_last) return {};
  pages_ = nullptr;
  return buffers_->done_with(chunk.args.stream);
}

void WholeLayer::settle(void* stream) {
  pages_ = nullptr;
  if (buffers_ != nullptr) buffers_->settle(stream);
}

}  // namespace tandem
