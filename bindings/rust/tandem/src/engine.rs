// SPDX-License-Identifier: MIT
//! The engine, and queries about the build and the machine.
use crate::attend_tensors::AttendTensors;
use crate::callbacks::LogEntry;
use crate::error::{call, static_text, text, Error, Result};
use crate::handle::Handle;
use crate::model::Model;
use crate::option_tables::{CacheOptions, SessionOptions};
use crate::options::{EngineOptions, LayerOptions};
use crate::plan::Plan;
use crate::raw::{address, or_null};
use crate::stats::MemoryPlan;
use crate::tensor::{TensorMut, TensorRef};
use std::ffi::CString;
use std::mem::size_of;
use std::ptr;
use std::sync::Arc;
use std::time::Duration;
use tandem_sys as sys;

/// The processors: a pool of CPU workers and, if a backend is named, a device. Clones are the same engine. Any thread may
/// use it at any time. Caches and sessions keep it alive.
#[derive(Clone, Debug)]
pub struct Engine {
    handle: Arc<Handle<sys::tandem_engine>>,
    pub(crate) log: Option<Arc<LogEntry>>,
}

/// Checks that the loaded library lays out its structs as these crates do.
pub(crate) fn check_abi() -> Result<()> {
    // SAFETY: takes and returns numbers.
    let fingerprint = unsafe { sys::tandem_abi_fingerprint(sys::TANDEM_VERSION_MINOR) };
    if fingerprint == sys::FINGERPRINT || size_of::<usize>() != 8 {
        return Ok(());
    }
    let (expected, minor) = (sys::FINGERPRINT, sys::TANDEM_VERSION_MINOR);
    // SAFETY: takes and returns numbers.
    let version = unsafe { sys::tandem_version() };
    let (major_there, minor_there) = (version >> 16, version >> 8 & 255);
    let what = format!(
        "({minor}) = {fingerprint:#x}, these bindings are for {expected:#x}: libtandem {major_there}.{minor_there} is loaded"
    );
    Err(Error::refuse("tandem", "tandem_abi_fingerprint", format_args!("{what}")))
}

impl Engine {
    /// Starts the CPU pool and loads the device backend if one is named.
    ///
    /// # Errors
    /// `NotFound` (`cpu_isa`), `Backend` (no module loads, each path with its reason), `System` (a thread could not be
    /// started), `OutOfMemory`, `InvalidArgument`.
    pub fn new(options: &EngineOptions) -> Result<Self> {
        check_abi()?;
        let log = options.log.clone().map(LogEntry::new);
        let handle = options.with_raw(log.as_ref(), |raw| {
            // SAFETY: texts live during the call; each callback takes the user pointer given with it.
            Handle::create(|engine, error| unsafe { sys::tandem_engine_create(engine, raw, error) })
        })?;
        Ok(Self { handle: Arc::new(handle), log })
    }

    /// Waits until background work has finished. `None`: for ever.
    ///
    /// # Errors
    /// `Timeout`.
    pub fn drain(&self, timeout: Option<Duration>) -> Result<()> {
        let timeout_ns = timeout.map_or(-1, |timeout| timeout.as_nanos().min(i64::MAX as u128) as i64);
        // SAFETY: a live handle.
        call(|error| unsafe { sys::tandem_engine_drain(self.as_ptr(), timeout_ns, error) })
    }

    /// Topology, workers, instruction set and backends as JSON.
    ///
    /// # Errors
    /// `OutOfMemory`.
    pub fn report(&self) -> Result<String> {
        text(|buffer, bytes, needed, error| {
            // SAFETY: a live handle and a buffer of `bytes` bytes.
            unsafe { sys::tandem_engine_report(buffer, bytes, needed, self.as_ptr(), error) }
        })
    }

    /// Computes o = softmax(logits) V and its lse over the caller's K and V, without a cache or a copy. Calls of one engine
    /// run one after another.
    ///
    /// # Errors
    /// `InvalidArgument` (shapes, strides, an output that overlaps an input), `Unsupported` (head dims without kernels,
    /// `q4_64`), `Capacity`, `OutOfMemory`, `Cancelled` (part of o and lse may be written).
    #[inline]
    pub fn attend_tensors(&self, args: AttendTensors<'_>) -> Result<()> {
        // SAFETY: a live handle; arrays have the lengths that the struct says; tensors are borrowed memory, outputs
        // exclusively.
        args.with_raw(|raw| call(|error| unsafe { sys::tandem_attend_tensors(self.as_ptr(), raw, error) }))
    }

    /// Merges states over disjoint keys: o `[n_tokens, n_heads, head_dim]` and lse `[n_tokens, n_heads]` of each.
    ///
    /// # Errors
    /// `InvalidArgument`: no states, or shapes and types that do not match.
    pub fn merge(
        &self,
        o_out: TensorMut<'_>,
        lse_out: TensorMut<'_>,
        states: &[(TensorRef<'_>, TensorRef<'_>)],
    ) -> Result<()> {
        self.merge_raw(o_out.as_raw(), lse_out.as_raw(), states.iter().map(|state| (state.0.as_raw(), state.1.as_raw())))
    }

    /// Merges `others` into the first state: `o` and `lse` are read and written.
    ///
    /// # Errors
    /// As [`Engine::merge`].
    pub fn merge_into(&self, o: TensorMut<'_>, lse: TensorMut<'_>, others: &[(TensorRef<'_>, TensorRef<'_>)]) -> Result<()> {
        let first = std::iter::once((o.as_raw(), lse.as_raw()));
        let others = others.iter().map(|state| (state.0.as_raw(), state.1.as_raw()));
        self.merge_raw(o.as_raw(), lse.as_raw(), first.chain(others))
    }

    fn merge_raw<'a>(
        &self,
        o_out: &sys::tandem_tensor,
        lse_out: &sys::tandem_tensor,
        states: impl Iterator<Item = (&'a sys::tandem_tensor, &'a sys::tandem_tensor)>,
    ) -> Result<()> {
        let (o, lse): (Vec<_>, Vec<_>) = states.map(|state| (address(state.0), address(state.1))).unzip();
        let n = i32::try_from(o.len())
            .map_err(|_| Error::refuse("tandem_merge", "n_states", format_args!("= {} is too large", o.len())))?;
        let (o, lse, none) = (o.as_ptr(), lse.as_ptr(), ptr::null_mut());
        // SAFETY: tensors of borrowed memory; n pointers in each array.
        call(|error| unsafe { sys::tandem_merge(o_out, lse_out, o, lse, n, self.as_ptr(), none, error) })
    }

    /// Plans the memory of a cache with one session and sequences of `kv_lens` tokens, without allocating any. `None`:
    /// defaults. If a cap would be exceeded, [`Plan::exceeds`] says so.
    ///
    /// # Errors
    /// Those of creating the cache and the session.
    pub fn plan_memory(
        &self,
        model: &Model,
        cache: Option<&CacheOptions>,
        session: Option<&SessionOptions>,
        kv_lens: &[i64],
    ) -> Result<Plan> {
        let cache = cache.map(|cache| cache.raw(model.n_layers())).transpose()?;
        with_session(session, |session| {
            let mut plan = MemoryPlan::default().into_raw();
            // SAFETY: live handles; structs and the array live during the call.
            let planned = call(|error| unsafe {
                let (lens, n) = (kv_lens.as_ptr(), kv_lens.len() as i64);
                sys::tandem_plan_memory(
                    &mut plan,
                    self.as_ptr(),
                    model.as_ptr(),
                    or_null(cache.as_ref()),
                    session,
                    lens,
                    n,
                    error,
                )
            });
            Plan::new(MemoryPlan::from_raw(&plan), planned)
        })
    }

    /// Checks whether the engine can serve such a layer, cache and session. `None` is not checked.
    ///
    /// # Errors
    /// The error that the create call would return, with the reason.
    pub fn supports(
        &self,
        layer: Option<&LayerOptions>,
        cache: Option<&CacheOptions>,
        session: Option<&SessionOptions>,
    ) -> Result<()> {
        let layer = layer.map(LayerOptions::raw).transpose()?;
        let cache = cache.map(|cache| cache.raw(1)).transpose()?;
        with_session(session, |session| {
            let layer = or_null(layer.as_ref().map(|layer| &layer.raw));
            // SAFETY: a live handle; structs live during the call.
            call(|why| unsafe { sys::tandem_supports(self.as_ptr(), layer, or_null(cache.as_ref()), session, why) })
        })
    }

    /// The handle, for functions of `tandem-sys`. It is released with the last clone.
    pub fn as_ptr(&self) -> *mut sys::tandem_engine {
        self.handle.get()
    }
}

fn with_session<R>(
    options: Option<&SessionOptions>,
    function: impl FnOnce(*const sys::tandem_session_options) -> Result<R>,
) -> Result<R> {
    match options {
        Some(options) => options.with_raw(|raw| function(raw)),
        None => function(ptr::null()),
    }
}

/// Major, minor and patch version of the loaded library.
pub fn version() -> (u32, u32, u32) {
    // SAFETY: returns a number.
    let version = unsafe { sys::tandem_version() };
    (version >> 16, version >> 8 & 0xff, version & 0xff)
}

/// Names of the policies.
pub fn policy_names() -> impl Iterator<Item = &'static str> {
    // SAFETY: a constant text, or NULL past the end.
    (0..).map_while(|idx| unsafe { static_text(sys::tandem_policy_name(idx)) })
}

/// Names of the instruction sets of this build, best first.
pub fn cpu_isa_names() -> impl Iterator<Item = &'static str> {
    // SAFETY: a constant text, or NULL past the end.
    (0..).map_while(|idx| unsafe { static_text(sys::tandem_cpu_isa_name(idx)) })
}

/// Returns whether this processor has the named instruction set.
pub fn cpu_isa_available(name: &str) -> bool {
    // SAFETY: a text that lives during the call.
    CString::new(name).map_or(false, |name| unsafe { sys::tandem_cpu_isa_available(name.as_ptr()) } == 1)
}
