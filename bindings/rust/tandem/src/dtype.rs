// SPDX-License-Identifier: MIT
//! Element types of tensors and storage types of caches.
use crate::error::static_text;
use std::fmt;
use tandem_sys as sys;

/// Queries, outputs and states are f32, f16 or bf16. K and V may be given, stored and read in any type but `Q4_64`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(i32)]
#[non_exhaustive]
pub enum Dtype {
    /// 32-bit floats.
    F32 = sys::TANDEM_F32,
    /// 16-bit floats of IEEE 754.
    F16 = sys::TANDEM_F16,
    /// The upper half of an f32.
    Bf16 = sys::TANDEM_BF16,
    /// 8-bit floats without infinities.
    E4m3 = sys::TANDEM_E4M3,
    /// 8-bit codes with an f16 scale for each 32 elements.
    Q8_0 = sys::TANDEM_Q8_0,
    /// 4-bit codes with an f16 scale for each 32 elements.
    Q4_0 = sys::TANDEM_Q4_0,
    /// 4-bit codes with an f16 scale and minimum for each 64 elements; for hidden states only.
    Q4_64 = sys::TANDEM_Q4_64,
}

impl Dtype {
    /// All types, in the order of their numbers.
    pub const ALL: [Self; 7] = [Self::F32, Self::F16, Self::Bf16, Self::E4m3, Self::Q8_0, Self::Q4_0, Self::Q4_64];

    /// The type's name: `"f32"`, `"q8_0"`, ...
    pub fn name(self) -> &'static str {
        // SAFETY: the function returns NULL or a constant text.
        unsafe { static_text(sys::tandem_dtype_name(self as i32)) }.unwrap_or("unknown")
    }
    /// The type with this name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|dtype| dtype.name() == name)
    }
    /// Bytes that a cache stores for `head_dim` elements of K or V, scales included. 0 for an invalid length.
    pub fn row_bytes(self, head_dim: i32) -> i64 {
        // SAFETY: takes numbers.
        unsafe { sys::tandem_dtype_row_bytes(self as i32, head_dim) }
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

mod sealed {
    pub trait Sealed {}
}

/// The value type of a tensor's slice: an element, or a block of elements. Any bytes are a valid value.
pub trait Element: sealed::Sealed + Copy + Send + Sync + 'static {
    /// The tensor's element type.
    const DTYPE: Dtype;
    /// Elements in one value; more than 1 for blocks.
    const LEN: usize;
}

macro_rules! elements {
    ($($(#[$doc:meta])* $name:ident($inner:ty), $align:literal, $dtype:ident, $len:literal;)+) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(C, align($align))]
        pub struct $name(
            /// The bits.
            pub $inner
        );
        impl sealed::Sealed for $name {}
        impl Element for $name {
            const DTYPE: Dtype = Dtype::$dtype;
            const LEN: usize = $len;
        }
    )+};
}
elements! {
    /// The bits of a 16-bit float of IEEE 754.
    F16(u16), 2, F16, 1;
    /// The bits of a bf16: the upper half of an f32.
    Bf16(u16), 2, Bf16, 1;
    /// The bits of an e4m3 float.
    E4m3(u8), 1, E4m3, 1;
    /// 32 elements: an f16 scale and 32 signed codes.
    BlockQ8_0([u8; 34]), 2, Q8_0, 32;
    /// 32 elements: an f16 scale and 16 bytes of two codes.
    BlockQ4_0([u8; 18]), 2, Q4_0, 32;
    /// 64 elements: an f16 scale, an f16 minimum and 32 bytes of two codes.
    BlockQ4_64([u8; 36]), 2, Q4_64, 64;
}
// Views of bit slices, for crates with their own float types.
macro_rules! of_bits {
    ($($name:ident($bits:ty))+) => {$(
        impl $name {
            /// The same values as a slice of this type. Floats of the crate `half` give their bits without unsafe code:
            /// `F16::of_bits(values.reinterpret_cast())`, with its trait `HalfFloatSliceExt`.
            pub fn of_bits(bits: &[$bits]) -> &[Self] {
                // SAFETY: the type's one member is of this type, with the same size and alignment; any bits are a valid
                // value.
                unsafe { std::slice::from_raw_parts(bits.as_ptr().cast(), bits.len()) }
            }
            /// The same values, for writing.
            pub fn of_bits_mut(bits: &mut [$bits]) -> &mut [Self] {
                // SAFETY: as above, and borrowed exclusively.
                unsafe { std::slice::from_raw_parts_mut(bits.as_mut_ptr().cast(), bits.len()) }
            }
        }
    )+};
}
of_bits! { F16(u16) Bf16(u16) E4m3(u8) }

impl sealed::Sealed for f32 {}
impl Element for f32 {
    const DTYPE: Dtype = Dtype::F32;
    const LEN: usize = 1;
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::{align_of, size_of};

    #[test]
    fn every_type_of_the_library_is_here() {
        for (i, dtype) in Dtype::ALL.into_iter().enumerate() {
            assert_eq!(dtype as usize, i + 1);
            assert_eq!(Dtype::from_name(dtype.name()), Some(dtype));
        }
        // SAFETY: takes a number.
        assert!(unsafe { sys::tandem_dtype_name(Dtype::ALL.len() as i32 + 1) }.is_null());
        assert_eq!(Dtype::from_name("f64"), None);
    }

    #[test]
    fn bits_are_values() {
        let mut bits = [0x3c00u16, 0xfc00];
        assert_eq!(F16::of_bits(&bits), [F16(0x3c00), F16(0xfc00)]);
        Bf16::of_bits_mut(&mut bits)[1] = Bf16(7);
        assert_eq!(bits, [0x3c00, 7]);
        assert_eq!(E4m3::of_bits(&[]), []);
        fn alike<T, Bits>() {
            assert_eq!((size_of::<T>(), align_of::<T>()), (size_of::<Bits>(), align_of::<Bits>()));
        }
        alike::<F16, u16>();
        alike::<Bf16, u16>();
        alike::<E4m3, u8>();
    }

    #[test]
    fn blocks_have_the_library_s_sizes() {
        fn check<T: Element>() {
            assert_eq!(T::DTYPE.row_bytes(64), (64 / T::LEN * size_of::<T>()) as i64, "{}", T::DTYPE);
            assert!(align_of::<T>() <= 4);
        }
        check::<f32>();
        check::<F16>();
        check::<Bf16>();
        check::<E4m3>();
        check::<BlockQ8_0>();
        check::<BlockQ4_0>();
        check::<BlockQ4_64>();
    }
}
