// SPDX-License-Identifier: MIT
// rebuild(): norm | K = x W_K and V = x W_V, in one call where they have one shape | both into pages. The work space:
//
//   cuBLAS's | x converted for the products, where x itself does not serve | sums, f32, of K | of V
//
// The event `read` is recorded once x has been normalised, or later where the store reads positions. `writable` is waited
// for once the sums are there, before the stores into pages.
#include <algorithm>
#include <functional>
#include <utility>

#include "cuda/kernels/rebuild.cuh"
#include "cuda/layer_check.h"
#include "cuda/rebuild.h"

namespace tandem::cuda {
namespace {

constexpr int64_t kAlign = 256, kMostBlocks = 4096, kMostRows = int64_t{1} << 24;
constexpr uint64_t kMostApart = uint64_t{1} << 36;  // bytes between the two matrices, for one call

int64_t aligned(int64_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }

bool is_converted(const Layer& layer) {
  return layer.projection->norm != TANDEM_NORM_NONE || layer.x_type != layer.projection->w_type;
}

int64_t converted_bytes(const Layer& layer, int64_t n_rows) {
  return is_converted(layer) ? aligned(2 * n_rows * layer.hidden_dim()) : 0;  // numbers have 16 bits
}

int64_t sums_bytes(const Layer& layer, int32_t dim, int64_t n_rows) { return aligned(n_rows * layer.n_kv_heads * dim * 4); }

int32_t check_layer_of(const Layer& layer, DeviceError* error) {
  if (const int32_t code = check_layer(layer, error); code != TANDEM_OK) return code;
  if (layer.projection == nullptr || layer.x_type == 0 || layer.rope != nullptr || layer.hidden_dim() % 8 != 0)
    return fail(error, TANDEM_ERROR_INTERNAL, 0, "", "a layer whose keys are not made of hidden states");
  return TANDEM_OK;
}

int32_t check_call(const DeviceRebuild& call, DeviceError* error) {
  if (const int32_t code = check_layer_of(*call.layer, error); code != TANDEM_OK) return code;
  const uint64_t weights =
      reinterpret_cast<uintptr_t>(call.projection.w_k) | reinterpret_cast<uintptr_t>(call.projection.w_v);
  const uint64_t unit = find_dtype(call.layer->x_type)->group > 0 ? 4 : 16;
  if (weights % 16 == 0 && reinterpret_cast<uintptr_t>(call.x) % unit == 0 && call.n_rows >= 0 && call.n_rows <= kMostRows &&
      call.pages.page_len > 0)
    return TANDEM_OK;
  return fail(error, TANDEM_ERROR_INTERNAL, 0, "",
              "%lld rows to rebuild, of weights at multiples of 16 bytes and hidden states at multiples of %d",
              static_cast<long long>(call.n_rows), static_cast<int>(unit));
}

int32_t launch_norm(const DeviceRebuild& call, void* to, const LaunchOn& on, DeviceError* error) {
  const Projection& projection = *call.layer->projection;
  const NormCall described = {call.x,
                              to,
                              call.projection.norm_weight,
                              call.projection.norm_bias,
                              projection.hidden_dim,
                              call.layer->x_type,
                              projection.w_type,
                              call.layer->x_bytes(),
                              call.layer->x_code_bytes(),
                              projection.norm,
                              projection.norm_eps};
  return launch_kernel(norm_kernel, dim3(static_cast<unsigned>(call.n_rows)), kNormWarps, described, on, error);
}

// Describes the store of a plane: kPlaneK or kPlaneV.
StoreCall describe_store(const DeviceRebuild& call, Plane plane, const float* y) {
  const Layer& layer = *call.layer;
  const PlaneBytes bytes = plane_bytes(layer);
  StoreCall described = {};
  described.y = y;
  described.bias = plane == kPlaneK ? call.projection.b_k : call.projection.b_v;
  described.n_rows = call.n_rows;
  described.n_heads = layer.n_kv_heads;
  described.dim = plane == kPlaneK ? layer.k_head_dim : layer.v_head_dim;
  described.type = plane == kPlaneK ? layer.k_type : layer.v_type;
  described.four_bytes = static_cast<int32_t>(row_bytes(described.type, kLaneNumbers));
  described.codes = call.pages.planes[plane];
  described.scales = call.pages.planes[plane + 1];
  for (int32_t i = 0; i < 2; ++i) {
    described.head_stride[i] = call.pages.head_stride[plane + i];
    described.row_bytes[i] = bytes.of[plane + i];
  }
  described.page_bytes = call.page_bytes;
  described.page_len = call.pages.page_len;
  if (plane == kPlaneK && layer.projection->rope != nullptr) {
    described.rotation = rotation_of(*layer.projection->rope, call.projection.rope);
    described.page_positions = call.page_positions;
  }
  return described;
}

// True if numbers have 16 bits and rows can be read and written eight numbers at once.
bool are_halves(const StoreCall& call) {
  const uint64_t sizes = reinterpret_cast<uintptr_t>(call.codes) | static_cast<uint64_t>(call.head_stride[0]) |
                         static_cast<uint64_t>(call.page_bytes) | static_cast<uint64_t>(call.row_bytes[0]);
  return (call.type == TANDEM_F16 || call.type == TANDEM_BF16) && call.rotation.n_pairs == 0 && call.dim % kEight == 0 &&
         call.page_len % kHalvesRows == 0 && sizes % 16 == 0;
}

int32_t launch_halves(const StoreCalls& calls, unsigned n_planes, const LaunchOn& on, DeviceError* error) {
  const StoreCall& call = calls.of[0];
  const int64_t n_eights = int64_t{call.n_heads} * call.dim / kEight, n_threads = 32 * kStoreWarps;
  const dim3 n_blocks(static_cast<unsigned>((call.n_rows + kHalvesRows - 1) / kHalvesRows),
                      static_cast<unsigned>((n_eights + n_threads - 1) / n_threads), n_planes);
  return launch_kernel(store_halves_kernel, n_blocks, kStoreWarps, calls, on, error);
}

int32_t launch_store(const StoreCall& call, const LaunchOn& on, DeviceError* error) {
  if (are_halves(call)) return launch_halves({{call, {}}}, 1, on, error);
  const int64_t n_blocks = std::min((call.n_rows * call.n_heads + kStoreWarps - 1) / kStoreWarps, kMostBlocks);
  return launch_kernel(store_kernel, dim3(static_cast<unsigned>(n_blocks)), kStoreWarps, call, on, error);
}

int32_t launch_stores(const StoreCall& k, const StoreCall& v, const LaunchOn& on, DeviceError* error) {
  if (are_halves(k) && are_halves(v) && k.dim == v.dim) return launch_halves({{k, v}}, 2, on, error);
  if (const int32_t code = launch_store(k, on, error); code != TANDEM_OK) return code;
  return launch_store(v, on, error);
}

bool are_one_call(const DeviceRebuild& call) {
  const auto k = reinterpret_cast<uintptr_t>(call.projection.w_k), v = reinterpret_cast<uintptr_t>(call.projection.w_v);
  return call.layer->k_head_dim == call.layer->v_head_dim && std::max(k, v) - std::min(k, v) < kMostApart;
}

int32_t record(void* event, cudaStream_t stream, DeviceError* error) {
  if (event != nullptr) TANDEM_CUDA_TRY(cudaEventRecord(static_cast<cudaEvent_t>(event), stream), error);
  return TANDEM_OK;
}

// These kernels take hardly any shared memory. With the same split of an SM's memory as the products, no memory is
// reconfigured between them.
int32_t prefer_shared(const void* kernel, DeviceError* error) {
  TANDEM_CUDA_TRY(
      cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared), error);
  return TANDEM_OK;
}

}  // namespace

int32_t Rebuilder::supports(const Layer& layer, DeviceError* error) {
  if (const int32_t code = check_layer_of(layer, error); code != TANDEM_OK) return code;
  for (const void* kernel : {reinterpret_cast<const void*>(norm_kernel), reinterpret_cast<const void*>(store_kernel),
                             reinterpret_cast<const void*>(store_halves_kernel)})
    // also loads the kernel onto the device
    if (const int32_t code = prefer_shared(kernel, error); code != TANDEM_OK) return code;
  const std::lock_guard lock(mutex_);
  return cublas_.open(error);
}

int64_t Rebuilder::workspace_bytes(const Layer& layer, int64_t n_rows) {
  return Cublas::kWorkspaceBytes + converted_bytes(layer, n_rows) + sums_bytes(layer, layer.k_head_dim, n_rows) +
         sums_bytes(layer, layer.v_head_dim, n_rows);
}

// One call of cuBLAS steps from the first matrix to the second by their distance. It builds tensor maps, whose steps are
// not negative and have a limit. So sums lie in the order of the matrices, and matrices that are far apart take two calls.
// In the ring of offloaded weights W_V may lie at the start when W_K was the last before the end.
int32_t Rebuilder::multiply(const DeviceRebuild& call, const void* x, const Sums& sums, const LaunchOn& on,
                            DeviceError* error) {
  const Layer& layer = *call.layer;
  Product product;
  product.x = x;
  product.is_out_by_in = layer.projection->is_out_by_in;
  product.dtype = layer.projection->w_type;
  product.n_rows = call.n_rows;
  product.n_in = layer.hidden_dim();
  product.w = call.projection.w_k;
  product.n_out = int64_t{layer.n_kv_heads} * layer.k_head_dim;
  product.y = sums.k;
  if (are_one_call(call)) {
    product.w = std::min(call.projection.w_k, call.projection.w_v, std::less<>());
    product.w_2 = std::max(call.projection.w_k, call.projection.w_v, std::less<>());
    product.y = std::min(sums.k, sums.v);
  }
  const std::lock_guard lock(mutex_);
  if (const int32_t code = cublas_.begin(on.stream, call.workspace, error); code != TANDEM_OK) return code;
  if (const int32_t code = cublas_.multiply(product, error); code != TANDEM_OK) return code;
  if (product.w_2 != nullptr) return TANDEM_OK;
  product.w = call.projection.w_v;
  product.n_out = int64_t{layer.n_kv_heads} * layer.v_head_dim;
  product.y = sums.v;
  return cublas_.multiply(product, error);
}

int32_t Rebuilder::launch(const DeviceRebuild& call, const LaunchOn& on, DeviceError* error) {
  if (const int32_t code = check_call(call, error); code != TANDEM_OK) return code;
  if (call.n_rows == 0) return record(call.read, on.stream, error);
  const Layer& layer = *call.layer;
  auto* const converted = static_cast<std::byte*>(call.workspace) + Cublas::kWorkspaceBytes;
  std::byte* const sums_at = converted + converted_bytes(layer, call.n_rows);
  Sums sums = {reinterpret_cast<float*>(sums_at),
               reinterpret_cast<float*>(sums_at + sums_bytes(layer, layer.k_head_dim, call.n_rows))};
  if (are_one_call(call)) {
    sums.v = sums.k + call.n_rows * layer.n_kv_heads * layer.k_head_dim;
    if (std::less<>()(call.projection.w_v, call.projection.w_k)) std::swap(sums.k, sums.v);
  }
  void* read[] = {nullptr, nullptr, nullptr};  // recorded after the norm, the products, the stores
  read[call.page_positions != nullptr ? 2 : is_converted(layer) ? 0 : 1] = call.read;
  if (is_converted(layer))
    if (const int32_t code = launch_norm(call, converted, on, error); code != TANDEM_OK) return code;
  if (const int32_t code = record(read[0], on.stream, error); code != TANDEM_OK) return code;
  const void* const x = is_converted(layer) ? converted : call.x;
  if (const int32_t code = multiply(call, x, sums, on, error); code != TANDEM_OK) return code;
  if (const int32_t code = record(read[1], on.stream, error); code != TANDEM_OK) return code;
  if (call.writable != nullptr)
    TANDEM_CUDA_TRY(cudaStreamWaitEvent(on.stream, static_cast<cudaEvent_t>(call.writable), 0), error);
  const StoreCall k = describe_store(call, kPlaneK, sums.k), v = describe_store(call, kPlaneV, sums.v);
  if (const int32_t code = launch_stores(k, v, on, error); code != TANDEM_OK) return code;
  return record(read[2], on.stream, error);
}

}  // namespace tandem::cuda
