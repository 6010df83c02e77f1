#![allow(unsafe_code)]

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::registration::Registration;
use crate::error::{LimitError, OutOfBounds, SetupError};
use crate::verbs::ProtectionDomain;
use rdma_provider::shared_memory as shared;

use crate::memory::{RemoteRegion, Storage};
use crate::types::{Access, Sge};

/// Memory that peers may read, write or update atomically, within its access rights.
///
/// A peer may access the bytes at any time, so there are no references to them:
///
/// - [`read`](Self::read) and [`write`](Self::write) copy, perhaps only a part of a peer's
///   concurrent write.
/// - [`load`](Self::load) and [`store`](Self::store) access 8 bytes atomically.
/// - A peer's write is visible once a message that the peer sent later is received.
///
/// When the region, its slices and its [leases](crate::op::Lease) are dropped, the access is
/// revoked, then the memory freed. Peers' later operations fail with
/// [`REM_ACCESS_ERR`](crate::types::WcStatus::REM_ACCESS_ERR).
///
/// ```
/// use tokio_rdma::{Access, ExposedRegion};
/// # use tokio_rdma::Device;
///
/// # let pd = Device::open_default_or_software()?.protection_domain()?;
/// let region = ExposedRegion::new(&pd, vec![0; 4096], Access::REMOTE_READ)?;
/// region.write(0, b"hello")?;
/// region.store(8, 42)?;
/// // The peer needs these 20 bytes to read the region.
/// let grant = region.grant().to_bytes();
///
/// let bytes: Vec<u8> = region.into_storage().map_err(|_| "still in use")?;
/// assert_eq!((&bytes[..5], u64::from_ne_bytes(bytes[8..16].try_into()?)), (&b"hello"[..], 42));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct ExposedRegion {
    inner: Arc<Registration>,
    access: Access,
}

impl ExposedRegion {
    /// Exposes `memory` with remote rights `access`, and for local writes.
    ///
    /// # Errors
    ///
    /// [`SetupError`] if the memory has no bytes, or too many for a registration, the device does
    /// not support `access`, or a verb fails.
    pub fn new<S: Storage>(
        pd: &ProtectionDomain,
        memory: S,
        access: Access,
    ) -> Result<Self, SetupError> {
        Self::registered(pd, memory, None, access)
    }

    /// Like [`new`](Self::new), but peers address the memory from `iova`, `ibv_reg_mr_iova(3)`, for
    /// example from 0, so that they do not learn its address. With some devices,
    /// [`slice`](Self::slice) then fails.
    ///
    /// # Errors
    ///
    /// As for `new`, and:
    ///
    /// - [`SetupError::Mismatch`] if `iova` and the memory differ in their offset within a page of
    ///   4,096 bytes; [`HostMemory`](crate::memory::HostMemory) begins with a page;
    /// - [`SetupError::Limit`] if the addresses wrap around;
    /// - [`SetupError::Unsupported`] if the device [cannot](crate::types::DeviceAttr::iova).
    pub fn at<S: Storage>(
        pd: &ProtectionDomain,
        memory: S,
        iova: u64,
        access: Access,
    ) -> Result<Self, SetupError> {
        Self::registered(pd, memory, Some(iova), access)
    }

    fn registered<S: Storage>(
        pd: &ProtectionDomain,
        memory: S,
        iova: Option<u64>,
        access: Access,
    ) -> Result<Self, SetupError> {
        SetupError::at_least("bytes of the region", memory.len() as u64, 1)?;
        let access = access | Access::LOCAL_WRITE;
        // `shared` even without remote rights: several operations may use slices at once, while the
        // program reads and writes.
        Ok(Self { inner: Arc::new(Registration::at(pd, memory, iova, access, true)?), access })
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

    /// Returns address and key of the whole region. They give access over any queue pair of the
    /// protection domain that allows remote access, until the region is dropped. Use
    /// [`QueuePair::lease`](crate::QueuePair::lease) for one peer, a part, or a limited time.
    #[must_use]
    pub fn grant(&self) -> RemoteRegion {
        self.inner.grant()
    }

    /// Copies bytes from `offset` into `out`.
    ///
    /// # Errors
    ///
    /// [`OutOfBounds`]; nothing is copied.
    pub fn read(&self, offset: usize, out: &mut [u8]) -> Result<(), OutOfBounds> {
        OutOfBounds::check(offset as u64, out.len() as u64, self.len() as u64)?;
        // SAFETY: S2: the range lies within the registration and is only accessed atomically; `out`
        // is borrowed exclusively.
        unsafe {
            shared::load(self.inner.base().add(offset).as_ptr(), out.as_mut_ptr(), out.len())
        };
        Ok(())
    }

    /// Copies `bytes` to `offset`.
    ///
    /// # Errors
    ///
    /// [`OutOfBounds`]; nothing is copied.
    pub fn write(&self, offset: usize, bytes: &[u8]) -> Result<(), OutOfBounds> {
        OutOfBounds::check(offset as u64, bytes.len() as u64, self.len() as u64)?;
        // SAFETY: S2: the range lies within the registration and is only accessed atomically;
        // `bytes` is borrowed and therefore unchanged.
        unsafe {
            shared::store(bytes.as_ptr(), self.inner.base().add(offset).as_ptr(), bytes.len())
        };
        Ok(())
    }

    /// Reads the 8-byte word at `offset` with acquire ordering, in native byte order like remote
    /// atomics.
    ///
    /// # Errors
    ///
    /// [`OutOfBounds`] if the word is not within the region or not on an 8-byte boundary.
    pub fn load(&self, offset: usize) -> Result<u64, OutOfBounds> {
        Ok(self.word(offset)?.load(Ordering::Acquire))
    }

    /// Writes the 8-byte word at `offset` with release ordering.
    ///
    /// # Errors
    ///
    /// As for [`load`](Self::load).
    pub fn store(&self, offset: usize, value: u64) -> Result<(), OutOfBounds> {
        self.word(offset)?.store(value, Ordering::Release);
        Ok(())
    }

    fn word(&self, offset: usize) -> Result<&AtomicU64, OutOfBounds> {
        OutOfBounds::check(offset as u64, 8, self.len() as u64)?;
        let word = self.inner.base().as_ptr().wrapping_add(offset).cast::<u64>();
        if !word.is_aligned() {
            return Err(OutOfBounds { offset: offset as u64, len: 8, size: self.len() as u64 });
        }
        // SAFETY: S2: the word is within the registration, aligned and only accessed atomically;
        // the reference does not outlive the region.
        Ok(unsafe { AtomicU64::from_ptr(word) })
    }

    /// Returns a part as local memory of an operation.
    ///
    /// # Errors
    ///
    /// [`SetupError::Limit`] if the range is reversed, not within the region, or longer than 2^32 -
    /// 1 bytes. [`SetupError::Unsupported`] if the addresses of the region are not those of its
    /// memory, unless the device [places by key](crate::types::DeviceAttr::places_by_key).
    pub fn slice(&self, range: Range<usize>) -> Result<ExposedSlice, SetupError> {
        ExposedSlice::new(&self.inner, range)
    }

    pub(crate) fn registration(&self) -> &Arc<Registration> {
        &self.inner
    }

    /// Revokes the access and returns the memory.
    ///
    /// # Errors
    ///
    /// The region, if operations, slices or leases still use it, the memory is not an `S`, or
    /// deregistration fails.
    pub fn into_storage<S: Storage>(self) -> Result<S, Self> {
        let access = self.access;
        match Arc::try_unwrap(self.inner) {
            Ok(mut registration) => {
                let storage = registration.take();
                storage.ok_or_else(|| Self { inner: Arc::new(registration), access })
            }
            Err(inner) => Err(Self { inner, access }),
        }
    }
}

/// A part of an [`ExposedRegion`] or [`DmaBufRegion`](crate::memory::DmaBufRegion) as local memory
/// of an operation, which keeps the region registered.
#[derive(Debug, Clone)]
pub struct ExposedSlice {
    inner: Arc<Registration>,
    offset: usize,
    len: u32,
}

impl ExposedSlice {
    pub(crate) fn new(of: &Arc<Registration>, range: Range<usize>) -> Result<Self, SetupError> {
        if !of.is_named_by_address() && !of.pd().device().attr().places_by_key {
            return Err(SetupError::Unsupported {
                what: "with this device, memory with other addresses than its own is for peers, \
                       not for local use by operations",
            });
        }
        of.check_range(&range)?;
        LimitError::check("slice bytes", range.len() as u64, u64::from(u32::MAX))?;
        Ok(Self { inner: of.clone(), offset: range.start, len: range.len() as u32 })
    }

    /// Returns the number of bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len as usize
    }

    /// Returns true if there are no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub(crate) fn truncate(&mut self, len: usize) {
        self.len = self.len.min(u32::try_from(len).unwrap_or(u32::MAX));
    }

    /// Returns the slice as a scatter/gather element, see
    /// [`BufMut::sge`](crate::memory::BufMut::sge).
    #[must_use]
    pub fn sge(&self) -> Sge {
        Sge {
            addr: self.inner.addr() + self.offset as u64,
            length: self.len,
            lkey: self.inner.lkey(),
        }
    }

    pub(crate) fn registration(&self) -> &Registration {
        &self.inner
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::memory::HostMemory;
    use crate::software::Network;
    use crate::verbs::Device;

    #[test]
    fn region_without_bytes_is_refused() {
        let pd = Device::software_in(&Network::new(), "one").unwrap().protection_domain().unwrap();
        let error = ExposedRegion::new(&pd, Vec::new(), Access::REMOTE_READ).unwrap_err();
        assert_eq!(error.to_string(), "bytes of the region: 0 requested, at least 1 required");
    }

    #[test]
    fn address_at_another_offset_within_a_page_is_refused() {
        let pd = Device::software_in(&Network::new(), "one").unwrap().protection_domain().unwrap();
        let memory = HostMemory::zeroed(16).unwrap();
        let error = ExposedRegion::at(&pd, memory, 0x1_0010, Access::REMOTE_READ).unwrap_err();
        assert_eq!(
            error.to_string(),
            "offsets within a page of the memory and of the addresses for it do not match: 0x0 and \
             0x10"
        );
        let memory = HostMemory::zeroed(8192).unwrap();
        let error = ExposedRegion::at(&pd, memory, u64::MAX << 12, Access::REMOTE_READ);
        assert!(matches!(error, Err(SetupError::Limit(limit)) if limit.allowed == u64::MAX - 8192));
    }

    #[test]
    fn reversed_or_outside_slices_are_refused() {
        let pd = Device::software_in(&Network::new(), "one").unwrap().protection_domain().unwrap();
        let region = ExposedRegion::new(&pd, vec![0; 16], Access::empty()).unwrap();
        assert_eq!(region.slice(16..16).unwrap().len(), 0);
        #[expect(clippy::reversed_empty_ranges, reason = "that is the case under test")]
        let reversed = region.slice(8..4);
        for outside in [reversed, region.slice(8..17), region.slice(17..17)] {
            assert!(matches!(outside, Err(SetupError::Limit(_))), "{outside:?}");
        }
    }
}
