// SPDX-License-Identifier: MIT
// Made by tools/abi/generate.py from include/tandem/; not to be edited.
//! The fingerprint, the callbacks and the structs, in the order of the header.
use crate::tandem_session;
use std::os::raw::{c_char, c_void};

/// `tandem_abi_fingerprint(TANDEM_VERSION_MINOR)` that these declarations were written for (64-bit pointers).
pub const FINGERPRINT: u64 = 0x7eb4_a54e_88f4_62a9;

/// level: `TANDEM_LOG_ERROR`, ... Threads of the caller and of the library call it. It must not call the library.
pub type tandem_log_fn = unsafe extern "C" fn(level: i32, message: *const c_char, user: *mut c_void);
/// Returns `bytes` bytes aligned to `alignment` (a power of two), or NULL.
pub type tandem_alloc_fn = unsafe extern "C" fn(bytes: usize, alignment: usize, user: *mut c_void) -> *mut c_void;
pub type tandem_free_fn = unsafe extern "C" fn(data: *mut c_void, bytes: usize, user: *mut c_void);
/// Runs tasks on the caller's threads: calls `task(i, context)` once for each i from 0 to `n_tasks` - 1, and returns when
/// all calls have returned. It runs as many calls at a time as it has threads. No task waits for another one, so one thread
/// is enough. Threads of the caller and of the library call it, one at a time. `n_tasks` is at most `n_threads`. Must not
/// fail, throw or call the library.
pub type tandem_task_fn = unsafe extern "C" fn(task_idx: i64, context: *mut c_void);
pub type tandem_run_fn =
    unsafe extern "C" fn(n_tasks: i64, task: Option<tandem_task_fn>, context: *mut c_void, user: *mut c_void);
/// Says how much of a call is done, `total` at its end, in units of no fixed size. Called from the thread that made the
/// call. It must return: no longjmp, no exception. It must not call the library for this session or engine. A result other
/// than 0 stops the call.
pub type tandem_progress_fn = unsafe extern "C" fn(done: i64, total: i64, user: *mut c_void) -> i32;
/// Takes all `n_bytes` bytes and returns 0. Any other number ends the save.
pub type tandem_write_fn = unsafe extern "C" fn(data: *const c_void, n_bytes: i64, user: *mut c_void) -> i32;
/// Gives the next bytes, 1 to `n_bytes` of them, and returns their number. Returns 0 at the end. A negative number ends the
/// load.
pub type tandem_read_fn = unsafe extern "C" fn(data: *mut c_void, n_bytes: i64, user: *mut c_void) -> i64;
/// A blob of the loaded sequence, valid during the call. Any result other than 0 makes the load fail.
pub type tandem_blob_fn =
    unsafe extern "C" fn(name: *const c_char, data: *const c_void, n_bytes: i64, user: *mut c_void) -> i32;

abi_structs! {
    struct tandem_tensor {
        struct_size: u32,
        dtype: i32,
        device_type: i32,
        device_index: i32,
        data: *mut c_void,
        n_dims: i32,
        reserved: i32,
        shape: [i64; 4],
        stride: [i64; 4],
    }

    struct tandem_engine_options {
        struct_size: u32,
        n_threads: i32,
        cpu_isa: *const c_char,
        backend: *const c_char,
        backend_path: *const c_char,
        alloc: Option<tandem_alloc_fn>,
        free: Option<tandem_free_fn>,
        alloc_user: *mut c_void,
        log: Option<tandem_log_fn>,
        log_user: *mut c_void,
        spin_ns: i64,
        pin_threads: i32,
        matmul_rows: i32,
        run: Option<tandem_run_fn>,
        run_user: *mut c_void,
    }

    struct tandem_layer_options {
        struct_size: u32,
        n_q_heads: i32,
        n_kv_heads: i32,
        k_head_dim: i32,
        v_head_dim: i32,
        v_aliases_k: i32,
        sm_scale: f32,
        soft_cap: f32,
        sliding_window_tokens: i64,
        sinks: *const f32,
        rope: i32,
        rope_dims: i32,
        rope_theta: f64,
        rope_position_scale: f64,
        rope_inv_freq: *const f32,
        rope_attn_factor: f64,
        projection: *const tandem_layer_projection,
    }

    struct tandem_cache_options {
        struct_size: u32,
        k_type: i32,
        v_type: i32,
        page_tokens: i32,
        host_cap_bytes: i64,
        device_cap_bytes: i64,
        layer_k_types: *const i32,
        layer_v_types: *const i32,
        k_rotation: i32,
        x_type: i32,
    }

    struct tandem_session_options {
        struct_size: u32,
        sleep_between_calls: i32,
        policy: *const c_char,
        window_tokens: i64,
        sink_tokens: i64,
        route: *const c_char,
        append_tokens: i64,
        layer_policies: *const *const c_char,
        n_layer_policies: i64,
        alpha: f32,
        beta: f32,
        halo_tokens: i64,
        stream_buffer_bytes: i64,
        stream_fraction: f64,
        stream_heads: i64,
        recompute_share: f64,
        streaming_heads: *const u8,
        n_streaming_heads: i64,
        selection_indices: i64,
        pruning: *const tandem_pruning,
        patterns: *const tandem_patterns,
    }

    struct tandem_attend_args {
        struct_size: u32,
        flags: u32,
        layer_idx: i32,
        n_sequences: i32,
        sequences: *const i64,
        q_lens: *const i64,
        q: *const tandem_tensor,
        k: *const tandem_tensor,
        v: *const tandem_tensor,
        o: *const tandem_tensor,
        lse: *const tandem_tensor,
        parent_idx: *const i32,
        stream: *mut c_void,
        cancel: *const i32,
        progress: Option<tandem_progress_fn>,
        progress_user: *mut c_void,
        x: *const tandem_tensor,
        selection: *const tandem_selection,
    }

    struct tandem_attend_tensors_args {
        struct_size: u32,
        flags: u32,
        n_sequences: i32,
        sm_scale: f32,
        soft_cap: f32,
        reserved: i32,
        sliding_window_tokens: i64,
        sinks: *const f32,
        alibi_slopes: *const f32,
        q_lens: *const i64,
        kv_lens: *const i64,
        q: *const tandem_tensor,
        k: *const tandem_tensor,
        v: *const tandem_tensor,
        mask: *const tandem_tensor,
        o: *const tandem_tensor,
        lse: *const tandem_tensor,
        stream: *mut c_void,
        cancel: *const i32,
        progress: Option<tandem_progress_fn>,
        progress_user: *mut c_void,
    }

    struct tandem_layer_projection {
        struct_size: u32,
        hidden_dim: i32,
        w_type: i32,
        w_order: i32,
        device_type: i32,
        norm: i32,
        norm_eps: f32,
        k_rope: i32,
        w_k: *const c_void,
        w_v: *const c_void,
        b_k: *const f32,
        b_v: *const f32,
        norm_weight: *const f32,
        norm_bias: *const f32,
    }

    struct tandem_weights_options {
        struct_size: u32,
        reserved: i32,
        resident_bytes: i64,
        buffer_bytes: i64,
        host_cap_bytes: i64,
        device_cap_bytes: i64,
    }

    struct tandem_weights_stats {
        struct_size: u32,
        reserved: i32,
        n_blocks: i64,
        n_resident: i64,
        resident_bytes: i64,
        host_bytes: i64,
        pinned_bytes: i64,
        device_bytes: i64,
        buffer_bytes: i64,
        n_uses: i64,
        n_streamed_uses: i64,
        n_ahead: i64,
        streamed_bytes: i64,
    }

    struct tandem_selection {
        struct_size: u32,
        flags: u32,
        unit_tokens: i64,
        idx: *const tandem_tensor,
    }

    struct tandem_pruning_stage {
        struct_size: u32,
        judge: i32,
        query_block: i32,
        plus_next: i32,
        chunk_tokens: i64,
        keep_tokens: i64,
        refresh_interval: i64,
        from_tokens: i64,
        to_tokens: i64,
    }

    struct tandem_pruning_record {
        struct_size: u32,
        reserved: i32,
        sink_tokens: i64,
        window_tokens: i64,
        stages: *const tandem_pruning_stage,
        n_stages: i64,
    }

    struct tandem_pruning {
        struct_size: u32,
        shared_lists: i32,
        preset: *const c_char,
        decode: *const tandem_pruning_record,
        n_decode: i64,
        append: *const tandem_pruning_record,
        n_append: i64,
    }

    struct tandem_head_pattern {
        struct_size: u32,
        kinds: u32,
        sink_tokens: i64,
        window_tokens: i64,
        vertical_tokens: i64,
        slash_tokens: i64,
        n_blocks: i64,
    }

    struct tandem_patterns {
        struct_size: u32,
        reserved: i32,
        heads: *const tandem_head_pattern,
        n_heads: i64,
        max_distance: i64,
    }

    struct tandem_pattern_file_options {
        struct_size: u32,
        reserved: i32,
        group_size: i64,
        threshold: f64,
        sink_tokens: i64,
        window_tokens: i64,
    }

    struct tandem_saved_blob {
        struct_size: u32,
        reserved: i32,
        name: *const c_char,
        data: *const c_void,
        n_bytes: i64,
    }

    struct tandem_save_options {
        struct_size: u32,
        reserved: i32,
        session: *mut tandem_session,
        model_id: u64,
        blobs: *const tandem_saved_blob,
        n_blobs: i64,
    }

    struct tandem_load_options {
        struct_size: u32,
        reserved: i32,
        session: *mut tandem_session,
        model_id: u64,
        file_bytes: i64,
        blob: Option<tandem_blob_fn>,
        blob_user: *mut c_void,
    }

    struct tandem_memory_plan {
        struct_size: u32,
        reserved: i32,
        host_kv_bytes: i64,
        host_session_bytes: i64,
        selection_max_bytes: i64,
        device_window_bytes: i64,
        device_work_bytes: i64,
        kv_token_bytes: i64,
        shared_bytes: i64,
        device_stream_bytes: i64,
        device_weights_bytes: i64,
        x_token_bytes: i64,
        device_window_max_bytes: i64,
        judged_kv_bytes: i64,
        judged_first_bytes: i64,
        judged_max_bytes: i64,
    }

    struct tandem_route_plan {
        struct_size: u32,
        reserved: i32,
        resident_tokens: i64,
        host_tokens: i64,
        stream_tokens: i64,
        host_bytes: i64,
        stream_bytes: i64,
        host_ns: i64,
        bus_ns: i64,
        device_ns: i64,
        total_ns: i64,
        host_alone_ns: i64,
        stream_alone_ns: i64,
        recompute_tokens: i64,
        recompute_bytes: i64,
        recompute_alone_ns: i64,
    }

    struct tandem_cache_stats {
        struct_size: u32,
        reserved: i32,
        n_sequences: i64,
        n_pages_used: i64,
        n_pages_shared: i64,
        host_kv_bytes: i64,
        host_session_bytes: i64,
        selection_bytes: i64,
        host_peak_bytes: i64,
        device_window_bytes: i64,
        device_work_bytes: i64,
        device_peak_bytes: i64,
        device_stream_bytes: i64,
        pinned_bytes: i64,
        device_weights_bytes: i64,
    }

    struct tandem_session_stats {
        struct_size: u32,
        reserved: i32,
        n_attends: i64,
        n_query_tokens: i64,
        resident_kv_bytes_read: i64,
        host_kv_bytes_read: i64,
        dense_kv_bytes: i64,
        evicted_tokens: i64,
        n_refreshes: i64,
        selected_keys: i64,
        host_keys: i64,
        attend_ns: i64,
        refresh_ns: i64,
        refresh_wait_ns: i64,
        n_device_attends: i64,
        n_host_parts: i64,
        host_part_ns: i64,
        staged_kv_bytes: i64,
        filled_kv_bytes: i64,
        n_stream_parts: i64,
        stream_part_ns: i64,
        streamed_kv_bytes: i64,
        n_joint_parts: i64,
        host_part_tokens: i64,
        stream_part_tokens: i64,
        n_planned_parts: i64,
        predicted_part_ns: i64,
        planned_part_ns: i64,
        streamed_x_bytes: i64,
        judged_kv_bytes: i64,
        pattern_pairs: i64,
        pattern_dense_pairs: i64,
    }
}
