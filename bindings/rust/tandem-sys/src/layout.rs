// SPDX-License-Identifier: MIT
//! The macro that declares the public structs (structs.rs) and lists size and member offsets as Rust lays them out, so that the
//! layout test and the fingerprint cannot leave a member out.

/// Size, alignment and member offsets of a struct, as Rust lays it out.
#[derive(Debug)]
pub struct Layout {
    /// Name in C.
    pub name: &'static str,
    /// Bytes.
    pub size: usize,
    /// Bytes.
    pub align: usize,
    /// Name, offset and size in bytes, in order of declaration.
    pub members: &'static [(&'static str, usize, usize)],
}

/// Declares the structs and `LAYOUTS`, in the order in which the library's fingerprint counts them.
macro_rules! abi_structs {
    ($(struct $name:ident { $($member:ident: $type:ty,)+ })+) => {
        $(
            #[repr(C)]
            #[derive(Clone, Copy, Debug)]
            #[allow(missing_docs)]
            pub struct $name { $(pub $member: $type,)+ }
        )+
        /// Every public struct.
        pub const LAYOUTS: &[Layout] = &[$(Layout {
            name: stringify!($name),
            size: std::mem::size_of::<$name>(),
            align: std::mem::align_of::<$name>(),
            members: &[$((stringify!($member), std::mem::offset_of!($name, $member), std::mem::size_of::<$type>()),)+],
        },)+];
    };
}
