// SPDX-License-Identifier: MIT
// Windows of layers whose keys the library rotates: they hold K rotated, as f32 (lib/device.h). New rows are rotated by the
// device; what a window has to get back from the store, here.
#include "lib/attend_call.h"
#include "lib/convert.h"
#include "lib/device_status.h"

namespace tandem {
namespace {

constexpr int64_t kMostAngles = int64_t{2} * 128;  // cos and sin of a row of the most dims that windows have

struct RotateTask {
  const Cache* cache;
  const Sequence* sequence;
  int32_t layer_idx;
  TokenRange range;
  float* rows;  // [n_kv_heads][range][k_head_dim]
};

}  // namespace

// A token's rows.
void AttendCall::rotate_task(void* context, int64_t task_idx, int32_t) {
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
Status AttendCall::copy_rotated(const SequenceCall& call, TokenRange range) {
  const WindowGeometry::LayerPlanes& planes = session_.device_->geometry().layers[layer_idx_];
  const int64_t n = range.end - range.begin, row = layer_.k_head_dim;
  std::vector<float> rows(static_cast<size_t>(layer_.n_kv_heads * n * row));
  RotateTask task{&cache_, call.sequence, args_.layer_idx, range, rows.data()};
  cpu_.table->run(cpu_.self, n, rotate_task, &task);
  for (int32_t h = 0; h < layer_.n_kv_heads; ++h) {
    auto* const page = reinterpret_cast<std::byte*>(call.window->page_of(range.begin));
    std::byte* const to = planes.row(page, kPlaneK, h, range.begin % kDevicePageLen);
    TANDEM_TRY(call_device(session_.device_->device(), &DeviceTable::copy, to, rows.data() + h * n * row, n * row * 4,
                           args_.stream));
  }
  return {};
}

}  // namespace tandem
