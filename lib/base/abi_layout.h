/* SPDX-License-Identifier: MIT
 * Made by tools/abi/generate.py from include/tandem/; not to be edited.
 *
 * The public structs where pointers have 64 bits: STRUCT(type, bytes) and MEMBER(type, member, offset), in the order of
 * the header; DEFAULTS(type, macro of its defaults, bytes in the version that introduced it). */
#ifndef TANDEM_LIB_ABI_LAYOUT_H_
#define TANDEM_LIB_ABI_LAYOUT_H_

/* clang-format off */
#define TANDEM_ABI_FINGERPRINT UINT64_C(0x7eb4a54e88f462a9)

#define TANDEM_ABI_LAYOUT(STRUCT, MEMBER) \
  STRUCT(tandem_tensor, 96) \
  MEMBER(tandem_tensor, struct_size, 0) \
  MEMBER(tandem_tensor, dtype, 4) \
  MEMBER(tandem_tensor, device_type, 8) \
  MEMBER(tandem_tensor, device_index, 12) \
  MEMBER(tandem_tensor, data, 16) \
  MEMBER(tandem_tensor, n_dims, 24) \
  MEMBER(tandem_tensor, reserved, 28) \
  MEMBER(tandem_tensor, shape, 32) \
  MEMBER(tandem_tensor, stride, 64) \
  STRUCT(tandem_engine_options, 104) \
  MEMBER(tandem_engine_options, struct_size, 0) \
  MEMBER(tandem_engine_options, n_threads, 4) \
  MEMBER(tandem_engine_options, cpu_isa, 8) \
  MEMBER(tandem_engine_options, backend, 16) \
  MEMBER(tandem_engine_options, backend_path, 24) \
  MEMBER(tandem_engine_options, alloc, 32) \
  MEMBER(tandem_engine_options, free, 40) \
  MEMBER(tandem_engine_options, alloc_user, 48) \
  MEMBER(tandem_engine_options, log, 56) \
  MEMBER(tandem_engine_options, log_user, 64) \
  MEMBER(tandem_engine_options, spin_ns, 72) \
  MEMBER(tandem_engine_options, pin_threads, 80) \
  MEMBER(tandem_engine_options, matmul_rows, 84) \
  MEMBER(tandem_engine_options, run, 88) \
  MEMBER(tandem_engine_options, run_user, 96) \
  STRUCT(tandem_layer_options, 96) \
  MEMBER(tandem_layer_options, struct_size, 0) \
  MEMBER(tandem_layer_options, n_q_heads, 4) \
  MEMBER(tandem_layer_options, n_kv_heads, 8) \
  MEMBER(tandem_layer_options, k_head_dim, 12) \
  MEMBER(tandem_layer_options, v_head_dim, 16) \
  MEMBER(tandem_layer_options, v_aliases_k, 20) \
  MEMBER(tandem_layer_options, sm_scale, 24) \
  MEMBER(tandem_layer_options, soft_cap, 28) \
  MEMBER(tandem_layer_options, sliding_window_tokens, 32) \
  MEMBER(tandem_layer_options, sinks, 40) \
  MEMBER(tandem_layer_options, rope, 48) \
  MEMBER(tandem_layer_options, rope_dims, 52) \
  MEMBER(tandem_layer_options, rope_theta, 56) \
  MEMBER(tandem_layer_options, rope_position_scale, 64) \
  MEMBER(tandem_layer_options, rope_inv_freq, 72) \
  MEMBER(tandem_layer_options, rope_attn_factor, 80) \
  MEMBER(tandem_layer_options, projection, 88) \
  STRUCT(tandem_cache_options, 56) \
  MEMBER(tandem_cache_options, struct_size, 0) \
  MEMBER(tandem_cache_options, k_type, 4) \
  MEMBER(tandem_cache_options, v_type, 8) \
  MEMBER(tandem_cache_options, page_tokens, 12) \
  MEMBER(tandem_cache_options, host_cap_bytes, 16) \
  MEMBER(tandem_cache_options, device_cap_bytes, 24) \
  MEMBER(tandem_cache_options, layer_k_types, 32) \
  MEMBER(tandem_cache_options, layer_v_types, 40) \
  MEMBER(tandem_cache_options, k_rotation, 48) \
  MEMBER(tandem_cache_options, x_type, 52) \
  STRUCT(tandem_session_options, 152) \
  MEMBER(tandem_session_options, struct_size, 0) \
  MEMBER(tandem_session_options, sleep_between_calls, 4) \
  MEMBER(tandem_session_options, policy, 8) \
  MEMBER(tandem_session_options, window_tokens, 16) \
  MEMBER(tandem_session_options, sink_tokens, 24) \
  MEMBER(tandem_session_options, route, 32) \
  MEMBER(tandem_session_options, append_tokens, 40) \
  MEMBER(tandem_session_options, layer_policies, 48) \
  MEMBER(tandem_session_options, n_layer_policies, 56) \
  MEMBER(tandem_session_options, alpha, 64) \
  MEMBER(tandem_session_options, beta, 68) \
  MEMBER(tandem_session_options, halo_tokens, 72) \
  MEMBER(tandem_session_options, stream_buffer_bytes, 80) \
  MEMBER(tandem_session_options, stream_fraction, 88) \
  MEMBER(tandem_session_options, stream_heads, 96) \
  MEMBER(tandem_session_options, recompute_share, 104) \
  MEMBER(tandem_session_options, streaming_heads, 112) \
  MEMBER(tandem_session_options, n_streaming_heads, 120) \
  MEMBER(tandem_session_options, selection_indices, 128) \
  MEMBER(tandem_session_options, pruning, 136) \
  MEMBER(tandem_session_options, patterns, 144) \
  STRUCT(tandem_attend_args, 128) \
  MEMBER(tandem_attend_args, struct_size, 0) \
  MEMBER(tandem_attend_args, flags, 4) \
  MEMBER(tandem_attend_args, layer_idx, 8) \
  MEMBER(tandem_attend_args, n_sequences, 12) \
  MEMBER(tandem_attend_args, sequences, 16) \
  MEMBER(tandem_attend_args, q_lens, 24) \
  MEMBER(tandem_attend_args, q, 32) \
  MEMBER(tandem_attend_args, k, 40) \
  MEMBER(tandem_attend_args, v, 48) \
  MEMBER(tandem_attend_args, o, 56) \
  MEMBER(tandem_attend_args, lse, 64) \
  MEMBER(tandem_attend_args, parent_idx, 72) \
  MEMBER(tandem_attend_args, stream, 80) \
  MEMBER(tandem_attend_args, cancel, 88) \
  MEMBER(tandem_attend_args, progress, 96) \
  MEMBER(tandem_attend_args, progress_user, 104) \
  MEMBER(tandem_attend_args, x, 112) \
  MEMBER(tandem_attend_args, selection, 120) \
  STRUCT(tandem_attend_tensors_args, 144) \
  MEMBER(tandem_attend_tensors_args, struct_size, 0) \
  MEMBER(tandem_attend_tensors_args, flags, 4) \
  MEMBER(tandem_attend_tensors_args, n_sequences, 8) \
  MEMBER(tandem_attend_tensors_args, sm_scale, 12) \
  MEMBER(tandem_attend_tensors_args, soft_cap, 16) \
  MEMBER(tandem_attend_tensors_args, reserved, 20) \
  MEMBER(tandem_attend_tensors_args, sliding_window_tokens, 24) \
  MEMBER(tandem_attend_tensors_args, sinks, 32) \
  MEMBER(tandem_attend_tensors_args, alibi_slopes, 40) \
  MEMBER(tandem_attend_tensors_args, q_lens, 48) \
  MEMBER(tandem_attend_tensors_args, kv_lens, 56) \
  MEMBER(tandem_attend_tensors_args, q, 64) \
  MEMBER(tandem_attend_tensors_args, k, 72) \
  MEMBER(tandem_attend_tensors_args, v, 80) \
  MEMBER(tandem_attend_tensors_args, mask, 88) \
  MEMBER(tandem_attend_tensors_args, o, 96) \
  MEMBER(tandem_attend_tensors_args, lse, 104) \
  MEMBER(tandem_attend_tensors_args, stream, 112) \
  MEMBER(tandem_attend_tensors_args, cancel, 120) \
  MEMBER(tandem_attend_tensors_args, progress, 128) \
  MEMBER(tandem_attend_tensors_args, progress_user, 136) \
  STRUCT(tandem_layer_projection, 80) \
  MEMBER(tandem_layer_projection, struct_size, 0) \
  MEMBER(tandem_layer_projection, hidden_dim, 4) \
  MEMBER(tandem_layer_projection, w_type, 8) \
  MEMBER(tandem_layer_projection, w_order, 12) \
  MEMBER(tandem_layer_projection, device_type, 16) \
  MEMBER(tandem_layer_projection, norm, 20) \
  MEMBER(tandem_layer_projection, norm_eps, 24) \
  MEMBER(tandem_layer_projection, k_rope, 28) \
  MEMBER(tandem_layer_projection, w_k, 32) \
  MEMBER(tandem_layer_projection, w_v, 40) \
  MEMBER(tandem_layer_projection, b_k, 48) \
  MEMBER(tandem_layer_projection, b_v, 56) \
  MEMBER(tandem_layer_projection, norm_weight, 64) \
  MEMBER(tandem_layer_projection, norm_bias, 72) \
  STRUCT(tandem_weights_options, 40) \
  MEMBER(tandem_weights_options, struct_size, 0) \
  MEMBER(tandem_weights_options, reserved, 4) \
  MEMBER(tandem_weights_options, resident_bytes, 8) \
  MEMBER(tandem_weights_options, buffer_bytes, 16) \
  MEMBER(tandem_weights_options, host_cap_bytes, 24) \
  MEMBER(tandem_weights_options, device_cap_bytes, 32) \
  STRUCT(tandem_weights_stats, 96) \
  MEMBER(tandem_weights_stats, struct_size, 0) \
  MEMBER(tandem_weights_stats, reserved, 4) \
  MEMBER(tandem_weights_stats, n_blocks, 8) \
  MEMBER(tandem_weights_stats, n_resident, 16) \
  MEMBER(tandem_weights_stats, resident_bytes, 24) \
  MEMBER(tandem_weights_stats, host_bytes, 32) \
  MEMBER(tandem_weights_stats, pinned_bytes, 40) \
  MEMBER(tandem_weights_stats, device_bytes, 48) \
  MEMBER(tandem_weights_stats, buffer_bytes, 56) \
  MEMBER(tandem_weights_stats, n_uses, 64) \
  MEMBER(tandem_weights_stats, n_streamed_uses, 72) \
  MEMBER(tandem_weights_stats, n_ahead, 80) \
  MEMBER(tandem_weights_stats, streamed_bytes, 88) \
  STRUCT(tandem_selection, 24) \
  MEMBER(tandem_selection, struct_size, 0) \
  MEMBER(tandem_selection, flags, 4) \
  MEMBER(tandem_selection, unit_tokens, 8) \
  MEMBER(tandem_selection, idx, 16) \
  STRUCT(tandem_pruning_stage, 56) \
  MEMBER(tandem_pruning_stage, struct_size, 0) \
  MEMBER(tandem_pruning_stage, judge, 4) \
  MEMBER(tandem_pruning_stage, query_block, 8) \
  MEMBER(tandem_pruning_stage, plus_next, 12) \
  MEMBER(tandem_pruning_stage, chunk_tokens, 16) \
  MEMBER(tandem_pruning_stage, keep_tokens, 24) \
  MEMBER(tandem_pruning_stage, refresh_interval, 32) \
  MEMBER(tandem_pruning_stage, from_tokens, 40) \
  MEMBER(tandem_pruning_stage, to_tokens, 48) \
  STRUCT(tandem_pruning_record, 40) \
  MEMBER(tandem_pruning_record, struct_size, 0) \
  MEMBER(tandem_pruning_record, reserved, 4) \
  MEMBER(tandem_pruning_record, sink_tokens, 8) \
  MEMBER(tandem_pruning_record, window_tokens, 16) \
  MEMBER(tandem_pruning_record, stages, 24) \
  MEMBER(tandem_pruning_record, n_stages, 32) \
  STRUCT(tandem_pruning, 48) \
  MEMBER(tandem_pruning, struct_size, 0) \
  MEMBER(tandem_pruning, shared_lists, 4) \
  MEMBER(tandem_pruning, preset, 8) \
  MEMBER(tandem_pruning, decode, 16) \
  MEMBER(tandem_pruning, n_decode, 24) \
  MEMBER(tandem_pruning, append, 32) \
  MEMBER(tandem_pruning, n_append, 40) \
  STRUCT(tandem_head_pattern, 48) \
  MEMBER(tandem_head_pattern, struct_size, 0) \
  MEMBER(tandem_head_pattern, kinds, 4) \
  MEMBER(tandem_head_pattern, sink_tokens, 8) \
  MEMBER(tandem_head_pattern, window_tokens, 16) \
  MEMBER(tandem_head_pattern, vertical_tokens, 24) \
  MEMBER(tandem_head_pattern, slash_tokens, 32) \
  MEMBER(tandem_head_pattern, n_blocks, 40) \
  STRUCT(tandem_patterns, 32) \
  MEMBER(tandem_patterns, struct_size, 0) \
  MEMBER(tandem_patterns, reserved, 4) \
  MEMBER(tandem_patterns, heads, 8) \
  MEMBER(tandem_patterns, n_heads, 16) \
  MEMBER(tandem_patterns, max_distance, 24) \
  STRUCT(tandem_pattern_file_options, 40) \
  MEMBER(tandem_pattern_file_options, struct_size, 0) \
  MEMBER(tandem_pattern_file_options, reserved, 4) \
  MEMBER(tandem_pattern_file_options, group_size, 8) \
  MEMBER(tandem_pattern_file_options, threshold, 16) \
  MEMBER(tandem_pattern_file_options, sink_tokens, 24) \
  MEMBER(tandem_pattern_file_options, window_tokens, 32) \
  STRUCT(tandem_saved_blob, 32) \
  MEMBER(tandem_saved_blob, struct_size, 0) \
  MEMBER(tandem_saved_blob, reserved, 4) \
  MEMBER(tandem_saved_blob, name, 8) \
  MEMBER(tandem_saved_blob, data, 16) \
  MEMBER(tandem_saved_blob, n_bytes, 24) \
  STRUCT(tandem_save_options, 40) \
  MEMBER(tandem_save_options, struct_size, 0) \
  MEMBER(tandem_save_options, reserved, 4) \
  MEMBER(tandem_save_options, session, 8) \
  MEMBER(tandem_save_options, model_id, 16) \
  MEMBER(tandem_save_options, blobs, 24) \
  MEMBER(tandem_save_options, n_blobs, 32) \
  STRUCT(tandem_load_options, 48) \
  MEMBER(tandem_load_options, struct_size, 0) \
  MEMBER(tandem_load_options, reserved, 4) \
  MEMBER(tandem_load_options, session, 8) \
  MEMBER(tandem_load_options, model_id, 16) \
  MEMBER(tandem_load_options, file_bytes, 24) \
  MEMBER(tandem_load_options, blob, 32) \
  MEMBER(tandem_load_options, blob_user, 40) \
  STRUCT(tandem_memory_plan, 120) \
  MEMBER(tandem_memory_plan, struct_size, 0) \
  MEMBER(tandem_memory_plan, reserved, 4) \
  MEMBER(tandem_memory_plan, host_kv_bytes, 8) \
  MEMBER(tandem_memory_plan, host_session_bytes, 16) \
  MEMBER(tandem_memory_plan, selection_max_bytes, 24) \
  MEMBER(tandem_memory_plan, device_window_bytes, 32) \
  MEMBER(tandem_memory_plan, device_work_bytes, 40) \
  MEMBER(tandem_memory_plan, kv_token_bytes, 48) \
  MEMBER(tandem_memory_plan, shared_bytes, 56) \
  MEMBER(tandem_memory_plan, device_stream_bytes, 64) \
  MEMBER(tandem_memory_plan, device_weights_bytes, 72) \
  MEMBER(tandem_memory_plan, x_token_bytes, 80) \
  MEMBER(tandem_memory_plan, device_window_max_bytes, 88) \
  MEMBER(tandem_memory_plan, judged_kv_bytes, 96) \
  MEMBER(tandem_memory_plan, judged_first_bytes, 104) \
  MEMBER(tandem_memory_plan, judged_max_bytes, 112) \
  STRUCT(tandem_route_plan, 120) \
  MEMBER(tandem_route_plan, struct_size, 0) \
  MEMBER(tandem_route_plan, reserved, 4) \
  MEMBER(tandem_route_plan, resident_tokens, 8) \
  MEMBER(tandem_route_plan, host_tokens, 16) \
  MEMBER(tandem_route_plan, stream_tokens, 24) \
  MEMBER(tandem_route_plan, host_bytes, 32) \
  MEMBER(tandem_route_plan, stream_bytes, 40) \
  MEMBER(tandem_route_plan, host_ns, 48) \
  MEMBER(tandem_route_plan, bus_ns, 56) \
  MEMBER(tandem_route_plan, device_ns, 64) \
  MEMBER(tandem_route_plan, total_ns, 72) \
  MEMBER(tandem_route_plan, host_alone_ns, 80) \
  MEMBER(tandem_route_plan, stream_alone_ns, 88) \
  MEMBER(tandem_route_plan, recompute_tokens, 96) \
  MEMBER(tandem_route_plan, recompute_bytes, 104) \
  MEMBER(tandem_route_plan, recompute_alone_ns, 112) \
  STRUCT(tandem_cache_stats, 112) \
  MEMBER(tandem_cache_stats, struct_size, 0) \
  MEMBER(tandem_cache_stats, reserved, 4) \
  MEMBER(tandem_cache_stats, n_sequences, 8) \
  MEMBER(tandem_cache_stats, n_pages_used, 16) \
  MEMBER(tandem_cache_stats, n_pages_shared, 24) \
  MEMBER(tandem_cache_stats, host_kv_bytes, 32) \
  MEMBER(tandem_cache_stats, host_session_bytes, 40) \
  MEMBER(tandem_cache_stats, selection_bytes, 48) \
  MEMBER(tandem_cache_stats, host_peak_bytes, 56) \
  MEMBER(tandem_cache_stats, device_window_bytes, 64) \
  MEMBER(tandem_cache_stats, device_work_bytes, 72) \
  MEMBER(tandem_cache_stats, device_peak_bytes, 80) \
  MEMBER(tandem_cache_stats, device_stream_bytes, 88) \
  MEMBER(tandem_cache_stats, pinned_bytes, 96) \
  MEMBER(tandem_cache_stats, device_weights_bytes, 104) \
  STRUCT(tandem_session_stats, 248) \
  MEMBER(tandem_session_stats, struct_size, 0) \
  MEMBER(tandem_session_stats, reserved, 4) \
  MEMBER(tandem_session_stats, n_attends, 8) \
  MEMBER(tandem_session_stats, n_query_tokens, 16) \
  MEMBER(tandem_session_stats, resident_kv_bytes_read, 24) \
  MEMBER(tandem_session_stats, host_kv_bytes_read, 32) \
  MEMBER(tandem_session_stats, dense_kv_bytes, 40) \
  MEMBER(tandem_session_stats, evicted_tokens, 48) \
  MEMBER(tandem_session_stats, n_refreshes, 56) \
  MEMBER(tandem_session_stats, selected_keys, 64) \
  MEMBER(tandem_session_stats, host_keys, 72) \
  MEMBER(tandem_session_stats, attend_ns, 80) \
  MEMBER(tandem_session_stats, refresh_ns, 88) \
  MEMBER(tandem_session_stats, refresh_wait_ns, 96) \
  MEMBER(tandem_session_stats, n_device_attends, 104) \
  MEMBER(tandem_session_stats, n_host_parts, 112) \
  MEMBER(tandem_session_stats, host_part_ns, 120) \
  MEMBER(tandem_session_stats, staged_kv_bytes, 128) \
  MEMBER(tandem_session_stats, filled_kv_bytes, 136) \
  MEMBER(tandem_session_stats, n_stream_parts, 144) \
  MEMBER(tandem_session_stats, stream_part_ns, 152) \
  MEMBER(tandem_session_stats, streamed_kv_bytes, 160) \
  MEMBER(tandem_session_stats, n_joint_parts, 168) \
  MEMBER(tandem_session_stats, host_part_tokens, 176) \
  MEMBER(tandem_session_stats, stream_part_tokens, 184) \
  MEMBER(tandem_session_stats, n_planned_parts, 192) \
  MEMBER(tandem_session_stats, predicted_part_ns, 200) \
  MEMBER(tandem_session_stats, planned_part_ns, 208) \
  MEMBER(tandem_session_stats, streamed_x_bytes, 216) \
  MEMBER(tandem_session_stats, judged_kv_bytes, 224) \
  MEMBER(tandem_session_stats, pattern_pairs, 232) \
  MEMBER(tandem_session_stats, pattern_dense_pairs, 240)

#define TANDEM_ABI_DEFAULTS(DEFAULTS) \
  DEFAULTS(tandem_engine_options, TANDEM_ENGINE_OPTIONS_INIT, 104) \
  DEFAULTS(tandem_layer_options, TANDEM_LAYER_OPTIONS_INIT, 96) \
  DEFAULTS(tandem_cache_options, TANDEM_CACHE_OPTIONS_INIT, 56) \
  DEFAULTS(tandem_session_options, TANDEM_SESSION_OPTIONS_INIT, 152) \
  DEFAULTS(tandem_attend_args, TANDEM_ATTEND_ARGS_INIT, 128) \
  DEFAULTS(tandem_attend_tensors_args, TANDEM_ATTEND_TENSORS_ARGS_INIT, 144) \
  DEFAULTS(tandem_layer_projection, TANDEM_LAYER_PROJECTION_INIT, 80) \
  DEFAULTS(tandem_weights_options, TANDEM_WEIGHTS_OPTIONS_INIT, 40) \
  DEFAULTS(tandem_weights_stats, TANDEM_WEIGHTS_STATS_INIT, 96) \
  DEFAULTS(tandem_selection, TANDEM_SELECTION_INIT, 24) \
  DEFAULTS(tandem_pruning_stage, TANDEM_PRUNING_STAGE_INIT, 56) \
  DEFAULTS(tandem_pruning_record, TANDEM_PRUNING_RECORD_INIT, 40) \
  DEFAULTS(tandem_pruning, TANDEM_PRUNING_INIT, 48) \
  DEFAULTS(tandem_head_pattern, TANDEM_HEAD_PATTERN_INIT, 48) \
  DEFAULTS(tandem_patterns, TANDEM_PATTERNS_INIT, 32) \
  DEFAULTS(tandem_pattern_file_options, TANDEM_PATTERN_FILE_OPTIONS_INIT, 40) \
  DEFAULTS(tandem_saved_blob, TANDEM_SAVED_BLOB_INIT, 32) \
  DEFAULTS(tandem_save_options, TANDEM_SAVE_OPTIONS_INIT, 40) \
  DEFAULTS(tandem_load_options, TANDEM_LOAD_OPTIONS_INIT, 48) \
  DEFAULTS(tandem_memory_plan, TANDEM_MEMORY_PLAN_INIT, 120) \
  DEFAULTS(tandem_route_plan, TANDEM_ROUTE_PLAN_INIT, 120) \
  DEFAULTS(tandem_cache_stats, TANDEM_CACHE_STATS_INIT, 112) \
  DEFAULTS(tandem_session_stats, TANDEM_SESSION_STATS_INIT, 248)
/* clang-format on */

#endif /* TANDEM_LIB_ABI_LAYOUT_H_ */
