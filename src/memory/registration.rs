//! Memory and its registration, freed in the right order.

#![allow(unsafe_code)]

use std::any::Any;
use std::fmt;
use std::mem;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;

use crate::dispatch::Mr;
use crate::error::{LimitError, SetupError};
use crate::memory::Storage;
use crate::types::{Access, Lkey, Rkey};
use crate::verbs::ProtectionDomain;
use rdma_provider::contract::{DmaBufRange, Mr as _, Pd as _};

/// Registered memory with its owner: the registration ends before the memory is freed.
pub(crate) struct Registration {
    /// Dangling, if it is memory that programs do not reach.
    base: NonNull<u8>,
    /// What work and peers call the first byte.
    addr: u64,
    len: usize,
    lkey: Lkey,
    rkey: Rkey,
    /// `None` once it has ended.
    held: Option<(Mr, Box<dyn Any + Send>)>,
    pd: ProtectionDomain,
}

// SAFETY: S1: `base` names memory owned by `storage`, which is `Send`; who may touch it is decided by
// the buffer types, not by who holds the registration.
unsafe impl Send for Registration {}
// SAFETY: S2: a shared registration gives out addresses and keys only.
unsafe impl Sync for Registration {}

impl Registration {
    /// `shared`: not only the device reaches the bytes while work names them.
    pub(crate) fn new<S: Storage>(
        pd: &ProtectionDomain,
        storage: S,
        access: Access,
        shared: bool,
    ) -> Result<Self, SetupError> {
        let mut storage = Box::new(storage);
        let (base, len) = (storage.base(), storage.len());
        if access.contains(Access::ON_DEMAND) && !pd.device().attr().on_demand_paging {
            return Err(SetupError::Unsupported { what: "on-demand paging" });
        }
        LimitError::check("registration bytes", len as u64, pd.device().attr().max_mr_size)?;
        // SAFETY: S1: `storage` owns the bytes and moves into the same value as the registration, which
        // ends first. S2: `storage` is private and no reference to its bytes is made from here on but
        // by the buffer types, which keep to their rules.
        let raw = unsafe { pd.raw().register(base, len, access, shared) }?;
        tracing::debug!(base = ?base, len, ?access, lkey = %raw.lkey(), "registered");
        Ok(Self::made(pd, (base, base.addr().get() as u64, len), raw, storage))
    }

    /// Of what a dma-buf names.
    pub(crate) fn of_dma_buf(
        pd: &ProtectionDomain,
        fd: OwnedFd,
        range: DmaBufRange,
        access: Access,
    ) -> Result<Self, SetupError> {
        if !pd.device().attr().dma_buf {
            return Err(SetupError::Unsupported { what: "registration of dma-bufs" });
        }
        LimitError::check("registration bytes", range.len as u64, pd.device().attr().max_mr_size)?;
        let raw = pd.raw().register_dma_buf(fd.as_fd(), range, access)?;
        tracing::debug!(?fd, ?range, ?access, lkey = %raw.lkey(), "registered a dma-buf");
        Ok(Self::made(pd, (NonNull::dangling(), range.iova, range.len), raw, Box::new(fd)))
    }

    fn made(
        pd: &ProtectionDomain,
        (base, addr, len): (NonNull<u8>, u64, usize),
        raw: Mr,
        storage: Box<dyn Any + Send>,
    ) -> Self {
        Self {
            base,
            addr,
            len,
            lkey: raw.lkey(),
            rkey: raw.rkey(),
            held: Some((raw, storage)),
            pd: pd.clone(),
        }
    }

    /// First byte, of memory that programs reach.
    pub(crate) fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// What work and peers call the first byte.
    pub(crate) fn addr(&self) -> u64 {
        self.addr
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn lkey(&self) -> Lkey {
        self.lkey
    }

    pub(crate) fn rkey(&self) -> Rkey {
        self.rkey
    }

    /// The provider's number of it.
    pub(crate) fn handle(&self) -> usize {
        self.held.as_ref().map_or(0, |(raw, _)| raw.handle())
    }

    /// The provider's object.
    #[cfg(feature = "ibverbs")]
    pub(crate) fn raw(&self) -> Option<&Mr> {
        self.held.as_ref().map(|(raw, _)| raw)
    }

    pub(crate) fn pd(&self) -> &ProtectionDomain {
        &self.pd
    }

    /// True if the memory is owned by an `S`.
    pub(crate) fn holds<S: Any>(&self) -> bool {
        self.held.as_ref().is_some_and(|(_, storage)| storage.is::<S>())
    }

    /// Ends the registration and gives the memory back; `None` if it does not end and the device may go on using it.
    pub(crate) fn end(&mut self) -> Option<Box<dyn Any + Send>> {
        let (raw, _) = self.held.as_mut()?;
        if let Err(error) = raw.deregister() {
            tracing::error!(%error, len = self.len, "a registration does not end");
            return None;
        }
        self.held.take().map(|(_, storage)| storage)
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        // Nothing is held any more once the memory was taken back.
        if self.held.is_some() && self.end().is_none() {
            // Better leaked than freed under the eyes of a device.
            mem::forget(self.held.take());
            // The number of its protection domain must not become that of another, which would reach it.
            mem::forget(self.pd.clone());
        }
    }
}

impl fmt::Debug for Registration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Registration")
            .field("base", &self.base)
            .field("len", &self.len)
            .field("lkey", &self.lkey)
            .finish_non_exhaustive()
    }
}
