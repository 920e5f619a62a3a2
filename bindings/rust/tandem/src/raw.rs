// SPDX-License-Identifier: MIT
//! Addresses for the C ABI, written for Rust 1.63. Newer versions have `ptr::from_ref` and its relatives.
use std::ptr;

pub(crate) fn address<T>(value: &T) -> *const T {
    value
}

pub(crate) fn address_mut<T>(value: &mut T) -> *mut T {
    value
}

pub(crate) fn or_null<T>(value: Option<&T>) -> *const T {
    value.map_or(ptr::null(), address)
}
