// SPDX-License-Identifier: MIT
#include "lib/store/cache_rows.h"

#include <algorithm>

namespace tandem {

TokenRun key_tokens(const StoreView& view, const Layer& layer, TokenRange tokens) {
  TokenRun run = view.run_at(tokens.begin, tokens.end);
  if (layer.rope != nullptr) run.n = consecutive(view.positions, run.token, run.n);
  return run;
}

KvRun keys_of(const StoreView& view, const Layer& layer, int32_t layer_idx, const TokenRun& at, int32_t kv_head) {
  KvRun run;
  point_run(view.layers[layer_idx].rows(at, kv_head), layer, &run);
  run.n_tokens = at.n;
  run.token_idx = at.token;
  run.first_position = position_of(view.positions, at.token);
  return run;
}

namespace {

constexpr int64_t kRowsPerTask = 32;

struct WriteTask {
  const SequenceTable* cache;
  const Sequence* sequence;
  int32_t layer_idx;
  int64_t first;
  AppendedRows rows;
};

void write_task(void* context, int64_t task_idx, int32_t) {
  const auto& task = *static_cast<const WriteTask*>(context);
  const AppendedRows& rows = task.rows;
  if (rows.watch.is_cancelled()) return;
  const SequenceTable& cache = *task.cache;
  const Layer& layer = cache.layers()[static_cast<size_t>(task.layer_idx)];
  const LayerPlanes& planes = cache.store().planes(task.layer_idx);
  const Backend& cpu = cache.engine().cpu();
  const int64_t end = std::min(rows.n_rows, (task_idx + 1) * kRowsPerTask);
  for (int64_t i = task_idx * kRowsPerTask; i < end; ++i) {
    const TokenRun at = cache.view(*task.sequence).run_at(task.first + i, task.first + i + 1);
    if (rows.x != nullptr)
      store_hidden(cpu, rows.x->dtype, rows.x->row(rows.first_row + i, 0), layer.x_type,
                   planes.planes[kPlaneHidden].row(at, 0), layer.hidden_dim());
    for (int32_t h = 0; h < layer.n_kv_heads; ++h) {
      const Rows to = planes.rows(at, h);
      store_row(cpu, rows.k->dtype, rows.k->row(rows.first_row + i, h), stored_k(layer, to), layer.k_head_dim);
      if (!layer.v_aliases_k)
        store_row(cpu, rows.v->dtype, rows.v->row(rows.first_row + i, h), stored_v(layer, to), layer.v_head_dim);
    }
  }
}

}  // namespace

void write_rows(const SequenceTable& cache, const Sequence& sequence, int32_t layer_idx, int64_t first,
                const AppendedRows& rows) {
  WriteTask task{&cache, &sequence, layer_idx, first, rows};
  const int64_t n_tasks = (rows.n_rows + kRowsPerTask - 1) / kRowsPerTask;
  if (n_tasks <= 1) {
    if (rows.n_rows > 0) write_task(&task, 0, 0);
    return;
  }
  const Backend& cpu = cache.engine().cpu();
  cpu.table->run(cpu.self, n_tasks, write_task, &task);
}

}  // namespace tandem
