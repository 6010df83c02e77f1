use std::fmt;
use std::sync::Arc;

use super::buf::Slab;
use super::free_list::FreeList;
use super::registration::Registration;
use crate::coop::try_within_budget;
use crate::error::{LimitError, SetupError, VerbError};
use crate::memory::{BufMut, HostMemory};
use crate::types::Access;
use crate::verbs::ProtectionDomain;

/// A pool of registered buffers of equal size. Clones refer to the same pool.
///
/// The pool registers large slabs, because registration is slow and counts towards limits. A
/// dropped buffer returns to the pool, that of an abandoned operation when the device has finished.
///
/// ```
/// use tokio_rdma::Pool;
/// use tokio_rdma::memory::PoolError;
/// # use tokio_rdma::Device;
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let pd = Device::open_default_or_software()?.protection_domain()?;
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

impl Pool {
    /// Creates a pool of `buffers` buffers of `buffer_size` bytes.
    ///
    /// # Errors
    ///
    /// As for [`PoolBuilder::build`].
    pub fn new(
        pd: &ProtectionDomain,
        buffer_size: usize,
        buffers: usize,
    ) -> Result<Self, SetupError> {
        Self::builder(pd).buffer_size(buffer_size).buffers(buffers).build()
    }

    /// Returns a builder for a pool.
    pub fn builder(pd: &ProtectionDomain) -> PoolBuilder {
        PoolBuilder {
            pd: pd.clone(),
            buffer_size: 4096,
            buffers: 64,
            growing: false,
            huge_pages: false,
        }
    }

    /// Takes a buffer of `len` bytes, waiting in FIFO order until one is free.
    ///
    /// # Errors
    ///
    /// [`PoolError::Limit`] if `len` exceeds the buffer size; [`PoolError::Register`] if a
    /// growing pool fails to register memory.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future only gives up the place in the wait queue.
    #[inline]
    pub async fn alloc(&self, len: usize) -> Result<BufMut, PoolError> {
        let attempt = || match self.try_alloc(len) {
            Err(PoolError::Empty) => None,
            other => Some(other),
        };
        match try_within_budget(attempt).await {
            Some(result) => result,
            None => Ok(self.inner.free.wait(len as u32).await),
        }
    }

    /// Takes a buffer of `len` bytes without waiting.
    ///
    /// # Errors
    ///
    /// As for [`alloc`](Self::alloc), and [`PoolError::Empty`] if no buffer is free.
    #[inline]
    pub fn try_alloc(&self, len: usize) -> Result<BufMut, PoolError> {
        loop {
            if let Some(buffer) = self.take_free(len)? {
                return Ok(buffer);
            }
            if !self.inner.growing {
                return Err(PoolError::Empty);
            }
            self.inner.grow(self.inner.per_slab).map_err(PoolError::Register)?;
        }
    }

    /// Takes `number` buffers of `len` bytes and appends them to `buffers`, waiting until so many
    /// are free at once, which delays the tasks behind it in the queue.
    ///
    /// # Errors
    ///
    /// As for [`alloc`](Self::alloc), and [`PoolError::Limit`] if a pool that does not grow has
    /// fewer buffers. `buffers` is unchanged then.
    ///
    /// # Cancel safety
    ///
    /// As for `alloc`.
    pub async fn alloc_many(
        &self,
        buffers: &mut Vec<BufMut>,
        number: usize,
        len: usize,
    ) -> Result<(), PoolError> {
        let attempt = || match self.try_alloc_many(buffers, number, len) {
            Err(PoolError::Empty) => None,
            other => Some(other),
        };
        match try_within_budget(attempt).await {
            Some(result) => result,
            // At most the pool's total: `try_alloc_many` has checked it.
            None => {
                self.inner.free.wait_many(buffers, number as u32, len as u32).await;
                Ok(())
            }
        }
    }

    /// Takes buffers like [`alloc_many`](Self::alloc_many), without waiting.
    ///
    /// # Errors
    ///
    /// As for `alloc_many`, and [`PoolError::Empty`] if fewer buffers are free. `buffers` is
    /// unchanged then.
    pub fn try_alloc_many(
        &self,
        buffers: &mut Vec<BufMut>,
        number: usize,
        len: usize,
    ) -> Result<(), PoolError> {
        self.check(len)?;
        while !self.inner.free.take_many(buffers, number, len as u32) {
            if self.inner.growing {
                self.inner.grow(self.inner.per_slab).map_err(PoolError::Register)?;
                continue;
            }
            LimitError::check(
                "buffers taken at once (PoolBuilder::buffers)",
                number as u64,
                u64::from(self.inner.per_slab),
            )
            .map_err(PoolError::Limit)?;
            return Err(PoolError::Empty);
        }
        Ok(())
    }

    #[inline]
    pub(crate) fn take_free(&self, len: usize) -> Result<Option<BufMut>, PoolError> {
        self.check(len)?;
        Ok(self.inner.free.take(len as u32))
    }

    #[inline]
    fn check(&self, len: usize) -> Result<(), PoolError> {
        LimitError::check(
            "buffer bytes (PoolBuilder::buffer_size)",
            len as u64,
            u64::from(self.inner.buffer_size),
        )
        .map_err(PoolError::Limit)
    }

    /// Takes a buffer without waiting and copies `bytes` into it.
    ///
    /// # Errors
    ///
    /// As for [`try_alloc`](Self::try_alloc).
    pub fn copy_from(&self, bytes: &[u8]) -> Result<BufMut, PoolError> {
        let mut buf = self.try_alloc(bytes.len())?;
        buf.copy_from_slice(bytes);
        Ok(buf)
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.total() as u64 * u64::from(self.inner.stride)
    }

    pub(crate) fn protection_domain(&self) -> &ProtectionDomain {
        &self.inner.pd
    }

    pub(crate) fn grow_by(&self, buffers: u32) -> Result<(), SetupError> {
        if buffers == 0 { Ok(()) } else { self.inner.grow(buffers) }
    }

    #[cfg(test)]
    pub(super) fn free_list(&self) -> &Arc<FreeList> {
        &self.inner.free
    }

    /// Returns the number of bytes of each buffer.
    #[must_use]
    pub fn buffer_size(&self) -> usize {
        self.inner.buffer_size as usize
    }

    /// Returns the number of free buffers.
    #[must_use]
    pub fn available(&self) -> usize {
        self.inner.free.available()
    }

    /// Returns the number of buffers, free or in use.
    #[must_use]
    pub fn total(&self) -> usize {
        self.inner.free.total()
    }
}

impl Inner {
    fn grow(&self, buffers: u32) -> Result<(), SetupError> {
        let len = self.stride as usize * buffers as usize;
        let memory = if self.huge_pages {
            let errno = |error: std::io::Error| error.raw_os_error().unwrap_or(VerbError::ENOMEM);
            HostMemory::huge(len).map_err(|error| VerbError::new("mmap", errno(error)))?
        } else {
            HostMemory::try_zeroed(len)?
        };
        let registration = Registration::new(&self.pd, memory, Access::LOCAL_WRITE, false)?;
        let slab = Slab::new(registration, self.stride, buffers, Some(self.free.clone()));
        self.free.add(&slab, buffers);
        Ok(())
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.free.close();
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

/// A builder for a [`Pool`].
#[derive(Debug, Clone)]
#[must_use]
pub struct PoolBuilder {
    pd: ProtectionDomain,
    buffer_size: usize,
    buffers: usize,
    growing: bool,
    huge_pages: bool,
}

impl PoolBuilder {
    /// Sets the bytes of each buffer; default 4096. A buffer takes this size rounded up to a
    /// multiple of 64; sizes up to 8 take 8 bytes.
    pub fn buffer_size(mut self, bytes: usize) -> Self {
        self.buffer_size = bytes;
        self
    }

    /// Sets the number of buffers, and of those that growing adds at a time; at least 1, default
    /// 64.
    pub fn buffers(mut self, number: usize) -> Self {
        self.buffers = number;
        self
    }

    /// Makes the pool register more buffers instead of waiting, without an upper limit.
    pub fn growing(mut self, growing: bool) -> Self {
        self.growing = growing;
        self
    }

    /// Takes huge pages ([`HostMemory::huge`]), for pools of many megabytes; off by default.
    pub fn huge_pages(mut self, huge: bool) -> Self {
        self.huge_pages = huge;
        self
    }

    /// Registers the memory and returns the pool.
    ///
    /// # Errors
    ///
    /// [`SetupError::TooSmall`] for 0 buffers, or buffers of 0 bytes; [`SetupError::Limit`] if
    /// number or size exceed a limit.
    pub fn build(self) -> Result<Pool, SetupError> {
        // Alignment to cache lines avoids false sharing; chunks of up to 8 bytes are packed.
        let align = if self.buffer_size <= 8 { 8 } else { 64 };
        SetupError::at_least("buffer_size", self.buffer_size as u64, 1)?;
        LimitError::check("buffer_size", self.buffer_size as u64, u64::from(u32::MAX - 63))?;
        SetupError::at_least("buffers", self.buffers as u64, 1)?;
        LimitError::check("buffers", self.buffers as u64, u64::from(u32::MAX))?;
        let stride = self.buffer_size.next_multiple_of(align) as u32;
        let free = Arc::new(FreeList::new());
        let inner = Inner {
            pd: self.pd,
            buffer_size: self.buffer_size as u32,
            stride,
            per_slab: self.buffers as u32,
            growing: self.growing,
            huge_pages: self.huge_pages,
            free,
        };
        inner.grow(inner.per_slab)?;
        Ok(Pool { inner: Arc::new(inner) })
    }
}

/// The reason why a pool returned no buffer.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum PoolError {
    /// All buffers are in use.
    Empty,
    /// The requested length exceeds the buffer size, or the requested number the buffers of a pool
    /// that does not grow.
    Limit(LimitError),
    /// A growing pool failed to register memory.
    Register(SetupError),
}

impl fmt::Display for PoolError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Empty => f.write_str(
                "all buffers of the pool are in use; wait with Pool::alloc or enlarge the pool",
            ),
            Self::Limit(error) => error.fmt(f),
            Self::Register(error) => write!(f, "failed to grow the buffer pool: {error}"),
        }
    }
}

impl std::error::Error for PoolError {}

impl From<PoolError> for std::io::Error {
    fn from(error: PoolError) -> Self {
        let kind = match &error {
            PoolError::Empty => std::io::ErrorKind::WouldBlock,
            PoolError::Limit(_) => std::io::ErrorKind::InvalidInput,
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
    fn buffers_are_adjacent_with_the_stride_of_their_size() {
        let pd =
            Device::software_in(&Network::new(), "strides0").unwrap().protection_domain().unwrap();
        for (size, stride) in [(1, 8), (8, 8), (9, 64), (64, 64), (65, 128)] {
            let pool = Pool::new(&pd, size, 3).unwrap();
            let buffers = [(); 3].map(|()| pool.try_alloc(size).unwrap());
            let [first, second, third] = buffers.each_ref().map(|buffer| buffer.sge().addr);
            assert_eq!((second, third), (first + stride, first + 2 * stride), "{size}");
            assert_eq!((pool.total(), pool.available(), pool.buffer_size()), (3, 0, size));
        }
    }

    #[test]
    fn memory_of_a_pool_is_freed_with_its_last_buffer() {
        let pd =
            Device::software_in(&Network::new(), "ends0").unwrap().protection_domain().unwrap();
        let pool = Pool::new(&pd, 64, 3).unwrap();
        let list = Arc::downgrade(&pool.inner.free);
        let buffers = [(); 2].map(|()| pool.try_alloc(64).unwrap());
        drop(pool);
        for buffer in buffers {
            assert!(list.upgrade().is_some_and(|list| list.available() == 0));
            drop(buffer);
        }
        assert!(list.upgrade().is_none());
    }

    #[test]
    fn sizes_and_numbers_beyond_the_limits_are_refused() {
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
        let none = SetupError::TooSmall { field: "buffer_size", asked: 0, least: 1 };
        assert_eq!(refused(0, 8), none);
    }
}
