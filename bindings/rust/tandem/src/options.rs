// SPDX-License-Identifier: MIT
//! Options as plain structs: `SessionOptions { policy: "hgca".into(), ..Default::default() }`.
//!
//! Members have the names and meanings of the C ABI, and numbers its defaults. Each struct is turned into its C counterpart,
//! which borrows from it, for the time of one call.
use crate::callbacks::{Allocator, Log, LogEntry};
use crate::dtype::Dtype;
use crate::error::{Error, Result};
use crate::projection::Projection;
use std::ffi::{c_char, CString};
use std::mem::size_of;
use std::ptr;
use std::sync::Arc;
use std::time::Duration;
use tandem_sys as sys;

/// How keys and queries are rotated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(i32)]
#[non_exhaustive]
pub enum Rope {
    /// Keys and queries arrive as they are to be used.
    #[default]
    Caller = sys::TANDEM_ROPE_CALLER,
    /// Rotated by the library: dim i pairs with i + rope_dims / 2.
    Halves = sys::TANDEM_ROPE_HALVES,
    /// Likewise: dim 2 i pairs with 2 i + 1.
    Interleaved = sys::TANDEM_ROPE_INTERLEAVED,
}

/// What keys are multiplied by before they are rounded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(i32)]
#[non_exhaustive]
pub enum Rotation {
    /// `Hadamard` for keys in 4 bits where a layer's keys can be rotated and its hidden states are not kept, else `None`.
    #[default]
    Default = sys::TANDEM_ROTATION_DEFAULT,
    /// A Walsh-Hadamard matrix; queries follow.
    Hadamard = sys::TANDEM_ROTATION_HADAMARD,
    /// Nothing.
    None = sys::TANDEM_ROTATION_NONE,
}

fn c_text(function: &str, field: &str, text: &str) -> Result<CString> {
    CString::new(text).map_err(|_| Error::refuse(function, field, format_args!("= {text:?} has a zero byte")))
}

fn c_text_or_null(field: &str, text: &Option<String>) -> Result<Option<CString>> {
    text.as_deref().map(|text| c_text("tandem_engine_create", field, text)).transpose()
}

fn or_null(text: &Option<CString>) -> *const c_char {
    text.as_ref().map_or(ptr::null(), |text| text.as_ptr())
}

/// How an engine is made.
#[derive(Clone, Default)]
pub struct EngineOptions {
    /// CPU workers, the calling thread included; 0: affinity mask and cgroup quota decide, and with a
    /// backend one CPU of four or more is left to the program's thread.
    pub n_threads: i32,
    /// `"amx"`, `"avx3"`, `"avx2"`, ...: exactly this instruction set; `None`: `$TANDEM_CPU_ISA`, else the best.
    pub cpu_isa: Option<String>,
    /// Device backend: `"cuda"`; `None`: the CPU does every part.
    pub backend: Option<String>,
    /// Absolute path of the backend's file, the only one tried.
    pub backend_path: Option<String>,
    /// Host memory of caches and sessions; `None`: huge-page-friendly mappings.
    pub allocator: Option<Allocator>,
    /// Gets the library's messages; `None`: silent. It lives until the last [`Engine`](crate::Engine),
    /// [`Cache`](crate::Cache) and [`Session`](crate::Session) made from this engine is dropped.
    pub log: Option<Log>,
    /// How long idle workers spin before they sleep; `None`: 50 us.
    pub spin: Option<Duration>,
    /// Whether each worker is bound to a core; `None`: yes.
    pub pin_threads: Option<bool>,
    /// Query rows of a KV head from which a call goes through matrix products; 0: as the process's first engine measures.
    pub matmul_rows: i32,
}

impl std::fmt::Debug for EngineOptions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut out = f.debug_struct("EngineOptions");
        out.field("n_threads", &self.n_threads).field("cpu_isa", &self.cpu_isa).field("backend", &self.backend);
        out.field("spin", &self.spin).field("pin_threads", &self.pin_threads).field("matmul_rows", &self.matmul_rows);
        out.finish_non_exhaustive()
    }
}

impl EngineOptions {
    /// Calls `function` with the C struct.
    pub(crate) fn with_raw<R>(
        &self,
        log: Option<&Arc<LogEntry>>,
        function: impl FnOnce(&sys::tandem_engine_options) -> Result<R>,
    ) -> Result<R> {
        let cpu_isa = c_text_or_null("cpu_isa", &self.cpu_isa)?;
        let backend = c_text_or_null("backend", &self.backend)?;
        let backend_path = c_text_or_null("backend_path", &self.backend_path)?;
        let longest = i64::MAX as u128;
        function(&sys::tandem_engine_options {
            struct_size: size_of::<sys::tandem_engine_options>() as u32,
            n_threads: self.n_threads,
            cpu_isa: or_null(&cpu_isa),
            backend: or_null(&backend),
            backend_path: or_null(&backend_path),
            alloc: self.allocator.map(|allocator| allocator.alloc),
            free: self.allocator.map(|allocator| allocator.free),
            alloc_user: self.allocator.map_or(ptr::null_mut(), |allocator| allocator.user),
            log: log.map(|_| crate::callbacks::log_entry as sys::tandem_log_fn),
            log_user: log.map_or(ptr::null_mut(), |entry| entry.user()),
            spin_ns: self.spin.map_or(-1, |spin| spin.as_nanos().min(longest) as i64),
            pin_threads: self.pin_threads.map_or(-1, i32::from),
            matmul_rows: self.matmul_rows,
            run: None,
            run_user: ptr::null_mut(),
        })
    }
}

/// Geometry of one layer.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LayerOptions {
    /// A multiple of `n_kv_heads`.
    pub n_q_heads: i32,
    /// `n_q_heads`: MHA; 1: MQA.
    pub n_kv_heads: i32,
    /// 64, 80, 96, 112, 128, 192, 256; 576 with MLA.
    pub k_head_dim: i32,
    /// 0: `k_head_dim`.
    pub v_head_dim: i32,
    /// V is the first `v_head_dim` dims of K, stored and read once.
    pub v_aliases_k: bool,
    /// 0: 1 / sqrt(`k_head_dim`).
    pub sm_scale: f32,
    /// 0: off.
    pub soft_cap: f32,
    /// 0: off; else a query at position p sees keys at positions > p - this.
    pub sliding_window_tokens: i64,
    /// `[n_q_heads]` learned sink logits.
    pub sinks: Option<Vec<f32>>,
    /// Who rotates.
    pub rope: Rope,
    /// Rotated leading dims, even; 0: `k_head_dim`.
    pub rope_dims: i32,
    /// 0: 10000.
    pub rope_theta: f64,
    /// 0: 1.
    pub rope_position_scale: f64,
    /// `[rope_dims / 2]`; `None`: from `rope_theta`.
    pub rope_inv_freq: Option<Vec<f32>>,
    /// 0: 1.
    pub rope_attn_factor: f64,
    /// How K and V come from hidden states; `None`: they are not to be made of them.
    pub projection: Option<Projection>,
}

/// A layer's C struct, and the one that it points to.
pub(crate) struct RawLayer {
    pub(crate) raw: sys::tandem_layer_options,
    _projection: Option<Box<sys::tandem_layer_projection>>,
}

pub(crate) fn array<'a, T>(field: &str, values: &'a Option<Vec<T>>, expected: i64, what: &str) -> Result<Option<&'a [T]>> {
    match values.as_deref() {
        Some(values) if values.len() as i64 != expected => {
            let n = values.len();
            Err(Error::refuse("tandem", field, format_args!("has {n} values, must have {what} = {expected}")))
        }
        values => Ok(values),
    }
}

pub(crate) fn pointer<T>(values: Option<&[T]>) -> *const T {
    values.map_or(ptr::null(), <[T]>::as_ptr)
}

impl LayerOptions {
    /// The C structs, which point into `self`. Arrays have the lengths that the library takes them to have.
    pub(crate) fn raw(&self) -> Result<RawLayer> {
        let projection = self.projection.as_ref().map(|projection| projection.raw(self)).transpose()?.map(Box::new);
        let rope_dims = if self.rope_dims == 0 { self.k_head_dim } else { self.rope_dims };
        let sinks = array("sinks", &self.sinks, self.n_q_heads.into(), "n_q_heads")?;
        let rope_inv_freq = array("rope_inv_freq", &self.rope_inv_freq, i64::from(rope_dims) / 2, "rope_dims / 2")?;
        let raw = sys::tandem_layer_options {
            struct_size: size_of::<sys::tandem_layer_options>() as u32,
            n_q_heads: self.n_q_heads,
            n_kv_heads: self.n_kv_heads,
            k_head_dim: self.k_head_dim,
            v_head_dim: self.v_head_dim,
            v_aliases_k: self.v_aliases_k.into(),
            sm_scale: self.sm_scale,
            soft_cap: self.soft_cap,
            sliding_window_tokens: self.sliding_window_tokens,
            sinks: pointer(sinks),
            rope: self.rope as i32,
            rope_dims: self.rope_dims,
            rope_theta: self.rope_theta,
            rope_position_scale: self.rope_position_scale,
            rope_inv_freq: pointer(rope_inv_freq),
            rope_attn_factor: self.rope_attn_factor,
            projection: projection.as_deref().map_or(ptr::null(), ptr::from_ref),
        };
        Ok(RawLayer { raw, _projection: projection })
    }
}

/// How keys and values are stored.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CacheOptions {
    /// Storage type of keys; `None`: bf16.
    pub k_type: Option<Dtype>,
    /// Storage type of values; `None`: `k_type`.
    pub v_type: Option<Dtype>,
    /// Tokens per page, a power of two from 16 to 4096; 0: 128.
    pub page_tokens: i32,
    /// Hard cap on pages, MAW and selections in host memory; 0: none.
    pub host_cap_bytes: i64,
    /// The same on windows and work space in device memory; 0: none.
    pub device_cap_bytes: i64,
    /// `[n_layers]`: overrides `k_type` per layer.
    pub layer_k_types: Option<Vec<Dtype>>,
    /// `[n_layers]`: overrides `v_type` per layer.
    pub layer_v_types: Option<Vec<Dtype>>,
    /// Rotation of keys before they are rounded.
    pub k_rotation: Rotation,
    /// f16, bf16, q8_0, q4_0 or q4_64: hidden states of layers with a projection are kept too, in this type, and every append
    /// brings them; `None`: none are.
    pub x_type: Option<Dtype>,
}

impl CacheOptions {
    /// The C struct, which points into `self`.
    pub(crate) fn raw(&self, n_layers: usize) -> Result<sys::tandem_cache_options> {
        let n = n_layers as i64;
        let k_types = array("layer_k_types", &self.layer_k_types, n, "n_layers")?;
        let v_types = array("layer_v_types", &self.layer_v_types, n, "n_layers")?;
        Ok(sys::tandem_cache_options {
            struct_size: size_of::<sys::tandem_cache_options>() as u32,
            k_type: self.k_type.map_or(0, |dtype| dtype as i32),
            v_type: self.v_type.map_or(0, |dtype| dtype as i32),
            page_tokens: self.page_tokens,
            host_cap_bytes: self.host_cap_bytes,
            device_cap_bytes: self.device_cap_bytes,
            layer_k_types: pointer(k_types).cast(), // Dtype is repr(i32)
            layer_v_types: pointer(v_types).cast(),
            k_rotation: self.k_rotation as i32,
            x_type: self.x_type.map_or(0, |dtype| dtype as i32),
        })
    }
}

/// How a cache is attended.
#[derive(Clone, Debug, PartialEq)]
pub struct SessionOptions {
    /// Whether the CPU workers may sleep between the calls of a step without a stream, for programs whose own threads compute on
    /// the same cores in between. Else they spin from the step's begin to its end.
    pub sleep_between_calls: bool,
    /// `"all"`, `"streaming"`, `"hgca"`: [`policy_names`](crate::policy_names).
    pub policy: String,
    /// Newest tokens, always attended, resident on the device; -1: 4096; 0: none.
    pub window_tokens: i64,
    /// First tokens, always attended; -1: 64; 0: none.
    pub sink_tokens: i64,
    /// MAW factor in (0, 1]; 0: 0.3.
    pub alpha: f32,
    /// MAW threshold factor, >= 0; -1: 1.
    pub beta: f32,
    /// Keys kept after a strongly attended one; -1: 128; 0: none.
    pub halo_tokens: i64,
    /// `"auto"`, `"host"`, `"stream"`, `"host+stream"`, `"recompute"`: who computes over keys outside the window for device
    /// tensors.
    pub route: String,
    /// Each of the two buffers that keys go through; 0: 16 MiB.
    pub stream_buffer_bytes: i64,
    /// With `"host+stream"`: the share of these keys that crosses the bus, 0 to 1; -1: not given.
    pub stream_fraction: f64,
    /// Most tokens of an append that meet a streamed key together; 0: 16,384, and plans have room for single queries alone.
    pub append_tokens: i64,
    /// KV heads of what is streamed at a time, at most; 0: as many as take the least time.
    pub stream_heads: i64,
    /// With `"recompute"`: the share, in (0, 1], of these keys that is made of hidden states; 0: 1.
    pub recompute_share: f64,
    /// Empty, or for each KV head of each layer, layer by layer, whether its queries see the first `sink_tokens` and the
    /// `window_tokens` newest alone.
    pub streaming_heads: Vec<bool>,
}

impl Default for SessionOptions {
    fn default() -> Self {
        Self {
            sleep_between_calls: false,
            policy: "all".to_string(),
            window_tokens: -1,
            sink_tokens: -1,
            alpha: 0.0,
            beta: -1.0,
            halo_tokens: -1,
            route: "auto".to_string(),
            stream_buffer_bytes: 0,
            stream_fraction: -1.0,
            append_tokens: 0,
            stream_heads: 0,
            recompute_share: 0.0,
            streaming_heads: Vec::new(),
        }
    }
}

impl SessionOptions {
    /// Calls `function` with the C struct.
    pub(crate) fn with_raw<R>(&self, function: impl FnOnce(&sys::tandem_session_options) -> Result<R>) -> Result<R> {
        let policy = c_text("tandem_session_create", "policy", &self.policy)?;
        let route = c_text("tandem_session_create", "route", &self.route)?;
        let flags: Vec<u8> = self.streaming_heads.iter().map(|&streams| streams.into()).collect();
        function(&sys::tandem_session_options {
            struct_size: size_of::<sys::tandem_session_options>() as u32,
            sleep_between_calls: self.sleep_between_calls.into(),
            policy: policy.as_ptr(),
            window_tokens: self.window_tokens,
            sink_tokens: self.sink_tokens,
            alpha: self.alpha,
            beta: self.beta,
            halo_tokens: self.halo_tokens,
            route: route.as_ptr(),
            stream_buffer_bytes: self.stream_buffer_bytes,
            stream_fraction: self.stream_fraction,
            append_tokens: self.append_tokens,
            stream_heads: self.stream_heads,
            recompute_share: self.recompute_share,
            streaming_heads: pointer(Some(&flags[..]).filter(|flags| !flags.is_empty())),
            n_streaming_heads: flags.len() as i64,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::MaybeUninit;

    /// What the library's init function fills in.
    fn initialised<T>(init: unsafe extern "C" fn(*mut T)) -> T {
        let mut options = MaybeUninit::uninit();
        // SAFETY: the function fills in the whole struct.
        unsafe {
            init(options.as_mut_ptr());
            options.assume_init()
        }
    }

    #[test]
    fn defaults_are_the_library_s() {
        let engine = format!("{:?}", initialised(sys::tandem_engine_options_init));
        let raw = EngineOptions::default().with_raw(None, |raw| Ok(format!("{raw:?}"))).unwrap();
        assert_eq!(raw, engine);
        let layer = format!("{:?}", initialised(sys::tandem_layer_options_init));
        assert_eq!(format!("{:?}", LayerOptions::default().raw().unwrap().raw), layer);
        let cache = format!("{:?}", initialised(sys::tandem_cache_options_init));
        assert_eq!(format!("{:?}", CacheOptions::default().raw(1).unwrap()), cache);
        let mut session = initialised(sys::tandem_session_options_init);
        assert!(session.policy.is_null() && session.route.is_null()); // which are "all" and "auto"
        let check = |raw: &sys::tandem_session_options| {
            (session.policy, session.route) = (raw.policy, raw.route);
            assert_eq!(format!("{raw:?}"), format!("{session:?}"));
            Ok(())
        };
        SessionOptions::default().with_raw(check).unwrap();
    }
}
