// SPDX-License-Identifier: MIT
//! Keys that the caller names.
use crate::error::Result;
use crate::tensor::TensorRef;
use std::mem::size_of;
use tandem_sys as sys;

/// Names the keys that each query attends, for models with their own indexer:
/// [`Attend::selection`](crate::Attend::selection).
///
/// Index i names the tokens `i * unit_tokens` to `(i + 1) * unit_tokens - 1` of the query's sequence. A query attends those
/// that it could see without a selection. Indices of a row ascend, and -1 fills the rest of the row. A row of -1 attends no
/// key.
///
/// ```no_run
/// # fn f(session: &mut tandem::Session, args: tandem::Attend<'_>) -> tandem::Result<()> {
/// let pages = [0, 3, 7, 1, 7, -1]; // of one query, for two KV heads
/// session.attend(args.selection(tandem::Selection::new(&pages, &[1, 2, 3])?.unit_tokens(64)))
/// # }
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Selection<'a> {
    idx: TensorRef<'a>,
    unit_tokens: i64,
    flags: u32,
}

impl<'a> Selection<'a> {
    /// Indices `[n_tokens, n_kv_heads, n_idx]`, or `[n_tokens, 1, n_idx]` for all KV heads alike.
    ///
    /// # Errors
    /// As [`TensorRef::new`].
    #[inline]
    pub fn new(idx: &'a [i32], shape: &[usize; 3]) -> Result<Self> {
        Ok(Self { idx: TensorRef::of_indices(idx, shape, None)?, unit_tokens: 1, flags: 0 })
    }
    /// The same with strides, in elements. The last dimension's stride must be 1.
    ///
    /// # Errors
    /// As [`TensorRef::new`].
    #[inline]
    pub fn strided(idx: &'a [i32], shape: &[usize; 3], strides: &[usize; 3]) -> Result<Self> {
        Ok(Self { idx: TensorRef::of_indices(idx, shape, Some(strides))?, unit_tokens: 1, flags: 0 })
    }
    /// Indices in a tensor of [`TANDEM_I32`](tandem_sys::TANDEM_I32) that [`TensorRef::from_raw`] made: those that the
    /// model's indexer has left in device memory. Steps on a stream take only such indices, and need the session's
    /// `selection_indices`.
    #[inline]
    pub fn of_tensor(idx: TensorRef<'a>) -> Self {
        Self { idx, unit_tokens: 1, flags: 0 }
    }
    /// An index names this many consecutive tokens: a power of two from 1 to 256.
    #[must_use]
    pub fn unit_tokens(mut self, unit_tokens: i64) -> Self {
        self.unit_tokens = unit_tokens;
        self
    }
    /// Indices of a row may be in any order: the library sorts a copy of each row.
    #[must_use]
    pub fn any_order(mut self) -> Self {
        self.flags |= sys::TANDEM_SELECTION_ANY_ORDER;
        self
    }
    /// Queries also attend the session's `sink_tokens` first keys and the `window_tokens` newest keys up to their own.
    #[must_use]
    pub fn plus_window(mut self) -> Self {
        self.flags |= sys::TANDEM_SELECTION_PLUS_WINDOW;
        self
    }
    /// The C struct, which points into this value.
    #[inline]
    pub(crate) fn as_raw(&self) -> sys::tandem_selection {
        sys::tandem_selection {
            struct_size: size_of::<sys::tandem_selection>() as u32,
            flags: self.flags,
            unit_tokens: self.unit_tokens,
            idx: self.idx.as_raw(),
        }
    }
}
