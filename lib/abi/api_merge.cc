// SPDX-License-Identifier: MIT
// Entry point: merge of states.
//
// The backend merges contiguous f32 rows. If all of the caller's tensors are such rows, they are merged directly. Otherwise
// rows go through work space in blocks: converted, merged, converted back. Blocks bound the memory. Each block is read
// before it is written, so outputs may replace the first state.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <vector>

#include "lib/abi/api.h"
#include "lib/machine/engine.h"
#include "lib/model/dtype.h"
#include "lib/tensors/convert.h"
#include "lib/tensors/tensor.h"

namespace tandem {
namespace {

constexpr int64_t kBlockBytes = int64_t{4} << 20;  // work space
constexpr int64_t kRowsPerTask = 64;
constexpr int32_t kMostStates = 65536;  // more than any number of machines; n_states comes unchecked from the caller

struct MergeCall {
  CheckedTensor o_out, lse_out;
  std::vector<CheckedTensor> o, lse;  // [n_states]
  int64_t n_tokens = 0, n_heads = 0, head_dim = 0;

  int64_t n_rows() const { return n_tokens * n_heads; }
};

// Returns row `row` of o [n_tokens, n_heads, head_dim] or of lse [n_tokens, n_heads], counted over tokens and heads.
std::byte* row_of(const CheckedTensor& t, int64_t row) {
  const int64_t heads = t.tensor.shape[1], size = row_bytes(t.tensor.dtype, 1);
  return static_cast<std::byte*>(t.tensor.data) +
         (row / heads * t.tensor.stride[0] + row % heads * t.tensor.stride[1]) * size;
}

bool is_dense_f32(const CheckedTensor& t) {
  int64_t needed = 1;
  for (int32_t d = t.tensor.n_dims - 1; d >= 0; needed *= t.tensor.shape[d--])
    if (t.tensor.stride[d] != needed && t.tensor.shape[d] > 1) return false;
  return t.tensor.dtype == TANDEM_F32;
}

Status check_states(const tandem_tensor* const* o, const tandem_tensor* const* lse, int32_t n_states, MergeCall* call) {
  // Grows one by one, so an error in the first states is reported before all of them need memory.
  for (int32_t i = 0; i < n_states; ++i) {
    char name[24];
    std::snprintf(name, sizeof name, "o[%d]", i);
    TANDEM_TRY(check_tensor(
        o[i], {name, 3, {{"n_tokens", call->n_tokens}, {"n_heads", call->n_heads}, {"head_dim", call->head_dim}}},
        &call->o.emplace_back()));
    std::snprintf(name, sizeof name, "lse[%d]", i);
    TANDEM_TRY(check_tensor(lse[i], {name, 2, {{"n_tokens", call->n_tokens}, {"n_heads", call->n_heads}}, TensorTypes::kF32},
                            &call->lse.emplace_back()));
  }
  return {};
}

// Checks that outputs overlap neither each other nor any state. Each output may be its counterpart of state 0.
Status check_outputs(const MergeCall& call) {
  TANDEM_TRY(check_disjoint(call.o_out, call.lse_out));
  for (size_t i = 0; i < call.o.size(); ++i) {
    if (i > 0 || !same_tensor(call.o_out, call.o[0])) TANDEM_TRY(check_disjoint(call.o_out, call.o[i]));
    if (i > 0 || !same_tensor(call.lse_out, call.lse[0])) TANDEM_TRY(check_disjoint(call.lse_out, call.lse[i]));
    TANDEM_TRY(check_disjoint(call.o_out, call.lse[i]));
    TANDEM_TRY(check_disjoint(call.lse_out, call.o[i]));
  }
  return {};
}

// Work space of one block: rows of every state. The result replaces state 0.
struct Block {
  const MergeCall* call;
  const Backend* cpu;
  int64_t first = 0, n_rows = 0, capacity = 0;
  std::vector<float> o{}, lse{};  // [n_states][capacity, head_dim], [n_states][capacity]

  float* o_of(size_t state) { return o.data() + static_cast<int64_t>(state) * capacity * call->head_dim; }
  float* lse_of(size_t state) { return lse.data() + static_cast<int64_t>(state) * capacity; }
  int64_t tasks_per_state() const { return (n_rows + kRowsPerTask - 1) / kRowsPerTask; }
};

void gather_task(void* context, int64_t task_idx, int32_t) {
  Block& block = *static_cast<Block*>(context);
  const auto state = static_cast<size_t>(task_idx / block.tasks_per_state());
  const int64_t begin = task_idx % block.tasks_per_state() * kRowsPerTask,
                end = std::min(begin + kRowsPerTask, block.n_rows);
  const CheckedTensor& o = block.call->o[state];
  const int64_t head_dim = block.call->head_dim;
  for (int64_t r = begin; r < end; ++r) {
    convert_row(*block.cpu, o.tensor.dtype, row_of(o, block.first + r), TANDEM_F32, block.o_of(state) + r * head_dim,
                head_dim);
    std::memcpy(block.lse_of(state) + r, row_of(block.call->lse[state], block.first + r), sizeof(float));
  }
}

// The result is in the place of state 0.
void scatter_task(void* context, int64_t task_idx, int32_t) {
  Block& block = *static_cast<Block*>(context);
  const int64_t begin = task_idx * kRowsPerTask, end = std::min(begin + kRowsPerTask, block.n_rows);
  const CheckedTensor& o = block.call->o_out;
  const int64_t head_dim = block.call->head_dim;
  for (int64_t r = begin; r < end; ++r) {
    convert_row(*block.cpu, TANDEM_F32, block.o_of(0) + r * head_dim, o.tensor.dtype, row_of(o, block.first + r), head_dim);
    std::memcpy(row_of(block.call->lse_out, block.first + r), block.lse_of(0) + r, sizeof(float));
  }
}

Status merge_in_blocks(const MergeCall& call, const Backend& cpu) {
  const size_t n_states = call.o.size();
  const int64_t bytes_per_row = static_cast<int64_t>(n_states) * (call.head_dim + 1) * static_cast<int64_t>(sizeof(float));
  Block block{&call, &cpu};
  block.capacity = std::clamp<int64_t>(kBlockBytes / bytes_per_row, 1, call.n_rows());
  block.o.resize(n_states * static_cast<size_t>(block.capacity * call.head_dim));
  block.lse.resize(n_states * static_cast<size_t>(block.capacity));
  std::vector<const float*> o, lse;
  for (size_t i = 0; i < n_states; ++i) {
    o.push_back(block.o_of(i));
    lse.push_back(block.lse_of(i));
  }
  for (block.first = 0; block.first < call.n_rows(); block.first += block.n_rows) {
    block.n_rows = std::min(block.capacity, call.n_rows() - block.first);
    cpu.table->run(cpu.self, static_cast<int64_t>(n_states) * block.tasks_per_state(), gather_task, &block);
    MergeJob job{block.n_rows, static_cast<int32_t>(call.head_dim), static_cast<int32_t>(n_states), o.data(), lse.data()};
    job.o_out = block.o_of(0);
    job.lse_out = block.lse_of(0);
    TANDEM_TRY(cpu.table->merge(cpu.self, &job, 1));
    cpu.table->run(cpu.self, block.tasks_per_state(), scatter_task, &block);
  }
  return {};
}

Status merge_dense(const MergeCall& call, const Backend& cpu) {
  std::vector<const float*> o, lse;
  for (size_t i = 0; i < call.o.size(); ++i) {
    o.push_back(static_cast<const float*>(call.o[i].tensor.data));
    lse.push_back(static_cast<const float*>(call.lse[i].tensor.data));
  }
  MergeJob job{call.n_rows(), static_cast<int32_t>(call.head_dim), static_cast<int32_t>(o.size()), o.data(), lse.data()};
  job.o_out = static_cast<float*>(call.o_out.tensor.data);
  job.lse_out = static_cast<float*>(call.lse_out.tensor.data);
  return cpu.table->merge(cpu.self, &job, 1);
}

Status merge(const MergeCall& call, const Backend& cpu) {
  if (call.n_rows() == 0) return {};
  const bool dense = is_dense_f32(call.o_out) && is_dense_f32(call.lse_out) &&
                     std::all_of(call.o.begin(), call.o.end(), is_dense_f32) &&
                     std::all_of(call.lse.begin(), call.lse.end(), is_dense_f32);
  return dense ? merge_dense(call, cpu) : merge_in_blocks(call, cpu);
}

}  // namespace
}  // namespace tandem

using namespace tandem;

int32_t tandem_merge(const tandem_tensor* o_out, const tandem_tensor* lse_out, const tandem_tensor* const* o,
                     const tandem_tensor* const* lse, int32_t n_states, tandem_engine* engine, void* stream,
                     tandem_error** error) {
  return guarded(__func__, error, [&]() -> Status {
    std::shared_ptr<Engine> object;
    TANDEM_TRY(resolve(engine, "engine", &object));
    TANDEM_TRY(require_range("n_states", n_states, 1, kMostStates));
    TANDEM_TRY(require(o, "o"));
    TANDEM_TRY(require(lse, "lse"));
    TANDEM_TRY(require_host_stream(stream));
    MergeCall call;
    TANDEM_TRY(check_tensor(
        o_out, {"o_out", 3, {{"n_tokens", kAnyLength}, {"n_heads", kAnyLength}, {"head_dim", kAnyLength}}}, &call.o_out));
    call.n_tokens = call.o_out.length(0);
    call.n_heads = call.o_out.length(1);
    call.head_dim = call.o_out.length(2);
    if (call.head_dim > INT32_MAX / 2) return require_range("o_out.shape[2]", call.head_dim, 0, INT32_MAX / 2);
    TANDEM_TRY(check_tensor(lse_out,
                            {"lse_out", 2, {{"n_tokens", call.n_tokens}, {"n_heads", call.n_heads}}, TensorTypes::kF32},
                            &call.lse_out));
    TANDEM_TRY(check_states(o, lse, n_states, &call));
    TANDEM_TRY(check_outputs(call));
    return merge(call, object->cpu());
  });
}
