// SPDX-License-Identifier: MIT
//! Numbers that the library reports.
use std::mem::size_of;
use tandem_sys as sys;

macro_rules! numbers {
    ($($(#[$doc:meta])* $name:ident = $raw:ident { $($(#[$member_doc:meta])* $member:ident,)+ })+) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        #[non_exhaustive]
        pub struct $name { $($(#[$member_doc])* pub $member: i64,)+ }
        impl $name {
            pub(crate) fn from_raw(raw: &sys::$raw) -> Self {
                Self { $($member: raw.$member,)+ }
            }
            pub(crate) fn into_raw(self) -> sys::$raw {
                sys::$raw { struct_size: size_of::<sys::$raw>() as u32, reserved: 0, $($member: self.$member,)+ }
            }
        }
    )+};
}

numbers! {
    /// The memory that a cache with one session will hold, and what decode steps will read, in bytes.
    MemoryPlan = tandem_memory_plan {
        /// Pages of K and V, and of hidden states.
        host_kv_bytes,
        /// MAW and selection tables of one session.
        host_session_bytes,
        /// Compacted copies of selected keys, upper bound.
        selection_max_bytes,
        /// Windows of calls with one query in a sequence: as many pages as the tokens fill.
        device_window_bytes,
        /// States, descriptors and work space of the same calls.
        device_work_bytes,
        /// K and V of one token in all layers.
        kv_token_bytes,
        /// Pinned host memory for the handshake of device and host.
        shared_bytes,
        /// Buffers of a session that may stream or rebuild keys.
        device_stream_bytes,
        /// Projections of the route "recompute".
        device_weights_bytes,
        /// Hidden states of one token in all layers.
        x_token_bytes,
        /// Windows once every sequence has filled its window, however long it becomes.
        device_window_max_bytes,
        /// Not held, but read: by the stages of policy "hip" in a decode step, on average.
        judged_kv_bytes,
        /// The part of `judged_kv_bytes` that first stages read.
        judged_first_bytes,
        /// The same as `judged_kv_bytes` for a step in which all stages run.
        judged_max_bytes,
    }
    /// Says which processor will attend the keys of a call on device tensors, and how long that takes, from what the engine
    /// has measured. Times run from the arrival of the call's queries to the end of each processor's work. They include the
    /// slowdown of CPU and bus by each other. 0: nothing is known.
    RoutePlan = tandem_route_plan {
        /// Keys in windows, the call's own included.
        resident_tokens,
        /// Keys that the CPU attends.
        host_tokens,
        /// Keys whose K and V cross the bus.
        stream_tokens,
        /// K and V of `host_tokens`.
        host_bytes,
        /// K and V of `stream_tokens`.
        stream_bytes,
        /// Time of the CPU.
        host_ns,
        /// Time of the bus, with transfers before the queries arrive, as in the session's last such calls.
        bus_ns,
        /// Time of the device for rebuilt keys and long appends (by a trial of their kernels); 0 if hidden behind the bus.
        device_ns,
        /// The end of the last one, without transfers before the queries arrive.
        total_ns,
        /// Time if the CPU attended all keys outside the windows.
        host_alone_ns,
        /// Time if all these keys crossed the bus.
        stream_alone_ns,
        /// Keys whose hidden states cross the bus. The device makes K and V of them.
        recompute_tokens,
        /// Hidden states of `recompute_tokens`.
        recompute_bytes,
        /// Time if the device made all keys outside the windows, or of the bus alone if making them has not been measured.
        /// 0: there are no hidden states.
        recompute_alone_ns,
    }
    /// Sums since the weights were created, and what they hold now.
    WeightsStats = tandem_weights_stats {
        /// Blocks.
        n_blocks,
        /// Blocks that are resident on the device.
        n_resident,
        /// Bytes of resident blocks, as the caller counts them.
        resident_bytes,
        /// Host copies of the other blocks.
        host_bytes,
        /// The pinned part of `host_bytes`; the rest crosses the bus more slowly.
        pinned_bytes,
        /// Device memory of blocks, buffer included.
        device_bytes,
        /// The buffer that streamed blocks go through.
        buffer_bytes,
        /// Uses of blocks.
        n_uses,
        /// Uses of blocks that cross the bus.
        n_streamed_uses,
        /// Streamed blocks that were under way or there when asked for.
        n_ahead,
        /// Bytes sent so far, unneeded transfers included.
        streamed_bytes,
    }
    /// Tells what a cache holds.
    CacheStats = tandem_cache_stats {
        /// Sequences.
        n_sequences,
        /// Pages held by at least one sequence.
        n_pages_used,
        /// Pages held by more than one sequence.
        n_pages_shared,
        /// Pages allocated.
        host_kv_bytes,
        /// MAW and selection tables of all sessions.
        host_session_bytes,
        /// Compacted copies of selected keys.
        selection_bytes,
        /// Largest use of host memory so far.
        host_peak_bytes,
        /// Windows of all sessions, in device memory.
        device_window_bytes,
        /// Work space of the sessions' calls, in device memory.
        device_work_bytes,
        /// Largest use of device memory so far.
        device_peak_bytes,
        /// Buffers of sessions that stream or rebuild keys.
        device_stream_bytes,
        /// Pages pinned for streams.
        pinned_bytes,
        /// Projections in device memory.
        device_weights_bytes,
    }
    /// Sums since a session was created.
    SessionStats = tandem_session_stats {
        /// Calls.
        n_attends,
        /// Queries, per layer.
        n_query_tokens,
        /// K and V read by attention inside the window.
        resident_kv_bytes_read,
        /// K and V read outside the window: the union over a query group.
        host_kv_bytes_read,
        /// K and V that policy `all` would have read.
        dense_kv_bytes,
        /// Tokens that left the window, per layer.
        evicted_tokens,
        /// Selections made.
        n_refreshes,
        /// Keys selected now, over layers, sequences and KV heads.
        selected_keys,
        /// Keys outside the window now, sinks not counted.
        host_keys,
        /// Time in attend calls.
        attend_ns,
        /// Time spent on making selections.
        refresh_ns,
        /// Time that attend calls on host tensors waited for background work.
        refresh_wait_ns,
        /// Calls on device tensors.
        n_device_attends,
        /// Parts that the CPU computed for these.
        n_host_parts,
        /// Time of these parts: from the arrival of the queries to the states being there.
        host_part_ns,
        /// Appended K and V that the device brought to the host store: through pinned slots, or by copies.
        staged_kv_bytes,
        /// K and V copied from the host store into windows.
        filled_kv_bytes,
        /// Parts outside the window that the device computed.
        n_stream_parts,
        /// Time of these parts: from when the bus could begin to the last key being on the device.
        stream_part_ns,
        /// K and V that crossed the bus for these parts.
        streamed_kv_bytes,
        /// Those of these parts with keys that the CPU attended.
        n_joint_parts,
        /// Keys that the CPU attended under policies that attend all keys.
        host_part_tokens,
        /// Keys that crossed the bus.
        stream_part_tokens,
        /// Parts whose time the engine could predict.
        n_planned_parts,
        /// Their predicted time.
        predicted_part_ns,
        /// Their measured time.
        planned_part_ns,
        /// Hidden states that crossed the bus, from which the device made K and V.
        streamed_x_bytes,
        /// K, and bounds of K, that policy "hip" read to choose keys; on a device an upper bound.
        judged_kv_bytes,
        /// (query, key) pairs that appends under "patterns" attended, summed over query heads.
        pattern_pairs,
        /// Pairs that policy "all" would have attended in the same calls.
        pattern_dense_pairs,
    }
}
