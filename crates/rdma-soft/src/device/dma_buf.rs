//! Validation and mapping of dma-bufs.
//!
//! The mapping is coherent for system memory. It is not for memory that needs `DMA_BUF_IOCTL_SYNC`
//! around each access, whose exporters rarely permit mappings.

#![forbid(unsafe_code)]

use std::os::fd::BorrowedFd;

use memmap2::{MmapOptions, MmapRaw};
use rustix::fs::{SealFlags, fcntl_get_seals, fstat, fstatfs};

use rdma_provider::VerbError;
use rdma_provider::contract::DmaBufRange;

use crate::memory::PAGE;

/// `f_type` of a dma-buf, `linux/magic.h`.
const DMA_BUF_MAGIC: u64 = 0x444d_4142;

/// Maps `range` of a dma-buf, or of a `memfd_create(2)` with `F_SEAL_SHRINK`.
///
/// The seal, which `/dev/udmabuf` requires too, prevents accesses beyond the end of the file, which
/// raise SIGBUS.
///
/// # Errors
///
/// Returns an `errno(3)`.
pub(crate) fn map(fd: BorrowedFd<'_>, range: DmaBufRange) -> Result<MmapRaw, i32> {
    let os = |error: rustix::io::Errno| error.raw_os_error();
    let stays = match fcntl_get_seals(fd) {
        Ok(seals) => seals.contains(SealFlags::SHRINK),
        // No support for seals.
        Err(_) => fstatfs(fd).map_err(os)?.f_type as u64 == DMA_BUF_MAGIC,
    };
    let size = u64::try_from(fstat(fd).map_err(os)?.st_size).unwrap_or(0);
    let end = range.offset.checked_add(range.len as u64);
    let named = range.iova.checked_add(range.len as u64).is_some()
        && range.iova % PAGE == range.offset % PAGE;
    if !stays || !named || range.len == 0 || end.is_none_or(|end| end > size) {
        return Err(VerbError::EINVAL);
    }
    MmapOptions::new()
        .offset(range.offset)
        .len(range.len)
        .map_raw(&fd)
        .map_err(|error| error.raw_os_error().unwrap_or(VerbError::EINVAL))
}
