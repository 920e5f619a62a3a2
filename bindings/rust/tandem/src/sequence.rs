// SPDX-License-Identifier: MIT
//! A sequence with an owner.
use crate::cache::{Cache, SequenceId};
use crate::error::{Error, Result};

/// A sequence that is dropped in its cache when this value is dropped. A bare [`SequenceId`] is a name that anyone may copy,
/// and its sequence stays until [`Cache::drop_sequence`] or the end of the cache.
///
/// Calls take the name: `Attend::new(0, &[sequence.id()], ...)`. A fork has an owner of its own, and pages that two
/// sequences share stay until neither holds them, so the two may be dropped in any order. The value keeps its cache alive.
///
/// Drop it after the steps that have it, as values declared before a [`Step`](crate::Step) are: a sequence in flight is
/// `Busy`, and dropping its owner then leaves it in the cache. [`Sequence::close`] tells of that.
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
    cache: Option<Cache>, // None: someone else has the sequence now
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
    /// The owner of a sequence that exists. A name that the cache does not know is not noticed here.
    pub fn adopt(cache: &Cache, id: SequenceId) -> Self {
        Self { cache: Some(cache.clone()), id }
    }
    /// A sequence with the same tokens, as [`Cache::fork`] makes it, and with an owner of its own.
    ///
    /// # Errors
    /// As there.
    pub fn fork(&self) -> Result<Self> {
        let cache = self.cache();
        Ok(Self::adopt(cache, cache.fork(self.id)?))
    }
    /// The name that calls take.
    pub fn id(&self) -> SequenceId {
        self.id
    }
    /// The cache that has it.
    pub fn cache(&self) -> &Cache {
        self.cache.as_ref().expect("an owner has its cache until it ends")
    }
    /// Gives the sequence up without dropping it.
    pub fn into_id(mut self) -> SequenceId {
        self.cache = None;
        self.id
    }
    /// Drops the sequence.
    ///
    /// # Errors
    /// Those of [`Cache::drop_sequence`], with the owner: the sequence is still there.
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
            let _ = cache.drop_sequence(self.id); // close() is for who wants to know
        }
    }
}
