// SPDX-License-Identifier: MIT
//! Sessions and steps.
use crate::attend::{n_sequences, Attend};
use crate::cache::{Cache, SequenceId};
use crate::callbacks::LogEntry;
use crate::error::{call, Error, Result};
use crate::handle::Handle;
use crate::option_tables::SessionOptions;
use crate::stats::{RoutePlan, SessionStats};
use crate::weights::Weights;
use std::ffi::c_void;
use std::ptr;
use std::sync::Arc;
use tandem_sys as sys;

/// Says how a cache is attended: a policy and its memory of what was attended. Several sessions may read one cache. A
/// session keeps its cache alive. It serves one thread at a time: every call takes `&mut self`.
#[derive(Debug)]
pub struct Session {
    handle: Handle<sys::tandem_session>,
    _log: Option<Arc<LogEntry>>, // declared after the handle, so dropped after its release
}

impl Session {
    /// A session of the cache.
    ///
    /// # Errors
    /// `NotFound` (policy, `pruning.preset`), `Unsupported` (policy and model), `Capacity`, `InvalidArgument`.
    pub fn new(cache: &Cache, options: &SessionOptions) -> Result<Self> {
        let handle = options.with_raw(|raw| {
            // SAFETY: a live handle; what the options point to lives during the call.
            Handle::create(|session, error| unsafe { sys::tandem_session_create(session, cache.as_ptr(), raw, error) })
        })?;
        Ok(Self { handle, _log: cache.log.clone() })
    }

    /// Appends K and V, then computes o = softmax(logits) V and its lse over the keys that the policy selects. On an error,
    /// no layer has grown.
    ///
    /// # Errors
    /// `NotFound`, `Busy`, `Capacity`, `OutOfMemory`, `Unsupported`, `InvalidState` (speculative tokens pending, more tokens
    /// than the step declared), `InvalidArgument`.
    #[inline]
    pub fn attend(&mut self, args: Attend<'_>) -> Result<()> {
        // SAFETY: a live handle that no other thread uses; arrays have the lengths that the struct says; tensors are
        // borrowed memory, outputs exclusively.
        args.with_raw(|raw| call(|error| unsafe { sys::tandem_attend(self.as_ptr(), raw, error) }))
    }

    /// Ends speculation in a sequence. The speculative tokens at `kept_idx` stay, the others are dropped. `kept_idx` ascends
    /// and is a chain of the tree.
    ///
    /// # Errors
    /// `InvalidState` (nothing speculative, or layers uneven), `InvalidArgument` (not a chain).
    pub fn commit(&mut self, sequence: SequenceId, kept_idx: &[i64]) -> Result<()> {
        let (kept, n) = (kept_idx.as_ptr(), kept_idx.len() as i64);
        // SAFETY: a live handle that no other thread uses and an array of n values.
        call(|error| unsafe { sys::tandem_session_commit(self.as_ptr(), sequence.to_raw(), kept, n, error) })
    }

    /// Opens a step: `q_lens[i]` tokens will be appended to `sequences[i]` in every layer. The step ends when the guard is
    /// dropped.
    ///
    /// # Errors
    /// As [`Cache::reserve`]; `Busy`; `InvalidArgument`.
    pub fn step(&mut self, sequences: &[SequenceId], q_lens: &[i64]) -> Result<Step<'_>> {
        // SAFETY: no stream.
        unsafe { self.step_on(sequences, q_lens, ptr::null_mut()) }
    }

    /// Opens a planned step, for device tensors on a CUDA stream.
    ///
    /// # Safety
    /// `stream` is a stream of the engine's device and lives as long as the step.
    ///
    /// # Errors
    /// As [`Session::step`]; `Unsupported`.
    pub unsafe fn step_on(&mut self, sequences: &[SequenceId], q_lens: &[i64], stream: *mut c_void) -> Result<Step<'_>> {
        let n = n_sequences("tandem_step_begin", sequences, q_lens)?;
        let ids = sequences.as_ptr().cast();
        // SAFETY: a live handle that no other thread uses, arrays of n values, a stream that the caller vouches for.
        call(|error| unsafe { sys::tandem_step_begin(self.as_ptr(), ids, q_lens.as_ptr(), n, stream, error) })?;
        Ok(Step { session: Some(self), stream })
    }

    /// Sums since the session was created. Waits for refreshes that are under way.
    ///
    /// # Errors
    /// `InvalidState` in a child after fork().
    pub fn stats(&mut self) -> Result<SessionStats> {
        let mut stats = SessionStats::default().into_raw();
        // SAFETY: a live handle that no other thread uses.
        call(|error| unsafe { sys::tandem_session_get_stats(&mut stats, self.as_ptr(), error) })?;
        Ok(SessionStats::from_raw(&stats))
    }

    /// The plan of the next call on device tensors: which processor attends the keys, and how long that takes. `kv_lens`
    /// counts each sequence's tokens, the call's included. `q_lens` counts the call's; `None`: 1 each. The engine measures
    /// what it has not measured yet.
    ///
    /// # Errors
    /// `Unsupported` (no device; a policy that does not attend all keys), `InvalidArgument`, `Capacity`, `OutOfMemory`.
    pub fn plan(&mut self, layer_idx: i32, kv_lens: &[i64], q_lens: Option<&[i64]>) -> Result<RoutePlan> {
        let n = kv_lens.len();
        if let Some(n_q) = q_lens.map(<[i64]>::len).filter(|&n_q| n_q != n) {
            return Err(Error::refuse("tandem_plan", "q_lens", format_args!("has {n_q} values for {n} sequences")));
        }
        let mut plan = RoutePlan::default().into_raw();
        let (kv_lens, q_lens) = (kv_lens.as_ptr(), q_lens.map_or(ptr::null(), <[i64]>::as_ptr));
        // SAFETY: a live handle that no other thread uses, arrays of n values.
        call(|error| unsafe { sys::tandem_plan(&mut plan, self.as_ptr(), layer_idx, kv_lens, q_lens, n as i64, error) })?;
        Ok(RoutePlan::from_raw(&plan))
    }

    /// Gives W_K and W_V of a layer whose projection has none ([`Projection::in_blocks`]): from the next call on they are
    /// blocks of `weights`. The session keeps `weights` alive. Route `"recompute"` uses the blocks while it makes keys, and
    /// `"auto"` does if that saves time. Without this call, `"recompute"` returns `InvalidState` and `"auto"` makes no keys.
    /// May be called again.
    ///
    /// [`Projection::in_blocks`]: crate::Projection::in_blocks
    ///
    /// # Errors
    /// `InvalidArgument` (`layer_idx`; a missing block or one of another size; weights of another engine), `Unsupported` (no
    /// projection, or one with its own weights).
    pub fn use_weights(&mut self, layer_idx: i32, weights: &Weights, w_k_block: i32, w_v_block: i32) -> Result<()> {
        let (session, weights) = (self.as_ptr(), weights.as_ptr());
        // SAFETY: live handles, of which no other thread uses the session.
        call(|error| unsafe { sys::tandem_session_use_weights(session, layer_idx, weights, w_k_block, w_v_block, error) })
    }

    /// The token indices that the next decode query of a KV head would attend, ascending.
    ///
    /// # Errors
    /// `NotFound`, `Busy`, `InvalidArgument` (`layer_idx`, `kv_head_idx`).
    pub fn selection(&mut self, sequence: SequenceId, layer_idx: i32, kv_head_idx: i32) -> Result<Vec<i64>> {
        let mut token_idx = Vec::new();
        self.select(sequence, layer_idx, (kv_head_idx, 0), &mut token_idx, None)?;
        Ok(token_idx)
    }

    /// The same, with the weight share of each selected key outside window and sinks, for query head `q_head_idx` of the
    /// group.
    ///
    /// # Errors
    /// As [`Session::selection`], and `InvalidArgument` (`q_head_idx`).
    pub fn selection_with_maw(
        &mut self,
        sequence: SequenceId,
        layer_idx: i32,
        kv_head_idx: i32,
        q_head_idx: i32,
    ) -> Result<(Vec<i64>, Vec<f32>)> {
        let (mut token_idx, mut maw) = (Vec::new(), Vec::new());
        self.select(sequence, layer_idx, (kv_head_idx, q_head_idx), &mut token_idx, Some(&mut maw))?;
        Ok((token_idx, maw))
    }

    /// For one layer, the (query, key) pairs that appends under "patterns" attended, summed over query heads, and the pairs
    /// that policy "all" would have attended.
    ///
    /// # Errors
    /// `InvalidArgument` (`layer_idx`).
    pub fn pattern_pairs(&mut self, layer_idx: i32) -> Result<(i64, i64)> {
        let (mut pairs, mut dense, session) = (0i64, 0i64, self.as_ptr());
        // SAFETY: a live handle that no other thread uses; both numbers are written.
        call(|error| unsafe { sys::tandem_session_pattern_pairs(&mut pairs, &mut dense, session, layer_idx, error) })?;
        Ok((pairs, dense))
    }

    /// Asks for the number of keys, then for the keys. Asks again if a background refresh has added some.
    fn select(
        &mut self,
        sequence: SequenceId,
        layer_idx: i32,
        heads: (i32, i32),
        token_idx: &mut Vec<i64>,
        mut maw: Option<&mut Vec<f32>>,
    ) -> Result<()> {
        let (mut n_kept, id, session) = (0i64, sequence.to_raw(), self.as_ptr());
        loop {
            token_idx.resize(n_kept as usize, 0);
            let capacity = n_kept;
            let maw = maw.as_deref_mut().map_or(ptr::null_mut(), |maw| {
                maw.resize(capacity as usize, 0.0);
                maw.as_mut_ptr()
            });
            let out = token_idx.as_mut_ptr();
            // SAFETY: a live handle that no other thread uses; both arrays have room for `capacity` values.
            call(|error| unsafe {
                let (kv, q, n) = (heads.0, heads.1, &mut n_kept);
                sys::tandem_session_selection(out, maw, capacity, n, session, id, layer_idx, kv, q, error)
            })?;
            if n_kept <= capacity {
                break;
            }
        }
        token_idx.truncate(n_kept as usize);
        if let Some(maw) = maw {
            maw.truncate(n_kept as usize);
        }
        Ok(())
    }

    /// The handle, for functions of `tandem-sys`. It is released when the session is dropped.
    pub fn as_ptr(&self) -> *mut sys::tandem_session {
        self.handle.get()
    }
}

/// A step of a session. [`end`](Step::end) ends it and reports errors; dropping it ends it silently. If a layer got fewer
/// tokens than declared, the sequences are rolled back.
#[derive(Debug)]
#[must_use = "dropping a step ends it"]
pub struct Step<'s> {
    session: Option<&'s mut Session>,
    stream: *mut c_void,
}

// SAFETY: a reference to a session, and a stream handle that any thread may use.
unsafe impl Send for Step<'_> {}
// SAFETY: every call takes `&mut self`.
unsafe impl Sync for Step<'_> {}

impl Step<'_> {
    /// As [`Session::attend`].
    ///
    /// # Errors
    /// As [`Session::attend`].
    #[inline]
    pub fn attend(&mut self, args: Attend<'_>) -> Result<()> {
        self.session.as_mut().expect("a step has its session until it ends").attend(args)
    }
    /// Closes the step.
    ///
    /// # Errors
    /// `InvalidState` where a layer got fewer tokens than declared.
    pub fn end(mut self) -> Result<()> {
        self.close()
    }
    fn close(&mut self) -> Result<()> {
        let session = match self.session.take() {
            Some(session) => session,
            None => return Ok(()),
        };
        // SAFETY: a live handle that no other thread uses, and the stream that the step began on.
        call(|error| unsafe { sys::tandem_step_end(session.as_ptr(), self.stream, error) })
    }
}

impl Drop for Step<'_> {
    fn drop(&mut self) {
        let _ = self.close(); // end() reports the error
    }
}
