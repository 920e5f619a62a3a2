// SPDX-License-Identifier: MIT
//! The C ABI of Tandem 0.2 as `tandem/tandem.h` declares it.
//!
//! Names, types and order are the header's. So is the documentation: the header says what each function does, which errors
//! it returns, and who owns memory. Prefer the crate `tandem` unless it lacks something.
//!
//! The library is found at build time in `$TANDEM_LIB_DIR` or through pkg-config. At run time the loader must find it: after
//! an install into `/usr/local` by `sudo ldconfig`, elsewhere by `LD_LIBRARY_PATH` or an rpath.
#![allow(non_camel_case_types, missing_docs)]

/// Declares the structs. tests/layout.rs expands the same text to sizes and offsets.
macro_rules! abi_structs {
    ($(struct $name:ident { $($member:ident: $type:ty,)+ })+) => {$(
        #[repr(C)]
        #[derive(Clone, Copy, Debug)]
        #[allow(missing_docs)]
        pub struct $name { $(pub $member: $type,)+ }
    )+};
}

mod constants;
mod functions;
mod structs;

pub use constants::*;
pub use functions::*;
pub use structs::*;

macro_rules! opaque {
    ($($name:ident)+) => {$(
        /// An opaque handle. Only pointers to it exist.
        #[repr(C)]
        #[derive(Debug)]
        pub struct $name {
            _opaque: [u8; 0],
            _neither_send_nor_unpin: std::marker::PhantomData<(*mut u8, std::marker::PhantomPinned)>,
        }
    )+};
}
opaque! { tandem_error tandem_engine tandem_model tandem_cache tandem_session tandem_weights }
