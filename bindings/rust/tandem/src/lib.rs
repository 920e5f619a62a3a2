// SPDX-License-Identifier: MIT
//! Attention over key/value caches larger than the GPU: the safe layer over Tandem's C ABI (`tandem-sys`).
//!
//! An [`Engine`] owns the processors. A [`Model`] holds the geometry of the layers. A [`Cache`] holds the keys and values of
//! many sequences. A [`Session`] says how they are attended; [`Session::attend`] is the call that does the work. Names and
//! options are those of `tandem/tandem.h`, which says more about each.
//!
//! ```
#![doc = include_str!("../examples/smallest.rs")]
//! ```
//!
//! # Ownership
//!
//! [`Engine`], [`Model`] and [`Cache`] are references that can be cloned. The library counts references, so a session keeps
//! its cache alive, and a cache its engine and model. Values may be dropped in any order.
//!
//! A [`SequenceId`] is a name, which can be copied. A [`Sequence`] owns its sequence and drops it with itself.
//!
//! # Options
//!
//! Option structs have public members and a setter for each: `SessionOptions::new().policy("hgca").window_tokens(512)`. They
//! are `#[non_exhaustive]`, because new versions add members, so other crates cannot write them as literals.
//!
//! # The library
//!
//! `tandem-sys` finds `libtandem.so` at build time: in `$TANDEM_LIB_DIR`, else through pkg-config. A program (`cargo run`
//! and `cargo test` too) needs the library again when it starts. If the loader does not search its folder, set
//! `LD_LIBRARY_PATH` to that folder. After an install to `/usr/local`, run `sudo ldconfig` once.
//!
//! # Threads
//!
//! | type | `Send` | `Sync` | why |
//! |---|---|---|---|
//! | [`Engine`], [`Model`], [`Weights`] | yes | yes | any thread may use them at any time |
//! | [`Cache`] | yes | yes | changes are serialised by the cache's writer lock |
//! | [`Sequence`] | yes | yes | a reference to its cache and a name |
//! | [`Session`] | yes | yes | one thread at a time: every call takes `&mut self` |
//! | [`Step`] | yes | yes | as the session that it borrows |
//! | [`WeightsBlock`] | yes | yes | a reference to weights, an address and a stream |
//! | [`TensorRef`], [`TensorMut`], [`Selection`] | yes | yes | as `&[T]` and `&mut [T]` |
//!
//! # Memory
//!
//! A tensor in host memory is a borrowed slice. Shape and strides are checked against the slice's length when the view is
//! made, so no safe call reads or writes outside of the slice. Device memory enters through `unsafe` functions
//! ([`TensorRef::from_raw`], [`TensorMut::from_raw`], [`Attend::on_stream`], [`Session::step_on`],
//! [`Projection::on_device`], [`Weights::block_on`]).
//!
//! # Errors
//!
//! Every call that can fail returns an [`Error`] with a [`Status`], the refused field, and a line that names field and
//! value. A failing call changes nothing. Panics in callbacks do not unwind into the library: see [`EngineOptions::log`] and
//! [`HostAllocator`].

#![warn(missing_docs, unsafe_op_in_unsafe_fn)] // the second is for Rust before 1.74, which does not read [lints]

#[macro_use]
mod setters;
mod attend;
mod attend_tensors;
mod cache;
mod callbacks;
mod dtype;
mod engine;
mod error;
mod handle;
mod model;
mod option_tables;
mod options;
mod patterns;
mod plan;
mod projection;
mod pruning;
mod raw;
mod saving;
mod selection;
mod sequence;
mod session;
mod stats;
mod tensor;
mod weights;

pub use attend::Attend;
pub use attend_tensors::AttendTensors;
pub use cache::{Cache, SequenceId};
pub use callbacks::{Allocator, HostAllocator, Log, LogLevel, Progress};
pub use dtype::{Bf16, BlockQ4_0, BlockQ4_64, BlockQ8_0, Dtype, E4m3, Element, F16};
pub use engine::{cpu_isa_available, cpu_isa_names, policy_names, version, Engine};
pub use error::{Error, Result, Status};
pub use model::Model;
pub use option_tables::{CacheOptions, SessionOptions};
pub use options::{EngineOptions, LayerOptions, Rope, Rotation};
pub use patterns::{HeadPattern, PatternFileOptions, PatternKinds, Patterns};
pub use plan::Plan;
pub use projection::{Norm, Projection, WeightOrder};
pub use pruning::{Judge, Pruning, PruningRecord, PruningStage};
pub use saving::{Loading, Saving};
pub use selection::Selection;
pub use sequence::Sequence;
pub use session::{Session, Step};
pub use stats::{CacheStats, MemoryPlan, RoutePlan, SessionStats, WeightsStats};
pub use tandem_sys as sys;
pub use tensor::{TensorMut, TensorRef};
pub use weights::{Weights, WeightsBlock, WeightsOptions};
