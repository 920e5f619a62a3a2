// SPDX-License-Identifier: MIT
//! Callbacks that the library calls: log, progress and allocator. A panic in one does not unwind into the library.
use crate::raw::address;
use std::any::Any;
use std::collections::BTreeMap;
use std::ffi::{c_void, CStr};
use std::ops::ControlFlow;
use std::os::raw::c_char;
use std::panic::{catch_unwind, resume_unwind, AssertUnwindSafe};
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use tandem_sys as sys;

/// The severity of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum LogLevel {
    /// Something failed.
    Error,
    /// Something works, but not as well as it should.
    Warning,
    /// All is well.
    Info,
    /// A level that this version does not know.
    Other(i32),
}

/// Receives the library's messages, from any of its threads. It must not call the library. A panic in it is ignored.
pub type Log = Arc<dyn Fn(LogLevel, &str) + Send + Sync>;

/// Logs of live engines. The library gets a number instead of a pointer, so a late message finds no entry.
static LOGS: RwLock<Option<BTreeMap<usize, Log>>> = RwLock::new(None);
/// The next number. No number is used twice.
static NEXT_LOG: AtomicUsize = AtomicUsize::new(1);

/// An entry of `LOGS`. It is removed when the engine's last owner in Rust is dropped.
#[derive(Debug)]
pub(crate) struct LogEntry(usize);

impl LogEntry {
    pub(crate) fn new(log: Log) -> Arc<Self> {
        let number = NEXT_LOG.fetch_add(1, Ordering::Relaxed);
        LOGS.write().unwrap_or_else(PoisonError::into_inner).get_or_insert_with(BTreeMap::new).insert(number, log);
        Arc::new(Self(number))
    }
    pub(crate) fn user(&self) -> *mut c_void {
        self.0 as *mut c_void // a number, which is never dereferenced
    }
}

impl Drop for LogEntry {
    fn drop(&mut self) {
        let removed = LOGS.write().unwrap_or_else(PoisonError::into_inner).as_mut().and_then(|logs| logs.remove(&self.0));
        drop(removed); // outside the lock, because the closure may hold another engine
    }
}

/// Runs a callback of the caller for the library. A panic's payload is leaked, because dropping it may panic again.
fn contain<T>(body: impl FnOnce() -> T) -> Option<T> {
    catch_unwind(AssertUnwindSafe(body)).map_err(std::mem::forget).ok()
}

pub(crate) unsafe extern "C" fn log_entry(level: i32, message: *const c_char, user: *mut c_void) {
    contain(|| {
        let log = LOGS
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .as_ref()
            .and_then(|logs| logs.get(&(user as usize)).cloned());
        let log = match log {
            Some(log) => log,
            None => return,
        };
        let level = match level {
            sys::TANDEM_LOG_ERROR => LogLevel::Error,
            sys::TANDEM_LOG_WARNING => LogLevel::Warning,
            sys::TANDEM_LOG_INFO => LogLevel::Info,
            other => LogLevel::Other(other),
        };
        // SAFETY: the library passes a text that lives until this function returns.
        log(level, &unsafe { CStr::from_ptr(message) }.to_string_lossy());
    });
}

type Listener<'a> = dyn FnMut(i64, i64) -> ControlFlow<()> + Send + Sync + 'a;

/// The callback of [`Attend::progress`](crate::Attend::progress). It gets the work done and the work in all, in units of no
/// fixed size.
pub struct Progress<'a> {
    listener: Box<Listener<'a>>,
    panic: Option<Box<dyn Any + Send>>,
}

impl std::fmt::Debug for Progress<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Progress").field("panicked", &self.panic.is_some()).finish_non_exhaustive()
    }
}

impl<'a> Progress<'a> {
    /// The callback must not call into the library.
    pub fn new(listener: impl FnMut(i64, i64) -> ControlFlow<()> + Send + Sync + 'a) -> Self {
        Self { listener: Box::new(listener), panic: None }
    }
    /// Continues a panic that was caught before it reached the library's frames.
    pub(crate) fn go_on(&mut self) {
        if let Some(panic) = self.panic.take() {
            resume_unwind(panic);
        }
    }
}

pub(crate) unsafe extern "C" fn progress_entry(done: i64, total: i64, user: *mut c_void) -> i32 {
    // SAFETY: the pointer is the `&mut Progress` of `Attend::progress`, which this call alone holds.
    let progress = unsafe { &mut *user.cast::<Progress<'_>>() };
    match catch_unwind(AssertUnwindSafe(|| (progress.listener)(done, total))) {
        Ok(answer) => answer.is_break().into(),
        Err(panic) => {
            progress.panic = Some(panic);
            1
        }
    }
}

/// Allocates host memory of caches and sessions. A panic in [`alloc`](HostAllocator::alloc) counts as a refusal. A panic in
/// [`free`](HostAllocator::free) is ignored.
///
/// # Safety
/// `alloc` returns memory of at least `bytes` bytes, aligned to `alignment`. No other code uses it until `free`.
pub unsafe trait HostAllocator: Sync {
    /// Returns `bytes` bytes aligned to `alignment`, a power of two, or `None` if there is no memory. Called on any thread.
    fn alloc(&self, bytes: usize, alignment: usize) -> Option<NonNull<u8>>;
    /// Frees memory that `alloc` returned for `bytes`. Called on any thread.
    ///
    /// # Safety
    /// `data` came from `alloc` with the same `bytes` and has not been freed.
    unsafe fn free(&self, data: NonNull<u8>, bytes: usize);
}

/// A [`HostAllocator`] in the form that engine options take.
#[derive(Clone, Copy)]
pub struct Allocator {
    pub(crate) alloc: sys::tandem_alloc_fn,
    pub(crate) free: sys::tandem_free_fn,
    pub(crate) user: *mut c_void,
}

// SAFETY: `user` is a `&'static` of a type that is Sync.
unsafe impl Send for Allocator {}
// SAFETY: as above.
unsafe impl Sync for Allocator {}

impl Allocator {
    /// The allocator must be `'static`, because memory may be freed as late as the last cache is dropped.
    pub fn new<A: HostAllocator>(allocator: &'static A) -> Self {
        Self { alloc: alloc_entry::<A>, free: free_entry::<A>, user: address(allocator) as *mut c_void }
    }
}

impl std::fmt::Debug for Allocator {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Allocator").field(&self.user).finish()
    }
}

unsafe extern "C" fn alloc_entry<A: HostAllocator>(bytes: usize, alignment: usize, user: *mut c_void) -> *mut c_void {
    // SAFETY: `user` is the `&'static A` of `Allocator::new`.
    let allocator = unsafe { &*user.cast::<A>() };
    let data = contain(|| allocator.alloc(bytes, alignment)).flatten();
    data.map_or(ptr::null_mut(), |data| data.as_ptr().cast())
}

unsafe extern "C" fn free_entry<A: HostAllocator>(data: *mut c_void, bytes: usize, user: *mut c_void) {
    // SAFETY: as above.
    let allocator = unsafe { &*user.cast::<A>() };
    if let Some(data) = NonNull::new(data.cast()) {
        // SAFETY: the library frees once what `alloc` returned.
        contain(|| unsafe { allocator.free(data, bytes) });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::CString;
    use std::sync::Mutex;

    #[test]
    fn panics_stay_and_late_messages_find_nothing() {
        let seen = Arc::new(Mutex::new(Vec::new()));
        let writer = seen.clone();
        let entry = LogEntry::new(Arc::new(move |level, text: &str| {
            writer.lock().unwrap_or_else(PoisonError::into_inner).push((level, text.to_string()));
            assert_ne!(text, "panic", "as the test wants");
        }));
        let user = entry.user();
        let send = |level, text: &str| {
            let text = CString::new(text).unwrap();
            // SAFETY: a text, and the number of an entry.
            unsafe { log_entry(level, text.as_ptr(), user) }
        };
        send(2, "one");
        send(1, "panic");
        send(9, "two");
        drop(entry);
        send(3, "too late");
        let seen = seen.lock().unwrap_or_else(PoisonError::into_inner);
        let expected = [(LogLevel::Warning, "one"), (LogLevel::Error, "panic"), (LogLevel::Other(9), "two")];
        assert_eq!(*seen, expected.map(|(level, text)| (level, text.to_string())));
    }
}
