// SPDX-License-Identifier: MIT
//! The cache and its sequences.
use crate::callbacks::LogEntry;
use crate::engine::Engine;
use crate::error::{call, Result};
use crate::handle::Handle;
use crate::model::Model;
use crate::option_tables::CacheOptions;
use crate::raw::or_null;
use crate::stats::CacheStats;
use crate::tensor::{TensorMut, TensorRef};
use std::ptr;
use std::sync::Arc;
use tandem_sys as sys;

/// Names a sequence in its cache. A cache never uses an id twice. A [`Sequence`](crate::Sequence) owns one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct SequenceId(i64);

impl SequenceId {
    /// The id with this number. Calls that take it find out whether the sequence exists.
    pub const fn from_raw(id: i64) -> Self {
        Self(id)
    }
    /// The number that the C ABI takes.
    pub const fn to_raw(self) -> i64 {
        self.0
    }
}

/// The keys and values of many sequences, in pages with reference counts. Clones are the same cache. Any thread may use it;
/// a writer lock serialises changes. It keeps its engine and model alive.
///
/// Calls that name a sequence return `NotFound` if it is unknown or dropped, and `Busy` while a session has it in flight.
#[derive(Clone, Debug)]
pub struct Cache {
    handle: Arc<Handle<sys::tandem_cache>>,
    pub(crate) log: Option<Arc<LogEntry>>, // declared after the handle, so dropped after its release
}

impl Cache {
    /// An empty cache. It takes memory as sequences grow.
    ///
    /// # Errors
    /// `Unsupported` (storage type, rotation of keys), `Capacity`, `OutOfMemory`, `InvalidArgument`.
    pub fn new(engine: &Engine, model: &Model, options: &CacheOptions) -> Result<Self> {
        let options = options.raw(model.n_layers())?;
        // SAFETY: live handles; arrays of the options have a value for each layer.
        let create =
            |cache, error| unsafe { sys::tandem_cache_create(cache, engine.as_ptr(), model.as_ptr(), &options, error) };
        Ok(Self { handle: Arc::new(Handle::create(create)?), log: engine.log.clone() })
    }

    /// A new, empty sequence.
    ///
    /// # Errors
    /// `OutOfMemory`.
    pub fn create_sequence(&self) -> Result<SequenceId> {
        let mut id = 0;
        // SAFETY: a live handle.
        call(|error| unsafe { sys::tandem_sequence_create(&mut id, self.as_ptr(), error) })?;
        Ok(SequenceId(id))
    }

    /// A sequence with the same tokens. Both share pages; a page is copied when one of them writes.
    ///
    /// # Errors
    /// `InvalidState` (layers of different lengths), `Capacity`, `OutOfMemory`.
    pub fn fork(&self, sequence: SequenceId) -> Result<SequenceId> {
        let mut id = 0;
        // SAFETY: a live handle.
        call(|error| unsafe { sys::tandem_sequence_fork(&mut id, self.as_ptr(), sequence.0, error) })?;
        Ok(SequenceId(id))
    }

    /// The cache's sequences, oldest first.
    ///
    /// # Errors
    /// None but those of every call.
    pub fn sequences(&self) -> Result<Vec<SequenceId>> {
        let (mut ids, mut n) = (Vec::<i64>::new(), 0);
        loop {
            // SAFETY: a live handle; at most `ids.len()` ids are written.
            call(|error| unsafe {
                sys::tandem_cache_sequences(ids.as_mut_ptr(), ids.len() as i64, &mut n, self.as_ptr(), error)
            })?;
            let n = n as usize;
            let has_all = n <= ids.len();
            ids.resize(n, 0);
            if has_all {
                return Ok(ids.into_iter().map(SequenceId).collect());
            }
        }
    }

    /// Frees host-store memory that dropped and truncated sequences have left. Returns the number of bytes.
    ///
    /// # Errors
    /// None but those of every call.
    pub fn trim(&self) -> Result<i64> {
        let mut n_bytes = 0;
        // SAFETY: a live handle.
        call(|error| unsafe { sys::tandem_cache_trim(&mut n_bytes, self.as_ptr(), error) })?;
        Ok(n_bytes)
    }

    /// Removes the sequence. Pages that no other sequence holds serve other sequences; [`Cache::trim`] frees their memory.
    ///
    /// # Errors
    /// Those of every call that names a sequence.
    pub fn drop_sequence(&self, sequence: SequenceId) -> Result<()> {
        // SAFETY: a live handle.
        call(|error| unsafe { sys::tandem_sequence_drop(self.as_ptr(), sequence.0, error) })
    }

    /// Takes pages, and every session's state, for `n_tokens` more tokens in every layer.
    ///
    /// # Errors
    /// `Capacity`, `OutOfMemory`.
    pub fn reserve(&self, sequence: SequenceId, n_tokens: i64) -> Result<()> {
        // SAFETY: a live handle.
        call(|error| unsafe { sys::tandem_sequence_reserve(self.as_ptr(), sequence.0, n_tokens, error) })
    }

    /// Keeps the first `n_tokens` tokens of every layer and drops speculative tokens.
    ///
    /// # Errors
    /// `InvalidArgument` (more tokens than the sequence has).
    pub fn truncate(&self, sequence: SequenceId, n_tokens: i64) -> Result<()> {
        // SAFETY: a live handle.
        call(|error| unsafe { sys::tandem_sequence_truncate(self.as_ptr(), sequence.0, n_tokens, error) })
    }

    /// Removes tokens `first` to `first + n_tokens - 1`. With `shift_positions` the positions of later tokens move down.
    ///
    /// # Errors
    /// `Unsupported` (a shift of keys that the caller has rotated), `InvalidArgument`, `InvalidState`.
    pub fn remove(&self, sequence: SequenceId, first: i64, n_tokens: i64, shift_positions: bool) -> Result<()> {
        let shift = shift_positions.into();
        // SAFETY: a live handle.
        call(|error| unsafe { sys::tandem_sequence_remove(self.as_ptr(), sequence.0, first, n_tokens, shift, error) })
    }

    /// Appends k `[n_tokens, n_kv_heads, k_head_dim]` and v `[n_tokens, n_kv_heads, v_head_dim]` to one layer without
    /// attending. v is `None` where V aliases K.
    ///
    /// # Errors
    /// `Capacity`, `OutOfMemory`, `InvalidArgument`.
    pub fn append(&self, sequence: SequenceId, layer_idx: i32, k: TensorRef<'_>, v: Option<TensorRef<'_>>) -> Result<()> {
        let (k, v, stream) = (k.as_raw(), or_null(v.as_ref().map(|v| v.as_raw())), ptr::null_mut());
        // SAFETY: a live handle and tensors of borrowed memory.
        call(|error| unsafe { sys::tandem_sequence_append(self.as_ptr(), sequence.0, layer_idx, k, v, stream, error) })
    }

    /// The same for a layer that keeps hidden states. x is `[n_tokens, hidden_dim]` of f32, f16 or bf16.
    ///
    /// # Errors
    /// As [`Cache::append`]; `InvalidArgument` if the layer keeps no hidden states.
    pub fn append_x(
        &self,
        sequence: SequenceId,
        layer_idx: i32,
        k: TensorRef<'_>,
        v: TensorRef<'_>,
        x: TensorRef<'_>,
    ) -> Result<()> {
        let (k, v, x, stream) = (k.as_raw(), v.as_raw(), x.as_raw(), ptr::null_mut());
        // SAFETY: a live handle and tensors of borrowed memory.
        call(|error| unsafe { sys::tandem_sequence_append_x(self.as_ptr(), sequence.0, layer_idx, k, v, x, stream, error) })
    }

    /// Reads back the hidden states of one layer, from token `first` on, as many tokens as x has room for.
    ///
    /// # Errors
    /// `InvalidArgument`: beyond the end, a wrong shape, or a layer that keeps no hidden states.
    pub fn read_x(&self, sequence: SequenceId, layer_idx: i32, first: i64, x: TensorMut<'_>) -> Result<()> {
        // SAFETY: a live handle and a tensor of exclusively borrowed memory.
        call(|error| unsafe { sys::tandem_sequence_read_x(x.as_raw(), self.as_ptr(), sequence.0, layer_idx, first, error) })
    }

    /// Reads back K and V of one layer, from token `first` on, as many tokens as k and v have room for. Either may be
    /// `None`.
    ///
    /// # Errors
    /// `InvalidArgument`: beyond the end, a wrong shape, or neither k nor v.
    pub fn read(
        &self,
        sequence: SequenceId,
        layer_idx: i32,
        first: i64,
        k: Option<TensorMut<'_>>,
        v: Option<TensorMut<'_>>,
    ) -> Result<()> {
        let (k, v) = (or_null(k.as_ref().map(|k| k.as_raw())), or_null(v.as_ref().map(|v| v.as_raw())));
        // SAFETY: a live handle and tensors of exclusively borrowed memory.
        call(|error| unsafe { sys::tandem_sequence_read(k, v, self.as_ptr(), sequence.0, layer_idx, first, error) })
    }

    /// Number of committed tokens of one layer.
    ///
    /// # Errors
    /// `InvalidArgument` (`layer_idx`).
    pub fn length(&self, sequence: SequenceId, layer_idx: i32) -> Result<i64> {
        let mut n_tokens = 0;
        // SAFETY: a live handle.
        call(|error| unsafe { sys::tandem_sequence_length(&mut n_tokens, self.as_ptr(), sequence.0, layer_idx, error) })?;
        Ok(n_tokens)
    }

    /// Hash of lengths, positions and stored bytes of every layer.
    ///
    /// # Errors
    /// Those of every call that names a sequence.
    pub fn digest(&self, sequence: SequenceId) -> Result<u64> {
        let mut digest = 0;
        // SAFETY: a live handle.
        call(|error| unsafe { sys::tandem_sequence_digest(&mut digest, self.as_ptr(), sequence.0, error) })?;
        Ok(digest)
    }

    /// What the cache holds.
    ///
    /// # Errors
    /// `InvalidState` in a child after fork().
    pub fn stats(&self) -> Result<CacheStats> {
        let mut stats = CacheStats::default().into_raw();
        // SAFETY: a live handle.
        call(|error| unsafe { sys::tandem_cache_get_stats(&mut stats, self.as_ptr(), error) })?;
        Ok(CacheStats::from_raw(&stats))
    }

    /// The handle, for functions of `tandem-sys`. It is released with the last clone.
    pub fn as_ptr(&self) -> *mut sys::tandem_cache {
        self.handle.get()
    }
}
