// SPDX-License-Identifier: MIT
#include <algorithm>

#include "cuda/decode_attend.h"
#include "cuda/layer_check.h"

namespace tandem::cuda {

#define TANDEM_DECODE_PAIR(kernels) extern const DecodeKernel kernels[];
#include "decode_pairs.inc"
#undef TANDEM_DECODE_PAIR

namespace {

constexpr int64_t kAlign = 256;
constexpr int32_t kLeastPage = 64;
constexpr int64_t kMostRows = 64;  // beyond, K and V would be read too often: a matter for prefill kernels

const DecodeKernel* const kPairs[] = {
#define TANDEM_DECODE_PAIR(kernels) kernels,
#include "decode_pairs.inc"
#undef TANDEM_DECODE_PAIR
};

int64_t max_tiles(const DeviceAttend& call, const DecodeKernel& kernel) {
  return (int64_t{call.sequences.max_q_len} * call.layer->group_size + kernel.tile_rows - 1) / kernel.tile_rows;
}

// Blocks of a kernel on a multiprocessor, as far as shared memory goes; the system keeps 1 KiB of each.
int32_t most_blocks(const DecodeKernel& kernel, int32_t shared_bytes) {
  return std::max(1, shared_bytes / (kernel.shared_bytes + 1024));
}

// A workspace is states and, behind them, counters, which are 0 between calls. States have the room that any kernel needs on
// this device: calls of different shapes may share a workspace, and none may leave a state where another counts.
int64_t bytes_of_states(int32_t n_multiprocessors, int32_t shared_bytes) {
  int64_t bytes = 0;
  for (const DecodeKernel* kernel : kPairs)
    for (; kernel->function != nullptr; ++kernel)
      bytes = std::max(bytes, int64_t{most_blocks(*kernel, shared_bytes)} * 2 * kernel->state_floats * 4);
  return (bytes * n_multiprocessors + kAlign - 1) / kAlign * kAlign;
}

DecodeCall describe(const DeviceAttend& call, const DecodeKernel& kernel, int64_t state_bytes) {
  const Layer& layer = *call.layer;
  DecodeCall to = {};
  std::copy(std::begin(call.pages.planes), std::end(call.pages.planes), to.planes);
  std::copy(std::begin(call.pages.head_stride), std::end(call.pages.head_stride), to.head_stride);
  to.page_len = call.pages.page_len;
  to.n_sequences = call.sequences.n_sequences;
  to.sequences = call.sequences.sequences;
  to.page_tables = call.sequences.page_tables;
  to.q = call.q;
  to.o = call.o;
  to.lse = call.lse;
  to.lse_token_stride = call.lse_token_stride;
  to.lse_head_stride = call.lse_head_stride;
  to.sinks = call.sinks;
  to.sliding_window = layer.sliding_window;
  to.sm_scale = layer.sm_scale;
  to.soft_cap = layer.soft_cap;
  to.n_kv_heads = layer.n_kv_heads;
  to.group_size = layer.group_size;
  // bf16 and f16 numbers are f16 once a row is moved into its range; a bf16 number is one bf16, an f16 two, an f32 three.
  if (kernel.is_narrow)
    to.n_q_parts = call.q.dtype == TANDEM_F32 ? 2 : 1;
  else
    to.n_q_parts = call.q.dtype == TANDEM_BF16 ? 1 : call.q.dtype == TANDEM_F16 ? 2 : 3;
  to.max_tiles = static_cast<int32_t>(max_tiles(call, kernel));
  to.states = static_cast<float*>(call.workspace);
  to.counters = reinterpret_cast<int32_t*>(static_cast<std::byte*>(call.workspace) + state_bytes);
  return to;
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

// UNSUPPORTED and the reason where there is none.
int32_t choose_decode_kernel(const Layer& layer, int32_t max_q_len, const DecodeKernel** kernel, DeviceError* error) {
  const int64_t n_rows = int64_t{max_q_len} * layer.group_size;
  if (const int32_t code = check_layer(layer, error); code != TANDEM_OK) return code;
  if (n_rows > kMostRows)
    return fail(error, TANDEM_ERROR_UNSUPPORTED, 0, "q_lens", "%d queries of %d heads a KV head are %lld rows: at most %lld",
                max_q_len, layer.group_size, static_cast<long long>(n_rows), static_cast<long long>(kMostRows));
  *kernel = find_decode_kernel(layer, n_rows);
  if (*kernel != nullptr) return TANDEM_OK;
  return fail(error, TANDEM_ERROR_UNSUPPORTED, 0, "k_type",
              "this module has no kernel for K in %s of %d dims and V in %s of %d", find_dtype(layer.k_type)->name,
              layer.k_head_dim, find_dtype(layer.v_type)->name, layer.v_head_dim);
}

}  // namespace

DecodeLauncher::DecodeLauncher(int32_t n_multiprocessors, int32_t shared_of_block, int32_t shared_of_multiprocessor)
    : n_multiprocessors_(n_multiprocessors),
      shared_of_block_(shared_of_block),
      shared_of_multiprocessor_(shared_of_multiprocessor),
      state_bytes_(bytes_of_states(n_multiprocessors, shared_of_multiprocessor)) {}

int32_t DecodeLauncher::prepare(const DecodeKernel& kernel, int32_t* n_blocks, DeviceError* error) const {
  cudaFuncAttributes attributes;
  TANDEM_CUDA_TRY(cudaFuncGetAttributes(&attributes, kernel.function), error);
  const int64_t shared_bytes = kernel.shared_bytes + static_cast<int64_t>(attributes.sharedSizeBytes);
  if (shared_bytes > shared_of_block_)
    return fail(error, TANDEM_ERROR_UNSUPPORTED, 0, "k_head_dim",
                "K of %d dims and V of %d need %lld bytes of shared memory a block, the device has %d", kernel.k_dim,
                kernel.v_dim, static_cast<long long>(shared_bytes), shared_of_block_);
  int n_fit = 0;
  if (attributes.maxDynamicSharedSizeBytes < kernel.shared_bytes)
    TANDEM_CUDA_TRY(cudaFuncSetAttribute(kernel.function, cudaFuncAttributeMaxDynamicSharedMemorySize, kernel.shared_bytes),
                    error);
  TANDEM_CUDA_TRY(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&n_fit, kernel.function, kernel.n_threads,
                                                                static_cast<size_t>(kernel.shared_bytes)),
                  error);
  *n_blocks = std::clamp(n_fit, 1, most_blocks(kernel, shared_of_multiprocessor_)) * n_multiprocessors_;
  return TANDEM_OK;
}

int32_t DecodeLauncher::choose(const Layer& layer, int32_t max_q_len, const DecodeKernel** kernel, int32_t* n_blocks,
                               DeviceError* error) const {
  if (const int32_t code = choose_decode_kernel(layer, max_q_len, kernel, error); code != TANDEM_OK) return code;
  return prepare(**kernel, n_blocks, error);
}

int64_t DecodeLauncher::workspace_bytes(const DeviceAttend& call) const {
  const DecodeKernel* kernel = find_decode_kernel(*call.layer, int64_t{call.sequences.max_q_len} * call.layer->group_size);
  if (kernel == nullptr) return 0;
  return state_bytes_ + int64_t{call.sequences.n_sequences} * call.layer->n_kv_heads * max_tiles(call, *kernel) * 4;
}

int32_t DecodeLauncher::launch(const DeviceAttend& call, cudaStream_t stream, DeviceError* error) const {
  const DecodeKernel* kernel = nullptr;
  int32_t n_blocks = 0;
  if (call.pages.page_len < kLeastPage || call.pages.page_len % kLeastPage != 0)
    return fail(error, TANDEM_ERROR_INVALID_ARGUMENT, 0, "page_len", "page_len = %d is not a multiple of %d",
                call.pages.page_len, kLeastPage);
  if (const int32_t code = choose(*call.layer, call.sequences.max_q_len, &kernel, &n_blocks, error); code != TANDEM_OK)
    return code;
  DecodeCall described = describe(call, *kernel, state_bytes_);
  void* arguments[] = {&described};
  TANDEM_CUDA_TRY(cudaLaunchKernel(kernel->function, dim3(static_cast<unsigned>(n_blocks)),
                                   dim3(static_cast<unsigned>(kernel->n_threads)), arguments,
                                   static_cast<size_t>(kernel->shared_bytes), stream),
                  error);
  return TANDEM_OK;
}

}  // namespace tandem::cuda
