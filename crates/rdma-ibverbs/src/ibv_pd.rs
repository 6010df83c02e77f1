//! Protection domains: `ibv_alloc_pd(3)`.

#![allow(unsafe_code)]

use std::ffi::c_int;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::NonNull;

use crate::ffi::*;

use super::ibv_ah::Ah;
use super::ibv_mr::{Mr, Mw};
use super::ibv_qp::Qp;
use super::ibv_srq::Srq;
use super::mlx5::dc::Dct;
use super::mlx5::direct::Registers;
use super::posting::Posting;
use super::vendor::empty_receive;
use super::{Ibverbs, convert, sys};
use rdma_provider::VerbError;
use rdma_provider::contract::{self, DctInit, DmaBufRange, NoDct, QpInit};
use rdma_provider::types::{Access, AddressVector, DeviceAttr, ScatterToCqe, SrqCaps};

/// The error of a kernel whose verbs interface lacks a method, `errno(3)`.
const EPROTONOSUPPORT: i32 = 93;

/// A protection domain, `ibv_pd`.
#[derive(Debug)]
pub struct Pd {
    raw: NonNull<ibv_pd>,
    /// The device's attributes, which limit queue pairs and address handles.
    device: DeviceAttr,
    /// How its queue pairs and shared receive queues post.
    posting: Posting,
    /// The doorbell registers of queue pairs that post directly.
    registers: Registers,
}

// SAFETY: S3: libibverbs is thread-safe; the handle is not used after `Drop`.
unsafe impl Send for Pd {}
// SAFETY: S3: as above.
unsafe impl Sync for Pd {}

impl Pd {
    /// Returns the C library's handle, which is valid while this object lives.
    ///
    /// Unsafe calls with it must neither destroy nor change it.
    #[must_use]
    pub const fn as_raw(&self) -> NonNull<ibv_pd> {
        self.raw
    }

    pub(super) fn new(
        context: NonNull<ibv_context>,
        device: DeviceAttr,
        posting: Posting,
    ) -> Result<Self, VerbError> {
        // SAFETY: S3: the context is open.
        let raw = sys::handle("ibv_alloc_pd", unsafe { ibv_alloc_pd(context.as_ptr()) })?;
        Ok(Self { raw, device, posting, registers: Registers::default() })
    }

    /// Calls `ibv_reg_dmabuf_mr(3)`.
    fn reg_dma_buf(&self, fd: c_int, range: DmaBufRange, access: Access) -> Result<Mr, VerbError> {
        let DmaBufRange { offset, len, iova } = range;
        let flags = convert::access_flags(access) as i32;
        // SAFETY: S3: the protection domain is alive; the kernel validates the descriptor.
        let raw = unsafe { ibv_reg_dmabuf_mr(self.raw.as_ptr(), offset, len, iova, fd, flags) };
        Ok(Mr::new(sys::handle("ibv_reg_dmabuf_mr", raw)?))
    }

    /// Returns true if the device registers dma-bufs.
    ///
    /// No verb reports this, so it is probed with an invalid descriptor. With support, the error is
    /// about the descriptor (EBADF).
    pub(super) fn supports_dma_bufs(&self) -> bool {
        let nothing = DmaBufRange { offset: 0, len: 4096, iova: 0 };
        match self.reg_dma_buf(-1, nothing, Access::LOCAL_WRITE) {
            Ok(_) => true,
            // The library, the kernel or the driver lacks support.
            Err(error) => {
                !matches!(error.errno, VerbError::EOPNOTSUPP | VerbError::ENOSYS | EPROTONOSUPPORT)
            }
        }
    }
}

impl contract::Pd<Ibverbs> for Pd {
    unsafe fn register(
        &self,
        addr: NonNull<u8>,
        len: usize,
        iova: u64,
        access: Access,
        _shared: bool,
    ) -> Result<Mr, VerbError> {
        let (flags, memory) = (convert::access_flags(access), addr.as_ptr().cast());
        // The function behind the macros `ibv_reg_mr` and `ibv_reg_mr_iova`. It removes optional
        // flags that the kernel does not know.
        // SAFETY: S1, S2: the caller keeps the range allocated and unaliased; the domain is alive.
        let raw = unsafe { ibv_reg_mr_iova2(self.raw.as_ptr(), memory, len, iova, flags) };
        Ok(Mr::new(sys::handle("ibv_reg_mr", raw)?))
    }

    fn register_dma_buf(
        &self,
        fd: BorrowedFd<'_>,
        range: DmaBufRange,
        access: Access,
    ) -> Result<Mr, VerbError> {
        self.reg_dma_buf(fd.as_raw_fd(), range, access)
    }

    fn create_qp(&self, init: &QpInit<'_, Ibverbs>) -> Result<Qp, VerbError> {
        Qp::new(self.raw, init, &self.device, self.posting, &self.registers)
    }

    fn create_dct(&self, init: &DctInit<'_, Ibverbs>) -> Result<Dct, VerbError> {
        if self.device.dc.is_none() {
            return Err(NoDct::REFUSED);
        }
        let flags =
            self.posting.direct().and_then(|direct| direct.create_flags(ScatterToCqe::Receives));
        Dct::new(self.raw, init, flags)
    }

    fn create_mw(&self) -> Result<Mw, VerbError> {
        // SAFETY: S3: the domain is alive.
        let raw = unsafe { ibv_alloc_mw(self.raw.as_ptr(), ibv_mw_type::IBV_MW_TYPE_2) };
        Ok(Mw::new(sys::handle("ibv_alloc_mw", raw)?))
    }

    fn create_srq(&self, caps: SrqCaps) -> Result<Srq, VerbError> {
        Srq::new(self.raw, caps, self.posting.direct(), empty_receive(&self.device))
    }

    fn create_ah(&self, address: &AddressVector) -> Result<Ah, VerbError> {
        // For an invalid port, libmlx5 fails without setting `errno`.
        if !(1..=self.device.ports).contains(&address.port.0) {
            return Err(VerbError::new("ibv_create_ah", VerbError::EINVAL));
        }
        Ah::new(self.raw, address, self.posting.direct())
    }
}

impl Drop for Pd {
    fn drop(&mut self) {
        // Parent domains refer to this domain, so they are deallocated first.
        drop(std::mem::take(&mut self.registers));
        // SAFETY: S3: created by this object; everything created from it is gone.
        sys::log_failure("ibv_dealloc_pd", unsafe { ibv_dealloc_pd(self.raw.as_ptr()) });
    }
}
