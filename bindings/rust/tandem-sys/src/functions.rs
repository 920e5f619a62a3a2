// SPDX-License-Identifier: MIT
// Made by tools/abi/generate.py from include/tandem/; not to be edited.
//! The functions, in the order of the header.
use super::*;
use std::os::raw::{c_char, c_void};

#[link(name = "tandem")]
extern "C" {
    pub fn tandem_version() -> u32;
    pub fn tandem_abi_fingerprint(minor: u32) -> u64;
    pub fn tandem_status_name(status: i32) -> *const c_char;
    pub fn tandem_error_message(error: *const tandem_error) -> *const c_char;
    pub fn tandem_error_field(error: *const tandem_error) -> *const c_char;
    pub fn tandem_error_status(error: *const tandem_error) -> i32;
    pub fn tandem_error_underlying(error: *const tandem_error) -> i64;
    pub fn tandem_error_release(error: *mut tandem_error);
    pub fn tandem_dtype_name(dtype: i32) -> *const c_char;
    pub fn tandem_dtype_row_bytes(dtype: i32, head_dim: i32) -> i64;
    pub fn tandem_tensor_init(
        tensor: *mut tandem_tensor,
        dtype: i32,
        data: *mut c_void,
        n_dims: i32,
        shape: *const i64,
        error: *mut *mut tandem_error,
    ) -> i32;
    pub fn tandem_engine_options_init(options: *mut tandem_engine_options);
    pub fn tandem_engine_create(
        engine: *mut *mut tandem_engine,
        options: *const tandem_engine_options,
        error: *mut *mut tandem_error,
    ) -> i32;
    pub fn tandem_engine_release(engine: *mut tandem_engine);
    pub fn tandem_engine_drain(engine: *mut tandem_engine, timeout_ns: i64, error: *mut *mut tandem_error) -> i32;
    pub fn tandem_engine_report(
        buffer: *mut c_char,
        buffer_bytes: usize,
        needed_bytes: *mut usize,
        engine: *const tandem_engine,
        error: *mut *mut tandem_error,
    ) -> i32;
    pub fn tandem_layer_options_init(options: *mut tandem_layer_options);
    pub fn tandem_model_create(
        model: *mut *mut tandem_model,
        layers: *const tandem_layer_options,
        n_layers: i32,
        error: *mut *mut tandem_error,
    ) -> i32;
    pub fn tandem_model_release(model: *mut tandem_model);
    pub fn tandem_cache_options_init(options: *mut tandem_cache_options);
    pub fn tandem_cache_create(
        cache: *mut *mut tandem_cache,
        engine: *mut tandem_engine,
        model: *const tandem_model,
        options: *const tandem_cache_options,
        error: *mut *mut tandem_error,
    ) -> i32;
    pub fn tandem_cache_release(cache: *mut tandem_cache);
    pub fn tandem_sequence_create(sequence: *mut i64, cache: *mut tandem_cache, error: *mut *mut tandem_error) -> i32;
    pub fn tandem_sequence_fork(
        fork: *mut i64,
        cache: *mut tandem_cache,
        sequence: i64,
        error: *mut *mut tandem_error,
    ) -> i32;
    pub fn tandem_sequence_drop(cache: *mut tandem_cache, sequence: i64, error: *mut *mut tandem_error) -> i32;
    pub fn tandem_sequence_reserve(
        cache: *mut tandem_cache,
        sequence: i64,
        n_tokens: i64,
        error: *mut *mut tandem_error,
    ) -> i32;
    pub fn tandem_sequence_truncate(
        cache: *mut tandem_cache,
        sequence: i64,
        n_tokens: i64,
        error: *mut *mut tandem_error,
    ) -> i32;
    pub fn tandem_sequence_remove(
        cache: *mut tandem_cache,
        sequence: i64,
        first: i64,
        n_tokens: i64,
        shift_positions: i32,
        error: *mut *mut tandem_error,
    ) -> i32;
    pub fn tandem_sequence_append(
        cache: *mut tandem_cache,
        sequence: i64,
        layer_idx: i32,
        k: *const tandem_tensor,
        v: *const tandem_tensor,
        stream: *mut c_void,
        error: *mut *mut tandem_error,
    ) -> i32;
    pub fn tandem_sequence_read(
        k: *const tandem_tensor,
        v: *const tandem_tensor,
        cache: *const tandem_cache,
        sequence: i64,
        layer_idx: i32,
        first: i64,
        error: *mut *mut tandem_error,
    ) -> i32;
    pub fn tandem_sequence_length(
        n_tokens: *mut i64,
        cache: *const tandem_cache,
        sequence: i64,
        layer_idx: i32,
        error: *mut *mut tandem_error,
    ) -> i32;
    pub fn tandem_sequence_digest(
        digest: *mut u64,
        cache: *const tandem_cache,
        sequence: i64,
        error: *mut *mut tandem_error,
    ) -> i32;
    pub fn tandem_session_options_init(options: *mut tandem_session_options);
    pub fn tandem_session_create(
        session: *mut *mut tandem_session,
        cache: *mut tandem_cache,
        options: *const tandem_session_options,
        error: *mut *mut tandem_error,
    ) -> i32;
    pub fn tandem_session_release(session: *mut tandem_session);
    pub fn tandem_attend_args_init(args: *mut tandem_attend_args);
    pub fn tandem_attend(
        session: *mut tandem_session,
        args: *const tandem_attend_args,
        error: *mut *mut tandem_error,
    ) -> i32;
    pub fn tandem_session_commit(
        session: *mut tandem_session,
        sequence: i64,
        kept_idx: *const i64,
        n_kept: i64,
        error: *mut *mut tandem_error,
    ) -> i32;
    pub fn tandem_step_begin(
        session: *mut tandem_session,
        sequences: *const i64,
        q_lens: *const i64,
        n_sequences: i32,
        stream: *mut c_void,
        error: *mut *mut tandem_error,
    ) -> i32;
    pub fn tandem_step_end(session: *mut tandem_session, stream: *mut c_void, error: *mut *mut tandem_error) -> i32;
    pub fn tandem_attend_tensors_args_init(args: *mut tandem_attend_tensors_args);
    pub fn tandem_attend_tensors(
        engine: *mut tandem_engine,
        args: *const tandem_attend_tensors_args,
        error: *mut *mut tandem_error,
    ) -> i32;
    pub fn tandem_merge(
        o_out: *const tandem_tensor,
        lse_out: *const tandem_tensor,
        o: *const *const tandem_tensor,
        lse: *const *const tandem_tensor,
        n_states: i32,
        engine: *mut tandem_engine,
        stream: *mut c_void,
        error: *mut *mut tandem_error,
    ) -> i32;
    pub fn tandem_layer_projection_init(projection: *mut tandem_layer_projection);
    pub fn tandem_weights_options_init(options: *mut tandem_weights_options);
    pub fn tandem_weights_create(
        weights: *mut *mut tandem_weights,
        engine: *mut tandem_engine,
        data: *const *const c_void,
        n_bytes: *const i64,
        n_blocks: i32,
        options: *const tandem_weights_options,
        error: *mut *mut tandem_error,
    ) -> i32;
    pub fn tandem_weights_release(weights: *mut tandem_weights);
    pub fn tandem_weights_use(
        data: *mut *mut c_void,
        weights: *mut tandem_weights,
        block_idx: i32,
        stream: *mut c_void,
        error: *mut *mut tandem_error,
    ) -> i32;
    pub fn tandem_weights_done(
        weights: *mut tandem_weights,
        block_idx: i32,
        stream: *mut c_void,
        error: *mut *mut tandem_error,
    ) -> i32;
    pub fn tandem_session_use_weights(
        session: *mut tandem_session,
        layer_idx: i32,
        weights: *mut tandem_weights,
        w_k_block: i32,
        w_v_block: i32,
        error: *mut *mut tandem_error,
    ) -> i32;
    pub fn tandem_weights_get_stats(
        stats: *mut tandem_weights_stats,
        weights: *const tandem_weights,
        error: *mut *mut tandem_error,
    ) -> i32;
    pub fn tandem_sequence_append_x(
        cache: *mut tandem_cache,
        sequence: i64,
        layer_idx: i32,
        k: *const tandem_tensor,
        v: *const tandem_tensor,
        x: *const tandem_tensor,
        stream: *mut c_void,
        error: *mut *mut tandem_error,
    ) -> i32;
    pub fn tandem_sequence_read_x(
        x: *const tandem_tensor,
        cache: *const tandem_cache,
        sequence: i64,
        layer_idx: i32,
        first: i64,
        error: *mut *mut tandem_error,
    ) -> i32;
    pub fn tandem_selection_init(selection: *mut tandem_selection);
    pub fn tandem_pruning_stage_init(stage: *mut tandem_pruning_stage);
    pub fn tandem_pruning_record_init(record: *mut tandem_pruning_record);
    pub fn tandem_pruning_init(pruning: *mut tandem_pruning);
    pub fn tandem_head_pattern_init(pattern: *mut tandem_head_pattern);
    pub fn tandem_patterns_init(patterns: *mut tandem_patterns);
    pub fn tandem_pattern_file_options_init(options: *mut tandem_pattern_file_options);
    pub fn tandem_patterns_read(
        heads: *mut tandem_head_pattern,
        capacity: i64,
        n_heads: *mut i64,
        n_layers: *mut i64,
        path: *const c_char,
        options: *const tandem_pattern_file_options,
        error: *mut *mut tandem_error,
    ) -> i32;
    pub fn tandem_saved_blob_init(blob: *mut tandem_saved_blob);
    pub fn tandem_save_options_init(options: *mut tandem_save_options);
    pub fn tandem_load_options_init(options: *mut tandem_load_options);
    pub fn tandem_sequence_save(
        cache: *mut tandem_cache,
        sequence: i64,
        write: Option<tandem_write_fn>,
        write_user: *mut c_void,
        options: *const tandem_save_options,
        error: *mut *mut tandem_error,
    ) -> i32;
    pub fn tandem_sequence_load(
        sequence: *mut i64,
        cache: *mut tandem_cache,
        read: Option<tandem_read_fn>,
        read_user: *mut c_void,
        options: *const tandem_load_options,
        error: *mut *mut tandem_error,
    ) -> i32;
    pub fn tandem_plan_memory(
        plan: *mut tandem_memory_plan,
        engine: *const tandem_engine,
        model: *const tandem_model,
        cache: *const tandem_cache_options,
        session: *const tandem_session_options,
        kv_lens: *const i64,
        n_sequences: i64,
        error: *mut *mut tandem_error,
    ) -> i32;
    pub fn tandem_plan_report(
        buffer: *mut c_char,
        buffer_bytes: usize,
        needed_bytes: *mut usize,
        plan: *const tandem_memory_plan,
        error: *mut *mut tandem_error,
    ) -> i32;
    pub fn tandem_plan(
        plan: *mut tandem_route_plan,
        session: *mut tandem_session,
        layer_idx: i32,
        kv_lens: *const i64,
        q_lens: *const i64,
        n_sequences: i64,
        error: *mut *mut tandem_error,
    ) -> i32;
    pub fn tandem_route_report(
        buffer: *mut c_char,
        buffer_bytes: usize,
        needed_bytes: *mut usize,
        plan: *const tandem_route_plan,
        error: *mut *mut tandem_error,
    ) -> i32;
    pub fn tandem_supports(
        engine: *const tandem_engine,
        layer: *const tandem_layer_options,
        cache: *const tandem_cache_options,
        session: *const tandem_session_options,
        why: *mut *mut tandem_error,
    ) -> i32;
    pub fn tandem_policy_name(idx: i32) -> *const c_char;
    pub fn tandem_cpu_isa_name(idx: i32) -> *const c_char;
    pub fn tandem_cpu_isa_available(name: *const c_char) -> i32;
    pub fn tandem_cache_get_stats(
        stats: *mut tandem_cache_stats,
        cache: *const tandem_cache,
        error: *mut *mut tandem_error,
    ) -> i32;
    pub fn tandem_cache_sequences(
        sequences: *mut i64,
        capacity: i64,
        n_sequences: *mut i64,
        cache: *const tandem_cache,
        error: *mut *mut tandem_error,
    ) -> i32;
    pub fn tandem_cache_trim(n_bytes: *mut i64, cache: *mut tandem_cache, error: *mut *mut tandem_error) -> i32;
    pub fn tandem_session_get_stats(
        stats: *mut tandem_session_stats,
        session: *const tandem_session,
        error: *mut *mut tandem_error,
    ) -> i32;
    pub fn tandem_session_pattern_pairs(
        pairs: *mut i64,
        dense_pairs: *mut i64,
        session: *const tandem_session,
        layer_idx: i32,
        error: *mut *mut tandem_error,
    ) -> i32;
    pub fn tandem_session_selection(
        token_idx: *mut i64,
        maw: *mut f32,
        capacity: i64,
        n_kept: *mut i64,
        session: *mut tandem_session,
        sequence: i64,
        layer_idx: i32,
        kv_head_idx: i32,
        q_head_idx: i32,
        error: *mut *mut tandem_error,
    ) -> i32;
}
