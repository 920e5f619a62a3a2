// SPDX-License-Identifier: MIT
#include "lib/attend/window_fill.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "lib/attend/session_states.h"
#include "lib/machine/device_status.h"
#include "lib/pieces/stream_pieces.h"
#include "lib/tensors/convert.h"

namespace tandem {
namespace {

constexpr int64_t kMostAngles = int64_t{2} * 128;  // cos and sin of a row, for the most dims that windows have

// Windows of layers whose keys the library rotates hold rotated K as f32 (lib/tables/device.h). The device rotates new rows.
// The host rotates rows that are copied from the store.
struct RotateTask {
  const Cache* cache;
  const Sequence* sequence;
  int32_t layer_idx;
  TokenRange range;
  float* rows;  // [n_kv_heads][range][k_head_dim]
};

// Rotates a token's rows.
void rotate_task(void* context, int64_t task_idx, int32_t) {
  const auto& task = *static_cast<const RotateTask*>(context);
  const Cache& cache = *task.cache;
  const Layer& layer = cache.layers()[static_cast<size_t>(task.layer_idx)];
  const int64_t token = task.range.begin + task_idx, n = task.range.end - task.range.begin;
  const TokenRun at = cache.view(*task.sequence).run_at(token, token + 1);
  float angles[kMostAngles];
  rope_angles(*layer.rope, task.sequence->position(token), angles);
  for (int32_t h = 0; h < layer.n_kv_heads; ++h) {
    const Rows rows = cache.store().planes(task.layer_idx).rows(at, h);
    float* to = task.rows + (h * n + task_idx) * layer.k_head_dim;
    load_row(cache.engine().cpu(), {layer.k_type, rows.of[kPlaneK], rows.of[kPlaneKScales]}, TANDEM_F32, to,
             layer.k_head_dim);
    rope_apply(*layer.rope, angles, to);
  }
}

// Copies rotated K rows to the window. range: within one page of the window.
Status copy_rotated(const Call& chunk, const SequenceCall& of, TokenRange range) {
  const DeviceSession& device = chunk.device();
  const Layer& layer = chunk.layer();
  const WindowGeometry::LayerPlanes& planes = device.geometry().layers[chunk.facts.idx];
  const int64_t n = range.end - range.begin, row = layer.k_head_dim;
  std::vector<float> rows(static_cast<size_t>(layer.n_kv_heads * n * row));
  RotateTask task{&chunk.cache(), of.sequence, chunk.args.layer_idx, range, rows.data()};
  chunk.cpu().table->run(chunk.cpu().self, n, rotate_task, &task);
  for (int32_t h = 0; h < layer.n_kv_heads; ++h) {
    auto* const page = reinterpret_cast<std::byte*>(of.window->page_of(range.begin));
    std::byte* const to = planes.row(page, kPlaneK, h, range.begin % kDevicePageLen);
    TANDEM_TRY(
        call_device(device.device(), &DeviceTable::copy, to, rows.data() + h * n * row, n * row * 4, chunk.args.stream));
  }
  return {};
}

// Copies rows to the window through a buffer of pinned memory, with the layout of the window's pages.
class StagedRows {
 public:
  StagedRows(const Call& chunk, const SequenceCall& of, PlaneSet planes)
      : chunk_(chunk), of_(of), planes_(planes), at_(chunk.device().geometry().layers[chunk.facts.idx]) {}

  // Sends the first pages of *range, as many as the buffer has room for, and advances range->begin.
  Status send(TokenRange* range) {
    WindowStaging& staging = *chunk_.session.staging;
    TANDEM_TRY(staging.next(&buffer_));
    runs_.clear();
    copies_.clear();
    std::byte* part = buffer_;
    for (; range->begin < range->end && part + at_.bytes <= buffer_ + staging.buffer_bytes(); part += at_.bytes) {
      const int64_t end = std::min(range->begin - range->begin % kDevicePageLen + kDevicePageLen, range->end);
      add_page({range->begin, end}, part);
      range->begin = end;
    }
    // While the pool attends for an earlier layer, this thread copies by itself instead of waiting for the pool.
    if (chunk_.session.hand_over().is_computing())
      for (int64_t i = 0; i < std::ssize(runs_); ++i) copy_run(this, i, 0);
    else
      chunk_.cpu().table->run(chunk_.cpu().self, std::ssize(runs_), copy_run, this);
    return staging.send(copies_);
  }

 private:
  struct StagedRun {
    const std::byte* from;
    std::byte* to;
    int64_t bytes;
  };
  static void copy_run(void* context, int64_t task_idx, int32_t) {
    const StagedRun& run = static_cast<StagedRows*>(context)->runs_[static_cast<size_t>(task_idx)];
    std::memcpy(run.to, run.from, static_cast<size_t>(run.bytes));
  }

  // part: the layer's part of a page. A whole page is copied as one row, a partial page in one row for each head's tokens.
  void add_page(TokenRange tokens, std::byte* part) {
    auto* const page = reinterpret_cast<std::byte*>(of_.window->page_of(tokens.begin));
    const bool is_whole = tokens.end - tokens.begin == kDevicePageLen;
    int64_t first = INT64_MAX, end = 0;
    RowCursor rows(chunk_.cache().view(*of_.sequence), chunk_.args.layer_idx, {0, chunk_.layer().n_kv_heads}, tokens,
                   planes_, RowOrder::kByRun);
    for (RowRun run; rows.next(&run);) {
      std::byte* const to = at_.row(page, run.plane, run.head, run.token % kDevicePageLen);
      const int64_t offset = to - page - at_.at[0];
      runs_.push_back({run.data, part + offset, run.bytes});
      first = std::min(first, offset);
      end = std::max(end, offset + run.bytes);
      if (!is_whole) copies_.cut();
      if (!is_whole) copies_.add(to, part + offset, run.bytes);
    }
    if (!is_whole) return;
    copies_.begin_page(*of_.window, tokens.begin, chunk_.device().geometry().page_bytes);
    copies_.add(page + at_.at[0] + first, part + first, end - first);
  }

  const Call& chunk_;
  const SequenceCall& of_;
  const PlaneSet planes_;
  const WindowGeometry::LayerPlanes& at_;
  std::byte* buffer_ = nullptr;
  std::vector<StagedRun> runs_;
  CopyList copies_;
};

// is_new: no launched work uses the layer's part of the window, so copies need not wait.
Status copy_to_window(const Call& chunk, const SequenceCall& of, TokenRange range, bool is_new) {
  const DeviceSession& device = chunk.device();
  const Layer& layer = chunk.layer();
  const PlaneSet unrotated =
      layer.rope != nullptr ? kHeadPlanes & ~PlaneSet{1 << kPlaneK | 1 << kPlaneKScales} : kHeadPlanes;
  if (layer.rope != nullptr)
    TANDEM_TRY(for_window_pages(range, [&](TokenRange page) { return copy_rotated(chunk, of, page); }));
  chunk.session.sums.filled_kv_bytes +=
      (range.end - range.begin) * layer.n_kv_heads * device.geometry().layers[chunk.facts.idx].row_bytes.total();
  if (chunk.session.staging == nullptr)
    TANDEM_TRY(WindowStaging::create(device.device(), chunk.cpu(), device.geometry(), &chunk.session.staging));
  WindowStaging& staging = *chunk.session.staging;
  bool is_sent = false;
  const AtEnd undo([&] {
    if (!is_sent) staging.settle();
  });
  if (!is_new) TANDEM_TRY(staging.fork(chunk.args.stream));
  for (StagedRows rows(chunk, of, unrotated); range.begin < range.end;) TANDEM_TRY(rows.send(&range));
  TANDEM_TRY(staging.join(chunk.args.stream));
  is_sent = true;
  return {};
}

// Copies the MAW of all tokens in the window before the chunk's own to the device, if the device's MAW are out of date.
// Queries of old tokens may not see the newest ones.
Status give_maw(const Call& chunk, const SequenceCall& of) {
  const int64_t end = chunk.appends() ? of.first_query : of.sequence->lengths[chunk.facts.idx];
  if (of.window->has_maw(chunk.facts.idx) || of.window_begin >= end) return {};
  DeviceSession& device = chunk.device();
  device.hand_over().drain();
  const int32_t n_q_heads = chunk.layer().n_q_heads;
  std::vector<float> page(static_cast<size_t>(int64_t{n_q_heads} * kDevicePageLen), 0.0f);
  return for_window_pages({of.window_begin, end}, [&](TokenRange range) {
    for_maw_of_page(*of.state->selection, n_q_heads, range, page.data(),
                    [](const float* from, float* to, int64_t n) { std::copy_n(from, n, to); });
    auto* to =
        reinterpret_cast<std::byte*>(of.window->page_of(range.begin)) + device.geometry().layers[chunk.facts.idx].maw_at;
    return call_device(device.device(), &DeviceTable::copy, to, page.data(),
                       static_cast<int64_t>(page.size() * sizeof(float)), chunk.args.stream);
  });
}

}  // namespace

Status fill_window(const Call& chunk, const SequenceCall& of, int64_t rows_end) {
  const size_t l = chunk.facts.idx;
  const int64_t end = chunk.appends() ? of.first_query : of.length;
  const int64_t in_ring = std::min(of.length, rows_end);  // the end of the rows written to the ring
  bool is_new = of.window->begin_use(l);
  of.window->make_way(l, chunk.args.speculative ? end : in_ring);
  if (of.resident_begin < end) of.window->make_way_for_older(l, of.resident_begin);
  TokenRange valid = of.window->valid(l);
  if (valid.end <= of.resident_begin || valid.begin >= end) valid = {end, end};
  const TokenRange missing[] = {{of.resident_begin, std::min(valid.begin, end)}, {valid.end, end}};
  for (const TokenRange& range : missing) {
    if (range.begin >= range.end) continue;
    chunk.session.hand_over().wait_for_rows(of.sequence->id, chunk.args.layer_idx, range.end);
    chunk.session.states->fetch_maw(*of.sequence);
    TANDEM_TRY(copy_to_window(chunk, of, range, std::exchange(is_new, false)));
  }
  return chunk.facts.policy.keeps_maw && !chunk.args.speculative ? give_maw(chunk, of) : Status();
}

// If enough queries follow, the older weights fade to nothing anyway.
void fade_newer(const Call& chunk, const SequenceCall& of) {
  const int64_t end = of.sequence->lengths[chunk.facts.idx], n_left = end - of.length;
  const float alpha = chunk.session.options.alpha;
  if (n_left <= 0 || n_left >= counted_queries(alpha)) return;
  chunk.session.hand_over().drain();
  chunk.session.states->fetch_maw(*of.sequence);
  const auto keep = static_cast<float>(std::pow(1.0 - alpha, static_cast<double>(of.q_len)));
  for (int32_t h = 0; h < chunk.layer().n_q_heads; ++h)
    for (int64_t t = of.length; t < end; ++t) *of.state->selection->weights(h, t) *= keep;
}

}  // namespace tandem
