// SPDX-License-Identifier: MIT
#include <algorithm>

#include "cuda/decode_attend.h"

namespace tandem::cuda {

#define TANDEM_DECODE_PAIR(kernels) extern const DecodeKernel kernels[];
#include "decode_pairs.inc"
#undef TANDEM_DECODE_PAIR

namespace {

constexpr int64_t kAlign = 256;
constexpr int64_t kMostRows = 64;  // beyond, K and V would be read too often: a matter for prefill kernels

const DecodeKernel* const kPairs[] = {
#define TANDEM_DECODE_PAIR(kernels) kernels,
#include "decode_pairs.inc"
#undef TANDEM_DECODE_PAIR
};

struct Workspace {
  int32_t n_blocks;
  int32_t max_tiles;
  int64_t counter_bytes;
  int64_t bytes;
};

Workspace plan_workspace(const DeviceAttend& call, const DecodeKernel& kernel, int32_t n_blocks) {
  Workspace plan;
  plan.n_blocks = n_blocks;
  plan.max_tiles = (call.max_q_len * call.layer->group_size + kernel.tile_rows - 1) / kernel.tile_rows;
  const int64_t n_counters = int64_t{call.n_sequences} * call.layer->n_kv_heads * plan.max_tiles;
  plan.counter_bytes = (n_counters * 4 + kAlign - 1) / kAlign * kAlign;
  plan.bytes = plan.counter_bytes + int64_t{plan.n_blocks} * 2 * kernel.state_floats * 4;
  return plan;
}

DecodeCall describe(const DeviceAttend& call, const DecodeKernel& kernel, const Workspace& plan) {
  const Layer& layer = *call.layer;
  DecodeCall to = {};
  std::copy(std::begin(call.pages.planes), std::end(call.pages.planes), to.planes);
  std::copy(std::begin(call.pages.head_stride), std::end(call.pages.head_stride), to.head_stride);
  to.page_stride = call.pages.page_stride;
  to.page_len = call.pages.page_len;
  to.n_sequences = call.n_sequences;
  to.sequences = call.sequences;
  to.page_tables = call.page_tables;
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
  to.max_tiles = plan.max_tiles;
  to.counters = static_cast<int32_t*>(call.workspace);
  to.states = reinterpret_cast<float*>(static_cast<std::byte*>(call.workspace) + plan.counter_bytes);
  return to;
}

}  // namespace

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

namespace {

// UNSUPPORTED and the reason where there is none.
int32_t choose_decode_kernel(const Layer& layer, int32_t max_q_len, const DecodeKernel** kernel, DeviceError* error) {
  const int64_t n_rows = int64_t{max_q_len} * layer.group_size;
  if (layer.v_aliases_k)
    return fail(error, TANDEM_ERROR_UNSUPPORTED, 0, "v_aliases_k", "v_aliases_k = 1: this module has no kernel for MLA");
  if (layer.rope != nullptr)
    return fail(error, TANDEM_ERROR_UNSUPPORTED, 0, "rope",
                "this module does not rotate keys: rope must be TANDEM_ROPE_CALLER");
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

int32_t DecodeLauncher::prepare(const DecodeKernel& kernel, int32_t* n_blocks, DeviceError* error) {
  const std::lock_guard lock(mutex_);
  if (const auto found = n_blocks_.find(kernel.function); found != n_blocks_.end()) {
    *n_blocks = found->second;
    return TANDEM_OK;
  }
  if (kernel.shared_bytes > shared_bytes_)
    return fail(error, TANDEM_ERROR_UNSUPPORTED, 0, "k_head_dim",
                "K of %d dims and V of %d need %d bytes of shared memory a block, the device has %d", kernel.k_dim,
                kernel.v_dim, kernel.shared_bytes, shared_bytes_);
  int n_fit = 0;
  TANDEM_CUDA_TRY(cudaFuncSetAttribute(kernel.function, cudaFuncAttributeMaxDynamicSharedMemorySize, kernel.shared_bytes),
                  error);
  TANDEM_CUDA_TRY(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&n_fit, kernel.function, kernel.n_threads,
                                                                static_cast<size_t>(kernel.shared_bytes)),
                  error);
  *n_blocks = n_blocks_[kernel.function] = std::max(n_fit, 1) * n_multiprocessors_;
  return TANDEM_OK;
}

int32_t DecodeLauncher::choose(const Layer& layer, int32_t max_q_len, const DecodeKernel** kernel, int32_t* n_blocks,
                               DeviceError* error) {
  if (const int32_t code = choose_decode_kernel(layer, max_q_len, kernel, error); code != TANDEM_OK) return code;
  return prepare(**kernel, n_blocks, error);
}

int64_t DecodeLauncher::workspace_bytes(const DeviceAttend& call) {
  const DecodeKernel* kernel = nullptr;
  int32_t n_blocks = 0;
  DeviceError error;
  if (choose(*call.layer, call.max_q_len, &kernel, &n_blocks, &error) != TANDEM_OK) return 0;
  return plan_workspace(call, *kernel, n_blocks).bytes;
}

int32_t DecodeLauncher::launch(const DeviceAttend& call, cudaStream_t stream, DeviceError* error) {
  const DecodeKernel* kernel = nullptr;
  int32_t n_blocks = 0;
  if (const int32_t code = choose(*call.layer, call.max_q_len, &kernel, &n_blocks, error); code != TANDEM_OK) return code;
  const Workspace plan = plan_workspace(call, *kernel, n_blocks);
  DecodeCall described = describe(call, *kernel, plan);
  void* arguments[] = {&described};
  TANDEM_CUDA_TRY(cudaLaunchKernel(kernel->function, dim3(static_cast<unsigned>(plan.n_blocks)),
                                   dim3(static_cast<unsigned>(kernel->n_threads)), arguments,
                                   static_cast<size_t>(kernel->shared_bytes), stream),
                  error);
  return TANDEM_OK;
}

}  // namespace tandem::cuda
