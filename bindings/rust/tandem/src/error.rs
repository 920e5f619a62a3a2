// SPDX-License-Identifier: MIT
//! Errors of failed calls.
use std::ffi::CStr;
use std::fmt;
use std::os::raw::c_char;
use std::ptr;
use tandem_sys as sys;

/// The result of this crate's calls.
pub type Result<T, E = Error> = std::result::Result<T, E>;

macro_rules! statuses {
    ($($(#[$doc:meta])* $name:ident = $code:ident,)+) => {
        /// Why a call failed.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum Status {
            $($(#[$doc])* $name,)+
            /// A status that this version of the crate does not know.
            Other(i32),
        }
        impl Status {
            /// The status with this number of the C ABI.
            pub fn from_code(code: i32) -> Self {
                match code { $(sys::$code => Self::$name,)+ other => Self::Other(other) }
            }
            /// `TANDEM_ERROR_*`.
            pub fn code(self) -> i32 {
                match self { $(Self::$name => sys::$code,)+ Self::Other(code) => code }
            }
        }
    };
}
statuses! {
    /// A value is out of range, misaligned, overlapping or inconsistent.
    InvalidArgument = TANDEM_ERROR_INVALID_ARGUMENT,
    /// Not a live handle of this kind.
    InvalidHandle = TANDEM_ERROR_INVALID_HANDLE,
    /// The object cannot do this now (open step, uneven layers, child after fork).
    InvalidState = TANDEM_ERROR_INVALID_STATE,
    /// A valid request that this build or machine does not implement.
    Unsupported = TANDEM_ERROR_UNSUPPORTED,
    /// The operating system or the caller's allocator refused memory.
    OutOfMemory = TANDEM_ERROR_OUT_OF_MEMORY,
    /// A cap or a declared maximum would be exceeded.
    Capacity = TANDEM_ERROR_CAPACITY,
    /// A call, a step or a save has the sequence in flight.
    Busy = TANDEM_ERROR_BUSY,
    /// No such sequence, policy, instruction set or backend.
    NotFound = TANDEM_ERROR_NOT_FOUND,
    /// The caller asked to stop, by its flag or its callback.
    Cancelled = TANDEM_ERROR_CANCELLED,
    /// The given time has passed.
    Timeout = TANDEM_ERROR_TIMEOUT,
    /// The device failed for good; tokens that were not yet on the host are gone.
    DeviceLost = TANDEM_ERROR_DEVICE_LOST,
    /// A requested backend module could not be used.
    Backend = TANDEM_ERROR_BACKEND,
    /// A file operation failed.
    Io = TANDEM_ERROR_IO,
    /// A file or a buffer is not what it claims to be.
    Corrupt = TANDEM_ERROR_CORRUPT,
    /// The operating system refused something other than memory.
    System = TANDEM_ERROR_SYSTEM,
    /// A bug in Tandem.
    Internal = TANDEM_ERROR_INTERNAL,
}

impl Status {
    /// `"TANDEM_ERROR_BUSY"`.
    pub fn name(self) -> &'static str {
        // SAFETY: the function returns a constant text for every number.
        unsafe { static_text(sys::tandem_status_name(self.code())) }.unwrap_or("unknown status")
    }
}

/// A failed call: status, field and message from the library.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error {
    status: Status,
    underlying: i64,
    field: String,
    message: String,
}

impl Error {
    /// The reason for the failure.
    pub fn status(&self) -> Status {
        self.status
    }
    /// The option or parameter that was refused; `""` if none applies.
    pub fn field(&self) -> &str {
        &self.field
    }
    /// One line that names function, field and value.
    pub fn message(&self) -> &str {
        &self.message
    }
    /// errno, CUDA result or other code of the layer below; 0 if none applies.
    pub fn underlying(&self) -> i64 {
        self.underlying
    }

    /// A refusal by this crate, before the library is called.
    #[cold]
    pub(crate) fn refuse(function: &str, field: &str, what: fmt::Arguments<'_>) -> Self {
        let message = format!("{function}: {field} {what}");
        Self { status: Status::InvalidArgument, underlying: 0, field: field.to_string(), message }
    }

    /// The error of a failed file operation.
    #[cold]
    pub(crate) fn of_io(function: &str, field: &str, error: &std::io::Error) -> Self {
        let message = format!("{function}: {field}: {error}");
        let underlying = error.raw_os_error().map_or(0, i64::from);
        Self { status: Status::Io, underlying, field: field.to_string(), message }
    }

    #[cold]
    fn take(status: i32, error: *mut sys::tandem_error) -> Self {
        // SAFETY: the error functions take NULL or an error object; its texts live until its release.
        unsafe {
            let text = |pointer: *const c_char| CStr::from_ptr(pointer).to_string_lossy().into_owned();
            let (field, message) = (text(sys::tandem_error_field(error)), text(sys::tandem_error_message(error)));
            let underlying = sys::tandem_error_underlying(error);
            sys::tandem_error_release(error);
            Self { status: Status::from_code(status), underlying, field, message }
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.message.is_empty() { self.status.name() } else { &self.message })
    }
}

impl std::error::Error for Error {}

/// Runs a function of the ABI, which gets a pointer for its error object.
#[inline]
pub(crate) fn call(function: impl FnOnce(*mut *mut sys::tandem_error) -> i32) -> Result<()> {
    let mut error = ptr::null_mut();
    match function(&mut error) {
        sys::TANDEM_OK => Ok(()),
        status => Err(Error::take(status, error)),
    }
}

/// Returns the text that `fill` writes. Asks for the size first, then for the text.
pub(crate) fn text(fill: impl Fn(*mut c_char, usize, *mut usize, *mut *mut sys::tandem_error) -> i32) -> Result<String> {
    let mut needed = 0;
    call(|error| fill(ptr::null_mut(), 0, &mut needed, error))?;
    loop {
        let mut buffer = vec![0u8; needed];
        call(|error| fill(buffer.as_mut_ptr().cast(), buffer.len(), &mut needed, error))?;
        if needed <= buffer.len() {
            buffer.truncate(buffer.iter().position(|&byte| byte == 0).unwrap_or(buffer.len()));
            return Ok(String::from_utf8_lossy(&buffer).into_owned());
        }
    }
}

/// # Safety
/// `text` is NULL or a constant of the library.
pub(crate) unsafe fn static_text(text: *const c_char) -> Option<&'static str> {
    if text.is_null() {
        return None;
    }
    // SAFETY: as above.
    unsafe { CStr::from_ptr(text) }.to_str().ok()
}
