// SPDX-License-Identifier: MIT
#include "lib/attend/window_fill.h"

#include <algorithm>
#include <cmath>

#include "lib/attend/session_states.h"
#include "lib/machine/device_status.h"
#include "lib/pieces/stream_pieces.h"
#include "lib/tensors/convert.h"

namespace tandem {
namespace {

constexpr int64_t kMostAngles = int64_t{2} * 128;  // cos and sin of a row of the most dims that windows have

// Windows of layers whose keys the library rotates hold K rotated, as f32 (lib/tables/device.h). New rows are rotated by the
// device; what a window has to get back from the store, here.
struct RotateTask {
  const Cache* cache;
  const Sequence* sequence;
  int32_t layer_idx;
  TokenRange range;
  float* rows;  // [n_kv_heads][range][k_head_dim]
};

// A token's rows.
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

// range: within a page of the window.
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

// Of each head and plane, pages side by side in an extent of the store and in the ring are one copy.
Status copy_to_window(const Call& chunk, const SequenceCall& of, TokenRange range) {
  const DeviceSession& device = chunk.device();
  const Layer& layer = chunk.layer();
  const WindowGeometry::LayerPlanes& planes = device.geometry().layers[chunk.facts.idx];
  const int64_t page_bytes = device.geometry().page_bytes;
  const PlaneSet unrotated =
      layer.rope != nullptr ? kHeadPlanes & ~PlaneSet{1 << kPlaneK | 1 << kPlaneKScales} : kHeadPlanes;
  for (int64_t t = range.begin, end = 0; layer.rope != nullptr && t < range.end; t = end) {
    end = std::min(t - t % kDevicePageLen + kDevicePageLen, range.end);
    TANDEM_TRY(copy_rotated(chunk, of, {t, end}));
  }
  chunk.session.sums.filled_kv_bytes += (range.end - range.begin) * layer.n_kv_heads * planes.row_bytes.total();
  CopyList copies;
  RowCursor rows(chunk.cache().view(*of.sequence), chunk.args.layer_idx, {0, layer.n_kv_heads}, range, unrotated,
                 RowOrder::kByHead);
  rows.stop_at_multiples(kDevicePageLen);
  int64_t before = 0;
  for (RowRun run; rows.next(&run);) {
    const int64_t page = of.window->page_of(run.token);
    if (run.token == range.begin || (page != before && page != before + page_bytes)) copies.cut();
    before = page;
    copies.add(planes.row(reinterpret_cast<std::byte*>(page), run.plane, run.head, run.token % kDevicePageLen), run);
  }
  for (const StridedCopy& copy : copies.copies())
    TANDEM_TRY(call_device(device.device(), &DeviceTable::copy_strided, &copy, chunk.args.stream));
  return {};
}

// MAW of all tokens that the window has before the chunk's own, where those there are out of date: queries of tokens that
// are there already may not see the newest.
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
  const int64_t in_ring = std::min(of.length, rows_end);  // what is written there meanwhile
  of.window->make_way(l, chunk.args.speculative ? end : in_ring);
  if (of.resident_begin < end) of.window->make_way_for_older(l, of.resident_begin);
  TokenRange valid = of.window->valid(l);
  if (valid.end <= of.resident_begin || valid.begin >= end) valid = {end, end};
  const TokenRange missing[] = {{of.resident_begin, std::min(valid.begin, end)}, {valid.end, end}};
  for (const TokenRange& range : missing) {
    if (range.begin >= range.end) continue;
    chunk.session.hand_over().drain();  // the store has the rows
    chunk.session.states->fetch_maw(*of.sequence);
    TANDEM_TRY(copy_to_window(chunk, of, range));
  }
  return chunk.facts.policy.keeps_maw && !chunk.args.speculative ? give_maw(chunk, of) : Status();
}

// Where enough queries follow nothing would be left of the older weights anyway.
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
