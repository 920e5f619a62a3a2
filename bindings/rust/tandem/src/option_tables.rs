// SPDX-License-Identifier: MIT
// Made by tools/abi/generate.py from include/tandem/; not to be edited.
//! Options of caches and sessions: `SessionOptions::new().policy("hgca")`.
use crate::dtype::Dtype;
use crate::error::Result;
use crate::options::{array, c_text, c_texts, pointer, Rotation};
use crate::patterns::Patterns;
use crate::pruning::Pruning;
use crate::raw::or_null;
use std::mem::size_of;
use tandem_sys as sys;

/// How keys and values are stored.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct CacheOptions {
    /// Storage type of keys, not `q4_64`; `None`: bf16.
    pub k_type: Option<Dtype>,
    /// Storage type of values, not `q4_64`; `None`: `k_type`.
    pub v_type: Option<Dtype>,
    /// Tokens in a page, a power of two from 16 to 4096; 0: 128.
    pub page_tokens: i32,
    /// Hard cap on pages, MAW and selections in host memory (not on work space); 0: none.
    pub host_cap_bytes: i64,
    /// Hard cap on windows, buffers and work space in device memory (the driver's page tables are not counted); 0: none.
    pub device_cap_bytes: i64,
    /// `[n_layers]` or `None`: overrides `k_type` per layer.
    pub layer_k_types: Option<Vec<Dtype>>,
    /// `[n_layers]` or `None`: overrides `v_type` per layer.
    pub layer_v_types: Option<Vec<Dtype>>,
    /// Rotation of keys before rounding, in all layers.
    pub k_rotation: Rotation,
    /// The cache keeps hidden states in this type, for layers with a projection, and every append brings them: f16, bf16;
    /// `q8_0`, `q4_0`, `q4_64` if `hidden_dim` is a multiple of 64; `None`: none are kept.
    pub x_type: Option<Dtype>,
}

setters! {
    CacheOptions {
        k_type: some Dtype,
        v_type: some Dtype,
        page_tokens: is i32,
        host_cap_bytes: is i64,
        device_cap_bytes: is i64,
        layer_k_types: some_from Vec<Dtype>,
        layer_v_types: some_from Vec<Dtype>,
        k_rotation: is Rotation,
        x_type: some Dtype,
    }
}

impl CacheOptions {
    /// The defaults.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// The C struct, which points into `self`.
    pub(crate) fn raw(&self, n_layers: usize) -> Result<sys::tandem_cache_options> {
        let layer_k_types = array("layer_k_types", &self.layer_k_types, n_layers as i64, "n_layers")?;
        let layer_v_types = array("layer_v_types", &self.layer_v_types, n_layers as i64, "n_layers")?;
        Ok(sys::tandem_cache_options {
            struct_size: size_of::<sys::tandem_cache_options>() as u32,
            k_type: self.k_type.map_or(0, |dtype| dtype as i32),
            v_type: self.v_type.map_or(0, |dtype| dtype as i32),
            page_tokens: self.page_tokens,
            host_cap_bytes: self.host_cap_bytes,
            device_cap_bytes: self.device_cap_bytes,
            layer_k_types: pointer(layer_k_types).cast(),
            layer_v_types: pointer(layer_v_types).cast(),
            k_rotation: self.k_rotation as i32,
            x_type: self.x_type.map_or(0, |dtype| dtype as i32),
        })
    }
}

/// How a cache is attended.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct SessionOptions {
    /// `true`: in a step without a stream the CPU workers sleep between calls, after they have spun for `spin_ns`. Use it
    /// if the program's own threads compute on the same cores between calls, as PyTorch's do. `false`: they spin until the
    /// step ends.
    pub sleep_between_calls: bool,
    /// Default: "all"; or "streaming", "hgca", "hip", "patterns": which keys outside the window are attended.
    pub policy: String,
    /// Newest tokens, always attended, resident on the device; -1: 4096; 0: none. It does not change which keys "all"
    /// attends with host tensors. Under "hip" it only says where keys are: calls on device tensors need it as long as the
    /// longest sequence.
    pub window_tokens: i64,
    /// First tokens, always attended; -1: 64; 0: none. Not used under "hip": its records have their own.
    pub sink_tokens: i64,
    /// Default: "auto"; or "host", "stream", "host+stream", "recompute": who attends the keys outside the window, for
    /// device tensors.
    pub route: String,
    /// Most tokens of an append that are attended together: at most 32768, in layers of policy "hip" 2048; 0: 16384, and
    /// memory plans have room for single queries only, else for appends of `append_tokens`.
    pub append_tokens: i64,
    /// Names of policies, one for each layer; `None`: policy is for all layers. Use "all" where a layer's attention spreads
    /// over many keys.
    pub layer_policies: Vec<String>,
    /// "hgca": MAW factor in (0, 1]; 0: 0.3.
    pub alpha: f32,
    /// "hgca": MAW threshold factor, >= 0; -1: 1.
    pub beta: f32,
    /// "hgca": keys kept after a strongly attended one; -1: 128; 0: none, as in the paper.
    pub halo_tokens: i64,
    /// Size of each buffer through which keys, or hidden states in 16 bits, cross the bus; 0: 16 MiB.
    pub stream_buffer_bytes: i64,
    /// Share of the keys outside the window that crosses the bus, 0 to 1, for route "host+stream" alone; -1: not given.
    pub stream_fraction: f64,
    /// Most KV heads that are streamed at a time; 0: as many as take the least time.
    pub stream_heads: i64,
    /// Share of the keys outside the window that the device makes from hidden states, in (0, 1]; with route "recompute"; 0:
    /// 1.
    pub recompute_share: f64,
    /// Flags of the KV heads of all layers, layer by layer; `true`: the head's queries see the first `sink_tokens` and the
    /// newest `window_tokens` up to their own; `None`: none. For policy "all".
    pub streaming_heads: Vec<bool>,
    /// Most indices of a `tandem_selection`, per query and KV head, that planned steps have room for; 0: calls of planned
    /// steps name no keys. With it the CPU starts on a layer when its queries arrive, not with the step, as only they bring
    /// the keys.
    pub selection_indices: i64,
    /// What policy "hip" prunes (pruning.h); `None`: its defaults; INVALID_ARGUMENT if no layer has that policy. Read when
    /// the session is created.
    pub pruning: Option<Pruning>,
    /// What heads attend under policy "patterns" (patterns.h); `None` under others.
    pub patterns: Option<Patterns>,
}

impl Default for SessionOptions {
    fn default() -> Self {
        Self {
            sleep_between_calls: false,
            policy: "all".to_string(),
            window_tokens: -1,
            sink_tokens: -1,
            route: "auto".to_string(),
            append_tokens: 0,
            layer_policies: Vec::new(),
            alpha: 0.0,
            beta: -1.0,
            halo_tokens: -1,
            stream_buffer_bytes: 0,
            stream_fraction: -1.0,
            stream_heads: 0,
            recompute_share: 0.0,
            streaming_heads: Vec::new(),
            selection_indices: 0,
            pruning: None,
            patterns: None,
        }
    }
}

setters! {
    SessionOptions {
        sleep_between_calls: is bool,
        policy: from String,
        window_tokens: is i64,
        sink_tokens: is i64,
        route: from String,
        append_tokens: is i64,
        layer_policies: from Vec<String>,
        alpha: is f32,
        beta: is f32,
        halo_tokens: is i64,
        stream_buffer_bytes: is i64,
        stream_fraction: is f64,
        stream_heads: is i64,
        recompute_share: is f64,
        streaming_heads: from Vec<bool>,
        selection_indices: is i64,
        pruning: some Pruning,
        patterns: some Patterns,
    }
}

impl SessionOptions {
    /// The defaults.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Calls `function` with the C struct.
    pub(crate) fn with_raw<R>(&self, function: impl FnOnce(&sys::tandem_session_options) -> Result<R>) -> Result<R> {
        let policy = c_text("tandem_session_create", "policy", &self.policy)?;
        let route = c_text("tandem_session_create", "route", &self.route)?;
        let layer_policies = c_texts("tandem_session_create", "layer_policies", &self.layer_policies)?;
        let layer_policies_c = layer_policies.iter().map(|text| text.as_ptr()).collect::<Vec<_>>();
        let streaming_heads = self.streaming_heads.iter().map(|&flag| flag.into()).collect::<Vec<u8>>();
        let pruning = self.pruning.as_ref().map(Pruning::raw).transpose()?;
        let patterns = self.patterns.as_ref().map(Patterns::raw).transpose()?;
        function(&sys::tandem_session_options {
            struct_size: size_of::<sys::tandem_session_options>() as u32,
            sleep_between_calls: self.sleep_between_calls.into(),
            policy: policy.as_ptr(),
            window_tokens: self.window_tokens,
            sink_tokens: self.sink_tokens,
            route: route.as_ptr(),
            append_tokens: self.append_tokens,
            layer_policies: pointer(Some(&layer_policies_c[..]).filter(|texts| !texts.is_empty())),
            n_layer_policies: layer_policies_c.len() as i64,
            alpha: self.alpha,
            beta: self.beta,
            halo_tokens: self.halo_tokens,
            stream_buffer_bytes: self.stream_buffer_bytes,
            stream_fraction: self.stream_fraction,
            stream_heads: self.stream_heads,
            recompute_share: self.recompute_share,
            streaming_heads: pointer(Some(&streaming_heads[..]).filter(|flags| !flags.is_empty())),
            n_streaming_heads: streaming_heads.len() as i64,
            selection_indices: self.selection_indices,
            pruning: or_null(pruning.as_ref().map(|made| &made.raw)),
            patterns: or_null(patterns.as_ref().map(|made| &made.raw)),
        })
    }
}
