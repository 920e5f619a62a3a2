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
    /// What a cache with one session will hold.
    MemoryPlan = tandem_memory_plan {
        /// Pages of K and V.
        host_kv_bytes,
        /// MAW and selection tables of one session.
        host_session_bytes,
        /// Compacted copies of selected keys: upper bound.
        selection_max_bytes,
        /// Windows, for calls of one query a sequence: as many pages as the tokens fill.
        device_window_bytes,
        /// States, descriptors and work space for the same calls.
        device_work_bytes,
        /// K and V of one token in all layers.
        kv_token_bytes,
        /// Pinned host memory through which device and host hand over.
        shared_bytes,
        /// Buffers of a session that may stream or rebuild keys.
        device_stream_bytes,
        /// Projections of the route "recompute".
        device_weights_bytes,
        /// Hidden states of one token in all layers.
        x_token_bytes,
        /// Windows once each sequence has filled its own, however long it becomes.
        device_window_max_bytes,
        /// Not held, but read: by the stages of policy "hip" in a decode step, on average.
        judged_kv_bytes,
        /// Of these, by first stages.
        judged_first_bytes,
        /// In a step in which all stages run.
        judged_max_bytes,
    }
    /// Who will compute over the keys of a call on device tensors, and what that takes, by what the engine has measured. Times end
    /// where an engine has ended, counted from when the call's queries are there, with CPU and bus as slow as they make each other;
    /// 0 where nothing is known.
    RoutePlan = tandem_route_plan {
        /// In windows, those of the call among them.
        resident_tokens,
        /// Attended by the CPU.
        host_tokens,
        /// Whose K and V cross the bus.
        stream_tokens,
        /// K and V of the CPU's.
        host_bytes,
        /// K and V of those that cross the bus.
        stream_bytes,
        /// When the CPU has ended.
        host_ns,
        /// When the bus has, with what it brings before the queries are there, as in the session's last such calls.
        bus_ns,
        /// When the device has, of rebuilt keys and long appends (by a trial of their kernels); 0 where it hides behind the bus.
        device_ns,
        /// The last of them, without what the bus brings before.
        total_ns,
        /// If the CPU had all keys outside the windows.
        host_alone_ns,
        /// If the bus had.
        stream_alone_ns,
        /// Whose hidden states cross the bus; the device makes K and V of them.
        recompute_tokens,
        /// Hidden states of these.
        recompute_bytes,
        /// If the device made all keys outside the windows, or the bus alone where making them has not been measured; 0: there are
        /// no hidden states.
        recompute_alone_ns,
    }
    /// Sums since weights were created, and what they hold.
    WeightsStats = tandem_weights_stats {
        /// Blocks.
        n_blocks,
        /// Of these, on the device for good.
        n_resident,
        /// Of these, in the caller's count.
        resident_bytes,
        /// Copies of the others.
        host_bytes,
        /// Of these, pinned: the rest crosses the bus more slowly.
        pinned_bytes,
        /// Memory that blocks take there, buffer included.
        device_bytes,
        /// The buffer that blocks go through.
        buffer_bytes,
        /// Uses.
        n_uses,
        /// Of these, blocks that cross the bus.
        n_streamed_uses,
        /// Of these, under way or there when they were asked for.
        n_ahead,
        /// Sent so far, in vain too.
        streamed_bytes,
    }
    /// What a cache holds.
    CacheStats = tandem_cache_stats {
        /// Sequences.
        n_sequences,
        /// Pages held by at least one sequence.
        n_pages_used,
        /// Pages held by more than one.
        n_pages_shared,
        /// Pages allocated.
        host_kv_bytes,
        /// MAW and selection tables of all sessions.
        host_session_bytes,
        /// Compacted copies of selected keys.
        selection_bytes,
        /// Most ever in use at once in host memory.
        host_peak_bytes,
        /// Windows of all sessions, in device memory.
        device_window_bytes,
        /// What their calls need there.
        device_work_bytes,
        /// Most ever in use at once in device memory.
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
        /// Outside it: the union over a query group.
        host_kv_bytes_read,
        /// What policy `all` would have read.
        dense_kv_bytes,
        /// Tokens that left the window, per layer.
        evicted_tokens,
        /// Selections made.
        n_refreshes,
        /// Now, over layers, sequences and KV heads.
        selected_keys,
        /// Now: what they were selected from.
        host_keys,
        /// Time in attend calls.
        attend_ns,
        /// Time in making selections.
        refresh_ns,
        /// Attend calls waiting for the background.
        refresh_wait_ns,
        /// Calls on device tensors.
        n_device_attends,
        /// Parts that the CPU computed for these.
        n_host_parts,
        /// From its queries having arrived to its states being there.
        host_part_ns,
        /// Appended K and V that reached the host store through pinned slots.
        staged_kv_bytes,
        /// K and V copied from the host store into windows.
        filled_kv_bytes,
        /// Parts outside the window that the device computed.
        n_stream_parts,
        /// From the call, or the part before it, to the last key being on the device.
        stream_part_ns,
        /// K and V that crossed the bus for these.
        streamed_kv_bytes,
        /// Of these, parts of which the CPU computed some keys.
        n_joint_parts,
        /// Keys that the CPU attended, where a policy attends all.
        host_part_tokens,
        /// Keys that crossed the bus.
        stream_part_tokens,
        /// Parts of which the engine knew what they would take.
        n_planned_parts,
        /// That.
        predicted_part_ns,
        /// And what they took.
        planned_part_ns,
        /// And hidden states, of which K and V were made on the device.
        streamed_x_bytes,
        /// K, and bounds of K, that policy "hip" read to choose keys; on a device at most.
        judged_kv_bytes,
        /// Pairs of a query and a key, query head by query head, that appends under "patterns" attended.
        pattern_pairs,
        /// What policy "all" would have attended in the same calls.
        pattern_dense_pairs,
    }
}
