// SPDX-License-Identifier: MIT
//! A handle of the library that is released when it is dropped.
use crate::error::{call, Result};
use std::fmt;
use std::ptr::{self, NonNull};
use tandem_sys as sys;

/// A handle type with the function that releases the caller's reference.
pub(crate) trait Released {
    const RELEASE: unsafe extern "C" fn(*mut Self);
}
impl Released for sys::tandem_engine {
    const RELEASE: unsafe extern "C" fn(*mut Self) = sys::tandem_engine_release;
}
impl Released for sys::tandem_model {
    const RELEASE: unsafe extern "C" fn(*mut Self) = sys::tandem_model_release;
}
impl Released for sys::tandem_cache {
    const RELEASE: unsafe extern "C" fn(*mut Self) = sys::tandem_cache_release;
}
impl Released for sys::tandem_session {
    const RELEASE: unsafe extern "C" fn(*mut Self) = sys::tandem_session_release;
}
impl Released for sys::tandem_weights {
    const RELEASE: unsafe extern "C" fn(*mut Self) = sys::tandem_weights_release;
}

pub(crate) struct Handle<T: Released>(NonNull<T>);

// SAFETY: any thread may use and release a handle. The types that own handles prevent forbidden concurrency: calls on a
// session take `&mut Session`.
unsafe impl<T: Released> Send for Handle<T> {}
// SAFETY: as above.
unsafe impl<T: Released> Sync for Handle<T> {}

impl<T: Released> Handle<T> {
    /// The handle that `create` stores into its first argument.
    pub(crate) fn create(create: impl FnOnce(*mut *mut T, *mut *mut sys::tandem_error) -> i32) -> Result<Self> {
        let mut handle = ptr::null_mut();
        call(|error| create(&mut handle, error))?;
        Ok(Self(NonNull::new(handle).expect("a create function that succeeds gives a handle")))
    }
    pub(crate) fn get(&self) -> *mut T {
        self.0.as_ptr()
    }
}

/// Shows the address. The library is not called.
impl<T: Released> fmt::Debug for Handle<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Pointer::fmt(&self.0, f)
    }
}

impl<T: Released> Drop for Handle<T> {
    fn drop(&mut self) {
        // SAFETY: the handle is live and this is its only release.
        unsafe { T::RELEASE(self.get()) }
    }
}
