#![forbid(unsafe_code)]

use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::registration::Registration;
use crate::error::{LimitError, SetupError};
use crate::memory::{ExposedSlice, RemoteRegion};
use crate::types::Access;
use crate::verbs::ProtectionDomain;
use rdma_provider::contract::DmaBufRange;

/// Memory of a dma-buf (of a GPU, a camera, `/dev/udmabuf`), registered without a mapping.
///
/// Like an [`ExposedRegion`](crate::memory::ExposedRegion), but without access to its bytes, which
/// the processor may be unable to reach. A program that maps the descriptor must follow the rules
/// of its exporter.
///
/// Real devices need Linux 5.12, rdma-core 34 and a driver with support
/// ([`DeviceAttr::dma_buf`](crate::types::DeviceAttr::dma_buf)). The software device accepts
/// dma-bufs that can be mapped, and `memfd_create(2)` descriptors sealed against shrinking.
///
/// When the region and all slices are dropped, the access is revoked, then the descriptor closed.
///
/// ```
/// use std::fs::File;
/// use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
/// use tokio_rdma::Access;
/// use tokio_rdma::memory::DmaBufRegion;
/// # use tokio_rdma::Device;
///
/// # let device = Device::software()?;
/// # let pd = device.protection_domain()?;
/// // The software device takes a sealed memfd; a real device needs a dma-buf.
/// let file = File::from(memfd_create("frame", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?);
/// file.set_len(4096)?;
/// fcntl_add_seals(&file, SealFlags::SHRINK)?;
/// let region = DmaBufRegion::new(&pd, file.try_clone()?.into(), 0..4096, Access::REMOTE_WRITE)?;
/// assert_eq!(region.grant().len(), 4096);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct DmaBufRegion {
    inner: Arc<Registration>,
    access: Access,
}

impl DmaBufRegion {
    #[cfg(feature = "ibverbs")]
    pub(crate) fn registration(&self) -> &Registration {
        &self.inner
    }

    /// Registers bytes `range` of `fd` with remote rights `access` and local writes. Addresses of
    /// the region start at `range.start`.
    ///
    /// # Errors
    ///
    /// - [`SetupError::Unsupported`] if the device lacks dma-bufs, or `access` contains windows,
    ///   on-demand paging or huge pages.
    /// - [`SetupError::Limit`] if the range is reversed or too long for a registration.
    /// - [`SetupError::Verb`] of `ibv_reg_dmabuf_mr(3)`: EBADF or EINVAL if `fd` is not a dma-buf,
    ///   EINVAL if the range exceeds it.
    pub fn new(
        pd: &ProtectionDomain,
        fd: OwnedFd,
        range: Range<u64>,
        access: Access,
    ) -> Result<Self, SetupError> {
        let iova = range.start;
        Self::at(pd, fd, range, iova, access)
    }

    /// Like [`new`](Self::new), but with addresses from `iova`, for example those of the other
    /// device.
    ///
    /// # Errors
    ///
    /// As for `new`. Also EINVAL if `iova` and `range.start` differ in their offset within a page,
    /// or the addresses wrap around.
    pub fn at(
        pd: &ProtectionDomain,
        fd: OwnedFd,
        range: Range<u64>,
        iova: u64,
        access: Access,
    ) -> Result<Self, SetupError> {
        let access = access | Access::LOCAL_WRITE;
        let allowed = Access::REMOTE_ALL | Access::LOCAL_WRITE | Access::RELAXED_ORDERING;
        if !allowed.contains(access) {
            return Err(SetupError::Unsupported {
                what: "a dma-buf accepts no memory windows, on-demand paging or huge pages",
            });
        }
        LimitError::check("start of the range (its end)", range.start, range.end)?;
        let bytes = range.end - range.start;
        LimitError::check("registration bytes", bytes, isize::MAX as u64)?;
        let range = DmaBufRange { offset: range.start, len: bytes as usize, iova };
        Ok(Self { inner: Arc::new(Registration::from_dma_buf(pd, fd, range, access)?), access })
    }

    /// Returns the access rights.
    #[must_use]
    pub fn access(&self) -> Access {
        self.access
    }

    /// Returns the number of bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.inner.len()
    }

    /// Returns true if there are no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns address and key like [`ExposedRegion::grant`](crate::memory::ExposedRegion::grant).
    #[must_use]
    pub fn grant(&self) -> RemoteRegion {
        self.inner.grant()
    }

    /// Returns a part as local memory of an operation. `range` counts from the start of the region.
    ///
    /// # Errors
    ///
    /// As for [`ExposedRegion::slice`](crate::memory::ExposedRegion::slice): a dma-buf has
    /// addresses of its own.
    pub fn slice(&self, range: Range<usize>) -> Result<ExposedSlice, SetupError> {
        ExposedSlice::new(&self.inner, range)
    }

    /// Revokes the access and returns the descriptor.
    ///
    /// # Errors
    ///
    /// The region, if operations or slices still use it, or deregistration fails.
    pub fn into_fd(self) -> Result<OwnedFd, Self> {
        let access = self.access;
        match Arc::try_unwrap(self.inner) {
            Ok(mut registration) => {
                let fd = registration.take();
                fd.ok_or_else(|| Self { inner: Arc::new(registration), access })
            }
            Err(inner) => Err(Self { inner, access }),
        }
    }
}

#[cfg(all(test, not(loom), not(miri)))]
mod tests {
    use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};

    use super::*;
    use crate::software::Network;
    use crate::verbs::Device;

    #[test]
    fn bytes_of_a_dma_buf_are_not_named_by_address() {
        let pd = Device::software_in(&Network::new(), "one").unwrap().protection_domain().unwrap();
        let fd = memfd_create("tokio-rdma", MemfdFlags::ALLOW_SEALING).unwrap();
        ftruncate(&fd, 8192).unwrap();
        fcntl_add_seals(&fd, SealFlags::SHRINK).unwrap();
        // 1 is the address of a dangling pointer.
        for start in [0, 1] {
            let fd = fd.try_clone().unwrap();
            let region = DmaBufRegion::new(&pd, fd, start..4096, Access::REMOTE_READ);
            assert!(!region.unwrap().inner.is_named_by_address());
        }
    }
}
