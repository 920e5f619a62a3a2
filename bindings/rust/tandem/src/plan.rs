// SPDX-License-Identifier: MIT
//! Plans of memory, with the cap that they exceed, and of which processor attends a call.
use crate::error::{text, Error, Result, Status};
use crate::stats::{MemoryPlan, RoutePlan};
use tandem_sys as sys;

/// The result of [`Engine::plan_memory`](crate::Engine::plan_memory).
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Plan {
    /// Memory that will be held.
    pub memory: MemoryPlan,
    /// The error of the exceeded cap, if there is one.
    pub exceeds: Option<Error>,
}

impl Plan {
    /// Keeps a plan that exceeds a cap, which the library fills in too.
    pub(crate) fn new(memory: MemoryPlan, planned: Result<()>) -> Result<Self> {
        match planned {
            Ok(()) => Ok(Self { memory, exceeds: None }),
            Err(error) if error.status() == Status::Capacity => Ok(Self { memory, exceeds: Some(error) }),
            Err(error) => Err(error),
        }
    }

    /// The plan as JSON.
    ///
    /// # Errors
    /// `OutOfMemory`.
    pub fn report(&self) -> Result<String> {
        let raw = self.memory.into_raw();
        text(|buffer, bytes, needed, error| {
            // SAFETY: a struct and a buffer of `bytes` bytes.
            unsafe { sys::tandem_plan_report(buffer, bytes, needed, &raw, error) }
        })
    }
}

impl RoutePlan {
    /// The plan as JSON.
    ///
    /// # Errors
    /// `OutOfMemory`.
    pub fn report(&self) -> Result<String> {
        let raw = self.into_raw();
        text(|buffer, bytes, needed, error| {
            // SAFETY: a struct and a buffer of `bytes` bytes.
            unsafe { sys::tandem_route_report(buffer, bytes, needed, &raw, error) }
        })
    }
}
