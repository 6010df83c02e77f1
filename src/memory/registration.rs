//! Registered memory, deregistered before it is freed.

#![allow(unsafe_code)]

use std::any::Any;
use std::fmt;
use std::mem;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;

use crate::dispatch::Mr;
use crate::error::{LimitError, SetupError};
use crate::memory::{HostMemory, RemoteRegion, Storage};
use crate::types::{Access, Lkey, Rkey};
use crate::verbs::ProtectionDomain;
use rdma_provider::contract::{DmaBufRange, Mr as _, Pd as _};

pub(crate) struct Registration {
    /// Dangling for a dma-buf, which is not mapped.
    base: NonNull<u8>,
    /// Work requests name each byte by its address in this process.
    named_by_address: bool,
    addr: u64,
    len: usize,
    lkey: Lkey,
    rkey: Rkey,
    held: Option<(Mr, Box<dyn Any + Send>)>,
    pd: ProtectionDomain,
}

// SAFETY: S1: `held` owns the memory at `base` and is `Send`. The buffer types decide which code
// may access the bytes.
unsafe impl Send for Registration {}
// SAFETY: S2: a shared registration exposes addresses and keys only.
unsafe impl Sync for Registration {}

impl Registration {
    /// If `shared`, the program may access the bytes while posted work requests use them.
    pub(crate) fn new<S: Storage>(
        pd: &ProtectionDomain,
        storage: S,
        access: Access,
        shared: bool,
    ) -> Result<Self, SetupError> {
        Self::at(pd, storage, None, access, shared)
    }

    /// The addresses are those of the memory unless `iova` is given.
    pub(crate) fn at<S: Storage>(
        pd: &ProtectionDomain,
        storage: S,
        iova: Option<u64>,
        access: Access,
        shared: bool,
    ) -> Result<Self, SetupError> {
        let mut storage = Box::new(storage);
        let (base, len) = (storage.base(), storage.len());
        let within_page = |address: u64| address % HostMemory::PAGE as u64;
        let address = base.addr().get() as u64;
        let addr = iova.unwrap_or(address);
        if addr != address && !pd.device().attr().iova {
            return Err(SetupError::Unsupported {
                what: "the device registers memory only at its own addresses (DeviceAttr::iova); \
                       use ExposedRegion::new",
            });
        }
        if within_page(addr) != within_page(address) {
            return Err(SetupError::Mismatch {
                what: "offsets within a page of the memory and of the addresses for it",
                ours: format!("{:#x}", within_page(address)),
                theirs: format!("{:#x}", within_page(addr)),
            });
        }
        if access.contains(Access::HUGE_PAGES) && !access.contains(Access::ON_DEMAND) {
            return Err(SetupError::Unsupported {
                what: "Access::HUGE_PAGES is for registrations with Access::ON_DEMAND",
            });
        }
        if access.contains(Access::ON_DEMAND) && !pd.device().attr().on_demand_paging {
            return Err(SetupError::Unsupported { what: "the device lacks on-demand paging" });
        }
        LimitError::check("registration bytes", len as u64, pd.device().attr().max_mr_size)?;
        LimitError::check("first address of the region", addr, u64::MAX - len as u64)?;
        // SAFETY: S1: `storage` owns the bytes and moves into the same value as the registration,
        // which is deregistered first. S2: `storage` is private; only the buffer types create
        // references to its bytes, by their rules.
        let raw = unsafe { pd.raw().register(base, len, addr, access, shared) }?;
        rdma_provider::debug!(base = ?base, len, ?access, lkey = %raw.lkey(), "registered memory");
        Ok(Self::assemble(pd, (Some(base), addr, len), raw, storage))
    }

    pub(crate) fn from_dma_buf(
        pd: &ProtectionDomain,
        fd: OwnedFd,
        range: DmaBufRange,
        access: Access,
    ) -> Result<Self, SetupError> {
        if !pd.device().attr().dma_buf {
            return Err(SetupError::Unsupported {
                what: "the device lacks registration of dma-bufs",
            });
        }
        LimitError::check("registration bytes", range.len as u64, pd.device().attr().max_mr_size)?;
        let raw = pd.raw().register_dma_buf(fd.as_fd(), range, access)?;
        rdma_provider::debug!(?fd, ?range, ?access, lkey = %raw.lkey(), "registered dma-buf");
        Ok(Self::assemble(pd, (None, range.iova, range.len), raw, Box::new(fd)))
    }

    fn assemble(
        pd: &ProtectionDomain,
        (base, addr, len): (Option<NonNull<u8>>, u64, usize),
        raw: Mr,
        storage: Box<dyn Any + Send>,
    ) -> Self {
        Self {
            base: base.unwrap_or(NonNull::dangling()),
            named_by_address: base.is_some_and(|base| base.addr().get() as u64 == addr),
            addr,
            len,
            lkey: raw.lkey(),
            rkey: raw.rkey(),
            held: Some((raw, storage)),
            pd: pd.clone(),
        }
    }

    pub(crate) fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// Returns true if work requests name each byte by its address in this process. A dma-buf is
    /// not mapped, so its bytes have none.
    pub(crate) fn is_named_by_address(&self) -> bool {
        self.named_by_address
    }

    pub(crate) fn addr(&self) -> u64 {
        self.addr
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn lkey(&self) -> Lkey {
        self.lkey
    }

    pub(crate) fn handle(&self) -> usize {
        self.held.as_ref().map_or(0, |(raw, _)| raw.handle())
    }

    #[cfg(feature = "ibverbs")]
    pub(crate) fn raw(&self) -> Option<&Mr> {
        self.held.as_ref().map(|(raw, _)| raw)
    }

    pub(crate) fn pd(&self) -> &ProtectionDomain {
        &self.pd
    }

    pub(crate) fn grant(&self) -> RemoteRegion {
        RemoteRegion::new(self.addr, self.len as u64, self.rkey)
    }

    pub(crate) fn check_range(&self, range: &Range<usize>) -> Result<(), LimitError> {
        let (start, end) = (range.start as u64, range.end as u64);
        LimitError::check("start of the range (its end)", start, end)?;
        LimitError::check("end of the range (bytes of the region)", end, self.len as u64)
    }

    /// Returns `None` if the memory is not an `S`, or if the device refuses and may still use it.
    pub(crate) fn take<S: Any>(&mut self) -> Option<S> {
        if !self.held.as_ref()?.1.is::<S>() {
            return None;
        }
        self.deregister()?.downcast().ok().map(|storage| *storage)
    }

    /// Returns `None` if the device refuses and may still use the memory.
    fn deregister(&mut self) -> Option<Box<dyn Any + Send>> {
        let (raw, _) = self.held.as_mut()?;
        if let Err(error) = raw.deregister() {
            rdma_provider::error!(
                %error,
                lkey = %self.lkey,
                len = self.len,
                "failed to deregister memory; leaking it"
            );
            return None;
        }
        self.held.take().map(|(_, storage)| storage)
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        if self.held.is_some() && self.deregister().is_none() {
            // The device may still access the memory.
            mem::forget(self.held.take());
            // The number of the protection domain must not be reused while the registration exists.
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
            .field("rkey", &self.rkey)
            .finish_non_exhaustive()
    }
}
