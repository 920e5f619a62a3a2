// SPDX-License-Identifier: MIT
//! Attention over K and V that the caller owns: no cache and no session.
use crate::callbacks::{progress_entry, Progress};
use crate::error::{Error, Result};
use crate::raw::{address, address_mut, or_null};
use crate::tensor::{TensorMut, TensorRef};
use std::marker::PhantomData;
use std::mem::size_of;
use std::ptr;
use std::sync::atomic::AtomicI32;
use tandem_sys as sys;

const FUNCTION: &str = "tandem_attend_tensors";

/// The arguments of [`Engine::attend_tensors`](crate::Engine::attend_tensors). Tensors of four dimensions are padded; the
/// first dimension is the sequence. Tensors of three dimensions are packed: the sequences' tokens follow one another.
/// Strides may order tokens and heads either way.
///
/// ```no_run
/// # fn f(engine: &tandem::Engine, q: &[f32], k: &[f32], v: &[f32]) -> tandem::Result<()> {
/// use tandem::{AttendTensors, TensorMut, TensorRef};
/// let mut o = [0f32; 8 * 64];
/// let (q, o) = (TensorRef::new(q, &[1, 8, 64])?, TensorMut::new(&mut o, &[1, 8, 64])?);
/// let (k, v) = (TensorRef::new(k, &[100, 2, 64])?, TensorRef::new(v, &[100, 2, 64])?);
/// engine.attend_tensors(AttendTensors::new(q, k, v, o).causal())
/// # }
/// ```
#[derive(Debug)]
pub struct AttendTensors<'a> {
    raw: sys::tandem_attend_tensors_args,
    q: TensorRef<'a>,
    k: TensorRef<'a>,
    v: Option<TensorRef<'a>>,
    mask: Option<TensorRef<'a>>,
    o: TensorMut<'a>,
    lse: Option<TensorMut<'a>>,
    q_lens: Option<&'a [i64]>,
    kv_lens: Option<&'a [i64]>,
    sinks: Option<&'a [f32]>,
    alibi_slopes: Option<&'a [f32]>,
    watch: PhantomData<(&'a AtomicI32, &'a mut ())>,
}

impl<'a> AttendTensors<'a> {
    /// A call that attends queries q `[n_tokens, n_q_heads, k_head_dim]` over k `[n_keys, n_kv_heads, k_head_dim]` and v
    /// `[n_keys, n_kv_heads, v_head_dim]` and writes o `[n_tokens, n_q_heads, v_head_dim]`. Padded tensors have
    /// `n_sequences` as their first dimension.
    #[inline]
    pub fn new(q: TensorRef<'a>, k: TensorRef<'a>, v: TensorRef<'a>, o: TensorMut<'a>) -> Self {
        Self { v: Some(v), ..Self::aliased(q, k, o) }
    }
    /// The same, where V is the first `v_head_dim` dims of K.
    #[inline]
    pub fn aliased(q: TensorRef<'a>, k: TensorRef<'a>, o: TensorMut<'a>) -> Self {
        let raw = sys::tandem_attend_tensors_args {
            struct_size: size_of::<sys::tandem_attend_tensors_args>() as u32,
            flags: 0,
            n_sequences: 0,
            sm_scale: 0.0,
            soft_cap: 0.0,
            reserved: 0,
            sliding_window_tokens: 0,
            sinks: ptr::null(),
            alibi_slopes: ptr::null(),
            q_lens: ptr::null(),
            kv_lens: ptr::null(),
            q: ptr::null(),
            k: ptr::null(),
            v: ptr::null(),
            mask: ptr::null(),
            o: ptr::null(),
            lse: ptr::null(),
            stream: ptr::null_mut(),
            cancel: ptr::null(),
            progress: None,
            progress_user: ptr::null_mut(),
        };
        let (v, mask, lse, q_lens, kv_lens) = (None, None, None, None, None);
        let (sinks, alibi_slopes, watch) = (None, None, PhantomData);
        Self { raw, q, k, v, mask, o, lse, q_lens, kv_lens, sinks, alibi_slopes, watch }
    }
    /// A query sees the keys up to its own. The last query of a sequence sees all its keys.
    #[must_use]
    pub fn causal(mut self) -> Self {
        self.raw.flags |= sys::TANDEM_TENSORS_CAUSAL;
        self
    }
    /// Causal, and a query sees only the newest `tokens` keys up to its own.
    #[must_use]
    pub fn sliding_window(mut self, tokens: i64) -> Self {
        self.raw.sliding_window_tokens = tokens;
        self.causal()
    }
    /// Adds a mask to the logits, f32 or f16. `-inf` hides a key. The shape is `[n_tokens, n_columns]`, or, padded, `[1 or
    /// n_sequences, 1 or n_q_heads, n_tokens, n_keys]`. Not with [`causal`](Self::causal).
    #[must_use]
    pub fn mask(mut self, mask: TensorRef<'a>) -> Self {
        self.mask = Some(mask);
        self
    }
    /// Also writes lse `[n_tokens, n_q_heads]`, f32; padded: `[n_sequences, n_tokens, n_q_heads]`.
    #[inline]
    #[must_use]
    pub fn lse(mut self, lse: TensorMut<'a>) -> Self {
        self.lse = Some(lse);
        self
    }
    /// Tokens of each sequence. Packed: they add up to those of q. Padded: a sequence's first tokens; the rest is neither
    /// read nor written.
    #[must_use]
    pub fn q_lens(mut self, q_lens: &'a [i64]) -> Self {
        self.q_lens = Some(q_lens);
        self
    }
    /// Keys of each sequence, in the same way.
    #[must_use]
    pub fn kv_lens(mut self, kv_lens: &'a [i64]) -> Self {
        self.kv_lens = Some(kv_lens);
        self
    }
    /// Factor of the logits. Default: 1 / sqrt(`k_head_dim`).
    #[must_use]
    pub fn sm_scale(mut self, sm_scale: f32) -> Self {
        self.raw.sm_scale = sm_scale;
        self
    }
    /// Caps the logits: `soft_cap` * tanh(logit / `soft_cap`).
    #[must_use]
    pub fn soft_cap(mut self, soft_cap: f32) -> Self {
        self.raw.soft_cap = soft_cap;
        self
    }
    /// Learned sink logits, one for each query head.
    #[must_use]
    pub fn sinks(mut self, sinks: &'a [f32]) -> Self {
        self.sinks = Some(sinks);
        self
    }
    /// `ALiBi` slopes, one for each query head. With a mask, its values are multiplied by them.
    #[must_use]
    pub fn alibi_slopes(mut self, slopes: &'a [f32]) -> Self {
        self.alibi_slopes = Some(slopes);
        self
    }
    /// Stops the call when any thread sets the flag to a value other than 0. The call then returns
    /// [`Cancelled`](crate::Status::Cancelled), and may have written part of o and lse.
    #[must_use]
    pub fn cancel(mut self, flag: &'a AtomicI32) -> Self {
        self.raw.cancel = address(flag).cast();
        self
    }
    /// Calls `progress` as [`Attend::progress`](crate::Attend::progress) does.
    #[must_use]
    pub fn progress(mut self, progress: &'a mut Progress<'_>) -> Self {
        self.raw.progress = Some(progress_entry);
        self.raw.progress_user = address_mut(progress).cast();
        self
    }

    /// Returns the number of sequences that q and the lengths give.
    fn n_sequences(&self) -> Result<i32> {
        let lens = self.q_lens.or(self.kv_lens);
        let (field, n) = match (self.q.shape(), lens) {
            ([n, _, _, _], _) => ("q.shape[0]", *n),
            (_, Some(lens)) if !lens.is_empty() => ("n_sequences", lens.len() as i64),
            (_, Some(_)) => return Err(Error::refuse(FUNCTION, "n_sequences", format_args!("= 0 with packed tensors"))),
            _ => ("n_sequences", 1),
        };
        i32::try_from(n).map_err(|_| Error::refuse(FUNCTION, field, format_args!("= {n} is too large")))
    }

    /// Calls `function` with the C struct. Checks array lengths, which the library cannot see.
    #[inline]
    pub(crate) fn with_raw(mut self, function: impl FnOnce(&sys::tandem_attend_tensors_args) -> Result<()>) -> Result<()> {
        fn tensor(tensor: &Option<TensorRef<'_>>) -> *const sys::tandem_tensor {
            or_null(tensor.as_ref().map(TensorRef::as_raw))
        }
        self.raw.n_sequences = self.n_sequences()?;
        let n_q_heads = self.q.shape().iter().rev().nth(1).map_or(0, |&n| n);
        self.raw.q_lens = array("q_lens", self.q_lens, self.raw.n_sequences.into())?;
        self.raw.kv_lens = array("kv_lens", self.kv_lens, self.raw.n_sequences.into())?;
        self.raw.sinks = array("sinks", self.sinks, n_q_heads)?;
        self.raw.alibi_slopes = array("alibi_slopes", self.alibi_slopes, n_q_heads)?;
        (self.raw.q, self.raw.k) = (self.q.as_raw(), self.k.as_raw());
        (self.raw.v, self.raw.mask) = (tensor(&self.v), tensor(&self.mask));
        self.raw.o = self.o.as_raw();
        self.raw.lse = or_null(self.lse.as_ref().map(TensorMut::as_raw));
        let result = function(&self.raw);
        if !self.raw.progress_user.is_null() {
            // SAFETY: the pointer is the `&mut Progress` of progress(), which this call alone holds.
            unsafe { &mut *self.raw.progress_user.cast::<Progress<'_>>() }.go_on();
        }
        result
    }
}

/// Checks that an array has n values. The library reads n values without a check.
fn array<T>(field: &str, values: Option<&[T]>, n: i64) -> Result<*const T> {
    match values {
        None => Ok(ptr::null()),
        Some(values) if values.len() as i64 == n => Ok(values.as_ptr()),
        Some(values) => Err(Error::refuse(FUNCTION, field, format_args!("has {} values, must have {n}", values.len()))),
    }
}
