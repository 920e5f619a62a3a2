// SPDX-License-Identifier: MIT
//! Options as plain structs: those of engines and layers, and helpers for the generated ones (option_tables.rs).
//!
//! Members have the names, meanings and numeric defaults of the C ABI. For each call, a struct is turned into its C
//! counterpart, which borrows from it.
use crate::callbacks::{Allocator, Log, LogEntry};
use crate::error::{Error, Result};
use crate::projection::Projection;
use std::ffi::CString;
use std::mem::size_of;
use std::os::raw::c_char;
use std::ptr;
use std::sync::Arc;
use std::time::Duration;
use tandem_sys as sys;

/// How keys and queries are rotated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(i32)]
#[non_exhaustive]
pub enum Rope {
    /// Keys and queries arrive ready for use.
    #[default]
    Caller = sys::TANDEM_ROPE_CALLER,
    /// The library rotates: dim i pairs with i + `rope_dims` / 2.
    Halves = sys::TANDEM_ROPE_HALVES,
    /// The library rotates: dim 2 i pairs with 2 i + 1.
    Interleaved = sys::TANDEM_ROPE_INTERLEAVED,
}

/// The matrix by which keys are multiplied before they are rounded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(i32)]
#[non_exhaustive]
pub enum Rotation {
    /// `Hadamard` for 4-bit keys of layers that can be rotated and keep no hidden states, else `None`.
    #[default]
    Default = sys::TANDEM_ROTATION_DEFAULT,
    /// A Walsh-Hadamard matrix. Queries are multiplied too.
    Hadamard = sys::TANDEM_ROTATION_HADAMARD,
    /// No matrix.
    None = sys::TANDEM_ROTATION_NONE,
}

pub(crate) fn c_text(function: &str, field: &str, text: &str) -> Result<CString> {
    CString::new(text).map_err(|_| Error::refuse(function, field, format_args!("= {text:?} has a zero byte")))
}

pub(crate) fn c_texts(function: &str, field: &str, texts: &[String]) -> Result<Vec<CString>> {
    texts.iter().enumerate().map(|(i, text)| c_text(function, &format!("{field}[{i}]"), text)).collect()
}

fn c_text_or_null(field: &str, text: &Option<String>) -> Result<Option<CString>> {
    text.as_deref().map(|text| c_text("tandem_engine_create", field, text)).transpose()
}

fn or_null(text: &Option<CString>) -> *const c_char {
    text.as_ref().map_or(ptr::null(), |text| text.as_ptr())
}

/// Configures an engine: `EngineOptions::new().n_threads(8)`.
#[derive(Clone, Default)]
#[non_exhaustive]
pub struct EngineOptions {
    /// CPU workers, the calling thread included. 0: from the affinity mask and cgroup quota; with a backend, one CPU of four
    /// or more is left to the program's thread.
    pub n_threads: i32,
    /// `"amx"`, `"avx3"`, `"avx2"`, ...: exactly this instruction set; `None`: `$TANDEM_CPU_ISA`, else the best.
    pub cpu_isa: Option<String>,
    /// Device backend: `"cuda"`; `None`: the CPU does every part.
    pub backend: Option<String>,
    /// Absolute path of the backend's file. No other file is tried.
    pub backend_path: Option<String>,
    /// Host memory of caches and sessions; `None`: huge-page-friendly mappings.
    pub allocator: Option<Allocator>,
    /// Receives the library's messages; `None`: silent. It lives until the last [`Engine`](crate::Engine),
    /// [`Cache`](crate::Cache) and [`Session`](crate::Session) of this engine is dropped.
    pub log: Option<Log>,
    /// Time that idle workers spin before they sleep; `None`: 50 us.
    pub spin: Option<Duration>,
    /// Whether each worker is bound to a core; `None`: yes.
    pub pin_threads: Option<bool>,
    /// Fewest query rows of a KV head for matrix products in a call. 0: by instruction set, from a table, so that every
    /// process gets the same bits. -1: as the process's first such engine measures.
    pub matmul_rows: i32,
}

impl std::fmt::Debug for EngineOptions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut out = f.debug_struct("EngineOptions");
        out.field("n_threads", &self.n_threads).field("cpu_isa", &self.cpu_isa).field("backend", &self.backend);
        out.field("backend_path", &self.backend_path).field("allocator", &self.allocator);
        out.field("log", &self.log.as_ref().map(|log| Arc::as_ptr(log).cast::<()>())).field("spin", &self.spin);
        out.field("pin_threads", &self.pin_threads).field("matmul_rows", &self.matmul_rows);
        out.finish()
    }
}

setters! {
    EngineOptions {
        n_threads: is i32,
        cpu_isa: some_from String,
        backend: some_from String,
        backend_path: some_from String,
        allocator: some Allocator,
        log: some Log,
        spin: some Duration,
        pin_threads: some bool,
        matmul_rows: is i32,
    }
}

impl EngineOptions {
    /// The defaults.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

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

/// Geometry of one layer: `LayerOptions::new(8, 2, 64)`.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
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
    /// 0: off; else a query at position p sees keys at positions > p - `sliding_window_tokens`.
    pub sliding_window_tokens: i64,
    /// `[n_q_heads]` learned sink logits.
    pub sinks: Option<Vec<f32>>,
    /// Who rotates keys and queries, and how.
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
    /// How K and V are made of hidden states; `None`: they are not.
    pub projection: Option<Projection>,
}

/// A layer's C struct, and the projection that it points to.
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

setters! {
    LayerOptions {
        n_q_heads: is i32,
        n_kv_heads: is i32,
        k_head_dim: is i32,
        v_head_dim: is i32,
        v_aliases_k: is bool,
        sm_scale: is f32,
        soft_cap: is f32,
        sliding_window_tokens: is i64,
        sinks: some_from Vec<f32>,
        rope: is Rope,
        rope_dims: is i32,
        rope_theta: is f64,
        rope_position_scale: is f64,
        rope_inv_freq: some_from Vec<f32>,
        rope_attn_factor: is f64,
        projection: some Projection,
    }
}

impl LayerOptions {
    /// A layer with these heads; other members are defaults.
    #[must_use]
    pub fn new(n_q_heads: i32, n_kv_heads: i32, k_head_dim: i32) -> Self {
        Self { n_q_heads, n_kv_heads, k_head_dim, ..Self::default() }
    }

    /// The C structs, which point into `self`. Array lengths are checked.
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
            projection: crate::raw::or_null(projection.as_deref()),
        };
        Ok(RawLayer { raw, _projection: projection })
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::option_tables::{CacheOptions, SessionOptions};
    use std::mem::MaybeUninit;

    /// The struct as the library's init function fills it in.
    pub(crate) fn initialised<T>(init: unsafe extern "C" fn(*mut T)) -> T {
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
        assert!(session.policy.is_null() && session.route.is_null()); // NULL means "all" and "auto"
        let check = |raw: &sys::tandem_session_options| {
            (session.policy, session.route) = (raw.policy, raw.route);
            assert_eq!(format!("{raw:?}"), format!("{session:?}"));
            Ok(())
        };
        SessionOptions::default().with_raw(check).unwrap();
    }
}
