//! Buffers for local use: registered with local access only, so that no peer can reach them.
//!
//! ```text
//! Slab: ┌ stride ┬────────┬────────┬────────┐  one registration
//!       │ BufMut │  free  │  Buf ──┼─ Buf   │  Buf: counted, BufMut: alone
//!       └────────┴────────┴────────┴────────┘
//! ```
//!
//! A buffer holds its slab, a slab its registration. The last holder of a chunk hands it back to the
//! slab's free list; a slab made of user memory has one chunk and no free list.

#![allow(unsafe_code)]

use std::any::Any;
use std::fmt;
use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut, RangeBounds};
use std::ptr::NonNull;
use std::slice;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering, fence};

use super::pool::FreeList;
use super::registration::Registration;
use crate::error::{LimitError, OutOfBounds, SetupError};
use crate::memory::Storage;
use crate::types::Access;
use crate::types::Sge;
use crate::verbs::ProtectionDomain;

/// Views of one chunk beyond which cloning aborts the process; only leaked views can be so many.
const MAX_VIEWS: u32 = u32::MAX / 2;

/// Registered memory cut into chunks of equal size.
pub(crate) struct Slab {
    registration: Registration,
    stride: u32,
    /// Holders of each chunk that was frozen; meaningless for the others.
    shares: Box<[AtomicU32]>,
    /// Where chunks go when their last holder drops; `None` for user memory.
    free: Option<Arc<FreeList>>,
}

impl Slab {
    pub(crate) fn new(
        registration: Registration,
        stride: u32,
        chunks: u32,
        free: Option<Arc<FreeList>>,
    ) -> Self {
        assert!(
            stride as usize * chunks as usize <= registration.len(),
            "chunks lie within the registration"
        );
        let shares = (0..chunks).map(|_| AtomicU32::new(0)).collect();
        Self { registration, stride, shares, free }
    }

    pub(crate) fn registration(&self) -> &Registration {
        &self.registration
    }

    #[inline]
    fn chunk(&self, index: u32) -> NonNull<u8> {
        // SAFETY: S1: chunk indices come from `new`, which checked that all lie within the registration.
        unsafe { self.registration.base().add(index as usize * self.stride as usize) }
    }

    /// Of the chunk that starts at `start`.
    fn index(&self, start: NonNull<u8>) -> u32 {
        let offset = start.addr().get() - self.registration.base().addr().get();
        // Without bytes there is one chunk.
        offset.checked_div(self.stride as usize).unwrap_or(0) as u32
    }

    /// Gives a chunk back, or drops the slab's share if it has no free list.
    fn release(self: Arc<Self>, index: u32) {
        if self.free.is_some() {
            FreeList::give_back(self, index);
        }
    }

    pub(crate) fn free_list(&self) -> Option<&Arc<FreeList>> {
        self.free.as_ref()
    }
}

/// A chunk of registered memory that its holder owns alone.
///
/// Dereferences to its bytes, which are always initialised (with what was there before, at first zeros).
/// An operation takes it by value and gives it back, so that nobody looks while a device writes.
/// Dropping it returns it to its pool.
pub struct BufMut {
    /// Start of its chunk.
    ptr: NonNull<u8>,
    len: u32,
    slab: ManuallyDrop<Arc<Slab>>,
}

// SAFETY: S1: a `BufMut` is the only way to its chunk.
unsafe impl Send for BufMut {}
// SAFETY: S1: through a shared `BufMut` bytes can only be read.
unsafe impl Sync for BufMut {}

impl ProtectionDomain {
    /// Registers memory of yours for local use and gives it as a buffer.
    ///
    /// The buffer takes part in operations as one of a [`Pool`](crate::Pool) does. Dropping it ends the registration,
    /// then frees the memory; [`BufMut::into_storage`] gives the memory back instead.
    ///
    /// # Errors
    ///
    /// [`SetupError`] if it is longer than a buffer (2^32 - 1 bytes) or a registration can be, or if the
    /// provider refuses.
    pub fn register<S: Storage>(&self, storage: S) -> Result<BufMut, SetupError> {
        BufMut::from_storage(Registration::new(self, storage, Access::LOCAL_WRITE, false)?)
    }
}

impl BufMut {
    #[cfg(feature = "ibverbs")]
    pub(crate) fn registration(&self) -> &Registration {
        self.slab.registration()
    }

    /// Chunk `index`, which the caller took from the slab's free list (or made just now).
    #[inline]
    pub(crate) fn from_chunk(slab: Arc<Slab>, index: u32, len: u32) -> Self {
        Self { ptr: slab.chunk(index), len, slab: ManuallyDrop::new(slab) }
    }

    /// One buffer of all the memory of a registration.
    pub(crate) fn from_storage(registration: Registration) -> Result<Self, SetupError> {
        LimitError::check("buffer bytes", registration.len() as u64, u64::from(u32::MAX))?;
        let len = registration.len() as u32;
        Ok(Self::from_chunk(Arc::new(Slab::new(registration, len, 1, None)), 0, len))
    }

    /// Bytes it can be resized to.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.slab.stride as usize
    }

    /// Sets the length. Bytes that come into view hold what was there before.
    ///
    /// # Errors
    ///
    /// [`LimitError`] above the capacity; nothing is changed.
    pub fn resize(&mut self, len: usize) -> Result<(), LimitError> {
        LimitError::check("buffer bytes", len as u64, u64::from(self.slab.stride))?;
        self.len = len as u32;
        Ok(())
    }

    /// Shortens it to at most `len` bytes.
    pub fn truncate(&mut self, len: usize) {
        if len < self.len as usize {
            self.len = len as u32;
        }
    }

    /// Gives up writing, to share the bytes: clones, slices, `bytes::Bytes`.
    #[must_use]
    pub fn freeze(self) -> Buf {
        let this = ManuallyDrop::new(self);
        let index = this.slab.index(this.ptr);
        this.slab.shares[index as usize].store(1, Ordering::Relaxed);
        // SAFETY: S1: `this` is never dropped, so its share of the slab moves to the new value.
        let slab = unsafe { std::ptr::read(&raw const this.slab) };
        Buf { ptr: this.ptr, len: this.len, index, slab }
    }

    /// Ends the registration and gives back memory that [`ProtectionDomain::register`] took.
    ///
    /// # Errors
    ///
    /// The buffer itself, if it is of a pool, the memory is not an `S`, or its registration does not end.
    ///
    /// [`ProtectionDomain::register`]: crate::verbs::ProtectionDomain::register
    pub fn into_storage<S: Storage>(self) -> Result<S, Self> {
        if self.slab.free.is_some() || !self.slab.registration().holds::<S>() {
            return Err(self);
        }
        let len = self.len;
        let mut this = ManuallyDrop::new(self);
        // SAFETY: S1: `this` is never dropped, so its share of the slab is taken once.
        let slab = unsafe { ManuallyDrop::take(&mut this.slab) };
        match Arc::try_unwrap(slab) {
            Ok(mut slab) => {
                let Some(storage) = slab.registration.end() else {
                    return Err(Self::from_chunk(Arc::new(slab), 0, len));
                };
                let storage: Box<dyn Any> = storage;
                Ok(*storage
                    .downcast::<S>()
                    .unwrap_or_else(|_| unreachable!("its type was checked above")))
            }
            Err(slab) => Err(Self::from_chunk(slab, 0, len)),
        }
    }

    /// As a scatter/gather element, for the bare [`Qp`](crate::verbs::Qp) and [`Srq`](crate::verbs::Srq): whoever posts it keeps the buffer
    /// until the completion.
    #[inline]
    #[must_use]
    pub fn sge(&self) -> Sge {
        Sge {
            addr: self.ptr.addr().get() as u64,
            length: self.len,
            lkey: self.slab.registration.lkey(),
        }
    }

    #[inline]
    pub(crate) fn slab(&self) -> &Slab {
        &self.slab
    }
}

impl Deref for BufMut {
    type Target = [u8];

    #[inline]
    fn deref(&self) -> &[u8] {
        // SAFETY: S1: the chunk belongs to this buffer alone and no posted work names it, for that
        // would own the buffer; its bytes are initialised.
        unsafe { slice::from_raw_parts(self.ptr.as_ptr(), self.len as usize) }
    }
}

impl DerefMut for BufMut {
    #[inline]
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: S1: as in `deref`; and the borrow is exclusive.
        unsafe { slice::from_raw_parts_mut(self.ptr.as_ptr(), self.len as usize) }
    }
}

impl Drop for BufMut {
    #[inline]
    fn drop(&mut self) {
        // SAFETY: S1: taken once, here; `freeze` and `into_storage` never drop the value they took it from.
        let slab = unsafe { ManuallyDrop::take(&mut self.slab) };
        let index = slab.index(self.ptr);
        slab.release(index);
    }
}

impl fmt::Debug for BufMut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BufMut")
            .field("len", &self.len)
            .field("capacity", &self.capacity())
            .finish_non_exhaustive()
    }
}

/// A view of registered memory that several holders read.
///
/// Cloning and slicing copy nothing. Operations that only read it (SEND, WRITE) take it by value; keep a
/// clone to go on reading. The chunk returns to its pool when the last view is dropped.
pub struct Buf {
    ptr: NonNull<u8>,
    len: u32,
    index: u32,
    slab: ManuallyDrop<Arc<Slab>>,
}

// SAFETY: S1: nobody writes a frozen chunk.
unsafe impl Send for Buf {}
// SAFETY: S1: nobody writes a frozen chunk.
unsafe impl Sync for Buf {}

impl Buf {
    /// A part of it.
    ///
    /// # Errors
    ///
    /// [`OutOfBounds`] if the range ends before it starts or reaches beyond the view.
    pub fn slice(&self, range: impl RangeBounds<usize>) -> Result<Self, OutOfBounds> {
        let bounds = (
            range.start_bound().map(|&start| start as u64),
            range.end_bound().map(|&end| end as u64),
        );
        let (start, len) = OutOfBounds::resolve(bounds, self.len.into())?;
        let mut part = self.clone();
        // SAFETY: S1: `start` is within the view, as just checked.
        part.ptr = unsafe { part.ptr.add(start as usize) };
        part.len = len as u32;
        Ok(part)
    }

    /// The right to write, if this is the only view of its chunk. The length stays as it is.
    ///
    /// # Errors
    ///
    /// The view itself, if there are others or it does not start where its chunk does.
    pub fn try_into_mut(self) -> Result<BufMut, Self> {
        if self.shares().load(Ordering::Acquire) != 1 || self.ptr != self.slab.chunk(self.index) {
            return Err(self);
        }
        let this = ManuallyDrop::new(self);
        // SAFETY: S1: `this` is never dropped, so its share of the slab moves to the new value.
        let slab = unsafe { std::ptr::read(&raw const this.slab) };
        Ok(BufMut { ptr: this.ptr, len: this.len, slab })
    }

    fn shares(&self) -> &AtomicU32 {
        &self.slab.shares[self.index as usize]
    }

    /// As a scatter/gather element, for the bare [`Qp`](crate::verbs::Qp) and [`Srq`](crate::verbs::Srq): whoever posts it keeps the buffer
    /// until the completion.
    #[inline]
    #[must_use]
    pub fn sge(&self) -> Sge {
        Sge {
            addr: self.ptr.addr().get() as u64,
            length: self.len,
            lkey: self.slab.registration.lkey(),
        }
    }

    #[inline]
    pub(crate) fn slab(&self) -> &Slab {
        &self.slab
    }
}

impl Clone for Buf {
    fn clone(&self) -> Self {
        let before = self.shares().fetch_add(1, Ordering::Relaxed);
        // As `Arc`: a panic could be caught and the clone tried again until the count wraps around. So many threads that
        // it wraps between the addition and the check do not exist.
        if before > MAX_VIEWS {
            std::process::abort();
        }
        Self { ptr: self.ptr, len: self.len, index: self.index, slab: self.slab.clone() }
    }
}

impl Deref for Buf {
    type Target = [u8];

    #[inline]
    fn deref(&self) -> &[u8] {
        // SAFETY: S1: a frozen chunk is written by nobody, the device included, until its last view is
        // gone; its bytes are initialised.
        unsafe { slice::from_raw_parts(self.ptr.as_ptr(), self.len as usize) }
    }
}

impl AsRef<[u8]> for Buf {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl Drop for Buf {
    fn drop(&mut self) {
        let last = self.shares().fetch_sub(1, Ordering::Release) == 1;
        // SAFETY: S1: taken once, here; `try_into_mut` never drops the value it took it from.
        let slab = unsafe { ManuallyDrop::take(&mut self.slab) };
        if last {
            // Reads through other views happen before the chunk is handed out again.
            fence(Ordering::Acquire);
            slab.release(self.index);
        }
    }
}

impl From<Buf> for bytes::Bytes {
    /// Without a copy; the chunk returns to its pool when the last clone is dropped.
    fn from(buf: Buf) -> Self {
        Self::from_owner(buf)
    }
}

impl From<BufMut> for bytes::Bytes {
    /// Without a copy, as of a [`Buf`].
    fn from(buf: BufMut) -> Self {
        buf.freeze().into()
    }
}

impl From<BufMut> for Buf {
    fn from(buf: BufMut) -> Self {
        buf.freeze()
    }
}

impl fmt::Debug for Buf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Buf").field("len", &self.len).finish_non_exhaustive()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::os::unix::process::ExitStatusExt;
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::process::{Command, Stdio};

    use super::*;
    use crate::memory::HostMemory;
    use crate::memory::Pool;
    use crate::software::Network;
    use crate::verbs::Device;

    fn domain() -> ProtectionDomain {
        Device::software_in(&Network::new(), "one").unwrap().protection_domain().unwrap()
    }

    /// Twice, in the ways that buffers are made: of a pool, and of memory that was registered.
    fn both(test: impl Fn(BufMut)) {
        let pd = domain();
        let pool = Pool::new(&pd, 64, 1).unwrap();
        // Of a pool whose second chunk it is, too: views are counted for each chunk.
        let pair = Pool::new(&pd, 64, 2).unwrap();
        let _first = pair.try_alloc(64).unwrap().freeze();
        for mut buffer in [
            pool.try_alloc(64).unwrap(),
            pair.try_alloc(64).unwrap(),
            pd.register(vec![0; 64]).unwrap(),
        ] {
            buffer.iter_mut().zip(1..).for_each(|(byte, value)| *byte = value);
            test(buffer);
        }
        assert_eq!((pool.available(), pair.available()), (1, 1), "every chunk has returned once");
    }

    #[test]
    fn the_only_view_becomes_writable_again() {
        both(|buffer| {
            let bytes: Vec<u8> = buffer.to_vec();
            let mut again = buffer.freeze().try_into_mut().expect("it is the only view");
            assert_eq!(again[..], bytes[..]);
            assert_eq!((again.len(), again.capacity()), (64, 64));
            again[0] = 99;
            assert_eq!(again.freeze()[..2], [99, 2]);
        });
    }

    #[test]
    fn view_beside_others_does_not_become_writable() {
        both(|buffer| {
            let view = buffer.freeze();
            let clone = view.clone();
            let view = view.try_into_mut().expect_err("there is a clone");
            assert_eq!(view[..], clone[..], "the view comes back as it was");
            let clone = clone.try_into_mut().expect_err("there is the original");
            let part = view.slice(8..16).unwrap();
            drop(clone);
            let view = view.try_into_mut().expect_err("there is a slice");
            assert_eq!(part[..], view[8..16]);
            drop(part);
            let bytes = bytes::Bytes::from(view.clone());
            let view = view.try_into_mut().expect_err("there are `Bytes`");
            drop(bytes);
            assert!(view.try_into_mut().is_ok(), "the others are gone");
        });
    }

    #[test]
    fn slice_becomes_writable_if_it_is_alone_and_begins_where_its_chunk_does() {
        both(|buffer| {
            let view = buffer.freeze();
            let inner = view.slice(1..9).unwrap();
            drop(view);
            let inner = inner.try_into_mut().expect_err("it begins behind its chunk");
            assert_eq!(inner[..], [2, 3, 4, 5, 6, 7, 8, 9]);
            drop(inner);
        });
        both(|buffer| {
            let view = buffer.freeze();
            let front = view.slice(..8).unwrap();
            drop(view);
            let mut front = front.try_into_mut().expect("it begins where its chunk does");
            assert_eq!(front[..], [1, 2, 3, 4, 5, 6, 7, 8]);
            // The rest of the chunk is there.
            front.resize(64).unwrap();
            assert_eq!(front[8..10], [9, 10]);
            assert!(front.resize(65).is_err() && front.len() == 64);
            front.truncate(3);
            front.truncate(5);
            assert_eq!(front[..], [1, 2, 3]);
        });
    }

    #[test]
    fn memory_is_taken_back_only_as_what_it_is_and_never_from_a_pool() {
        let pd = domain();
        // Of a pool of one buffer, which has nothing else of its slab.
        let pool = Pool::new(&pd, 64, 1).unwrap();
        let buffer = pool
            .try_alloc(8)
            .unwrap()
            .into_storage::<HostMemory>()
            .map(drop)
            .expect_err("it is the pool's");
        assert_eq!((buffer.len(), pool.available()), (8, 0));
        drop(buffer);
        assert_eq!((pool.available(), pool.total()), (1, 1));
        let other = pd.register(vec![7_u8; 16]).unwrap();
        let other = other.into_storage::<HostMemory>().map(drop).expect_err("it is a vector");
        assert_eq!(other.into_storage::<Vec<u8>>().unwrap(), [7; 16]);
    }

    #[test]
    fn chunk_returns_with_its_last_view() {
        let pd = domain();
        let pool = Pool::new(&pd, 64, 1).unwrap();
        let view = pool.try_alloc(64).unwrap().freeze();
        let others = [view.clone(), view.slice(3..5).unwrap(), view.slice(64..64).unwrap()];
        drop(view);
        for other in others {
            assert_eq!(pool.available(), 0);
            drop(other);
        }
        assert_eq!(pool.available(), 1);
    }

    #[test]
    fn parts_beyond_a_view_are_refused() {
        let pd = domain();
        let view = pd.register(vec![7; 16]).unwrap().freeze();
        let inner = view.slice(4..=11).unwrap();
        assert_eq!((inner.len(), inner.slice(8..).unwrap().len()), (8, 0));
        #[expect(clippy::reversed_empty_ranges, reason = "that is the case under test")]
        let reversed = inner.slice(5..4);
        for outside in [reversed, inner.slice(0..9), inner.slice(9..)] {
            assert!(outside.is_err());
        }
        assert_eq!(inner.sge().addr, view.sge().addr + 4);
        assert_eq!((inner.sge().length, inner.sge().lkey), (8, view.sge().lkey));
    }

    /// SIGABRT of `signal(7)`.
    const SIGABRT: i32 = 6;

    #[test]
    #[cfg_attr(miri, ignore = "starts a process")]
    fn clone_beyond_the_limit_of_views_aborts_the_process() {
        const CLONES: &str = "TOKIO_RDMA_CLONES";
        if std::env::var_os(CLONES).is_some() {
            let pd = Device::software_in(&crate::software::Network::new(), "views0")
                .unwrap()
                .protection_domain()
                .unwrap();
            let buf = Pool::new(&pd, 64, 1).unwrap().try_alloc(8).unwrap().freeze();
            buf.shares().store(MAX_VIEWS, Ordering::Relaxed);
            for _ in 0..4 {
                let _ = catch_unwind(AssertUnwindSafe(|| std::mem::forget(buf.clone())));
            }
            std::mem::forget(buf);
            return;
        }
        let mut child = Command::new(std::env::current_exe().unwrap());
        child.args([
            "--exact",
            "memory::buf::tests::clone_beyond_the_limit_of_views_aborts_the_process",
        ]);
        let status =
            child.env(CLONES, "1").stdout(Stdio::null()).stderr(Stdio::null()).status().unwrap();
        assert_eq!(status.signal(), Some(SIGABRT), "{status}");
    }
}
