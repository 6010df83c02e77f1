//! Buffers for local use: registered with local access only, so that no peer can reach them.
//!
//! ```text
//! Slab: ┌ stride ┬────────┬────────┬────────┐  one registration
//!       │ BufMut │  free  │  Buf ──┼─ Buf   │  BufMut: exclusive, Buf: counted
//!       └────────┴────────┴────────┴────────┘
//! ```
//!
//! A buffer references its slab, and a slab its registration. When the last view of a chunk is
//! dropped, the chunk returns to the slab's free list; a slab of user memory (one chunk) has none.

#![allow(unsafe_code)]

use std::fmt;
use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut, RangeBounds};
use std::ptr::NonNull;
use std::slice;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering, fence};

use super::free_list::FreeList;
use super::registration::Registration;
use super::slab_index;
use crate::error::{LimitError, OutOfBounds, SetupError};
use crate::memory::Storage;
use crate::types::{Access, Sge};
use crate::verbs::ProtectionDomain;

/// The process aborts beyond this number, which only leaked views reach.
const MAX_VIEWS: u32 = u32::MAX / 2;

pub(crate) struct Slab {
    registration: Registration,
    stride: u32,
    /// Views of each chunk; 0 unless it is frozen.
    views: Box<[AtomicU32]>,
    free: Option<Arc<FreeList>>,
}

impl Slab {
    pub(crate) fn new(
        registration: Registration,
        stride: u32,
        chunks: u32,
        free: Option<Arc<FreeList>>,
    ) -> Arc<Self> {
        assert!(
            stride as usize * chunks as usize <= registration.len(),
            "chunks lie within the registration"
        );
        let views = (0..chunks).map(|_| AtomicU32::new(0)).collect();
        Self { registration, stride, views, free }.into_shared()
    }

    fn into_shared(self) -> Arc<Self> {
        let slab = Arc::new(self);
        if slab.is_indexed() {
            slab_index::insert(&slab);
        }
        slab
    }

    fn is_indexed(&self) -> bool {
        self.stride as usize >= slab_index::SHORTEST
    }

    pub(super) fn range(&self) -> (usize, usize) {
        let start = self.registration.base().addr().get();
        (start, start + self.registration.len())
    }

    pub(crate) fn registration(&self) -> &Registration {
        &self.registration
    }

    #[inline]
    fn chunk(&self, index: u32) -> NonNull<u8> {
        // SAFETY: S1: indices come from `new`, which checked that all chunks lie within the
        // registration.
        unsafe { self.registration.base().add(index as usize * self.stride as usize) }
    }

    #[inline]
    fn index(&self, start: NonNull<u8>) -> u32 {
        let offset = start.addr().get() - self.registration.base().addr().get();
        // A stride of 0 means one empty chunk.
        offset.checked_div(self.stride as usize).unwrap_or(0) as u32
    }

    #[inline]
    pub(crate) fn free_list(&self) -> Option<&Arc<FreeList>> {
        self.free.as_ref()
    }
}

impl Drop for Slab {
    fn drop(&mut self) {
        if self.is_indexed() {
            slab_index::remove(self);
        }
    }
}

pub(super) struct Chunk {
    start: NonNull<u8>,
    slab: Arc<Slab>,
}

// SAFETY: S1: a `Chunk` is the only access to its memory.
unsafe impl Send for Chunk {}

impl Chunk {
    /// The chunk is new, or its last user has released it.
    #[inline]
    pub(super) fn new(slab: Arc<Slab>, index: u32) -> Self {
        Self { start: slab.chunk(index), slab }
    }

    #[inline]
    pub(super) fn into_buffer(self, len: u32) -> BufMut {
        BufMut { ptr: self.start, len, slab: ManuallyDrop::new(self.slab) }
    }

    #[inline]
    pub(super) fn free_list(&self) -> Option<&Arc<FreeList>> {
        self.slab.free_list()
    }
}

/// An exclusively owned chunk of registered memory.
///
/// It dereferences to its bytes: zero at first, then the previous content. An operation takes and
/// returns the buffer by value, so the program never reads bytes while a device writes them. A
/// dropped buffer returns to its pool.
pub struct BufMut {
    ptr: NonNull<u8>,
    len: u32,
    slab: ManuallyDrop<Arc<Slab>>,
}

// SAFETY: S1: a `BufMut` is the only access to its chunk.
unsafe impl Send for BufMut {}
// SAFETY: S1: a shared `BufMut` gives read access only.
unsafe impl Sync for BufMut {}

impl ProtectionDomain {
    /// Registers `storage` for local use as a buffer. Dropping the buffer deregisters and frees the
    /// memory; [`BufMut::into_storage`] returns it.
    ///
    /// # Errors
    ///
    /// [`SetupError`] if the memory exceeds the maximum length of a buffer (2^32 - 1 bytes) or of a
    /// registration, or if a verb fails.
    pub fn register<S: Storage>(&self, storage: S) -> Result<BufMut, SetupError> {
        let registration = Registration::new(self, storage, Access::LOCAL_WRITE, false)?;
        LimitError::check("buffer bytes", registration.len() as u64, u64::from(u32::MAX))?;
        let len = registration.len() as u32;
        Ok(Chunk::new(Slab::new(registration, len, 1, None), 0).into_buffer(len))
    }
}

impl BufMut {
    #[cfg(feature = "ibverbs")]
    pub(crate) fn registration(&self) -> &Registration {
        self.slab.registration()
    }

    #[inline]
    pub(super) fn into_chunk(self) -> Chunk {
        let mut this = ManuallyDrop::new(self);
        // SAFETY: S1: `this` is never dropped, so its reference to the slab is taken once.
        let slab = unsafe { ManuallyDrop::take(&mut this.slab) };
        Chunk { start: this.ptr, slab }
    }

    /// Returns the maximum length.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.slab.stride as usize
    }

    /// Sets the length. Added bytes have their previous content.
    ///
    /// # Errors
    ///
    /// [`LimitError`] above the capacity; the length is unchanged.
    pub fn resize(&mut self, len: usize) -> Result<(), LimitError> {
        LimitError::check("buffer bytes", len as u64, u64::from(self.slab.stride))?;
        self.len = len as u32;
        Ok(())
    }

    /// Shortens the buffer to at most `len` bytes.
    pub fn truncate(&mut self, len: usize) {
        if len < self.len as usize {
            self.len = len as u32;
        }
    }

    /// Converts the buffer into a read-only view, for clones, slices and `bytes::Bytes`.
    #[must_use]
    pub fn freeze(self) -> Buf {
        let this = ManuallyDrop::new(self);
        let index = this.slab.index(this.ptr);
        this.slab.views[index as usize].store(1, Ordering::Relaxed);
        // SAFETY: S1: `this` is never dropped, so its reference to the slab moves to the new value.
        let slab = unsafe { std::ptr::read(&raw const this.slab) };
        Buf { ptr: this.ptr, len: this.len, index, slab }
    }

    /// Deregisters and returns memory that [`ProtectionDomain::register`] took.
    ///
    /// # Errors
    ///
    /// The buffer, if it belongs to a pool, the memory is not an `S`, or deregistration fails.
    ///
    /// [`ProtectionDomain::register`]: crate::verbs::ProtectionDomain::register
    pub fn into_storage<S: Storage>(self) -> Result<S, Self> {
        if self.slab.free.is_some() {
            return Err(self);
        }
        let len = self.len;
        match Arc::try_unwrap(self.into_chunk().slab) {
            Ok(mut slab) => {
                let storage = slab.registration.take();
                storage.ok_or_else(|| Chunk::new(slab.into_shared(), 0).into_buffer(len))
            }
            Err(slab) => Err(Chunk::new(slab, 0).into_buffer(len)),
        }
    }

    /// Returns the scatter/gather element for a bare [`Qp`](crate::verbs::Qp) or
    /// [`Srq`](crate::verbs::Srq). Keep the buffer until the completion.
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
        // SAFETY: S1: this buffer owns the chunk exclusively; posted work would own the buffer. The
        // bytes are initialised.
        unsafe { slice::from_raw_parts(self.ptr.as_ptr(), self.len as usize) }
    }
}

impl DerefMut for BufMut {
    #[inline]
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: S1: see `deref`; the borrow is exclusive.
        unsafe { slice::from_raw_parts_mut(self.ptr.as_ptr(), self.len as usize) }
    }
}

impl Drop for BufMut {
    #[inline]
    fn drop(&mut self) {
        // SAFETY: S1: taken only here; `freeze` and `into_chunk` never drop the value they take it
        // from.
        let slab = unsafe { ManuallyDrop::take(&mut self.slab) };
        FreeList::return_chunk(Chunk { start: self.ptr, slab });
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

/// A shared, read-only view of registered memory.
///
/// Clones and slices copy no bytes. Operations that read their buffer (SEND, WRITE) take a view by
/// value; keep a clone to continue reading. The chunk returns to its pool with the last view.
pub struct Buf {
    ptr: NonNull<u8>,
    len: u32,
    index: u32,
    slab: ManuallyDrop<Arc<Slab>>,
}

// SAFETY: S1: a frozen chunk is never written.
unsafe impl Send for Buf {}
// SAFETY: S1: a frozen chunk is never written.
unsafe impl Sync for Buf {}

impl Buf {
    /// Returns a view of a part.
    ///
    /// # Errors
    ///
    /// [`OutOfBounds`] if the range is reversed or not within the view.
    pub fn slice(&self, range: impl RangeBounds<usize>) -> Result<Self, OutOfBounds> {
        let bounds = (
            range.start_bound().map(|&start| start as u64),
            range.end_bound().map(|&end| end as u64),
        );
        let (start, len) = OutOfBounds::resolve(bounds, self.len.into())?;
        let mut part = self.clone();
        // SAFETY: S1: `resolve` checked that `start` is within the view.
        part.ptr = unsafe { part.ptr.add(start as usize) };
        part.len = len as u32;
        Ok(part)
    }

    /// Converts the view into a writable buffer if no other view of the chunk exists.
    ///
    /// # Errors
    ///
    /// The view, if there are others, or if it does not start with its chunk.
    pub fn try_into_mut(self) -> Result<BufMut, Self> {
        if self.views().load(Ordering::Acquire) != 1 || self.ptr != self.slab.chunk(self.index) {
            return Err(self);
        }
        let this = ManuallyDrop::new(self);
        this.views().store(0, Ordering::Relaxed);
        // SAFETY: S1: `this` is never dropped, so its reference to the slab moves to the new value.
        let slab = unsafe { std::ptr::read(&raw const this.slab) };
        Ok(BufMut { ptr: this.ptr, len: this.len, slab })
    }

    /// Returns the registered buffer that already contains `bytes`, if they are long
    /// ([`slab_index`]).
    #[inline]
    pub(crate) fn of_bytes(bytes: &bytes::Bytes, pd: &ProtectionDomain) -> Option<Self> {
        if bytes.len() < slab_index::SHORTEST {
            return None;
        }
        let address = bytes.as_ptr().addr();
        let slab = slab_index::find(pd, address, bytes.len())?;
        let offset = address - slab.range().0;
        let (index, start) = (offset / slab.stride as usize, offset % slab.stride as usize);
        if start + bytes.len() > slab.stride as usize {
            return None;
        }
        let views = slab.views.get(index)?;
        // Zero if the owner of `bytes` has the chunk exclusively. Otherwise it has a view, and the
        // number stays above zero during this call.
        if views.load(Ordering::Relaxed) == 0 {
            return None;
        }
        Self::add_view(views);
        // SAFETY: S1: `start` is within the chunk, which is frozen while it has views, and now has
        // one more.
        let ptr = unsafe { slab.chunk(index as u32).add(start) };
        let (len, index) = (bytes.len() as u32, index as u32);
        Some(Self { ptr, len, index, slab: ManuallyDrop::new(slab) })
    }

    fn views(&self) -> &AtomicU32 {
        &self.slab.views[self.index as usize]
    }

    #[inline]
    fn add_view(views: &AtomicU32) {
        let before = views.fetch_add(1, Ordering::Relaxed);
        // Aborts like `Arc`: a program could catch a panic and clone until the count wraps around.
        // Too few threads exist to wrap it between the addition and the check.
        if before > MAX_VIEWS {
            std::process::abort();
        }
    }

    /// Returns the scatter/gather element, see [`BufMut::sge`].
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
        Self::add_view(self.views());
        Self { ptr: self.ptr, len: self.len, index: self.index, slab: self.slab.clone() }
    }
}

impl Deref for Buf {
    type Target = [u8];

    #[inline]
    fn deref(&self) -> &[u8] {
        // SAFETY: S1: neither program nor device writes a frozen chunk before its last view is
        // dropped. The bytes are initialised.
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
        let last = self.views().fetch_sub(1, Ordering::Release) == 1;
        // SAFETY: S1: taken only here; `try_into_mut` never drops the value it takes it from.
        let slab = unsafe { ManuallyDrop::take(&mut self.slab) };
        if last {
            // Reads through other views happen before the chunk is reused.
            fence(Ordering::Acquire);
            FreeList::return_chunk(Chunk::new(slab, self.index));
        }
    }
}

impl From<Buf> for bytes::Bytes {
    /// Copies nothing.
    fn from(buf: Buf) -> Self {
        Self::from_owner(buf)
    }
}

impl From<BufMut> for bytes::Bytes {
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

    /// Runs `test` with buffers of pools and of registered memory.
    fn both(test: impl Fn(BufMut)) {
        let pd = domain();
        let pool = Pool::new(&pd, 64, 1).unwrap();
        // Uses the second chunk of a slab.
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
        assert_eq!((pool.available(), pair.available()), (1, 1), "each chunk was returned once");
    }

    #[test]
    fn only_view_of_a_chunk_becomes_writable_again() {
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
    fn view_of_a_shared_chunk_does_not_become_writable() {
        both(|buffer| {
            let view = buffer.freeze();
            let clone = view.clone();
            let view = view.try_into_mut().expect_err("there is a clone");
            assert_eq!(view[..], clone[..], "the error holds the unchanged view");
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
    fn only_slice_becomes_writable_if_it_starts_with_its_chunk() {
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
            front.resize(64).unwrap();
            assert_eq!(front[8..10], [9, 10]);
            assert!(front.resize(65).is_err() && front.len() == 64);
            front.truncate(3);
            front.truncate(5);
            assert_eq!(front[..], [1, 2, 3]);
        });
    }

    /// `Bytes` whose owner has an exclusive buffer.
    struct Exclusive(BufMut);

    impl AsRef<[u8]> for Exclusive {
        fn as_ref(&self) -> &[u8] {
            &self.0
        }
    }

    #[test]
    fn bytes_of_a_buffer_are_found_in_its_memory() {
        use bytes::Bytes;

        let pd = domain();
        let pool = Pool::new(&pd, 5000, 3).unwrap();
        let _first = pool.try_alloc(1).unwrap();
        let mut buffer = pool.try_alloc(5000).unwrap();
        buffer[100..4200].fill(7);
        let address = buffer.sge().addr;
        let bytes = Bytes::from(buffer).slice(100..4200);
        let view = Buf::of_bytes(&bytes, &pd).expect("it is in a buffer");
        let other = Buf::of_bytes(&bytes.clone(), &pd).expect("a clone is, too");
        assert_eq!((view.sge().addr, view.len(), view[0]), (address + 100, 4100, 7));
        drop((bytes, other));
        assert_eq!((pool.available(), view[4099]), (1, 7), "the view keeps the buffer");
        drop(view);
        assert_eq!(pool.available(), 2);

        let registered = Bytes::from(pd.register(vec![5; 4096]).unwrap());
        assert_eq!(Buf::of_bytes(&registered, &pd).expect("it is registered")[..], registered[..]);
        let device = Device::software_in(&Network::new(), "two").unwrap();
        let foreign = device.protection_domain().unwrap();
        assert!(Buf::of_bytes(&registered, &foreign).is_none(), "of another domain");
        assert!(Buf::of_bytes(&registered.slice(1..), &pd).is_none(), "a copy costs less");
        assert!(Buf::of_bytes(&vec![1; 5000].into(), &pd).is_none(), "of the allocator");
        assert!(Buf::of_bytes(&Bytes::new(), &pd).is_none());
    }

    #[test]
    fn bytes_of_an_exclusive_buffer_are_not_found() {
        let pd = domain();
        let pool = Pool::new(&pd, 4096, 1).unwrap();
        let again = pool.try_alloc(4096).unwrap().freeze().try_into_mut().unwrap();
        for buffer in [again, pd.register(vec![0; 4096]).unwrap()] {
            let bytes = bytes::Bytes::from_owner(Exclusive(buffer));
            assert!(Buf::of_bytes(&bytes, &pd).is_none());
        }
        assert_eq!(pool.available(), 1);
    }

    #[test]
    fn slabs_leave_the_index_before_their_memory_is_freed() {
        let pd = domain();
        let buffer = pd.register(vec![0; 4096]).unwrap();
        let address = buffer.sge().addr as usize;
        assert!(slab_index::find(&pd, address, 4096).is_some());
        assert!(slab_index::find(&pd, address, 4097).is_none(), "beyond the end");
        let memory = buffer.into_storage::<Vec<u8>>().unwrap();
        assert!(slab_index::find(&pd, address, 4096).is_none());
        drop(memory);
        let pool = Pool::new(&pd, 4096, 2).unwrap();
        let address = pool.try_alloc(1).unwrap().sge().addr as usize;
        assert!(slab_index::find(&pd, address, 8192).is_some());
        drop(pool);
        assert!(slab_index::find(&pd, address, 4096).is_none());
        assert!(pd.index().read().is_empty(), "each entry was removed");
    }

    #[test]
    fn storage_is_returned_only_as_its_type_and_never_from_a_pool() {
        let pd = domain();
        // The pool has one buffer, which is the only reference to the slab.
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
    fn slices_beyond_a_view_are_refused() {
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
            buf.views().store(MAX_VIEWS, Ordering::Relaxed);
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
