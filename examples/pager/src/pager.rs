//! The client: pages on demand, through a cache.

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_rdma::error::OutOfBounds;
use tokio_rdma::memory::PoolError;
use tokio_rdma::{BufMut, Device, Pool};

use crate::cache::{Cache, Dirty, Evicted, Flight, Frame, Moving, Place};
use crate::lease::Lease;
use crate::meter::Meter;
use crate::readahead::Readahead;
use crate::replicas::Replicas;
use crate::{Directory, NodeError, PAGE, PagerError, Report, StartError, Wanted};

/// Settings of a [`Pager`].
#[derive(Debug, Clone)]
pub struct Config {
    /// Capacity of the cache, in pages of 4 KiB of registered memory.
    pub cache: usize,
    /// Pages in flight at once, in either direction; more wait in a FIFO. At most half of `cache`.
    pub in_flight: usize,
    /// Maximum number of pages to prefetch for a sequential reader; 0: none. Prefetches take up to
    /// half of `in_flight`.
    pub readahead: u64,
    /// Requirements of the map before the pager starts.
    pub wanted: Wanted,
    /// Maximum wait for them, up to 30 seconds.
    pub patience: Duration,
    /// Accepts that a client died while writing, so that copies may differ.
    pub unclean_too: bool,
}

impl Default for Config {
    fn default() -> Self {
        let patience = Duration::from_secs(30);
        Self {
            cache: 4096,
            in_flight: 64,
            readahead: 32,
            wanted: Wanted::default(),
            patience,
            unclean_too: false,
        }
    }
}

/// The memory of all nodes of a coordinator, in pages, with an LRU cache. Clones share it.
///
/// An access fetches a page that is not in the cache, once for all waiters. A changed page is
/// dirty, and is written to all its nodes on eviction or [flush](Self::flush). If a node dies,
/// pages come from other nodes with a copy; without one, accesses fail with [`PagerError::Lost`].
/// Dropping the last clone discards what is not flushed.
///
/// **One client writes at a time**: from its first [`write`](Self::write) until a
/// [`flush`](Self::flush) after which nothing is dirty. The coordinator refuses other writers,
/// because caches of several clients are not coherent. Others may read what was flushed before they
/// began. A writer that dies before its flush leaves copies that may differ; after 30 seconds the
/// coordinator refuses new clients with [`StartError::Unclean`].
#[derive(Debug, Clone)]
pub struct Pager {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    replicas: Replicas,
    lease: Lease,
    cache: Mutex<Cache>,
    pool: Pool,
    readahead: Mutex<Readahead>,
    meter: Meter,
    /// Permits to move pages. A holder has at most one frame outside the cache. There are fewer
    /// permits than frames, so a holder always finds a frame in the pool or in the cache.
    moves: Semaphore,
    /// Permits for prefetches, fewer than `moves`.
    prefetches: Arc<Semaphore>,
    runtime: Handle,
}

impl Pager {
    /// Waits for the required pages, and connects to all nodes of the coordinator.
    ///
    /// # Errors
    ///
    /// [`StartError`]: invalid settings, no memory for the cache, too few pages, no reachable node,
    /// or copies that may differ.
    ///
    /// # Panics
    ///
    /// Outside of a Tokio runtime with I/O and time drivers.
    pub async fn connect(
        device: &Device,
        directory: &Directory,
        config: &Config,
    ) -> Result<Self, StartError> {
        let setting = |field, asked: usize, min: u64, max: u64| match asked as u64 {
            asked if (min..=max).contains(&asked) => Ok(()),
            asked => Err(StartError::Setting { field, asked, min, max }),
        };
        setting("cache", config.cache, 2, u64::from(u32::MAX))?;
        setting(
            "in_flight",
            config.in_flight,
            1,
            (config.cache as u64 / 2).min(Semaphore::MAX_PERMITS as u64),
        )?;
        let pd = device.protection_domain()?;
        let pool = Pool::new(&pd, PAGE, config.cache)?;
        let map = directory.map(config.wanted, config.patience).await?;
        if map.unclean && !config.unclean_too {
            return Err(StartError::Unclean { instance: map.instance });
        }
        let shared = Shared {
            lease: Lease::new(directory, map.instance, config.unclean_too),
            replicas: Replicas::connect(device, &pd, directory, map).await?,
            cache: Mutex::new(Cache::new()),
            pool,
            readahead: Mutex::new(Readahead::new(config.readahead)),
            meter: Meter::new()?,
            moves: Semaphore::new(config.in_flight),
            prefetches: Arc::new(Semaphore::new(config.in_flight / 2)),
            runtime: Handle::current(),
        };
        Ok(Self { shared: Arc::new(shared) })
    }

    /// Returns the number of pages, which are numbered from 0.
    #[must_use]
    pub fn pages(&self) -> u64 {
        self.shared.replicas.pages()
    }

    /// Copies bytes of a page, from `offset` on.
    ///
    /// # Errors
    ///
    /// - [`PagerError::NoPage`] or [`PagerError::Bounds`]: the bytes do not exist.
    /// - [`PagerError::Lost`]: all nodes with the page are lost.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future does not stop the fetch: the page enters the cache.
    pub async fn read(&self, page: u64, offset: usize, out: &mut [u8]) -> Result<(), PagerError> {
        let range = self.range(page, offset, out.len())?;
        self.access(page, |frame| out.copy_from_slice(&frame.bytes[range])).await
    }

    /// Changes bytes of a page, from `offset` on. Its nodes get them on eviction or flush.
    ///
    /// # Errors
    ///
    /// Like [`read`](Self::read), since the page is fetched first. [`PagerError::NotWriter`] if
    /// another client writes or the coordinator is unreachable.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future before completion changes no bytes. The client may keep the lease to
    /// write until its next flush.
    pub async fn write(&self, page: u64, offset: usize, bytes: &[u8]) -> Result<(), PagerError> {
        let range = self.range(page, offset, bytes.len())?;
        // Held until the page is marked dirty, which prevents a flush from ending the lease.
        let held = self.shared.lease.hold().await.ok_or(PagerError::Runtime { page })?;
        let _held = held.map_err(|cause| PagerError::NotWriter { page, cause })?;
        let change = |frame: &mut Frame| {
            frame.bytes[range].copy_from_slice(bytes);
            frame.dirty = true;
        };
        self.access(page, change).await
    }

    /// Starts fetching pages ahead of their use, as far as capacity permits. It is a hint: failures
    /// are reported only to later accesses.
    pub fn prefetch(&self, pages: Range<u64>) {
        for page in pages.start..pages.end.min(self.pages()) {
            let Ok(permit) = self.shared.prefetches.clone().try_acquire_owned() else { return };
            let mut cache = self.shared.cache.lock();
            if cache.is_absent(page) {
                let (moving, _) = cache.start_fetch(page);
                self.shared.start_fetching(moving, Some(permit));
            }
        }
    }

    /// Writes all earlier changes to the nodes. The pages stay in the cache. If nothing was changed
    /// meanwhile, other clients may write from then on.
    ///
    /// # Errors
    ///
    /// The first error. Other pages are still written; failed ones stay in the cache, dirty.
    /// [`PagerError::Unended`] if everything is written, but the coordinator was not notified.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future does not stop writes that have begun. The coordinator may not have been
    /// notified: flush again.
    pub async fn flush(&self) -> Result<(), PagerError> {
        let pages = self.shared.cache.lock().dirty();
        let cleaning: Vec<_> = pages
            .into_iter()
            .map(|page| (page, self.shared.runtime.spawn(self.shared.clone().clean(page))))
            .collect();
        let mut result = Ok(());
        for (page, task) in cleaning {
            let cleaned = task.await.unwrap_or(Err(PagerError::Runtime { page }));
            result = result.and(cleaned);
        }
        result?;
        let ended = self.shared.lease.end(|| self.shared.cache.lock().is_dirty()).await;
        // `None` means that the runtime has shut down, which ended the tasks above too.
        ended.unwrap_or(Ok(())).map_err(PagerError::Unended)
    }

    /// Returns the statistics since the start.
    #[must_use]
    pub fn report(&self) -> Report {
        self.shared.meter.report()
    }

    /// Returns the lost nodes with the causes.
    #[must_use]
    pub fn lost(&self) -> Vec<(String, NodeError)> {
        self.shared.replicas.lost()
    }

    fn range(&self, page: u64, offset: usize, len: usize) -> Result<Range<usize>, PagerError> {
        if page >= self.pages() {
            return Err(PagerError::NoPage { page, pages: self.pages() });
        }
        match offset.checked_add(len) {
            Some(end) if end <= PAGE => Ok(offset..end),
            _ => {
                let bounds =
                    OutOfBounds { offset: offset as u64, len: len as u64, size: PAGE as u64 };
                Err(PagerError::Bounds { page, bounds })
            }
        }
    }

    /// Applies `used` to a page once it is present.
    async fn access(&self, page: u64, used: impl FnOnce(&mut Frame)) -> Result<(), PagerError> {
        let next = self.shared.readahead.lock().used(page);
        let missing = match self.shared.find(page, used) {
            Ok(()) => {
                self.shared.meter.count(|counters| counters.hits += 1);
                self.prefetch(next);
                return Ok(());
            }
            Err(missing) => missing,
        };
        let start = Instant::now();
        self.prefetch(next);
        let (mut used, mut flight) = missing;
        loop {
            let end = flight.wait_for(Option::is_some).await;
            // A dropped sender means that the runtime aborted the task.
            end.map_err(|_| PagerError::Runtime { page })?.clone().unwrap_or(Ok(()))?;
            match self.shared.find(page, used) {
                Ok(()) => {
                    self.shared.meter.waited(start.elapsed());
                    return Ok(());
                }
                // Evicted before this task ran.
                Err(missing) => (used, flight) = missing,
            }
        }
    }
}

impl Shared {
    /// Applies `used` to a page if it is present; otherwise starts a fetch if none is in flight.
    fn find<U: FnOnce(&mut Frame)>(
        self: &Arc<Self>,
        page: u64,
        used: U,
    ) -> Result<(), (U, Flight)> {
        let mut cache = self.cache.lock();
        match cache.find(page) {
            Place::Present(frame) => {
                used(frame);
                Ok(())
            }
            Place::Moving(flight) => Err((used, flight)),
            Place::Absent => {
                let (moving, flight) = cache.start_fetch(page);
                self.start_fetching(moving, None);
                Err((used, flight))
            }
        }
    }

    /// Fetches in a separate task, which dropped accesses do not cancel.
    fn start_fetching(
        self: &Arc<Self>,
        moving: Moving,
        prefetch_permit: Option<OwnedSemaphorePermit>,
    ) {
        drop(self.runtime.spawn(self.clone().fetch(moving, prefetch_permit)));
    }

    async fn fetch(self: Arc<Self>, moving: Moving, prefetch_permit: Option<OwnedSemaphorePermit>) {
        let permit = self.moves.acquire().await;
        match self.read_page(moving.page).await {
            // Counted before waiters are notified.
            Ok(bytes) => {
                self.meter.count(|counters| {
                    counters.fetched += 1;
                    counters.prefetched += u64::from(prefetch_permit.is_some());
                });
                let (page, mut cache) = (moving.page, self.cache.lock());
                cache.finish(moving, Frame { bytes, dirty: false });
                // Marks it as used, or it might be evicted before its waiters run.
                let _ = cache.find(page);
            }
            Err(error) => {
                self.meter.count(|counters| counters.failed += 1);
                self.cache.lock().remove(moving, Err(error));
            }
        }
        drop(permit);
    }

    async fn read_page(&self, page: u64) -> Result<BufMut, PagerError> {
        let buffer = self.buffer(page).await?;
        let start = Instant::now();
        let buffer = self.replicas.read(page, buffer).await?;
        self.meter.read(start.elapsed());
        Ok(buffer)
    }

    /// Returns a buffer for `page`, from the pool or by evicting another page.
    async fn buffer(&self, page: u64) -> Result<BufMut, PagerError> {
        let mut failed = PagerError::NoBuffer { page, cause: PoolError::Empty };
        // While a node's removal is unconfirmed, dirty pages are evicted only if no clean one is
        // left: their write-back would wait for the coordinator.
        let mut waiting = self.replicas.is_unsure();
        let mut dirty_too = !waiting;
        // At most one iteration per frame: pages that fail to be written back are not retried.
        for _ in 0..self.pool.total() {
            let evicted = {
                // One lock for both, because a fetched frame enters the cache under this lock.
                let mut cache = self.cache.lock();
                match self.pool.try_alloc(PAGE) {
                    Ok(buffer) => return Ok(buffer),
                    Err(PoolError::Empty) => cache.evict(dirty_too),
                    Err(cause) => return Err(PagerError::NoBuffer { page, cause }),
                }
            };
            match evicted {
                Some(Evicted::Clean(bytes)) => {
                    self.meter.count(|counters| counters.evicted += 1);
                    return Ok(bytes);
                }
                Some(Evicted::Dirty(moving, bytes)) => {
                    match self.write_back(moving.page, bytes).await {
                        (bytes, Ok(())) => {
                            self.meter.count(|counters| {
                                counters.evicted += 1;
                                counters.written_back += 1;
                            });
                            self.cache.lock().remove(moving, Ok(()));
                            return Ok(bytes);
                        }
                        (bytes, Err(error)) => {
                            // The cache has the only copy: keep it, as most recently used.
                            let mut cache = self.cache.lock();
                            let kept = moving.page;
                            cache.finish(moving, Frame { bytes, dirty: true });
                            let _ = cache.find(kept);
                            failed = error;
                            // Other pages may have other nodes, but have the same coordinator.
                            dirty_too = !matches!(
                                failed,
                                PagerError::Unsure { .. } | PagerError::NotWriter { .. }
                            );
                        }
                    }
                }
                None if waiting => (waiting, dirty_too) = (false, true),
                None => break,
            }
        }
        Err(failed)
    }

    /// Writes a page back. Returns the buffer in any case.
    async fn write_back(&self, page: u64, bytes: BufMut) -> (BufMut, Result<(), PagerError>) {
        match self.lease.check() {
            Ok(()) => self.replicas.write(page, bytes).await,
            Err(cause) => (bytes, Err(PagerError::NotWriter { page, cause })),
        }
    }

    async fn clean(self: Arc<Self>, page: u64) -> Result<(), PagerError> {
        loop {
            let permit = self.moves.acquire().await;
            let found = match self.cache.lock().find_dirty(page) {
                Dirty::Present(moving, bytes) => Ok((moving, bytes)),
                Dirty::Moving(flight) => Err(flight),
                Dirty::No => return Ok(()),
            };
            match found {
                Ok((moving, bytes)) => {
                    let (bytes, result) = self.write_back(page, bytes).await;
                    self.meter.count(|counters| counters.written_back += u64::from(result.is_ok()));
                    self.cache.lock().finish(moving, Frame { bytes, dirty: result.is_err() });
                    return result;
                }
                Err(mut flight) => {
                    // The task that moves it may need the permit.
                    drop(permit);
                    let end = flight.wait_for(Option::is_some).await;
                    end.map(drop).map_err(|_| PagerError::Runtime { page })?;
                }
            }
        }
    }
}
