// SPDX-License-Identifier: MIT
// What a binding asks about the library it has loaded: version, layout of the public structs, names of statuses.
//
// The fingerprint of a minor version is FNV-1a (64 bits) over a list of numbers, each as four bytes, lowest first: for
// every public struct in the order of the header, its size and then the offset of each member, as of that minor. A
// later minor that appends members adds a list of its own and leaves this one, whose sizes are then written as numbers.
#include <cstddef>
#include <cstdint>

#include "tandem/tandem.h"

namespace tandem {
namespace {

#define SIZE(type) static_cast<uint32_t>(sizeof(type))
#define AT(type, member) static_cast<uint32_t>(offsetof(type, member))

constexpr uint32_t kLayout2[] = {
    SIZE(tandem_tensor),
    AT(tandem_tensor, struct_size),
    AT(tandem_tensor, dtype),
    AT(tandem_tensor, device_type),
    AT(tandem_tensor, device_index),
    AT(tandem_tensor, data),
    AT(tandem_tensor, n_dims),
    AT(tandem_tensor, reserved),
    AT(tandem_tensor, shape),
    AT(tandem_tensor, stride),

    SIZE(tandem_engine_options),
    AT(tandem_engine_options, struct_size),
    AT(tandem_engine_options, n_threads),
    AT(tandem_engine_options, cpu_isa),
    AT(tandem_engine_options, backend),
    AT(tandem_engine_options, backend_path),
    AT(tandem_engine_options, alloc),
    AT(tandem_engine_options, free),
    AT(tandem_engine_options, alloc_user),
    AT(tandem_engine_options, log),
    AT(tandem_engine_options, log_user),
    AT(tandem_engine_options, spin_ns),
    AT(tandem_engine_options, pin_threads),
    AT(tandem_engine_options, matmul_rows),
    AT(tandem_engine_options, run),
    AT(tandem_engine_options, run_user),

    SIZE(tandem_layer_projection),
    AT(tandem_layer_projection, struct_size),
    AT(tandem_layer_projection, hidden_dim),
    AT(tandem_layer_projection, w_type),
    AT(tandem_layer_projection, w_order),
    AT(tandem_layer_projection, device_type),
    AT(tandem_layer_projection, norm),
    AT(tandem_layer_projection, norm_eps),
    AT(tandem_layer_projection, k_rope),
    AT(tandem_layer_projection, w_k),
    AT(tandem_layer_projection, w_v),
    AT(tandem_layer_projection, b_k),
    AT(tandem_layer_projection, b_v),
    AT(tandem_layer_projection, norm_weight),
    AT(tandem_layer_projection, norm_bias),

    SIZE(tandem_layer_options),
    AT(tandem_layer_options, struct_size),
    AT(tandem_layer_options, n_q_heads),
    AT(tandem_layer_options, n_kv_heads),
    AT(tandem_layer_options, k_head_dim),
    AT(tandem_layer_options, v_head_dim),
    AT(tandem_layer_options, v_aliases_k),
    AT(tandem_layer_options, sm_scale),
    AT(tandem_layer_options, soft_cap),
    AT(tandem_layer_options, sliding_window_tokens),
    AT(tandem_layer_options, sinks),
    AT(tandem_layer_options, rope),
    AT(tandem_layer_options, rope_dims),
    AT(tandem_layer_options, rope_theta),
    AT(tandem_layer_options, rope_position_scale),
    AT(tandem_layer_options, rope_inv_freq),
    AT(tandem_layer_options, rope_attn_factor),
    AT(tandem_layer_options, projection),

    SIZE(tandem_cache_options),
    AT(tandem_cache_options, struct_size),
    AT(tandem_cache_options, k_type),
    AT(tandem_cache_options, v_type),
    AT(tandem_cache_options, page_tokens),
    AT(tandem_cache_options, host_cap_bytes),
    AT(tandem_cache_options, device_cap_bytes),
    AT(tandem_cache_options, layer_k_types),
    AT(tandem_cache_options, layer_v_types),
    AT(tandem_cache_options, k_rotation),
    AT(tandem_cache_options, x_type),

    SIZE(tandem_session_options),
    AT(tandem_session_options, struct_size),
    AT(tandem_session_options, sleep_between_calls),
    AT(tandem_session_options, policy),
    AT(tandem_session_options, window_tokens),
    AT(tandem_session_options, sink_tokens),
    AT(tandem_session_options, alpha),
    AT(tandem_session_options, beta),
    AT(tandem_session_options, halo_tokens),
    AT(tandem_session_options, route),
    AT(tandem_session_options, stream_buffer_bytes),
    AT(tandem_session_options, stream_fraction),
    AT(tandem_session_options, append_tokens),
    AT(tandem_session_options, stream_heads),
    AT(tandem_session_options, recompute_share),
    AT(tandem_session_options, streaming_heads),
    AT(tandem_session_options, n_streaming_heads),

    SIZE(tandem_attend_args),
    AT(tandem_attend_args, struct_size),
    AT(tandem_attend_args, flags),
    AT(tandem_attend_args, layer_idx),
    AT(tandem_attend_args, n_sequences),
    AT(tandem_attend_args, sequences),
    AT(tandem_attend_args, q_lens),
    AT(tandem_attend_args, q),
    AT(tandem_attend_args, k),
    AT(tandem_attend_args, v),
    AT(tandem_attend_args, o),
    AT(tandem_attend_args, lse),
    AT(tandem_attend_args, parent_idx),
    AT(tandem_attend_args, stream),
    AT(tandem_attend_args, cancel),
    AT(tandem_attend_args, progress),
    AT(tandem_attend_args, progress_user),
    AT(tandem_attend_args, x),

    SIZE(tandem_attend_tensors_args),
    AT(tandem_attend_tensors_args, struct_size),
    AT(tandem_attend_tensors_args, flags),
    AT(tandem_attend_tensors_args, n_sequences),
    AT(tandem_attend_tensors_args, sm_scale),
    AT(tandem_attend_tensors_args, soft_cap),
    AT(tandem_attend_tensors_args, reserved),
    AT(tandem_attend_tensors_args, sliding_window_tokens),
    AT(tandem_attend_tensors_args, sinks),
    AT(tandem_attend_tensors_args, alibi_slopes),
    AT(tandem_attend_tensors_args, q_lens),
    AT(tandem_attend_tensors_args, kv_lens),
    AT(tandem_attend_tensors_args, q),
    AT(tandem_attend_tensors_args, k),
    AT(tandem_attend_tensors_args, v),
    AT(tandem_attend_tensors_args, mask),
    AT(tandem_attend_tensors_args, o),
    AT(tandem_attend_tensors_args, lse),
    AT(tandem_attend_tensors_args, stream),
    AT(tandem_attend_tensors_args, cancel),
    AT(tandem_attend_tensors_args, progress),
    AT(tandem_attend_tensors_args, progress_user),

    SIZE(tandem_memory_plan),
    AT(tandem_memory_plan, struct_size),
    AT(tandem_memory_plan, reserved),
    AT(tandem_memory_plan, host_kv_bytes),
    AT(tandem_memory_plan, host_session_bytes),
    AT(tandem_memory_plan, selection_max_bytes),
    AT(tandem_memory_plan, device_window_bytes),
    AT(tandem_memory_plan, device_work_bytes),
    AT(tandem_memory_plan, kv_token_bytes),
    AT(tandem_memory_plan, shared_bytes),
    AT(tandem_memory_plan, device_stream_bytes),
    AT(tandem_memory_plan, device_weights_bytes),
    AT(tandem_memory_plan, x_token_bytes),

    SIZE(tandem_route_plan),
    AT(tandem_route_plan, struct_size),
    AT(tandem_route_plan, reserved),
    AT(tandem_route_plan, resident_tokens),
    AT(tandem_route_plan, host_tokens),
    AT(tandem_route_plan, stream_tokens),
    AT(tandem_route_plan, host_bytes),
    AT(tandem_route_plan, stream_bytes),
    AT(tandem_route_plan, host_ns),
    AT(tandem_route_plan, bus_ns),
    AT(tandem_route_plan, device_ns),
    AT(tandem_route_plan, total_ns),
    AT(tandem_route_plan, host_alone_ns),
    AT(tandem_route_plan, stream_alone_ns),
    AT(tandem_route_plan, recompute_tokens),
    AT(tandem_route_plan, recompute_bytes),
    AT(tandem_route_plan, recompute_alone_ns),

    SIZE(tandem_cache_stats),
    AT(tandem_cache_stats, struct_size),
    AT(tandem_cache_stats, reserved),
    AT(tandem_cache_stats, n_sequences),
    AT(tandem_cache_stats, n_pages_used),
    AT(tandem_cache_stats, n_pages_shared),
    AT(tandem_cache_stats, host_kv_bytes),
    AT(tandem_cache_stats, host_session_bytes),
    AT(tandem_cache_stats, selection_bytes),
    AT(tandem_cache_stats, host_peak_bytes),
    AT(tandem_cache_stats, device_window_bytes),
    AT(tandem_cache_stats, device_work_bytes),
    AT(tandem_cache_stats, device_peak_bytes),
    AT(tandem_cache_stats, device_stream_bytes),
    AT(tandem_cache_stats, pinned_bytes),
    AT(tandem_cache_stats, device_weights_bytes),

    SIZE(tandem_session_stats),
    AT(tandem_session_stats, struct_size),
    AT(tandem_session_stats, reserved),
    AT(tandem_session_stats, n_attends),
    AT(tandem_session_stats, n_query_tokens),
    AT(tandem_session_stats, resident_kv_bytes_read),
    AT(tandem_session_stats, host_kv_bytes_read),
    AT(tandem_session_stats, dense_kv_bytes),
    AT(tandem_session_stats, evicted_tokens),
    AT(tandem_session_stats, n_refreshes),
    AT(tandem_session_stats, selected_keys),
    AT(tandem_session_stats, host_keys),
    AT(tandem_session_stats, attend_ns),
    AT(tandem_session_stats, refresh_ns),
    AT(tandem_session_stats, refresh_wait_ns),
    AT(tandem_session_stats, n_device_attends),
    AT(tandem_session_stats, n_host_parts),
    AT(tandem_session_stats, host_part_ns),
    AT(tandem_session_stats, staged_kv_bytes),
    AT(tandem_session_stats, filled_kv_bytes),
    AT(tandem_session_stats, n_stream_parts),
    AT(tandem_session_stats, stream_part_ns),
    AT(tandem_session_stats, streamed_kv_bytes),
    AT(tandem_session_stats, n_joint_parts),
    AT(tandem_session_stats, host_part_tokens),
    AT(tandem_session_stats, stream_part_tokens),
    AT(tandem_session_stats, n_planned_parts),
    AT(tandem_session_stats, predicted_part_ns),
    AT(tandem_session_stats, planned_part_ns),
    AT(tandem_session_stats, streamed_x_bytes),

    SIZE(tandem_weights_options),
    AT(tandem_weights_options, struct_size),
    AT(tandem_weights_options, reserved),
    AT(tandem_weights_options, resident_bytes),
    AT(tandem_weights_options, buffer_bytes),
    AT(tandem_weights_options, host_cap_bytes),
    AT(tandem_weights_options, device_cap_bytes),

    SIZE(tandem_weights_stats),
    AT(tandem_weights_stats, struct_size),
    AT(tandem_weights_stats, reserved),
    AT(tandem_weights_stats, n_blocks),
    AT(tandem_weights_stats, n_resident),
    AT(tandem_weights_stats, resident_bytes),
    AT(tandem_weights_stats, host_bytes),
    AT(tandem_weights_stats, pinned_bytes),
    AT(tandem_weights_stats, device_bytes),
    AT(tandem_weights_stats, buffer_bytes),
    AT(tandem_weights_stats, n_uses),
    AT(tandem_weights_stats, n_streamed_uses),
    AT(tandem_weights_stats, n_ahead),
    AT(tandem_weights_stats, streamed_bytes),
};

#undef SIZE
#undef AT

template <size_t n>
constexpr uint64_t fnv1a(const uint32_t (&numbers)[n]) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (const uint32_t number : numbers)
    for (int shift = 0; shift < 32; shift += 8) hash = (hash ^ ((number >> shift) & 0xff)) * 0x100000001b3u;
  return hash;
}

struct StatusName {
  int32_t status;
  const char* name;
};

constexpr StatusName kStatusNames[] = {
    {TANDEM_OK, "TANDEM_OK"},
    {TANDEM_ERROR_INVALID_ARGUMENT, "TANDEM_ERROR_INVALID_ARGUMENT"},
    {TANDEM_ERROR_INVALID_HANDLE, "TANDEM_ERROR_INVALID_HANDLE"},
    {TANDEM_ERROR_INVALID_STATE, "TANDEM_ERROR_INVALID_STATE"},
    {TANDEM_ERROR_UNSUPPORTED, "TANDEM_ERROR_UNSUPPORTED"},
    {TANDEM_ERROR_OUT_OF_MEMORY, "TANDEM_ERROR_OUT_OF_MEMORY"},
    {TANDEM_ERROR_CAPACITY, "TANDEM_ERROR_CAPACITY"},
    {TANDEM_ERROR_BUSY, "TANDEM_ERROR_BUSY"},
    {TANDEM_ERROR_NOT_FOUND, "TANDEM_ERROR_NOT_FOUND"},
    {TANDEM_ERROR_CANCELLED, "TANDEM_ERROR_CANCELLED"},
    {TANDEM_ERROR_TIMEOUT, "TANDEM_ERROR_TIMEOUT"},
    {TANDEM_ERROR_DEVICE_LOST, "TANDEM_ERROR_DEVICE_LOST"},
    {TANDEM_ERROR_BACKEND, "TANDEM_ERROR_BACKEND"},
    {TANDEM_ERROR_IO, "TANDEM_ERROR_IO"},
    {TANDEM_ERROR_CORRUPT, "TANDEM_ERROR_CORRUPT"},
    {TANDEM_ERROR_SYSTEM, "TANDEM_ERROR_SYSTEM"},
    {TANDEM_ERROR_INTERNAL, "TANDEM_ERROR_INTERNAL"},
};

}  // namespace
}  // namespace tandem

uint32_t tandem_version(void) { return TANDEM_VERSION_MAJOR << 16 | TANDEM_VERSION_MINOR << 8 | TANDEM_VERSION_PATCH; }

uint64_t tandem_abi_fingerprint(uint32_t minor) { return minor == 2 ? tandem::fnv1a(tandem::kLayout2) : 0; }

const char* tandem_status_name(int32_t status) {
  for (const tandem::StatusName& entry : tandem::kStatusNames)
    if (entry.status == status) return entry.name;
  return "unknown status";
}
