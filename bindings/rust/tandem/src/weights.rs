// SPDX-License-Identifier: MIT
//! Offloaded weights, for which the device has no room.
use crate::callbacks::LogEntry;
use crate::engine::Engine;
use crate::error::{call, Result};
use crate::handle::Handle;
use crate::stats::WeightsStats;
use std::ffi::c_void;
use std::mem::size_of;
use std::ptr;
use std::sync::Arc;
use tandem_sys as sys;

/// Configures offloaded weights. Zeros are defaults.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct WeightsOptions {
    /// Device memory for resident blocks, which are spread evenly over the order; 0: no block is resident.
    pub resident_bytes: i64,
    /// Device memory for the streamed blocks; 0: the largest sum of two neighbours, plus the largest block.
    pub buffer_bytes: i64,
    /// Hard cap on host memory; 0: none.
    pub host_cap_bytes: i64,
    /// Hard cap on device memory; 0: none.
    pub device_cap_bytes: i64,
}

setters! {
    WeightsOptions {
        resident_bytes: is i64,
        buffer_bytes: is i64,
        host_cap_bytes: is i64,
        device_cap_bytes: is i64,
    }
}

impl WeightsOptions {
    /// The defaults.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }
}

/// A model's weights when the device has no room for all. They are blocks of bytes, in the order in which a token uses them.
/// Some blocks stay on the device. The others cross the bus again and again, while the work before them computes. Any thread
/// may use them.
#[derive(Debug)]
pub struct Weights {
    handle: Handle<sys::tandem_weights>,
    _log: Option<Arc<LogEntry>>, // declared after the handle, so dropped after its release
}

impl Weights {
    /// Copies resident blocks to the device and the others to pinned host memory. Then it begins to send the first ones.
    ///
    /// # Errors
    /// `Unsupported` (the engine has no device), `InvalidArgument`, `OutOfMemory`, `Capacity`, `DeviceLost`.
    pub fn new(engine: &Engine, blocks: &[&[u8]], options: &WeightsOptions) -> Result<Self> {
        let data: Vec<*const c_void> = blocks.iter().map(|block| block.as_ptr().cast()).collect();
        let n_bytes: Vec<i64> = blocks.iter().map(|block| block.len() as i64).collect();
        let n_blocks = i32::try_from(blocks.len()).unwrap_or(i32::MAX); // the library refuses that many anyway
        let raw = sys::tandem_weights_options {
            struct_size: size_of::<sys::tandem_weights_options>() as u32,
            reserved: 0,
            resident_bytes: options.resident_bytes,
            buffer_bytes: options.buffer_bytes,
            host_cap_bytes: options.host_cap_bytes,
            device_cap_bytes: options.device_cap_bytes,
        };
        let handle = Handle::create(|weights, error| {
            let (data, n_bytes) = (data.as_ptr(), n_bytes.as_ptr());
            // SAFETY: a live handle; n_blocks addresses, each of n_bytes[i] bytes.
            unsafe { sys::tandem_weights_create(weights, engine.as_ptr(), data, n_bytes, n_blocks, &raw, error) }
        })?;
        Ok(Self { handle, _log: engine.log.clone() })
    }

    /// A block for work on the legacy default stream.
    ///
    /// # Errors
    /// `InvalidArgument` (`block_idx`), `InvalidState` (blocks in use leave no room for this one), `DeviceLost`.
    pub fn block(&self, block_idx: i32) -> Result<WeightsBlock<'_>> {
        // SAFETY: the legacy default stream always exists.
        unsafe { self.block_on(block_idx, ptr::null_mut()) }
    }

    /// A block for work on a CUDA stream.
    ///
    /// # Safety
    /// `stream` is a stream of the engine's device and lives as long as the block.
    ///
    /// # Errors
    /// As [`Weights::block`], and `InvalidState` (the stream is being captured).
    pub unsafe fn block_on(&self, block_idx: i32, stream: *mut c_void) -> Result<WeightsBlock<'_>> {
        let mut data = ptr::null_mut();
        // SAFETY: a live handle and a stream that the caller vouches for.
        call(|error| unsafe { sys::tandem_weights_use(&mut data, self.as_ptr(), block_idx, stream, error) })?;
        Ok(WeightsBlock { weights: Some(self), block_idx, data, stream })
    }

    /// Sums since the weights were created, and what they hold now.
    ///
    /// # Errors
    /// `InvalidState` in a child after fork().
    pub fn stats(&self) -> Result<WeightsStats> {
        let mut stats = WeightsStats::default().into_raw();
        // SAFETY: a live handle.
        call(|error| unsafe { sys::tandem_weights_get_stats(&mut stats, self.as_ptr(), error) })?;
        Ok(WeightsStats::from_raw(&stats))
    }

    /// The handle, for functions of `tandem-sys`. It is released when the weights are dropped.
    pub fn as_ptr(&self) -> *mut sys::tandem_weights {
        self.handle.get()
    }
}

/// A block in use, until it is dropped or [`done`](WeightsBlock::done). Only work that is on its stream by then may read the
/// block. After that work, its memory may be overwritten.
#[derive(Debug)]
#[must_use = "a block is in use until it is dropped"]
pub struct WeightsBlock<'w> {
    weights: Option<&'w Weights>,
    block_idx: i32,
    data: *mut c_void,
    stream: *mut c_void,
}

// SAFETY: a reference to weights, which any thread may use, an address and a stream handle.
unsafe impl Send for WeightsBlock<'_> {}
// SAFETY: nothing changes through a reference.
unsafe impl Sync for WeightsBlock<'_> {}

impl WeightsBlock<'_> {
    /// The block's address in device memory, 256-byte aligned, for later work on its stream.
    pub fn data(&self) -> *const c_void {
        self.data
    }
    /// Ends the use.
    ///
    /// # Errors
    /// `DeviceLost`.
    pub fn done(mut self) -> Result<()> {
        self.close()
    }
    fn close(&mut self) -> Result<()> {
        let weights = match self.weights.take() {
            Some(weights) => weights,
            None => return Ok(()),
        };
        // SAFETY: a live handle, and the stream that the use began on.
        call(|error| unsafe { sys::tandem_weights_done(weights.as_ptr(), self.block_idx, self.stream, error) })
    }
}

impl Drop for WeightsBlock<'_> {
    fn drop(&mut self) {
        let _ = self.close(); // done() reports the error
    }
}
