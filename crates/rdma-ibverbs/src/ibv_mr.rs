//! Memory regions and memory windows.

#![allow(unsafe_code)]

use std::ptr::NonNull;

use crate::ffi::*;

use super::owned::Owned;
use rdma_provider::VerbError;
use rdma_provider::contract;
use rdma_provider::types::{Lkey, Rkey};

/// A memory region, `ibv_mr`.
#[derive(Debug)]
pub struct Mr {
    raw: Owned<ibv_mr>,
}

impl Mr {
    /// Returns the C library's handle, which is valid while this object lives.
    ///
    /// Unsafe calls with it must neither deregister nor re-register it.
    #[must_use]
    pub const fn as_raw(&self) -> NonNull<ibv_mr> {
        self.raw.get()
    }

    pub(super) fn new(raw: NonNull<ibv_mr>) -> Self {
        // SAFETY: S3: just created; the layer above destroys its windows first.
        Self { raw: unsafe { Owned::new(raw) } }
    }
}

impl contract::Mr for Mr {
    fn lkey(&self) -> Lkey {
        // SAFETY: S3: the registration is alive.
        Lkey(unsafe { self.raw.get().as_ref().lkey })
    }

    fn rkey(&self) -> Rkey {
        // SAFETY: S3: the registration is alive.
        Rkey(unsafe { self.raw.get().as_ref().rkey })
    }

    fn handle(&self) -> usize {
        self.raw.get().as_ptr().expose_provenance()
    }

    fn deregister(&mut self) -> Result<(), VerbError> {
        self.raw.destroy()
    }
}

/// A memory window, `ibv_mw`.
#[derive(Debug)]
pub struct Mw {
    raw: Owned<ibv_mw>,
}

impl Mw {
    pub(super) fn new(raw: NonNull<ibv_mw>) -> Self {
        // SAFETY: S3: just created; a binding is not an object created from it.
        Self { raw: unsafe { Owned::new(raw) } }
    }
}

impl contract::Mw for Mw {
    fn rkey(&self) -> Rkey {
        // SAFETY: S3: the window is alive.
        Rkey(unsafe { self.raw.get().as_ref().rkey })
    }

    fn handle(&self) -> usize {
        self.raw.get().as_ptr().expose_provenance()
    }

    fn deallocate(&mut self) -> Result<(), VerbError> {
        self.raw.destroy()
    }
}
