// SPDX-License-Identifier: MIT
//! A sequence with an owner.
use crate::cache::{Cache, SequenceId};
use crate::error::{Error, Result};

/// Owns a sequence and drops it in its cache when this value is dropped. A bare [`SequenceId`] is a name that can be copied.
/// Its sequence stays until [`Cache::drop_sequence`] or the end of the cache.
///
/// Calls take the name: `Attend::new(0, &[sequence.id()], ...)`. A fork has its own owner. Pages that two sequences share
/// stay until neither holds them, so the two may be dropped in any order. The value keeps its cache alive.
///
/// Drop it after the steps that use it: declare it before the [`Step`](crate::Step). A sequence in flight is `Busy`, and
/// dropping its owner then leaves it in the cache. [`Sequence::close`] reports that.
///
/// ```no_run
/// # fn f(cache: &tandem::Cache) -> tandem::Result<()> {
/// let prompt = tandem::Sequence::new(cache)?;
/// // ... append the prompt; all three sequences go at the end of the function
/// let answers = [prompt.fork()?, prompt.fork()?];
/// cache.reserve(answers[0].id(), 100)?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
#[must_use = "the sequence is dropped with its owner"]
pub struct Sequence {
    cache: Option<Cache>, // None: no longer the owner
    id: SequenceId,
}

impl Sequence {
    /// A new, empty sequence.
    ///
    /// # Errors
    /// As [`Cache::create_sequence`].
    pub fn new(cache: &Cache) -> Result<Self> {
        Ok(Self::adopt(cache, cache.create_sequence()?))
    }
    /// Takes ownership of an existing sequence. An unknown id is not noticed here.
    pub fn adopt(cache: &Cache, id: SequenceId) -> Self {
        Self { cache: Some(cache.clone()), id }
    }
    /// A sequence with the same tokens, made by [`Cache::fork`], with its own owner.
    ///
    /// # Errors
    /// As [`Cache::fork`].
    pub fn fork(&self) -> Result<Self> {
        let cache = self.cache();
        Ok(Self::adopt(cache, cache.fork(self.id)?))
    }
    /// The id that calls take.
    pub fn id(&self) -> SequenceId {
        self.id
    }
    /// The sequence's cache.
    pub fn cache(&self) -> &Cache {
        self.cache.as_ref().expect("an owner has its cache until it ends")
    }
    /// Returns the id without dropping the sequence.
    pub fn into_id(mut self) -> SequenceId {
        self.cache = None;
        self.id
    }
    /// Drops the sequence.
    ///
    /// # Errors
    /// Those of [`Cache::drop_sequence`]. The owner comes back with the error, because the sequence still exists.
    pub fn close(mut self) -> std::result::Result<(), (Self, Error)> {
        match self.cache().drop_sequence(self.id) {
            Ok(()) => {
                self.cache = None;
                Ok(())
            }
            Err(error) => Err((self, error)),
        }
    }
}

impl Drop for Sequence {
    fn drop(&mut self) {
        if let Some(cache) = self.cache.take() {
            let _ = cache.drop_sequence(self.id); // close() reports the error
        }
    }
}
