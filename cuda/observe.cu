// SPDX-License-Identifier: MIT
#include <algorithm>

#include "cuda/exchange.h"
#include "cuda/kernel_setup.h"
#include "cuda/kernels/observe.cuh"
#include "cuda/layer_check.h"

namespace tandem::cuda {
namespace {

using ObserveKernel = void (*)(ObserveCall);

// Runs of a sequence and KV head where not all blocks run at once: small parts end at about the same time.
constexpr int64_t kLeastRuns = 8;
constexpr int64_t kMostBlocks = int64_t{1} << 30;
constexpr int32_t kLeastRun = 64;  // tokens, for any kernel

constexpr struct {
  int32_t k_type;
  ObserveKernel of_chunks[3][2];  // chunks 2, 4 and 8: dims up to 64, 128 and 256; whether q is plain
} kKernels[] = {
#define TANDEM_OBSERVE_CHUNKS(type, n) \
  { observe_kernel<type, n, false>, observe_kernel<type, n, true> }
#define TANDEM_OBSERVE(type)                                                                                 \
  {                                                                                                          \
    type, { TANDEM_OBSERVE_CHUNKS(type, 2), TANDEM_OBSERVE_CHUNKS(type, 4), TANDEM_OBSERVE_CHUNKS(type, 8) } \
  }
    TANDEM_OBSERVE(TANDEM_F32),  TANDEM_OBSERVE(TANDEM_F16),  TANDEM_OBSERVE(TANDEM_BF16),
    TANDEM_OBSERVE(TANDEM_E4M3), TANDEM_OBSERVE(TANDEM_Q8_0), TANDEM_OBSERVE(TANDEM_Q4_0),
#undef TANDEM_OBSERVE
#undef TANDEM_OBSERVE_CHUNKS
};

// Finds the kernel. layer is as windows have it.
ObserveKernel find_kernel(const Layer& layer, const DeviceRows& q) {
  for (const auto& of_type : kKernels)
    if (of_type.k_type == layer.k_type)
      return of_type.of_chunks[layer.k_head_dim <= 64 ? 0 : layer.k_head_dim <= 128 ? 1 : 2][is_plain(q, layer.k_head_dim)];
  return nullptr;  // check_layer() refuses all other types
}

int32_t check_observe(const DeviceObserve& call, DeviceError* error) {
  if (const int32_t code = check_layer(*call.layer, error); code != TANDEM_OK) return code;
  if (call.layer->sliding_window != 0)
    return fail(error, TANDEM_ERROR_UNSUPPORTED, 0, "sliding_window",
                "sliding_window = %lld: moving averages are kept of layers without one",
                static_cast<long long>(call.layer->sliding_window));
  if (const int32_t code = check_rows(call.q, "q", error); code != TANDEM_OK) return code;
  if (const int32_t code = check_exchange(call.exchange, error); code != TANDEM_OK) return code;
  if (const int32_t code = refuse_page_len(call.pages.page_len, error); code != TANDEM_OK) return code;
  if (call.pages.maw == nullptr) return fail(error, TANDEM_ERROR_INTERNAL, 0, "", "pages without moving averages");
  if (!(call.alpha > 0.0f && call.alpha <= 1.0f))
    return fail(error, TANDEM_ERROR_INVALID_ARGUMENT, 0, "alpha", "alpha = %g is not above 0 and up to 1",
                static_cast<double>(call.alpha));
  if (call.n_counted > 0) return TANDEM_OK;
  return fail(error, TANDEM_ERROR_INTERNAL, 0, "", "n_counted = %d: no query is counted", call.n_counted);
}

}  // namespace

int32_t load_observe_kernels(DeviceError* error) {
  cudaFuncAttributes attributes;
  for (const auto& of_type : kKernels)
    for (const auto& of_dims : of_type.of_chunks)
      for (const ObserveKernel kernel : of_dims)
        TANDEM_CUDA_TRY(cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel)), error);
  return TANDEM_OK;
}

// Launches as many blocks as run at once, or a few for each sequence and KV head, but no more than the keys need. Replays
// may have any lengths up to max_keys, and blocks read them.
int32_t launch_observe(const DeviceObserve& call, const LaunchOn& on, DeviceError* error) {
  if (const int32_t code = check_observe(call, error); code != TANDEM_OK) return code;
  const Layer layer = window_layer(*call.layer);
  const int64_t n_pairs = std::max<int64_t>(1, int64_t{call.sequences.n_sequences} * layer.n_kv_heads);
  const int64_t n_at_once = int64_t{on.n_multiprocessors} * kObserveBlocks;
  const int64_t n_for_keys = std::max<int64_t>(1, call.sequences.max_keys / kLeastRun + 1);
  const int64_t n_runs = std::min(std::max(kLeastRuns, n_at_once / n_pairs), n_for_keys);
  if (n_pairs * n_runs > kMostBlocks)
    return fail(error, TANDEM_ERROR_UNSUPPORTED, 0, "n_sequences", "%d sequences of %d KV heads are too many",
                call.sequences.n_sequences, layer.n_kv_heads);
  ObserveCall described = {};
  described.observe = call;
  described.n_q_heads = layer.n_q_heads;
  described.n_kv_heads = layer.n_kv_heads;
  described.group_size = layer.group_size;
  described.dim = layer.k_head_dim;
  described.n_runs = static_cast<int32_t>(n_runs);
  described.sm_scale = layer.sm_scale;
  described.soft_cap = layer.soft_cap;
  const PlaneBytes bytes = plane_bytes(layer);
  described.row_bytes = bytes.of[kPlaneK];
  described.scale_bytes = bytes.of[kPlaneKScales];
  return launch_kernel(find_kernel(layer, call.q), dim3(static_cast<unsigned>(n_pairs * n_runs)), kObserveWarps, described,
                       on, error);
}

}  // namespace tandem::cuda
