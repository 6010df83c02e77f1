//! Memory that a dma-buf names, that of another device for example.

#![forbid(unsafe_code)]

use std::fmt;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::registration::Registration;
use crate::error::{LimitError, SetupError};
use crate::memory::ExposedSlice;
use crate::memory::RemoteRegion;
use crate::types::Access;
use crate::verbs::ProtectionDomain;
use rdma_provider::contract::DmaBufRange;

/// Memory that a dma-buf names, registered without a mapping: that of a GPU, of a camera, of `/dev/udmabuf`.
///
/// Operations take [`slice`](Self::slice)s of it, and peers reach it as far as its access rights go, as they do an
/// [`ExposedRegion`](crate::memory::ExposedRegion). There are no methods to read or write its bytes: the processor may not reach
/// them at all, and who can map the descriptor does it as its exporter demands.
///
/// Real devices need Linux 5.12, rdma-core 34 and a driver that takes dma-bufs
/// ([`DeviceAttr::dma_buf`](crate::types::DeviceAttr::dma_buf)). The software device takes dma-bufs that can be mapped, and
/// `memfd_create(2)`s that are sealed against shrinking.
///
/// Dropping it (and all slices) revokes the access first and closes the descriptor after.
///
/// ```
/// use std::fs::File;
/// use std::os::unix::fs::FileExt;
/// use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
/// use tokio_rdma::Access;
/// use tokio_rdma::memory::DmaBufRegion;
/// # use tokio_rdma::{CompletionMode, CompletionQueue, Device, Pool, QueuePair};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let device = Device::software()?;
/// # let pd = device.protection_domain()?;
/// # let queue = CompletionQueue::new(&device, CompletionMode::Event)?;
/// # let pool = Pool::new(&pd, 64, 4)?;
/// # let qp = QueuePair::new(&pd, &queue)?;
/// # qp.connect(&qp.endpoint())?;
/// // The software device takes a sealed memfd; a real device needs a dma-buf.
/// let file = File::from(memfd_create("frame", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?);
/// file.set_len(4096)?;
/// fcntl_add_seals(&file, SealFlags::SHRINK)?;
/// let region = DmaBufRegion::new(&pd, file.try_clone()?.into(), 0..4096, Access::REMOTE_WRITE)?;
///
/// qp.write(pool.copy_from(b"hello")?, region.grant().slice(..5)?).await?;
/// let mut bytes = [0; 5];
/// file.read_exact_at(&mut bytes, 0)?;
/// assert_eq!(&bytes, b"hello");
/// # Ok(())
/// # }
/// ```
pub struct DmaBufRegion {
    inner: Arc<Registration>,
    access: Access,
}

impl DmaBufRegion {
    #[cfg(feature = "ibverbs")]
    pub(crate) fn registration(&self) -> &Registration {
        &self.inner
    }

    /// Registers bytes `range` of `fd` with the rights `access` (remote ones; local writing is always included). Peers and
    /// bare work requests count them from `range.start` on.
    ///
    /// # Errors
    ///
    /// [`SetupError::Unsupported`] if the device takes no dma-bufs, or `access` has more than remote rights (windows and
    /// on-demand paging are not for dma-bufs); [`SetupError::Limit`] if the range ends before it starts or is longer than a
    /// registration can be; [`SetupError::Verb`] as `ibv_reg_dmabuf_mr(3)`: EBADF or EINVAL for what is no dma-buf, EINVAL
    /// beyond its end.
    pub fn new(
        pd: &ProtectionDomain,
        fd: OwnedFd,
        range: Range<u64>,
        access: Access,
    ) -> Result<Self, SetupError> {
        let iova = range.start;
        Self::at(pd, fd, range, iova, access)
    }

    /// As [`new`](Self::new), counted from `iova` on: the address of the memory on the other device, for example.
    ///
    /// # Errors
    ///
    /// As [`new`](Self::new); EINVAL also if `iova` is at another place in its page than `range.start`, or the range wraps
    /// around from there.
    pub fn at(
        pd: &ProtectionDomain,
        fd: OwnedFd,
        range: Range<u64>,
        iova: u64,
        access: Access,
    ) -> Result<Self, SetupError> {
        let access = access | Access::LOCAL_WRITE;
        if !(Access::REMOTE_ALL | Access::LOCAL_WRITE).contains(access) {
            return Err(SetupError::Unsupported {
                what: "windows or on-demand paging of dma-bufs",
            });
        }
        LimitError::check("start of the range", range.start, range.end)?;
        let bytes = range.end - range.start;
        LimitError::check("registration bytes", bytes, isize::MAX as u64)?;
        let range = DmaBufRange { offset: range.start, len: bytes as usize, iova };
        Ok(Self { inner: Arc::new(Registration::of_dma_buf(pd, fd, range, access)?), access })
    }

    /// What peers may do.
    #[must_use]
    pub fn access(&self) -> Access {
        self.access
    }

    /// Bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.inner.len()
    }

    /// True without any byte.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Address and key of the whole region, to hand to a peer.
    ///
    /// Whoever knows them can use them over any queue pair of the same protection domain that allows remote access, until
    /// the region is dropped.
    #[must_use]
    pub fn grant(&self) -> RemoteRegion {
        RemoteRegion::new(self.inner.addr(), self.len() as u64, self.inner.rkey())
    }

    /// A part of the region, counted from its own start, as the local side of an operation: data to send, or room to read
    /// into.
    ///
    /// # Errors
    ///
    /// [`SetupError::Limit`] if the range ends before it starts, reaches beyond the region, or is longer than a
    /// scatter/gather element (2^32 - 1 bytes).
    pub fn slice(&self, range: Range<usize>) -> Result<ExposedSlice, SetupError> {
        ExposedSlice::new(&self.inner, range)
    }

    /// Revokes the access and gives the descriptor back.
    ///
    /// # Errors
    ///
    /// The region itself, if operations or slices still use it, or its registration does not end.
    pub fn into_fd(self) -> Result<OwnedFd, Self> {
        let access = self.access;
        let mut registration = match Arc::try_unwrap(self.inner) {
            Ok(registration) => registration,
            Err(inner) => return Err(Self { inner, access }),
        };
        match registration.end().map(|owner| owner.downcast::<OwnedFd>()) {
            Some(Ok(fd)) => Ok(*fd),
            _ => Err(Self { inner: Arc::new(registration), access }),
        }
    }
}

impl fmt::Debug for DmaBufRegion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DmaBufRegion")
            .field("len", &self.len())
            .field("access", &self.access)
            .field("rkey", &self.inner.rkey())
            .finish()
    }
}
