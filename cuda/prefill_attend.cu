// SPDX-License-Identifier: MIT
#include <algorithm>
#include <limits>

#include "cuda/layer_check.h"
#include "cuda/prefill_attend.h"

namespace tandem::cuda {

#define TANDEM_PREFILL_PAIR(kernels) extern const PrefillKernel kernels[];
#include "prefill_pairs.inc"
#undef TANDEM_PREFILL_PAIR

namespace {

const PrefillKernel* const kPairs[] = {
#define TANDEM_PREFILL_PAIR(kernels) kernels,
#include "prefill_pairs.inc"
#undef TANDEM_PREFILL_PAIR
};

constexpr int64_t kLeastTiles = 4;  // of keys, of a block, as a split costs a merge

int64_t max_tiles(const DeviceAttend& call, const PrefillKernel& kernel) {
  return (int64_t{call.sequences.max_q_len} * call.layer->group_size + kernel.tile_rows - 1) / kernel.tile_rows;
}

int64_t max_items(const DeviceAttend& call, const PrefillKernel& kernel) {
  return int64_t{call.sequences.n_sequences} * call.layer->n_kv_heads * max_tiles(call, kernel);
}

bool is_of_pieces(const DeviceRows& q) {
  return reinterpret_cast<uintptr_t>(q.data) % 16 == 0 && q.token_stride % 8 == 0 && q.head_stride % 8 == 0;
}

bool serves(const PrefillKernel& kernel, const Layer& layer) {
  return kernel.k_type == layer.k_type && kernel.v_type == layer.v_type && kernel.k_dim == layer.k_head_dim &&
         kernel.v_dim == layer.v_head_dim;
}

// Is a better than b for queries that both serve? The one for this device, then the one with less to multiply.
bool is_better(const PrefillKernel& a, const PrefillKernel& b) {
  return a.is_sm90 != b.is_sm90 ? a.is_sm90 : a.most_q_parts < b.most_q_parts;
}

}  // namespace

const PrefillKernel* PrefillLauncher::find(const Layer& layer, const DeviceRows& q, bool has_tiles) const {
  const PrefillKernel* found = nullptr;
  for (const PrefillKernel* kernel : kPairs)
    for (; kernel->function != nullptr; ++kernel) {
      if (!serves(*kernel, layer)) continue;
      if (has_tiles ? !kernel->takes_tiles : !kernel->takes_dense) continue;
      if (kernel->is_sm90 && limits_.capability != 90) continue;
      if (!kernel->takes_caps && layer.soft_cap > 0.0f) continue;
      if (kernel->copies_q && (q.dtype != layer.k_type || !is_of_pieces(q))) continue;
      if (count_q_parts(q.dtype, kernel->is_narrow) > kernel->most_q_parts) continue;
      if (found == nullptr || is_better(*kernel, *found)) found = kernel;
    }
  return found;
}

int32_t PrefillLauncher::choose(const Layer& layer, const DeviceRows& q, bool has_tiles, const PrefillKernel** kernel,
                                int32_t* n_blocks, DeviceError* error) const {
  if (const int32_t code = check_layer(layer, error); code != TANDEM_OK) return code;
  *kernel = find(layer, q, has_tiles);
  if (*kernel == nullptr) return refuse_types(layer, error);
  const PrefillKernel& found = **kernel;
  int32_t n_fit = 0;
  if (const int32_t code = set_up_kernel({found.function, found.n_threads, found.shared_bytes, found.k_dim, found.v_dim},
                                         limits_, &n_fit, error);
      code != TANDEM_OK)
    return code;
  *n_blocks = std::min(n_fit, found.n_blocks) * limits_.n_multiprocessors;
  return TANDEM_OK;
}

int64_t PrefillLauncher::states_bytes() const {
  int64_t bytes = 0;
  for (const PrefillKernel* kernel : kPairs)
    for (; kernel->function != nullptr; ++kernel)
      bytes = std::max(
          bytes, int64_t{std::min(limits_.most_blocks(kernel->shared_bytes), kernel->n_blocks)} * kernel->state_floats * 4);
  return bytes * limits_.n_multiprocessors;
}

int64_t PrefillLauncher::counters_bytes(const DeviceAttend& call) const {
  int64_t n_items = 0;
  for (const PrefillKernel* kernel : kPairs)
    for (; kernel->function != nullptr; ++kernel)
      if (serves(*kernel, *call.layer)) n_items = std::max(n_items, max_items(call, *kernel));
  return n_items * 4;
}

int32_t PrefillLauncher::launch(const DeviceAttend& call, int64_t states_bytes, cudaStream_t stream,
                                DeviceError* error) const {
  const bool has_tiles = call.tiles.lists != nullptr;
  const PrefillKernel* kernel = nullptr;
  int32_t n_at_once = 0;
  if (const int32_t code = choose(*call.layer, call.q, has_tiles, &kernel, &n_at_once, error); code != TANDEM_OK)
    return code;
  const int64_t n_items = max_items(call, *kernel);
  if (n_items > std::numeric_limits<int32_t>::max())
    return fail(error, TANDEM_ERROR_UNSUPPORTED, 0, "q_lens", "%d sequences of up to %d queries are more than a grid has",
                call.sequences.n_sequences, call.sequences.max_q_len);
  if (n_items == 0) return TANDEM_OK;
  PrefillCall described = {describe_call(call, kernel->is_narrow),
                           1,
                           call.before_o,
                           call.before_lse,
                           call.tiles,
                           tile_words(call.layer->group_size, call.tiles.classes_by)};
  described.max_tiles = static_cast<int32_t>(max_tiles(call, *kernel));
  described.states = static_cast<float*>(call.workspace);
  described.counters = reinterpret_cast<int32_t*>(static_cast<std::byte*>(call.workspace) + states_bytes);
  const int64_t most_keys = has_tiles ? int64_t{call.tiles.most_tiles} * kTileTokens : call.sequences.max_keys;
  const int64_t most_splits = most_keys / (kLeastTiles * kernel->tile_keys);
  described.n_splits = static_cast<int32_t>(std::max<int64_t>(std::min(n_at_once / n_items, most_splits), 1));
  void* arguments[] = {&described};
  TANDEM_CUDA_TRY(cudaLaunchKernel(kernel->function, dim3(static_cast<unsigned>(n_items * described.n_splits)),
                                   dim3(static_cast<unsigned>(kernel->n_threads)), arguments,
                                   static_cast<size_t>(kernel->shared_bytes), stream),
                  error);
  return TANDEM_OK;
}

}  // namespace tandem::cuda
