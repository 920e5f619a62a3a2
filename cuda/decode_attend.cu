// SPDX-License-Identifier: MIT
#include <algorithm>

#include "cuda/decode_attend.h"
#include "cuda/exchange.h"
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

int64_t max_items(const DeviceAttend& call, const DecodeKernel& kernel) {
  return int64_t{call.sequences.n_sequences} * call.layer->n_kv_heads * max_tiles(call, kernel);
}

bool has_types(const DecodeKernel& kernel, const Layer& layer) {
  return kernel.k_type == layer.k_type && kernel.v_type == layer.v_type && kernel.k_dim == layer.k_head_dim &&
         kernel.v_dim == layer.v_head_dim;
}

bool takes_maps(const DecodeKernel& kernel) { return kernel.k_box.keys > 0; }

int32_t make_maps(const DecodeKernel& kernel, CUtensorMap (&maps)[4], DeviceError* error) {
  if (!takes_maps(kernel)) return TANDEM_OK;
  const BoxShape boxes[] = {kernel.k_box,
                            kernel.v_box,
                            {kernel.k_box.row_bytes, kernel.k_box.panel_bytes, kGranuleKeys},
                            {kernel.v_box.row_bytes, kernel.v_box.panel_bytes, kGranuleKeys}};
  for (int i = 0; i < (kernel.takes_lists ? 4 : 2); ++i)
    if (const int32_t code = make_map(boxes[i], &maps[i], error); code != TANDEM_OK) return code;
  return TANDEM_OK;
}

// True if a is better than b for n_rows. Prefers the kernel for this device, then the kernel with the fewest rows a tile
// that n_rows fit into, then the kernel with the most rows a tile.
bool is_better(const DecodeKernel& a, const DecodeKernel& b, int64_t n_rows) {
  if (takes_maps(a) != takes_maps(b)) return takes_maps(a);
  if (a.of_multiprocessor != b.of_multiprocessor) return a.of_multiprocessor > b.of_multiprocessor;
  if ((a.tile_rows >= n_rows) != (b.tile_rows >= n_rows)) return a.tile_rows >= n_rows;
  return a.tile_rows >= n_rows ? a.tile_rows < b.tile_rows : a.tile_rows > b.tile_rows;
}

}  // namespace

// Newer devices have the copy engine, but some have less shared memory than kernels with maps need. They run the kernels
// for older devices.
bool DecodeLauncher::serves_maps(const DecodeKernel& kernel) const {
  constexpr int32_t kStatic = 2048;  // shared memory that is not dynamic, at most
  return limits_.code >= 90 && kernel.shared_bytes + kStatic <= limits_.shared_of_block;
}

const DecodeKernel* DecodeLauncher::find(const Layer& layer, int32_t max_q_len, bool has_lists) const {
  const int64_t n_rows = int64_t{max_q_len} * layer.group_size;
  const DecodeKernel* found = nullptr;
  for (const DecodeKernel* kernel : kPairs)
    for (; kernel->function != nullptr; ++kernel) {
      if (!has_types(*kernel, layer)) continue;
      if (kernel->takes_lists != has_lists) continue;
      if (takes_maps(*kernel) && !serves_maps(*kernel)) continue;
      if (kernel->of_multiprocessor > limits_.most_size) continue;
      if (found == nullptr || is_better(*kernel, *found, n_rows)) found = kernel;
    }
  return found;
}

int32_t DecodeLauncher::choose(const Layer& layer, int32_t max_q_len, bool has_lists, const DecodeKernel** kernel,
                               int32_t* n_blocks, DeviceError* error) const {
  if (const int32_t code = check_layer(layer, error); code != TANDEM_OK) return code;
  *kernel = find(layer, max_q_len, has_lists);
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

bool DecodeLauncher::has_one_tile(const DeviceAttend& call) const {
  const DecodeKernel* kernel = find(*call.layer, call.sequences.max_q_len, call.lists.keys != nullptr);
  return kernel != nullptr && max_tiles(call, *kernel) == 1;
}

int64_t DecodeLauncher::states_bytes() const {
  int64_t bytes = 0;
  for (const DecodeKernel* kernel : kPairs)
    for (; kernel->function != nullptr; ++kernel)
      bytes = std::max(bytes, int64_t{limits_.most_blocks(kernel->shared_bytes)} * 2 * kernel->state_floats * 4);
  return bytes * limits_.n_multiprocessors;
}

// More queries need more tiles. Calls with more than kMostRows query rows go to the other launcher.
int64_t DecodeLauncher::counters_bytes(const DeviceAttend& of) const {
  DeviceAttend call = of;
  call.sequences.max_q_len =
      std::min(call.sequences.max_q_len, static_cast<int32_t>(kMostRows / std::max(call.layer->group_size, 1)));
  // A call of fewer queries may use another kernel, so all kernels of these types count.
  int64_t n_counts = 0;
  for (const DecodeKernel* kernel : kPairs)
    for (; kernel->function != nullptr; ++kernel)
      if (has_types(*kernel, *call.layer))
        n_counts = std::max(n_counts, max_items(call, *kernel) +
                                          int64_t{limits_.most_blocks(kernel->shared_bytes)} * limits_.n_multiprocessors);
  return n_counts * 4;
}

int32_t DecodeLauncher::launch(const DeviceAttend& call, int64_t states_bytes, cudaStream_t stream,
                               DeviceError* error) const {
  const DecodeKernel* kernel = nullptr;
  int32_t n_blocks = 0;
  const bool has_lists = call.lists.keys != nullptr;
  if (const int32_t code = choose(*call.layer, call.sequences.max_q_len, has_lists, &kernel, &n_blocks, error);
      code != TANDEM_OK)
    return code;
  if (takes_maps(*kernel)) n_blocks -= n_blocks / limits_.n_multiprocessors * left_to_append(call, limits_);
  DecodeCall described = describe_call(call, kernel->is_narrow, limits_);
  described.max_tiles = static_cast<int32_t>(max_tiles(call, *kernel));
  described.states = static_cast<float*>(call.workspace);
  // Counts of groups come first. A planned step may launch more sequences than the workspace is for. These have no keys and
  // so count nothing.
  described.group_counters = reinterpret_cast<int32_t*>(static_cast<std::byte*>(call.workspace) + states_bytes);
  described.counters = described.group_counters + n_blocks;
  CUtensorMap maps[4];  // of K and V; with lists also of their granules
  if (const int32_t code = make_maps(*kernel, maps, error); code != TANDEM_OK) return code;
  void* arguments[] = {&described, &maps[0], &maps[1], &maps[2], &maps[3]};  // a kernel takes as many as it has
  // Kernels that take maps may start before the kernel before them has ended. They wait for its end themselves.
  cudaLaunchAttribute starts_early = {};
  starts_early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  starts_early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(n_blocks));
  config.blockDim = dim3(static_cast<unsigned>(kernel->n_threads));
  config.dynamicSmemBytes = static_cast<size_t>(kernel->shared_bytes);
  config.stream = stream;
  config.attrs = &starts_early;
  config.numAttrs = takes_maps(*kernel) ? 1 : 0;
  TANDEM_CUDA_TRY(cudaLaunchKernelExC(&config, kernel->function, arguments), error);
  return TANDEM_OK;
}

}  // namespace tandem::cuda
