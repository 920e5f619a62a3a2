// SPDX-License-Identifier: MIT
#include <algorithm>
#include <map>
#include <mutex>
#include <tuple>

#include "cuda/exchange.h"
#include "cuda/kernel_setup.h"
#include "lib/model/dtype.h"

namespace tandem::cuda {
namespace {

constexpr int32_t kLeastPage = 64;

}  // namespace

int32_t DeviceLimits::most_blocks(int32_t shared_bytes) const {
  return std::max(1, shared_of_multiprocessor / (shared_bytes + 1024));
}

int32_t refuse_types(const Layer& layer, DeviceError* error) {
  if (layer.k_head_dim != layer.v_head_dim)
    return fail(error, TANDEM_ERROR_UNSUPPORTED, 0, "v_head_dim",
                "k_head_dim = %d with v_head_dim = %d: this module has kernels for K and V of the same dims alone",
                layer.k_head_dim, layer.v_head_dim);
  if (layer.rope != nullptr)
    return fail(
        error, TANDEM_ERROR_UNSUPPORTED, 0, "rope",
        "rope = %d with K of %d dims and V in %s of %d: this module has no kernel for it; for some it has, with V in "
        "f32, f16, bf16 or q8_0, any K",
        layer.rope->interleaved ? TANDEM_ROPE_INTERLEAVED : TANDEM_ROPE_HALVES, layer.k_head_dim,
        find_dtype(layer.v_type)->name, layer.v_head_dim);
  return fail(error, TANDEM_ERROR_UNSUPPORTED, 0, "k_type",
              "this module has no kernel for K in %s of %d dims and V in %s of %d", find_dtype(layer.k_type)->name,
              layer.k_head_dim, find_dtype(layer.v_type)->name, layer.v_head_dim);
}

int32_t refuse_page_len(int32_t page_len, DeviceError* error) {
  if (page_len >= kLeastPage && page_len % kLeastPage == 0) return TANDEM_OK;
  return fail(error, TANDEM_ERROR_INVALID_ARGUMENT, 0, "page_len", "page_len = %d is not a multiple of %d", page_len,
              kLeastPage);
}

int32_t count_q_parts(int32_t q_type, bool is_narrow) {
  if (is_narrow) return q_type == TANDEM_F32 ? 2 : 1;
  return q_type == TANDEM_BF16 ? 1 : q_type == TANDEM_F16 ? 2 : 3;
}

DecodeCall describe_call(const DeviceAttend& call, bool is_narrow, const DeviceLimits& limits) {
  const Layer& layer = *call.layer;
  DecodeCall to = {};
  std::copy(std::begin(call.pages.planes), std::end(call.pages.planes), to.planes);
  std::copy(std::begin(call.pages.head_stride), std::end(call.pages.head_stride), to.head_stride);
  to.page_len = call.pages.page_len;
  to.n_sequences = call.sequences.n_sequences;
  to.sequences = call.sequences.sequences;
  to.page_tables = call.sequences.page_tables;
  to.q = call.q;
  to.out = {call.o, call.lse, call.lse_token_stride, call.lse_head_stride, call.sinks};
  to.finished = call.finished;
  to.sliding_window = layer.sliding_window;
  to.sm_scale = layer.sm_scale;
  to.soft_cap = layer.soft_cap;
  to.n_kv_heads = layer.n_kv_heads;
  to.group_size = layer.group_size;
  to.n_q_parts = count_q_parts(call.q.dtype, is_narrow);
  to.lists = call.lists;
  if (call.append != nullptr && runs_beside(*call.append, limits.code)) {
    to.rows_written = rows_written(call.append->exchange);
    to.epoch = call.append->epoch;
  }
  return to;
}

int32_t left_to_append(const DeviceAttend& call, const DeviceLimits& limits) {
  return call.append != nullptr && runs_beside(*call.append, limits.code) ? append_blocks(*call.append) : 0;
}

int32_t set_up_kernel(const KernelNeeds& needs, const DeviceLimits& limits, int32_t* n_fit, DeviceError* error) {
  cudaFuncAttributes attributes;
  TANDEM_CUDA_TRY(cudaFuncGetAttributes(&attributes, needs.function), error);
  const int64_t shared_bytes = needs.shared_bytes + static_cast<int64_t>(attributes.sharedSizeBytes);
  if (shared_bytes > limits.shared_of_block)
    return fail(error, TANDEM_ERROR_UNSUPPORTED, 0, "k_head_dim",
                "K of %d dims and V of %d need %lld bytes of shared memory a block, the device has %d", needs.k_dim,
                needs.v_dim, static_cast<long long>(shared_bytes), limits.shared_of_block);
  if (attributes.maxDynamicSharedSizeBytes < needs.shared_bytes)
    TANDEM_CUDA_TRY(cudaFuncSetAttribute(needs.function, cudaFuncAttributeMaxDynamicSharedMemorySize, needs.shared_bytes),
                    error);
  int n = 0;
  TANDEM_CUDA_TRY(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&n, needs.function, needs.n_threads,
                                                                static_cast<size_t>(needs.shared_bytes)),
                  error);
  *n_fit = std::clamp(n, 1, limits.most_blocks(needs.shared_bytes));
  return TANDEM_OK;
}

int32_t count_clusters(const void* function, int32_t n_threads, int32_t shared_bytes, int32_t n_blocks) {
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return 0;
  static std::mutex mutex;
  static std::map<std::tuple<int, const void*, int32_t>, int32_t> counts;  // a query takes as long as a launch
  std::lock_guard lock(mutex);
  if (const auto found = counts.find({device, function, n_blocks}); found != counts.end()) return found->second;
  cudaLaunchAttribute cluster = {};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {static_cast<unsigned>(n_blocks), 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(n_blocks));
  config.blockDim = dim3(static_cast<unsigned>(n_threads));
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.attrs = &cluster;
  config.numAttrs = 1;
  int n = 0;
  if (cudaOccupancyMaxActiveClusters(&n, function, &config) != cudaSuccess) {
    cudaGetLastError();
    return 0;
  }
  return counts[{device, function, n_blocks}] = n;
}

int32_t make_map(const BoxShape& box, CUtensorMap* map, DeviceError* error) {
  static PFN_cuTensorMapEncodeTiled_v12000 encode = nullptr;
  static const cudaError_t found = look_up_driver("cuTensorMapEncodeTiled", 12000, reinterpret_cast<void**>(&encode));
  TANDEM_CUDA_TRY(found, error);
  constexpr cuuint64_t kApart = 16, kNextPart = 1 << 20, kParts = (1ull << 31) - 1;
  const cuuint64_t dims[4] = {static_cast<cuuint64_t>(box.row_bytes), 64, kNextPart / kApart, kParts};
  const cuuint64_t strides[3] = {static_cast<cuuint64_t>(box.row_bytes), kApart, kNextPart};
  const cuuint32_t sides[4] = {static_cast<cuuint32_t>(box.panel_bytes), static_cast<cuuint32_t>(box.keys), 1, 1};
  const cuuint32_t steps[4] = {1, 1, 1, 1};
  const CUtensorMapSwizzle swizzle = box.panel_bytes == 128  ? CU_TENSOR_MAP_SWIZZLE_128B
                                     : box.panel_bytes == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                                                             : CU_TENSOR_MAP_SWIZZLE_32B;
  // L2 promotion takes 128 bytes of a row. With 256 bytes a miss, reading takes a tenth longer.
  const CUresult result =
      encode(map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 4, reinterpret_cast<void*>(kMapBase), dims, strides, sides, steps,
             CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result == CUDA_SUCCESS) return TANDEM_OK;
  return fail(error, TANDEM_ERROR_BACKEND, result, "", "cuTensorMapEncodeTiled of rows of %d bytes failed", box.row_bytes);
}

}  // namespace tandem::cuda
