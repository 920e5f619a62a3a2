// SPDX-License-Identifier: MIT
#include <algorithm>
#include <cmath>

#include "cuda/exchange.h"
#include "cuda/kernel_setup.h"
#include "cuda/kernels/append_chunk.cuh"
#include "cuda/kernels/append_copy.cuh"
#include "cuda/kernels/merge.cuh"
#include "cuda/kernels/name_keys.cuh"
#include "cuda/kernels/upload.cuh"
#include "cuda/layer_check.h"

namespace tandem::cuda {
namespace {

// An append of at most this many rows runs in one block, two rows to a warp. Counting several blocks would take longer.
constexpr int64_t kAloneRows = 2 * kAppendAloneWarps;
constexpr int64_t kMostBlocks = 1024;  // of an append; with more rows, a warp takes several
// Blocks of appends that leave room for other kernels. Each block takes a multiprocessor. kSomeBlocks send a ticket's rows
// as fast as the host takes them. kFewBlocks multiprocessors are free beside a prefill of 128 blocks, and one block more
// would begin another wave. These appends do not start before the kernel before has ended, or their waiting blocks would
// take the whole device.
constexpr int64_t kSomeBlocks = 16, kFewBlocks = 4;
// An append beside attention has one block, or two in a cluster, so that they lie side by side. The limits: bytes of K and
// V that one block copies, bytes that two blocks copy, and rows of q, K and V that one block rounds. Larger appends are
// faster on all multiprocessors, with attention waiting for the whole append.
constexpr int64_t kAloneCopied = int64_t{32} << 10, kMostCopied = int64_t{128} << 10;
constexpr int64_t kMostRoundedBeside = 64;
constexpr int64_t kMostRows = int64_t{1} << 30;

}  // namespace

int32_t check_rows(const DeviceRows& rows, const char* field, DeviceError* error) {
  if (rows.data == nullptr || is_tensor_float(rows.dtype)) return TANDEM_OK;
  return fail(error, TANDEM_ERROR_UNSUPPORTED, 0, field, "%s is neither f32 nor f16 nor bf16 (dtype %d)", field, rows.dtype);
}

// Places that kernels write 16 bytes at a time begin at multiples of 16. An exchange of a single slot would never have a
// free slot.
int32_t check_exchange(const DeviceExchange& exchange, DeviceError* error) {
  int64_t offsets = exchange.slot_bytes | exchange.q_at | exchange.o_at | exchange.x_at;
  for (const int64_t at : exchange.rows_at) offsets |= at;
  if (exchange.n_slots > 1 && offsets % 16 == 0 && exchange.maw_at % 4 == 0 && exchange.idx_at % 4 == 0) return TANDEM_OK;
  return fail(error, TANDEM_ERROR_INTERNAL, 0, "",
              "an exchange of %d slots of %lld bytes: they are two at least, and multiples of 16 as are places in them",
              exchange.n_slots, static_cast<long long>(exchange.slot_bytes));
}

namespace {

int32_t check_append(const DeviceAppend& call, DeviceError* error) {
  if (const int32_t code = check_layer(*call.layer, error); code != TANDEM_OK) return code;
  if (const int32_t code = check_rows(call.q, "q", error); code != TANDEM_OK) return code;
  if (const int32_t code = check_rows(call.k, "k", error); code != TANDEM_OK) return code;
  if (const int32_t code = check_rows(call.v, "v", error); code != TANDEM_OK) return code;
  if (call.exchange.flags != nullptr)
    if (const int32_t code = check_exchange(call.exchange, error); code != TANDEM_OK) return code;
  if (call.n_tokens > call.exchange.n_rows)
    return fail(error, TANDEM_ERROR_INTERNAL, 0, "", "%d tokens, and slots of %d rows", call.n_tokens, call.exchange.n_rows);
  if (int64_t{call.n_tokens} * call.idx.n_heads * call.idx.n_idx > call.exchange.n_idx)
    return fail(error, TANDEM_ERROR_INTERNAL, 0, "", "%d tokens of %d x %d indices, and slots with room for %lld",
                call.n_tokens, call.idx.n_heads, call.idx.n_idx, static_cast<long long>(call.exchange.n_idx));
  if (const int32_t code = check_rows(call.x, "x", error); code != TANDEM_OK) return code;
  if ((call.x.data != nullptr) != (call.k.data != nullptr && call.layer->x_type != 0))
    return fail(error, TANDEM_ERROR_INTERNAL, 0, "x",
                "hidden states come with k where the layer keeps them, and only there");
  if ((call.k.data == nullptr) != (call.v.data == nullptr))
    return fail(error, TANDEM_ERROR_INVALID_ARGUMENT, 0, "v", "k and v come together: one of them is null");
  if (call.n_tokens > 0 && call.layer->rope != nullptr && call.rope == nullptr)
    return fail(error, TANDEM_ERROR_INTERNAL, 0, "", "rotated keys without their angles");
  if (call.n_tokens > 0 && rotates_queries(*call.layer) && (call.rotated_q == nullptr || call.q.data == nullptr))
    return fail(error, TANDEM_ERROR_INTERNAL, 0, "", "rotated keys without queries, or without room for these");
  return call.k.data == nullptr ? TANDEM_OK : refuse_page_len(call.pages.page_len, error);
}

AppendCall describe(const DeviceAppend& call) {
  const Layer& layer = *call.layer;
  AppendCall to = {};
  to.append = call;
  to.n_q_heads = layer.n_q_heads;
  to.n_kv_heads = layer.n_kv_heads;
  to.group_size = layer.group_size;
  to.k_dim = layer.k_head_dim;
  to.v_dim = layer.v_head_dim;
  to.k_type = layer.k_type;
  to.v_type = layer.v_type;
  to.k_four_bytes = static_cast<int32_t>(row_bytes(layer.k_type, kLaneNumbers));
  to.v_four_bytes = static_cast<int32_t>(row_bytes(layer.v_type, kLaneNumbers));
  to.token_rows = (call.q.data != nullptr ? layer.n_q_heads : 0) + (call.k.data != nullptr ? 2 * layer.n_kv_heads : 0);
  const PlaneBytes bytes = plane_bytes(layer);
  std::copy(std::begin(bytes.of), std::end(bytes.of), to.row_bytes);
  to.window_k_bytes = plane_bytes(window_layer(layer)).of[kPlaneK];
  if (call.x.data != nullptr) {
    to.x_dim = layer.hidden_dim();
    to.x_type = layer.x_type;
    const DtypeInfo& x = *find_dtype(layer.x_type);
    to.x_four_bytes = static_cast<int32_t>(row_bytes(layer.x_type, kLaneNumbers));
    to.x_scale_bytes = 2 * x.scales;
    to.x_group_fours = x.group / kLaneNumbers;
    to.x_bytes = layer.x_bytes();
    to.x_scales_at = layer.x_code_bytes();
    to.token_rows += (to.x_dim + kMostDims - 1) / kMostDims;
  }
  if (layer.rope != nullptr) to.rotation = rotation_of(*layer.rope, call.rope);
  to.hadamard_factor = 1.0f / std::sqrt(static_cast<float>(layer.k_head_dim));
  return to;
}

auto append_kernel_of(const DeviceAppend& call) {
  if (call.layer->rope != nullptr) return append_kernel<Rotates::kByPosition, false>;
  if (call.layer->k_rotation == TANDEM_ROTATION_HADAMARD) return append_kernel<Rotates::kHadamard, false>;
  return append_kernel<Rotates::kNothing, false>;
}

}  // namespace

Rotation rotation_of(const RopeTable& table, const float* cos_sin) {
  return {cos_sin, table.n_pairs, table.interleaved ? 1 : 0, table.attn_factor};
}

int32_t load_exchange_kernels(DeviceError* error) {
  cudaFuncAttributes attributes;
  for (const auto kernel : {append_kernel<Rotates::kNothing, false>, append_kernel<Rotates::kNothing, true>,
                            append_kernel<Rotates::kByPosition, false>, append_kernel<Rotates::kHadamard, false>})
    TANDEM_CUDA_TRY(cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel)), error);
  TANDEM_CUDA_TRY(cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(append_copy_kernel)), error);
  TANDEM_CUDA_TRY(cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(append_chunk_kernel)), error);
  TANDEM_CUDA_TRY(cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(upload_kernel)), error);
  TANDEM_CUDA_TRY(cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(merge_kernel)), error);
  TANDEM_CUDA_TRY(cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(accumulate_kernel)), error);
  TANDEM_CUDA_TRY(cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(name_keys_kernel)), error);
  return load_observe_kernels(error);
}

int32_t find_code_version(int32_t* version, DeviceError* error) {
  cudaFuncAttributes attributes;
  TANDEM_CUDA_TRY(cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(upload_kernel)), error);
  *version = attributes.ptxVersion;
  return TANDEM_OK;
}

bool may_upload(const void* to, const void* from, int64_t bytes) {
  constexpr int64_t kMostBytes = int64_t{256} << 10;
  if (bytes <= 0 || bytes > kMostBytes) return false;
  if ((reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from) | static_cast<uintptr_t>(bytes)) % kUploadUnit !=
      0)
    return false;
  cudaPointerAttributes of_from, of_to;
  if (cudaPointerGetAttributes(&of_from, from) != cudaSuccess || cudaPointerGetAttributes(&of_to, to) != cudaSuccess)
    return false;
  return of_from.type == cudaMemoryTypeHost && of_from.devicePointer == from && of_to.type == cudaMemoryTypeDevice;
}

int32_t launch_upload(void* to, const void* from, int64_t bytes, const LaunchOn& on, DeviceError* error) {
  const UploadCall call = {static_cast<uint2*>(to), static_cast<const uint2*>(from), bytes / kUploadUnit};
  const int64_t n_blocks = (call.n + 32 * kUploadWarps - 1) / (32 * kUploadWarps);
  return launch_kernel(upload_kernel, dim3(static_cast<unsigned>(n_blocks)), kUploadWarps, call, on, error);
}

// The grid has a page more than the tokens fill, as the chunk may begin within a page.
static int32_t launch_append_chunk(const AppendCall& call, const LaunchOn& on, DeviceError* error) {
  const int32_t page_len = call.append.pages.page_len, n_pages = (call.append.n_tokens + page_len - 1) / page_len + 1;
  return launch_kernel(append_chunk_kernel, dim3(static_cast<unsigned>(n_pages), static_cast<unsigned>(2 * call.n_kv_heads)),
                       kAppendWarps, call, on, error);
}

// True if the rows of K, or of V, are in the storage type, in units of 16 bytes.
static bool are_copied(const DeviceRows& rows, int32_t type, int64_t bytes) {
  const int64_t number = rows.dtype == TANDEM_F32 ? 4 : 2;
  return rows.dtype == type && bytes % 16 == 0 && reinterpret_cast<uintptr_t>(rows.data) % 16 == 0 &&
         rows.token_stride * number % 16 == 0 && rows.head_stride * number % 16 == 0;
}

static bool is_copy(const AppendCall& call) {
  return call.append.n_tokens <= kMostCopiedTokens && are_copied(call.append.k, call.k_type, call.row_bytes[kPlaneK]) &&
         are_copied(call.append.v, call.v_type, call.row_bytes[kPlaneV]);
}

static int64_t copied_bytes(const AppendCall& call) {
  return call.append.n_tokens * call.n_kv_heads * (call.row_bytes[kPlaneK] + call.row_bytes[kPlaneV]);
}

// Appends that rotate rows write all rows in one pass (kernels/append.cuh), so attention cannot run beside them.
bool runs_beside(const DeviceAppend& call, int32_t capability) {
  if (call.epoch == 0 || capability < 90 || rotates_queries(*call.layer) || call.x.data != nullptr) return false;
  if (call.k.data == nullptr || call.exchange.flags == nullptr || call.idx.n_heads > 0) return false;
  if (call.layer->k_type == TANDEM_F32) return false;
  const AppendCall described = describe(call);
  if (is_copy(described)) return copied_bytes(described) <= kMostCopied;
  return int64_t{call.n_tokens} * described.token_rows <= kMostRoundedBeside;
}

int32_t append_blocks(const DeviceAppend& call) {
  const AppendCall described = describe(call);
  return is_copy(described) && copied_bytes(described) > kAloneCopied ? 2 : 1;
}

const int64_t* rows_written(const DeviceExchange& exchange) { return exchange.state + kRowsWritten; }

int32_t launch_append(const DeviceAppend& call, const LaunchOn& on, DeviceError* error) {
  if (const int32_t code = check_append(call, error); code != TANDEM_OK) return code;
  const AppendCall described = describe(call);
  const int64_t n_rows = int64_t{call.n_tokens} * described.token_rows;
  if (n_rows >= kMostRows)
    return fail(error, TANDEM_ERROR_UNSUPPORTED, 0, "q_lens", "%d tokens of %d rows: at most %lld rows", call.n_tokens,
                described.token_rows, static_cast<long long>(kMostRows));
  if (call.exchange.flags == nullptr && !rotates_queries(*call.layer) && call.x.data == nullptr)
    return launch_append_chunk(described, on, error);
  if (runs_beside(call, on.capability)) {
    const int32_t n_blocks = append_blocks(call);
    return launch_kernel(is_copy(described) ? append_copy_kernel : append_kernel<Rotates::kNothing, true>,
                         dim3(static_cast<unsigned>(n_blocks)), kAppendBesideWarps, described,
                         {on.stream, on.capability, on.n_multiprocessors, n_blocks}, error);
  }
  const auto kernel = append_kernel_of(call);
  if (n_rows <= kAloneRows) return launch_kernel(kernel, dim3(1), kAppendAloneWarps, described, on, error);
  if (call.leaves_room != 0) {
    constexpr int32_t kStartsNoneEarly = 0;
    return launch_kernel(kernel, dim3(call.leaves_room == 2 ? kFewBlocks : kSomeBlocks), kAppendAloneWarps, described,
                         {on.stream, kStartsNoneEarly, on.n_multiprocessors}, error);
  }
  const int64_t n_blocks = std::min((n_rows + kAppendWarps - 1) / kAppendWarps, kMostBlocks);
  return launch_kernel(kernel, dim3(static_cast<unsigned>(n_blocks)), kAppendWarps, described, on, error);
}

int32_t launch_accumulate(const DeviceAccumulate& call, const LaunchOn& on, DeviceError* error) {
  if (const int32_t code = check_layer(*call.layer, error); code != TANDEM_OK) return code;
  const int64_t n_rows = int64_t{call.n_rows} * call.n_heads;
  if (n_rows == 0) return TANDEM_OK;
  const AccumulateCall described = {call, call.layer->n_q_heads, call.layer->v_head_dim};
  const int64_t n_blocks = std::min((n_rows + kMergeWarps - 1) / kMergeWarps, kMostBlocks);
  return launch_kernel(accumulate_kernel, dim3(static_cast<unsigned>(n_blocks)), kMergeWarps, described, on, error);
}

int32_t launch_name_keys(const DeviceNamedKeys& call, const LaunchOn& on, DeviceError* error) {
  if (const int32_t code = refuse_page_len(call.page_len, error); code != TANDEM_OK) return code;
  const int64_t n_lists = int64_t{call.sequences.n_sequences} * call.idx.n_heads;
  if (n_lists > call.n_lists || (int64_t{call.idx.n_idx} << call.idx.unit_shift) > INT32_MAX)
    return fail(error, TANDEM_ERROR_INTERNAL, 0, "", "%lld lists, and room for %d; %d units of %d tokens",
                static_cast<long long>(n_lists), call.n_lists, call.idx.n_idx, 1 << call.idx.unit_shift);
  if (call.sequences.n_sequences == 0) return TANDEM_OK;
  const dim3 n_blocks(static_cast<unsigned>(call.sequences.n_sequences), static_cast<unsigned>(call.idx.n_heads));
  return launch_kernel(name_keys_kernel, n_blocks, kNameWarps, call, on, error);
}

int32_t launch_merge(const DeviceMerge& call, const LaunchOn& on, DeviceError* error) {
  const Layer& layer = *call.layer;
  if (const int32_t code = check_layer(layer, error); code != TANDEM_OK) return code;
  if (const int32_t code = check_rows(call.o_out, "o", error); code != TANDEM_OK) return code;
  if (const int32_t code = check_exchange(call.exchange, error); code != TANDEM_OK) return code;
  if (call.n_tokens == 0) return TANDEM_OK;
  const bool waits = call.append != nullptr && runs_beside(*call.append, on.capability);
  const MergeCall described = {call, layer.n_q_heads, layer.group_size, layer.v_head_dim, waits ? call.append->epoch : 0};
  const int32_t n_heads_blocks = (layer.n_q_heads + kMergeWarps - 1) / kMergeWarps;
  return launch_kernel(merge_kernel, dim3(static_cast<unsigned>(call.n_tokens), static_cast<unsigned>(n_heads_blocks)),
                       kMergeWarps, described, on, error);
}

}  // namespace tandem::cuda
