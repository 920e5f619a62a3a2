// SPDX-License-Identifier: MIT
//! Tensors: borrowed slices with a shape and strides.
//!
//! A view is checked when it is made: the last element that shape and strides reach must lie inside the slice. The library
//! checks the rest on every call: types, alignment, overlap, and shapes against the layer.
use crate::dtype::{Dtype, Element};
use crate::error::{Error, Result};
use std::ffi::c_void;
use std::marker::PhantomData;
use std::mem::size_of;
use tandem_sys as sys;

/// A tensor that is read.
#[derive(Clone, Copy)]
pub struct TensorRef<'a> {
    raw: sys::tandem_tensor,
    data: PhantomData<&'a [u8]>,
}

/// A tensor that is written.
pub struct TensorMut<'a> {
    raw: sys::tandem_tensor,
    data: PhantomData<&'a mut [u8]>,
}

// SAFETY: the views stand for `&[T]` and `&mut [T]` of elements that are Send and Sync.
unsafe impl Send for TensorRef<'_> {}
// SAFETY: as above.
unsafe impl Sync for TensorRef<'_> {}
// SAFETY: as above.
unsafe impl Send for TensorMut<'_> {}
// SAFETY: as above.
unsafe impl Sync for TensorMut<'_> {}

const EMPTY: sys::tandem_tensor = sys::tandem_tensor {
    struct_size: size_of::<sys::tandem_tensor>() as u32,
    dtype: 0,
    device_type: sys::TANDEM_DEVICE_HOST,
    device_index: 0,
    data: std::ptr::null_mut(),
    n_dims: 0,
    reserved: 0,
    shape: [0; 4],
    stride: [0; 4],
};

#[cold]
fn refuse<T>(field: &str, what: std::fmt::Arguments<'_>) -> Result<T> {
    Err(Error::refuse("tensor", field, what))
}

/// Formats strides for a message.
fn with(strides: Option<&[usize]>) -> String {
    strides.map_or(String::new(), |strides| format!(" with strides {strides:?}"))
}

/// Returns the description of shape and strides, and the number of elements from the first to the last that they reach.
/// Inlined, so that a constant shape is checked at compile time.
#[inline]
fn describe(shape: &[usize], strides: Option<&[usize]>) -> Result<(sys::tandem_tensor, usize)> {
    let n_dims = shape.len();
    if n_dims == 0 || n_dims > 4 {
        return refuse("shape", format_args!("= {shape:?} does not have 1 to 4 dimensions"));
    }
    if strides.map_or(false, |strides| strides.len() != n_dims) {
        return refuse("strides", format_args!("= {strides:?} does not have {n_dims} dimensions as the shape"));
    }
    let mut raw = EMPTY;
    raw.n_dims = n_dims as i32;
    let mut packed = 1usize;
    let mut last = Some(0usize); // index of the last element
    for d in (0..n_dims).rev() {
        let stride = strides.map_or(packed, |strides| strides[d]);
        match (i64::try_from(shape[d]), i64::try_from(stride)) {
            (Ok(length), Ok(step)) => (raw.shape[d], raw.stride[d]) = (length, step),
            _ => return refuse("shape", format_args!("= {shape:?}{} is more than memory can hold", with(strides))),
        }
        last = last.and_then(|last| shape[d].saturating_sub(1).checked_mul(stride)?.checked_add(last));
        packed = match packed.checked_mul(shape[d].max(1)) {
            Some(packed) => packed,
            None => return refuse("shape", format_args!("= {shape:?} is more than memory can hold")),
        };
    }
    if shape.contains(&0) {
        return Ok((raw, 0));
    }
    match last.and_then(|last| last.checked_add(1)) {
        Some(span) => Ok((raw, span)),
        None => refuse("shape", format_args!("= {shape:?}{} is more than memory can hold", with(strides))),
    }
}

/// Describes a view into `len` values of T at `data`.
#[inline]
fn view<T: Element>(data: *mut T, len: usize, shape: &[usize], strides: Option<&[usize]>) -> Result<sys::tandem_tensor> {
    let (mut raw, span) = describe(shape, strides)?;
    check_span(len, T::LEN, span, shape, strides)?;
    raw.dtype = T::DTYPE as i32;
    raw.data = data.cast();
    Ok(raw)
}

/// Refuses a view of `span` elements into `len` values of `n_elements` elements each, if the values are too few.
#[inline]
fn check_span(len: usize, n_elements: usize, span: usize, shape: &[usize], strides: Option<&[usize]>) -> Result<()> {
    if span > 0 && (span - 1) / n_elements >= len {
        let held = len.saturating_mul(n_elements);
        return refuse("data", format_args!("has {held} elements, shape {shape:?}{} reaches {span}", with(strides)));
    }
    Ok(())
}

macro_rules! accessors {
    () => {
        /// Lengths of the dimensions.
        pub fn shape(&self) -> &[i64] {
            &self.raw.shape[..self.raw.n_dims.clamp(0, 4) as usize]
        }
        /// Distance in elements between neighbours, for each dimension.
        pub fn strides(&self) -> &[i64] {
            &self.raw.stride[..self.raw.n_dims.clamp(0, 4) as usize]
        }
        /// The element type. `None` for a number that this version does not know, which only a raw tensor can have.
        pub fn dtype(&self) -> Option<Dtype> {
            Dtype::ALL.into_iter().find(|&dtype| dtype as i32 == self.raw.dtype)
        }
        /// The tensor as the C ABI takes it.
        pub fn as_raw(&self) -> &sys::tandem_tensor {
            &self.raw
        }
        /// Describes memory that this crate knows nothing about, on a device or on the host.
        ///
        /// # Safety
        /// `raw` describes memory of the kind that it says. The memory stays valid for `'a` and, on a device, until the
        /// stream has passed every call that gets it. No other code writes it meanwhile. If it is an output, no other code
        /// reads it either.
        pub unsafe fn from_raw(raw: sys::tandem_tensor) -> Self {
            Self { raw, data: PhantomData }
        }
    };
}

impl<'a> TensorRef<'a> {
    /// A packed view of `shape`, in elements, from the start of `data`.
    ///
    /// # Errors
    /// [`Status::InvalidArgument`](crate::Status::InvalidArgument) if `data` is too short (`data`), or for no or more than
    /// four dimensions (`shape`).
    #[inline]
    pub fn new<T: Element>(data: &'a [T], shape: &[usize]) -> Result<Self> {
        Ok(Self { raw: view(data.as_ptr() as *mut T, data.len(), shape, None)?, data: PhantomData })
    }
    /// The same with strides, in elements. The last dimension's stride must be 1.
    ///
    /// # Errors
    /// As [`TensorRef::new`], and if the numbers of strides and dimensions differ (`strides`).
    #[inline]
    pub fn strided<T: Element>(data: &'a [T], shape: &[usize], strides: &[usize]) -> Result<Self> {
        Ok(Self { raw: view(data.as_ptr() as *mut T, data.len(), shape, Some(strides))?, data: PhantomData })
    }
    /// A view of indices. `i32` is no [`Element`], because no other tensor consists of it.
    #[inline]
    pub(crate) fn of_indices(data: &'a [i32], shape: &[usize], strides: Option<&[usize]>) -> Result<Self> {
        let (mut raw, span) = describe(shape, strides)?;
        check_span(data.len(), 1, span, shape, strides)?;
        raw.dtype = sys::TANDEM_I32;
        raw.data = data.as_ptr() as *mut c_void;
        Ok(Self { raw, data: PhantomData })
    }
    accessors!();
}

impl<'a> TensorMut<'a> {
    /// A packed view, as [`TensorRef::new`] makes it.
    ///
    /// # Errors
    /// As [`TensorRef::new`].
    #[inline]
    pub fn new<T: Element>(data: &'a mut [T], shape: &[usize]) -> Result<Self> {
        Ok(Self { raw: view(data.as_mut_ptr(), data.len(), shape, None)?, data: PhantomData })
    }
    /// A view with strides, as [`TensorRef::strided`] makes it.
    ///
    /// # Errors
    /// As [`TensorRef::strided`].
    #[inline]
    pub fn strided<T: Element>(data: &'a mut [T], shape: &[usize], strides: &[usize]) -> Result<Self> {
        Ok(Self { raw: view(data.as_mut_ptr(), data.len(), shape, Some(strides))?, data: PhantomData })
    }
    /// The same tensor for a shorter lifetime, so that it can be used again.
    pub fn reborrow(&mut self) -> TensorMut<'_> {
        TensorMut { raw: self.raw, data: PhantomData }
    }
    /// The same tensor for reading.
    pub fn as_ref(&self) -> TensorRef<'_> {
        TensorRef { raw: self.raw, data: PhantomData }
    }
    accessors!();
}

macro_rules! debug {
    ($($name:ident)+) => {$(
        impl std::fmt::Debug for $name<'_> {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                let (dtype, shape, strides) = (self.dtype(), self.shape(), self.strides());
                f.debug_struct(stringify!($name)).field("dtype", &dtype).field("shape", &shape).field("strides", &strides).finish()
            }
        }
    )+};
}
debug! { TensorRef TensorMut }

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::BlockQ8_0;

    fn refused(result: Result<TensorRef<'_>>, field: &str, value: &str) {
        let error = result.expect_err(value);
        assert_eq!((error.status(), error.field()), (crate::Status::InvalidArgument, field), "{error}");
        assert!(error.message().contains(value), "{error} does not say {value}");
    }

    #[test]
    fn views_reach_to_the_last_element_and_no_further() {
        let data = [0f32; 24];
        assert_eq!(TensorRef::new(&data, &[2, 3, 4]).unwrap().strides(), [12, 4, 1]);
        refused(TensorRef::new(&data, &[5, 5]), "data", "has 24 elements, shape [5, 5] reaches 25");
        assert!(TensorRef::strided(&data, &[2, 2, 4], &[16, 4, 1]).is_ok()); // the last element is 16 + 4 + 3 = 23
        refused(TensorRef::strided(&data, &[2, 2, 4], &[17, 4, 1]), "data", "strides [17, 4, 1] reaches 25");
        refused(TensorRef::strided(&data, &[2], &[24]), "data", "reaches 25");
    }

    #[test]
    fn views_without_elements_need_no_data() {
        let none: [f32; 0] = [];
        let tensor = TensorRef::new(&none, &[0, 8, 64]).unwrap();
        assert_eq!((tensor.shape(), tensor.strides()), (&[0i64, 8, 64][..], &[512i64, 64, 1][..]));
        refused(TensorRef::new(&none, &[1]), "data", "reaches 1");
    }

    #[test]
    fn numbers_that_overflow_are_refused() {
        let data = [0f32; 4];
        refused(TensorRef::new(&data, &[usize::MAX, 2]), "shape", "= [18446744073709551615, 2] is more than memory");
        refused(TensorRef::new(&data, &[1 << 40, 1 << 40]), "shape", "more than memory");
        refused(TensorRef::strided(&data, &[4, 1], &[usize::MAX / 2, 1]), "shape", "more than memory");
        refused(
            TensorRef::strided(&data, &[2, 1], &[usize::MAX / 2 + 1, 1]),
            "shape",
            "strides [9223372036854775808, 1] is more",
        );
        refused(TensorRef::strided(&data, &[0, 1], &[usize::MAX, 1]), "shape", "more than memory");
    }

    #[test]
    fn dimensions_are_counted() {
        let data = [0f32; 4];
        refused(TensorRef::new(&data, &[]), "shape", "[]");
        refused(TensorRef::new(&data, &[1; 5]), "shape", "1 to 4");
        refused(TensorRef::strided(&data, &[2, 2], &[1]), "strides", "2 dimensions");
    }

    #[test]
    fn blocks_are_counted_in_elements() {
        let blocks = [BlockQ8_0([0; 34]); 4];
        assert_eq!(TensorRef::new(&blocks, &[2, 64]).unwrap().dtype(), Some(Dtype::Q8_0));
        refused(TensorRef::new(&blocks, &[2, 65]), "data", "has 128 elements");
    }
}
