//! Registered slabs cut into buffers that come back.

use std::fmt;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::Semaphore;

use super::buf::Slab;
use super::registration::Registration;
use crate::contained::wakes_contained;
use crate::error::{LimitError, SetupError, VerbError};
use crate::memory::BufMut;
use crate::memory::HostMemory;
use crate::types::Access;
use crate::verbs::ProtectionDomain;

/// A pool of registered buffers of equal size; clones share it.
///
/// Registering memory is slow and counts against limits, so it is done once, in slabs. An empty pool makes
/// [`alloc`](Self::alloc) wait for a buffer to come back, in order of asking; buffers come back when they are
/// dropped, those of abandoned operations when the device is done with them.
///
/// ```
/// use tokio_rdma::Pool;
/// use tokio_rdma::memory::PoolError;
/// # use tokio_rdma::Device;
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let device = Device::open_default()?;
/// # let pd = device.protection_domain()?;
/// let pool = Pool::new(&pd, 4096, 2)?;
/// let (first, second) = (pool.alloc(100).await?, pool.copy_from(b"hello")?);
/// assert_eq!((first.len(), &second[..]), (100, &b"hello"[..]));
/// assert!(matches!(pool.try_alloc(1), Err(PoolError::Empty)));
/// drop(first);
/// assert_eq!(pool.available(), 1);
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Pool {
    inner: Arc<Inner>,
}

struct Inner {
    pd: ProtectionDomain,
    buffer_size: u32,
    stride: u32,
    per_slab: u32,
    growing: bool,
    huge_pages: bool,
    free: Arc<FreeList>,
}

/// Chunks nobody holds. Its entries keep their slabs alive, so the pool empties it when it goes.
pub(crate) struct FreeList {
    chunks: Mutex<Chunks>,
    /// One permit per free chunk that no waiter has been promised. The wakers of the waiters are contained: a task that
    /// returns a buffer is not to panic by the waker of another one.
    permits: Semaphore,
}

struct Chunks {
    free: Vec<(Arc<Slab>, u32)>,
    total: usize,
    /// The pool is gone: chunks that come back are dropped.
    closed: bool,
}

impl FreeList {
    /// Puts a chunk of `slab` back.
    pub(crate) fn give_back(slab: Arc<Slab>, index: u32) {
        let Some(list) = slab.free_list().cloned() else { return };
        let mut chunks = list.chunks.lock();
        if chunks.closed {
            // Unlock first: this may be the last holder, and ending a registration takes time.
            drop(chunks);
            drop(slab);
            return;
        }
        chunks.free.push((slab, index));
        drop(chunks);
        list.permits.add_permits(1);
    }
}

impl Pool {
    /// `buffers` buffers of `buffer_size` bytes.
    ///
    /// # Errors
    ///
    /// [`SetupError`] if the memory cannot be registered.
    pub fn new(
        pd: &ProtectionDomain,
        buffer_size: usize,
        buffers: usize,
    ) -> Result<Self, SetupError> {
        Self::builder(pd).buffer_size(buffer_size).buffers(buffers).build()
    }

    /// A pool to be described further.
    #[must_use]
    pub fn builder(pd: &ProtectionDomain) -> PoolBuilder {
        PoolBuilder {
            pd: pd.clone(),
            buffer_size: 4096,
            buffers: 64,
            growing: false,
            huge_pages: false,
        }
    }

    /// A buffer of `len` bytes, waiting for one to come back if there is none.
    ///
    /// # Errors
    ///
    /// [`PoolError::TooLong`] if `len` is above the size of the pool's buffers; [`PoolError::Register`] if a
    /// growing pool cannot register more.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future loses nothing but its place in the queue.
    pub async fn alloc(&self, len: usize) -> Result<BufMut, PoolError> {
        match self.try_alloc(len) {
            Err(PoolError::Empty) => {}
            other => return other,
        }
        match wakes_contained(self.inner.free.permits.acquire()).await {
            Ok(permit) => permit.forget(),
            Err(_) => unreachable!("the semaphore is never closed"),
        }
        Ok(self.take(len))
    }

    /// A buffer of `len` bytes if there is one now.
    ///
    /// # Errors
    ///
    /// As [`alloc`](Self::alloc), and [`PoolError::Empty`].
    pub fn try_alloc(&self, len: usize) -> Result<BufMut, PoolError> {
        loop {
            match self.take_free(len)? {
                Some(buffer) => return Ok(buffer),
                None if self.inner.growing => self.inner.grow().map_err(PoolError::Register)?,
                None => return Err(PoolError::Empty),
            }
        }
    }

    /// A buffer of `len` bytes if there is one now; never grows.
    pub(crate) fn take_free(&self, len: usize) -> Result<Option<BufMut>, PoolError> {
        LimitError::check(
            "buffer bytes (PoolBuilder::buffer_size)",
            len as u64,
            u64::from(self.inner.buffer_size),
        )
        .map_err(PoolError::TooLong)?;
        let Ok(permit) = self.inner.free.permits.try_acquire() else { return Ok(None) };
        permit.forget();
        Ok(Some(self.take(len)))
    }

    /// A buffer that holds a copy of `bytes`, if there is one now.
    ///
    /// # Errors
    ///
    /// As [`try_alloc`](Self::try_alloc).
    pub fn copy_from(&self, bytes: &[u8]) -> Result<BufMut, PoolError> {
        let mut buf = self.try_alloc(bytes.len())?;
        buf.copy_from_slice(bytes);
        Ok(buf)
    }

    /// Bytes of each buffer.
    #[must_use]
    pub fn buffer_size(&self) -> usize {
        self.inner.buffer_size as usize
    }

    /// Buffers that are in the pool now.
    #[must_use]
    pub fn available(&self) -> usize {
        self.inner.free.chunks.lock().free.len()
    }

    /// Buffers there are, in the pool and out of it.
    #[must_use]
    pub fn total(&self) -> usize {
        self.inner.free.chunks.lock().total
    }

    /// Takes the chunk that a forgotten permit promises.
    fn take(&self, len: usize) -> BufMut {
        let chunk = self.inner.free.chunks.lock().free.pop();
        let Some((slab, index)) = chunk else {
            unreachable!("a permit stands for a chunk in the list")
        };
        BufMut::from_chunk(slab, index, len as u32)
    }
}

impl Inner {
    /// Registers one more slab.
    fn grow(&self) -> Result<(), SetupError> {
        let len = self.stride as usize * self.per_slab as usize;
        let memory = if self.huge_pages {
            let errno = |error: std::io::Error| error.raw_os_error().unwrap_or(VerbError::ENOMEM);
            HostMemory::huge(len).map_err(|error| VerbError::new("mmap", errno(error)))?
        } else {
            HostMemory::try_zeroed(len)?
        };
        let registration = Registration::new(&self.pd, memory, Access::LOCAL_WRITE, false)?;
        let slab =
            Arc::new(Slab::new(registration, self.stride, self.per_slab, Some(self.free.clone())));
        let mut chunks = self.free.chunks.lock();
        chunks.total += self.per_slab as usize;
        // Room for all there are, so that giving back never allocates.
        let room = chunks.total - chunks.free.len();
        chunks.free.reserve(room);
        chunks.free.extend((0..self.per_slab).rev().map(|index| (slab.clone(), index)));
        drop(chunks);
        self.free.permits.add_permits(self.per_slab as usize);
        Ok(())
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        let mut chunks = self.free.chunks.lock();
        chunks.closed = true;
        let free = std::mem::take(&mut chunks.free);
        drop(chunks);
        drop(free);
    }
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pool")
            .field("buffer_size", &self.inner.buffer_size)
            .field("available", &self.available())
            .field("total", &self.total())
            .finish()
    }
}

/// Describes a [`Pool`].
///
/// ```
/// use tokio_rdma::Pool;
/// # use tokio_rdma::Device;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let device = Device::open_default()?;
/// # let pd = device.protection_domain()?;
/// let pool = Pool::builder(&pd).buffer_size(1500).buffers(2).growing(true).build()?;
/// let buffers = (0..3).map(|_| pool.try_alloc(1500)).collect::<Result<Vec<_>, _>>()?;
/// // The third buffer made the pool register two more.
/// assert_eq!((buffers.len(), pool.total()), (3, 4));
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct PoolBuilder {
    pd: ProtectionDomain,
    buffer_size: usize,
    buffers: usize,
    growing: bool,
    huge_pages: bool,
}

impl PoolBuilder {
    /// Bytes of each buffer; 4096 unless set. Memory use is this, rounded up to 64, times the number of buffers.
    #[must_use]
    pub fn buffer_size(mut self, bytes: usize) -> Self {
        self.buffer_size = bytes;
        self
    }

    /// Number of buffers, or of those added each time a growing pool grows; 64 unless set, at least 1.
    #[must_use]
    pub fn buffers(mut self, number: usize) -> Self {
        self.buffers = number;
        self
    }

    /// Registers more buffers instead of waiting for one to come back; without limit, so bound the
    /// number in use in some other way.
    #[must_use]
    pub fn growing(mut self, growing: bool) -> Self {
        self.growing = growing;
        self
    }

    /// Takes its memory from huge pages, [`HostMemory::huge`]; not unless set. Worth it for pools of many megabytes.
    #[must_use]
    pub fn huge_pages(mut self, huge: bool) -> Self {
        self.huge_pages = huge;
        self
    }

    /// Registers the memory.
    ///
    /// # Errors
    ///
    /// [`SetupError::TooSmall`] for no buffers, [`SetupError::Limit`] for too many or too long ones; [`SetupError::Verb`] if the
    /// provider refuses.
    pub fn build(self) -> Result<Pool, SetupError> {
        // A cache line each, so that neighbours do not fight; words of 8 bytes stay words.
        let align = if self.buffer_size <= 8 { 8 } else { 64 };
        LimitError::check("buffer_size", self.buffer_size as u64, u64::from(u32::MAX - 63))?;
        SetupError::at_least("buffers", self.buffers as u64, 1)?;
        LimitError::check("buffers", self.buffers as u64, u64::from(u32::MAX))?;
        let stride = self.buffer_size.max(1).next_multiple_of(align) as u32;
        let free = Arc::new(FreeList {
            chunks: Mutex::new(Chunks { free: Vec::new(), total: 0, closed: false }),
            permits: Semaphore::new(0),
        });
        let inner = Inner {
            pd: self.pd,
            buffer_size: self.buffer_size as u32,
            stride,
            per_slab: self.buffers as u32,
            growing: self.growing,
            huge_pages: self.huge_pages,
            free,
        };
        inner.grow()?;
        Ok(Pool { inner: Arc::new(inner) })
    }
}

/// No buffer to be had.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum PoolError {
    /// All buffers are out.
    Empty,
    /// Longer than the pool's buffers.
    TooLong(LimitError),
    /// The pool should grow and could not.
    Register(SetupError),
}

impl fmt::Display for PoolError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Empty => f.write_str("all buffers of the pool are in use"),
            Self::TooLong(error) => error.fmt(f),
            Self::Register(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for PoolError {}

impl From<PoolError> for std::io::Error {
    fn from(error: PoolError) -> Self {
        let kind = match &error {
            PoolError::Empty => std::io::ErrorKind::WouldBlock,
            PoolError::TooLong(_) => std::io::ErrorKind::InvalidInput,
            PoolError::Register(setup) => Self::from(setup.clone()).kind(),
        };
        Self::new(kind, error)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::software::Network;
    use crate::verbs::Device;

    #[test]
    fn buffers_lie_side_by_side_by_their_size() {
        let pd =
            Device::software_in(&Network::new(), "strides0").unwrap().protection_domain().unwrap();
        for (size, stride) in [(0, 8), (1, 8), (8, 8), (9, 64), (64, 64), (65, 128)] {
            let pool = Pool::new(&pd, size, 3).unwrap();
            let buffers = [(); 3].map(|()| pool.try_alloc(size).unwrap());
            let [first, second, third] = buffers.each_ref().map(|buffer| buffer.sge().addr);
            assert_eq!((second, third), (first + stride, first + 2 * stride), "{size}");
            assert_eq!((pool.total(), pool.available(), pool.buffer_size()), (3, 0, size));
        }
    }

    #[test]
    fn memory_of_a_pool_ends_with_its_last_buffer() {
        let pd =
            Device::software_in(&Network::new(), "ends0").unwrap().protection_domain().unwrap();
        let pool = Pool::new(&pd, 64, 3).unwrap();
        let list = Arc::downgrade(&pool.inner.free);
        let buffers = [(); 2].map(|()| pool.try_alloc(64).unwrap());
        drop(pool);
        for buffer in buffers {
            assert!(list.upgrade().is_some_and(|list| list.chunks.lock().free.is_empty()));
            drop(buffer);
        }
        assert!(list.upgrade().is_none());
    }

    #[test]
    fn sizes_and_numbers_beyond_the_limits_are_named() {
        let pd =
            Device::software_in(&Network::new(), "limits0").unwrap().protection_domain().unwrap();
        let refused = |size: u64, buffers: u64| {
            let builder = Pool::builder(&pd).buffer_size(size as usize).buffers(buffers as usize);
            builder.build().expect_err("it is beyond a limit")
        };
        let beyond =
            |field, asked, allowed| SetupError::Limit(LimitError { field, asked, allowed });
        let most = u64::from(u32::MAX);
        assert_eq!(refused(most - 62, 1), beyond("buffer_size", most - 62, most - 63));
        assert_eq!(refused(8, most + 1), beyond("buffers", most + 1, most));
        assert_eq!(refused(8, 0), SetupError::TooSmall { field: "buffers", asked: 0, least: 1 });
    }
}
