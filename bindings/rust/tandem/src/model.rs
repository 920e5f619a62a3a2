// SPDX-License-Identifier: MIT
//! The geometry of a model's layers.
use crate::engine::check_abi;
use crate::error::Result;
use crate::handle::Handle;
use crate::options::LayerOptions;
use std::sync::Arc;
use tandem_sys as sys;

/// The geometry of a model's layers. Clones are the same model; any thread may use it at any time.
#[derive(Clone, Debug)]
pub struct Model {
    handle: Arc<Handle<sys::tandem_model>>,
    n_layers: usize,
}

impl Model {
    /// A model of these layers.
    ///
    /// # Errors
    /// `InvalidArgument` (`layers[i].member`; `sinks` or `rope_inv_freq` with a wrong length), `Unsupported` (a
    /// `k_head_dim`, or a combination, without kernels).
    pub fn new(layers: &[LayerOptions]) -> Result<Self> {
        check_abi()?;
        let held = layers.iter().map(LayerOptions::raw).collect::<Result<Vec<_>>>()?;
        let raw: Vec<_> = held.iter().map(|layer| layer.raw).collect();
        let n_layers = i32::try_from(raw.len()).unwrap_or(i32::MAX); // the library refuses that many anyway
        let handle = Handle::create(|model, error| {
            // SAFETY: n_layers structs. Their arrays live in `layers` and `held` and have the lengths that the structs say.
            unsafe { sys::tandem_model_create(model, raw.as_ptr(), n_layers, error) }
        })?;
        Ok(Self { handle: Arc::new(handle), n_layers: layers.len() })
    }
    /// Number of layers.
    pub fn n_layers(&self) -> usize {
        self.n_layers
    }
    /// The handle, for functions of `tandem-sys`. It is released with the last clone.
    pub fn as_ptr(&self) -> *mut sys::tandem_model {
        self.handle.get()
    }
}
