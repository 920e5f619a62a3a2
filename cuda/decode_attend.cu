// SPDX-License-Identifier: MIT
#include <algorithm>

#include "cuda/decode_attend.h"
#include "cuda/layer_check.h"

namespace tandem::cuda {

#define TANDEM_DECODE_PAIR(kernels) extern const DecodeKernel kernels[];
#include "decode_pairs.inc"
#undef TANDEM_DECODE_PAIR

namespace {

const DecodeKernel* const kPairs[] = {
#define TANDEM_DECODE_PAIR(kernels) kernels,
#include "decode_pairs.inc"
#undef TANDEM_DECODE_PAIR
};

int64_t max_tiles(const DeviceAttend& call, const DecodeKernel& kernel) {
  return (int64_t{call.sequences.max_q_len} * call.layer->group_size + kernel.tile_rows - 1) / kernel.tile_rows;
}

// The one with the fewest rows that n_rows fit into, else the one with most; null: there is none.
const DecodeKernel* find_decode_kernel(const Layer& layer, int64_t n_rows) {
  const DecodeKernel* found = nullptr;
  for (const DecodeKernel* kernel : kPairs)
    for (; kernel->function != nullptr; ++kernel) {
      if (kernel->k_type != layer.k_type || kernel->v_type != layer.v_type || kernel->k_dim != layer.k_head_dim ||
          kernel->v_dim != layer.v_head_dim)
        continue;
      found = kernel;
      if (kernel->tile_rows >= n_rows) return kernel;
    }
  return found;
}

}  // namespace

int32_t DecodeLauncher::choose(const Layer& layer, int32_t max_q_len, const DecodeKernel** kernel, int32_t* n_blocks,
                               DeviceError* error) const {
  if (const int32_t code = check_layer(layer, error); code != TANDEM_OK) return code;
  *kernel = find_decode_kernel(layer, int64_t{max_q_len} * layer.group_size);
  if (*kernel == nullptr) return refuse_types(layer, error);
  const DecodeKernel& found = **kernel;
  int32_t n_fit = 0;
  if (const int32_t code = set_up_kernel({found.function, found.n_threads, found.shared_bytes, found.k_dim, found.v_dim},
                                         limits_, &n_fit, error);
      code != TANDEM_OK)
    return code;
  *n_blocks = n_fit * limits_.n_multiprocessors;
  return TANDEM_OK;
}

int64_t DecodeLauncher::states_bytes() const {
  int64_t bytes = 0;
  for (const DecodeKernel* kernel : kPairs)
    for (; kernel->function != nullptr; ++kernel)
      bytes = std::max(bytes, int64_t{limits_.most_blocks(kernel->shared_bytes)} * 2 * kernel->state_floats * 4);
  return bytes * limits_.n_multiprocessors;
}

int64_t DecodeLauncher::counters_bytes(const DeviceAttend& call) const {
  const DecodeKernel* kernel = find_decode_kernel(*call.layer, int64_t{call.sequences.max_q_len} * call.layer->group_size);
  if (kernel == nullptr) return 0;
  return int64_t{call.sequences.n_sequences} * call.layer->n_kv_heads * max_tiles(call, *kernel) * 4;
}

int32_t DecodeLauncher::launch(const DeviceAttend& call, int64_t states_bytes, cudaStream_t stream,
                               DeviceError* error) const {
  const DecodeKernel* kernel = nullptr;
  int32_t n_blocks = 0;
  if (const int32_t code = choose(*call.layer, call.sequences.max_q_len, &kernel, &n_blocks, error); code != TANDEM_OK)
    return code;
  DecodeCall described = describe_call(call, kernel->is_narrow);
  described.max_tiles = static_cast<int32_t>(max_tiles(call, *kernel));
  described.states = static_cast<float*>(call.workspace);
  described.counters = reinterpret_cast<int32_t*>(static_cast<std::byte*>(call.workspace) + states_bytes);
  void* arguments[] = {&described};
  TANDEM_CUDA_TRY(cudaLaunchKernel(kernel->function, dim3(static_cast<unsigned>(n_blocks)),
                                   dim3(static_cast<unsigned>(kernel->n_threads)), arguments,
                                   static_cast<size_t>(kernel->shared_bytes), stream),
                  error);
  return TANDEM_OK;
}

}  // namespace tandem::cuda
