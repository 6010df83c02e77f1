//! Memory that peers may reach.

#![allow(unsafe_code)]

use std::any::Any;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::registration::Registration;
use crate::error::{LimitError, OutOfBounds, SetupError};
use crate::verbs::ProtectionDomain;
use rdma_provider::shared_memory as shared;

use crate::memory::{RemoteRegion, Storage};
use crate::types::{Access, Sge};

/// Memory that peers may read, write or change atomically, as far as its access rights go.
///
/// A peer may do so at any moment, so there is no reference to the bytes: they are read and written by
/// copies, which can see a peer's write half done, and in words of 8 bytes, which cannot. Order comes from
/// messages: what a peer wrote before it sent one is seen after that one was received.
///
/// Dropping the region (and all slices in flight, and all [leases](crate::op::Lease)) revokes the access first and frees the memory after; what
/// peers do with the key from then on fails at their side with
/// [`REM_ACCESS_ERR`](crate::types::WcStatus::REM_ACCESS_ERR).
///
/// ```
/// use tokio_rdma::{Access, ExposedRegion, RemoteRegion};
/// # use tokio_rdma::Device;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let device = Device::open_default()?;
/// # let pd = device.protection_domain()?;
/// let region = ExposedRegion::new(&pd, vec![0; 4096], Access::REMOTE_READ)?;
/// region.write(0, b"hello")?;
/// region.store(8, 42)?;
/// // The peer needs these 20 bytes to read the region.
/// let grant = region.grant().to_bytes();
/// # assert_eq!(RemoteRegion::from_bytes(&grant), Some(region.grant()));
///
/// let bytes: Vec<u8> = region.into_storage().map_err(|_| "still in use")?;
/// assert_eq!((&bytes[..5], u64::from_ne_bytes(bytes[8..16].try_into()?)), (&b"hello"[..], 42));
/// # Ok(())
/// # }
/// ```
pub struct ExposedRegion {
    inner: Arc<Registration>,
    access: Access,
}

impl ExposedRegion {
    /// Exposes `memory` with the rights `access` (remote ones; local writing is always included).
    ///
    /// # Errors
    ///
    /// [`SetupError`] if it is longer than a registration can be, the device lacks what `access` asks for, or the provider
    /// refuses.
    pub fn new<S: Storage>(
        pd: &ProtectionDomain,
        memory: S,
        access: Access,
    ) -> Result<Self, SetupError> {
        let access = access | Access::LOCAL_WRITE;
        // Shared even without remote rights: slices of it may be in several operations, and are read and written here.
        Ok(Self { inner: Arc::new(Registration::new(pd, memory, access, true)?), access })
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
    /// Whoever knows them can use them over any queue pair of the same protection domain that allows remote
    /// access, until the region is dropped. [`QueuePair::lease`](crate::QueuePair::lease) grants a part of it to one peer,
    /// for a time.
    #[must_use]
    pub fn grant(&self) -> RemoteRegion {
        RemoteRegion::new(self.inner.addr(), self.inner.len() as u64, self.inner.rkey())
    }

    /// Copies bytes out, from `offset`.
    ///
    /// # Errors
    ///
    /// [`OutOfBounds`]; nothing is copied.
    pub fn read(&self, offset: usize, out: &mut [u8]) -> Result<(), OutOfBounds> {
        OutOfBounds::check(offset as u64, out.len() as u64, self.len() as u64)?;
        // SAFETY: S2: the range lies within the registration and is reached by atomic accesses only;
        // `out` is borrowed exclusively.
        unsafe {
            shared::load(self.inner.base().add(offset).as_ptr(), out.as_mut_ptr(), out.len())
        };
        Ok(())
    }

    /// Copies `bytes` in, to `offset`.
    ///
    /// # Errors
    ///
    /// [`OutOfBounds`]; nothing is copied.
    pub fn write(&self, offset: usize, bytes: &[u8]) -> Result<(), OutOfBounds> {
        OutOfBounds::check(offset as u64, bytes.len() as u64, self.len() as u64)?;
        // SAFETY: S2: the range lies within the registration and is reached by atomic accesses only;
        // `bytes` is borrowed, so nobody writes it.
        unsafe {
            shared::store(bytes.as_ptr(), self.inner.base().add(offset).as_ptr(), bytes.len())
        };
        Ok(())
    }

    /// Reads the word at `offset` with acquire order, in the byte order of this machine, as atomics leave it.
    ///
    /// # Errors
    ///
    /// [`OutOfBounds`] if 8 bytes from `offset` reach beyond the region or do not start on an 8-byte boundary.
    pub fn load(&self, offset: usize) -> Result<u64, OutOfBounds> {
        Ok(self.word(offset)?.load(Ordering::Acquire))
    }

    /// Writes the word at `offset` with release order.
    ///
    /// # Errors
    ///
    /// As [`load`](Self::load).
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
        // SAFETY: S2: within the registration, on a boundary, and reached by atomic accesses only; the
        // reference lives no longer than the region.
        Ok(unsafe { AtomicU64::from_ptr(word) })
    }

    /// A part of the region as the local side of an operation: data to send, or room to read into.
    ///
    /// # Errors
    ///
    /// [`SetupError::Limit`] if the range ends before it starts, reaches beyond the region, or is longer than a
    /// scatter/gather element (2^32 - 1 bytes).
    pub fn slice(&self, range: Range<usize>) -> Result<ExposedSlice, SetupError> {
        ExposedSlice::new(&self.inner, range)
    }

    /// `Ok` if the range is one, and within the region.
    pub(crate) fn check(&self, range: &Range<usize>) -> Result<(), LimitError> {
        check(&self.inner, range)
    }

    pub(crate) fn registration(&self) -> &Arc<Registration> {
        &self.inner
    }

    /// Revokes the access and gives the memory back.
    ///
    /// # Errors
    ///
    /// The region itself, if operations, slices or leases still use it, the memory is not an `S`, or its registration does
    /// not end.
    pub fn into_storage<S: Storage>(self) -> Result<S, Self> {
        if !self.inner.holds::<S>() {
            return Err(self);
        }
        let access = self.access;
        match Arc::try_unwrap(self.inner) {
            Ok(mut registration) => {
                let Some(storage) = registration.end() else {
                    return Err(Self { inner: Arc::new(registration), access });
                };
                let storage: Box<dyn Any> = storage;
                Ok(*storage
                    .downcast::<S>()
                    .unwrap_or_else(|_| unreachable!("its type was checked above")))
            }
            Err(inner) => Err(Self { inner, access }),
        }
    }
}

impl fmt::Debug for ExposedRegion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ExposedRegion")
            .field("len", &self.len())
            .field("access", &self.access)
            .field("rkey", &self.inner.rkey())
            .finish()
    }
}

/// `Ok` if the range is one, and within the registration.
fn check(registration: &Registration, range: &Range<usize>) -> Result<(), LimitError> {
    LimitError::check("start of the range", range.start as u64, range.end as u64)?;
    LimitError::check("end of the range", range.end as u64, registration.len() as u64)
}

/// A part of an [`ExposedRegion`] or a [`DmaBufRegion`](crate::memory::DmaBufRegion) as the local side of an operation; keeps the
/// region registered.
#[derive(Clone)]
pub struct ExposedSlice {
    inner: Arc<Registration>,
    offset: usize,
    len: u32,
}

impl ExposedSlice {
    pub(crate) fn new(of: &Arc<Registration>, range: Range<usize>) -> Result<Self, SetupError> {
        check(of, &range)?;
        LimitError::check("slice bytes", range.len() as u64, u64::from(u32::MAX))?;
        Ok(Self { inner: of.clone(), offset: range.start, len: range.len() as u32 })
    }

    /// Bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len as usize
    }

    /// True without any byte.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub(crate) fn truncate(&mut self, len: usize) {
        self.len = self.len.min(u32::try_from(len).unwrap_or(u32::MAX));
    }

    /// As a scatter/gather element, for the bare [`Qp`](crate::verbs::Qp) and [`Srq`](crate::verbs::Srq): whoever posts it keeps the slice
    /// until the completion.
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

impl fmt::Debug for ExposedSlice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ExposedSlice")
            .field("offset", &self.offset)
            .field("len", &self.len)
            .finish_non_exhaustive()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::software::Network;
    use crate::verbs::Device;

    #[test]
    fn slices_stay_within_the_region_and_do_not_end_before_they_start() {
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
