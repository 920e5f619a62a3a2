// SPDX-License-Identifier: MIT
//! The arguments of an attend call.
use crate::cache::SequenceId;
use crate::callbacks::{progress_entry, Progress};
use crate::error::{Error, Result};
use crate::raw::{address, address_mut, or_null};
use crate::selection::Selection;
use crate::tensor::{TensorMut, TensorRef};
use std::ffi::c_void;
use std::marker::PhantomData;
use std::mem::size_of;
use std::ptr;
use std::sync::atomic::AtomicI32;
use tandem_sys as sys;

/// The arguments of a call: one layer, several sequences. In every tensor the sequences' tokens follow one another.
///
/// ```no_run
/// # fn f(session: &mut tandem::Session, id: tandem::SequenceId, q: &[f32], k: &[f32], v: &[f32]) -> tandem::Result<()> {
/// use tandem::{Attend, TensorMut, TensorRef};
/// let (mut o, mut lse) = ([0f32; 8 * 64], [0f32; 8]);
/// let (q, o) = (TensorRef::new(q, &[1, 8, 64])?, TensorMut::new(&mut o, &[1, 8, 64])?);
/// let (k, v) = (TensorRef::new(k, &[1, 2, 64])?, TensorRef::new(v, &[1, 2, 64])?);
/// session.attend(Attend::new(0, &[id], &[1], q, o).append(k, v).lse(TensorMut::new(&mut lse, &[1, 8])?))
/// # }
/// ```
#[derive(Debug)]
pub struct Attend<'a> {
    raw: sys::tandem_attend_args,
    sequences: &'a [SequenceId],
    q_lens: &'a [i64],
    parents: Option<&'a [i32]>,
    q: TensorRef<'a>,
    k: Option<TensorRef<'a>>,
    v: Option<TensorRef<'a>>,
    o: TensorMut<'a>,
    lse: Option<TensorMut<'a>>,
    x: Option<TensorRef<'a>>,
    selection: Option<Selection<'a>>,
    watch: PhantomData<(&'a AtomicI32, &'a mut ())>,
}

impl<'a> Attend<'a> {
    /// A call that attends queries q `[n_tokens, n_q_heads, k_head_dim]` and writes o `[n_tokens, n_q_heads, v_head_dim]`.
    /// Sequence `sequences[i]` has `q_lens[i]` queries. Unless keys are appended, the queries are its last tokens.
    #[inline]
    pub fn new(layer_idx: i32, sequences: &'a [SequenceId], q_lens: &'a [i64], q: TensorRef<'a>, o: TensorMut<'a>) -> Self {
        let raw = sys::tandem_attend_args {
            struct_size: size_of::<sys::tandem_attend_args>() as u32,
            flags: 0,
            layer_idx,
            n_sequences: 0,
            sequences: ptr::null(),
            q_lens: ptr::null(),
            q: ptr::null(),
            k: ptr::null(),
            v: ptr::null(),
            o: ptr::null(),
            lse: ptr::null(),
            parent_idx: ptr::null(),
            stream: ptr::null_mut(),
            cancel: ptr::null(),
            progress: None,
            progress_user: ptr::null_mut(),
            x: ptr::null(),
            selection: ptr::null(),
        };
        let (parents, k, v, lse, x, selection) = (None, None, None, None, None, None);
        Self { raw, sequences, q_lens, parents, q, k, v, o, lse, x, selection, watch: PhantomData }
    }
    /// Appends k `[n_tokens, n_kv_heads, k_head_dim]` and v `[n_tokens, n_kv_heads, v_head_dim]` before attention.
    #[inline]
    #[must_use]
    pub fn append(mut self, k: TensorRef<'a>, v: TensorRef<'a>) -> Self {
        (self.k, self.v) = (Some(k), Some(v));
        self
    }
    /// Appends k in a layer whose V aliases K.
    #[inline]
    #[must_use]
    pub fn append_keys(mut self, k: TensorRef<'a>) -> Self {
        (self.k, self.v) = (Some(k), None);
        self
    }
    /// Gives the hidden states x `[n_tokens, hidden_dim]` of the appended tokens. Needed if the layer keeps hidden states.
    #[inline]
    #[must_use]
    pub fn hidden(mut self, x: TensorRef<'a>) -> Self {
        self.x = Some(x);
        self
    }
    /// Also writes lse `[n_tokens, n_q_heads]`, f32.
    #[inline]
    #[must_use]
    pub fn lse(mut self, lse: TensorMut<'a>) -> Self {
        self.lse = Some(lse);
        self
    }
    /// Queries attend the keys that the caller names, instead of the policy's. The layer's policy must be "all" without
    /// streaming heads. Calls on device tensors take indices in host or device memory. Steps on a stream take them in device
    /// memory only ([`Selection::of_tensor`]).
    #[inline]
    #[must_use]
    pub fn selection(mut self, selection: Selection<'a>) -> Self {
        self.selection = Some(selection);
        self
    }
    /// The appended tokens are a guess, kept apart until [`Session::commit`](crate::Session::commit).
    #[must_use]
    pub fn speculative(mut self) -> Self {
        self.raw.flags |= sys::TANDEM_ATTEND_SPECULATIVE;
        self
    }
    /// The guess is a tree: `parent_idx[i]` is the parent of token i, counted within its sequence in this call. -1 means the
    /// last token before the call.
    #[must_use]
    pub fn tree(mut self, parent_idx: &'a [i32]) -> Self {
        self.parents = Some(parent_idx);
        self.speculative()
    }
    /// The tokens are a chunk of a longer append. The last chunk, which is not marked, judges all keys anew.
    #[must_use]
    pub fn partial(mut self) -> Self {
        self.raw.flags |= sys::TANDEM_ATTEND_PARTIAL;
        self
    }
    /// Stops the call when any thread sets the flag to a value other than 0. The call then returns
    /// [`Cancelled`](crate::Status::Cancelled) and has changed nothing. Tensors must be in host memory.
    #[must_use]
    pub fn cancel(mut self, flag: &'a AtomicI32) -> Self {
        self.raw.cancel = address(flag).cast();
        self
    }
    /// Calls `progress` on this thread with the work done and the work in all. [`Break`](std::ops::ControlFlow::Break) stops
    /// the call as [`Attend::cancel`] does. A panic stops it too, and continues when the call has ended.
    #[must_use]
    pub fn progress(mut self, progress: &'a mut Progress<'_>) -> Self {
        self.raw.progress = Some(progress_entry);
        self.raw.progress_user = address_mut(progress).cast();
        self
    }
    /// Orders the call on a CUDA stream, for tensors in device memory.
    ///
    /// # Safety
    /// `stream` is a stream of the engine's device. Tensors keep the promises of [`TensorRef::from_raw`] until the stream
    /// has passed the call.
    #[must_use]
    pub unsafe fn on_stream(mut self, stream: *mut c_void) -> Self {
        self.raw.stream = stream;
        self
    }

    /// Calls `function` with the C struct. Checks array lengths, which the library cannot see.
    #[inline]
    pub(crate) fn with_raw(mut self, function: impl FnOnce(&sys::tandem_attend_args) -> Result<()>) -> Result<()> {
        self.raw.n_sequences = n_sequences("tandem_attend", self.sequences, self.q_lens)?;
        self.raw.sequences = self.sequences.as_ptr().cast();
        self.raw.q_lens = self.q_lens.as_ptr();
        self.raw.q = self.q.as_raw();
        self.raw.k = or_null(self.k.as_ref().map(TensorRef::as_raw));
        self.raw.v = or_null(self.v.as_ref().map(TensorRef::as_raw));
        self.raw.o = self.o.as_raw();
        self.raw.lse = or_null(self.lse.as_ref().map(TensorMut::as_raw));
        self.raw.x = or_null(self.x.as_ref().map(TensorRef::as_raw));
        let selection = self.selection.as_ref().map(Selection::as_raw);
        self.raw.selection = or_null(selection.as_ref());
        if let Some(parents) = self.parents {
            let n_tokens = self.q_lens.iter().try_fold(0i64, |sum, &n| sum.checked_add(n));
            if n_tokens != Some(parents.len() as i64) {
                let n = parents.len();
                let what = "values, must have the sum of q_lens";
                return Err(Error::refuse("tandem_attend", "parent_idx", format_args!("has {n} {what}")));
            }
            self.raw.parent_idx = parents.as_ptr();
        }
        let result = function(&self.raw);
        if !self.raw.progress_user.is_null() {
            // SAFETY: the pointer is the `&mut Progress` of progress(), which this call alone holds.
            unsafe { &mut *self.raw.progress_user.cast::<Progress<'_>>() }.go_on();
        }
        result
    }
}

/// Returns the number of sequences, if both slices agree.
#[inline]
pub(crate) fn n_sequences(function: &str, sequences: &[SequenceId], q_lens: &[i64]) -> Result<i32> {
    if sequences.len() == q_lens.len() && sequences.len() <= i32::MAX as usize {
        return Ok(sequences.len() as i32);
    }
    let (n_ids, n_lens) = (sequences.len(), q_lens.len());
    Err(Error::refuse(function, "q_lens", format_args!("has {n_lens} values for {n_ids} sequences")))
}
