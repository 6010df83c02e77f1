//! Pages for the asking.

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
    /// Pages that the cache holds, 4 KiB each of registered memory.
    pub cache: usize,
    /// Pages on their way at once, either way: more wait in line. At most half of `cache`.
    pub in_flight: usize,
    /// Pages to fetch ahead of somebody who reads in order, at most; 0: none. They take up to half of `in_flight`.
    pub readahead: u64,
    /// What the coordinator has to know before the pager starts.
    pub wanted: Wanted,
    /// How long to wait for that, up to 30 seconds.
    pub patience: Duration,
    /// A client that wrote and was not heard of any more may have left copies that differ, which is fine.
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

/// The memory of all nodes of a coordinator, in pages, with a cache of those used last; clones share it.
///
/// A page is fetched when it is not in the cache, once however many ask for it. One that was written to is dirty, and written to
/// all nodes that have it when it is evicted or [flushed](Self::flush). When nodes die, pages come from the others that have
/// them; [`PagerError::Lost`] if there are none. What was not flushed when the last clone is dropped is gone.
///
/// **One client writes at a time**, from its first [`write`](Self::write) to a [`flush`](Self::flush) after which nothing is left to
/// be written back, and the coordinator refuses others: caches of several are not kept alike, as those of processors are. Others
/// may read what was flushed before they began. Who writes and does not come to a flush leaves copies that may differ, and after
/// 30 seconds the coordinator says so to those who come ([`StartError::Unclean`]).
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
    /// Who has a permit has at most one frame in hand. There are fewer permits than frames, so that whoever needs one finds
    /// it in the pool or in the cache.
    movers: Semaphore,
    /// Fetching ahead never takes all of them.
    ahead: Arc<Semaphore>,
    runtime: Handle,
}

impl Pager {
    /// Connects to all nodes that the coordinator has, when it has what is wanted.
    ///
    /// # Errors
    ///
    /// [`StartError`]: settings that do not work, no memory for the cache, not enough pages, no node that can be reached, or copies
    /// that may differ.
    ///
    /// # Panics
    ///
    /// Outside of a Tokio runtime with its I/O and time drivers.
    pub async fn connect(
        device: &Device,
        directory: &Directory,
        config: &Config,
    ) -> Result<Self, StartError> {
        let setting = |field, asked: usize, least: u64, most: u64| match asked as u64 {
            asked if (least..=most).contains(&asked) => Ok(()),
            asked => Err(StartError::Setting { field, asked, least, most }),
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
            movers: Semaphore::new(config.in_flight),
            ahead: Arc::new(Semaphore::new(config.in_flight / 2)),
            runtime: Handle::current(),
        };
        Ok(Self { shared: Arc::new(shared) })
    }

    /// Pages there are, from 0 on.
    #[must_use]
    pub fn pages(&self) -> u64 {
        self.shared.replicas.pages()
    }

    /// Copies bytes of a page, from `offset` on.
    ///
    /// # Errors
    ///
    /// [`PagerError::NoPage`] and [`PagerError::Bounds`] for what there is not, [`PagerError::Lost`] if no node has it any more.
    ///
    /// # Cancel safety
    ///
    /// If it is dropped, the page comes into the cache all the same.
    pub async fn read(&self, page: u64, offset: usize, out: &mut [u8]) -> Result<(), PagerError> {
        let range = self.range(page, offset, out.len())?;
        self.access(page, |frame| out.copy_from_slice(&frame.bytes[range])).await
    }

    /// Changes bytes of a page, from `offset` on. Its nodes have them when it is evicted or flushed.
    ///
    /// # Errors
    ///
    /// As [`read`](Self::read): a page is fetched before it is changed. [`PagerError::NotWriter`] if another client writes, or the
    /// coordinator is not there to say so.
    ///
    /// # Cancel safety
    ///
    /// If it is dropped before it was ready, nothing was changed; this client may be the one that writes, until it flushes.
    pub async fn write(&self, page: u64, offset: usize, bytes: &[u8]) -> Result<(), PagerError> {
        let range = self.range(page, offset, bytes.len())?;
        // Held until the page is dirty, which a flush sees.
        let held = self.shared.lease.hold().await.ok_or(PagerError::Runtime { page })?;
        let _held = held.map_err(|cause| PagerError::NotWriter { page, cause })?;
        let change = |frame: &mut Frame| {
            frame.bytes[range].copy_from_slice(bytes);
            frame.dirty = true;
        };
        self.access(page, change).await
    }

    /// Has pages fetched that will be wanted, as far as nothing else is in the way: it is a hint, and failures are seen by those
    /// who want a page that did not come.
    pub fn prefetch(&self, pages: Range<u64>) {
        for page in pages.start..pages.end.min(self.pages()) {
            let Ok(permit) = self.shared.ahead.clone().try_acquire_owned() else { return };
            let mut cache = self.shared.cache.lock();
            if cache.is_absent(page) {
                let (moving, _) = cache.depart(page);
                self.shared.start_fetching(moving, Some(permit));
            }
        }
    }

    /// Writes all that was changed before to the nodes. The pages stay in the cache. If nothing was changed meanwhile, other clients
    /// may write from then on.
    ///
    /// # Errors
    ///
    /// The first of them; the others are written all the same, and what was not stays in the cache, dirty.
    /// [`PagerError::Unended`] if all is written, and the coordinator cannot be told.
    ///
    /// # Cancel safety
    ///
    /// If it is dropped, what was begun goes on. The coordinator may not have been told that all is written: flush again.
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
        let given = self.shared.lease.give_back(|| self.shared.cache.lock().is_dirty()).await;
        // A runtime that has shut down has ended the tasks above, and nobody is told.
        given.unwrap_or(Ok(())).map_err(PagerError::Unended)
    }

    /// What was done so far, and what it took.
    #[must_use]
    pub fn report(&self) -> Report {
        self.shared.meter.report()
    }

    /// Nodes that were lost, with the reasons.
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

    /// Does something with a page when it is here.
    async fn access(&self, page: u64, used: impl FnOnce(&mut Frame)) -> Result<(), PagerError> {
        let ahead = self.shared.readahead.lock().used(page);
        let missing = match self.shared.find(page, used) {
            Ok(()) => {
                self.shared.meter.count(|counters| counters.hits += 1);
                self.prefetch(ahead);
                return Ok(());
            }
            Err(missing) => missing,
        };
        let start = Instant::now();
        self.prefetch(ahead);
        let (mut used, mut flight) = missing;
        loop {
            let end = flight.wait_for(Option::is_some).await;
            // A task that ends without a word was ended with its runtime.
            end.map_err(|_| PagerError::Runtime { page })?.clone().unwrap_or(Ok(()))?;
            match self.shared.find(page, used) {
                Ok(()) => {
                    self.shared.meter.waited(start.elapsed());
                    return Ok(());
                }
                // It made room for others before we came here.
                Err(missing) => (used, flight) = missing,
            }
        }
    }
}

impl Shared {
    /// Uses a page if it is here. If not, it is on its way when this returns.
    fn find<U: FnOnce(&mut Frame)>(
        self: &Arc<Self>,
        page: u64,
        used: U,
    ) -> Result<(), (U, Flight)> {
        let mut cache = self.cache.lock();
        match cache.find(page) {
            Place::Here(frame) => {
                used(frame);
                Ok(())
            }
            Place::Moving(flight) => Err((used, flight)),
            Place::Absent => {
                let (moving, flight) = cache.depart(page);
                self.start_fetching(moving, None);
                Err((used, flight))
            }
        }
    }

    /// In a task of its own, that nobody who asks for the page can end.
    fn start_fetching(self: &Arc<Self>, moving: Moving, ahead: Option<OwnedSemaphorePermit>) {
        drop(self.runtime.spawn(self.clone().fetch(moving, ahead)));
    }

    async fn fetch(self: Arc<Self>, moving: Moving, ahead: Option<OwnedSemaphorePermit>) {
        let permit = self.movers.acquire().await;
        match self.bring(moving.page).await {
            // Counted before anybody is told.
            Ok(bytes) => {
                self.meter.count(|counters| {
                    counters.fetched += 1;
                    counters.prefetched += u64::from(ahead.is_some());
                });
                let (page, mut cache) = (moving.page, self.cache.lock());
                cache.land(moving, Frame { bytes, dirty: false });
                // Else others might evict it before who asked for it has come.
                let _ = cache.find(page);
            }
            Err(error) => {
                self.meter.count(|counters| counters.failed += 1);
                self.cache.lock().vanish(moving, Err(error));
            }
        }
        drop(permit);
    }

    async fn bring(&self, page: u64) -> Result<BufMut, PagerError> {
        let buffer = self.buffer(page).await?;
        let start = Instant::now();
        let buffer = self.replicas.read(page, buffer).await?;
        self.meter.read(start.elapsed());
        Ok(buffer)
    }

    /// A buffer for `page`, from the pool or of a page that makes room.
    async fn buffer(&self, page: u64) -> Result<BufMut, PagerError> {
        let mut failed = PagerError::NoBuffer { page, cause: PoolError::Empty };
        // A page that would have to wait for the coordinator does so only if there is no other.
        let mut waiting = self.replicas.is_unsure();
        let mut dirty_too = !waiting;
        // Once for each page there may be: those that cannot be written back are not tried again.
        for _ in 0..self.pool.total() {
            let evicted = {
                // Under one lock, as a frame that lands goes from hand to cache under it.
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
                            self.cache.lock().vanish(moving, Ok(()));
                            return Ok(bytes);
                        }
                        (bytes, Err(error)) => {
                            // What is here is all there is of it: it stays, as the page used last.
                            let mut cache = self.cache.lock();
                            let kept = moving.page;
                            cache.land(moving, Frame { bytes, dirty: true });
                            let _ = cache.find(kept);
                            failed = error;
                            // Others have other nodes, but no other coordinator.
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

    /// Gives the buffer back in any case.
    async fn write_back(&self, page: u64, bytes: BufMut) -> (BufMut, Result<(), PagerError>) {
        match self.lease.check() {
            Ok(()) => self.replicas.write(page, bytes).await,
            Err(cause) => (bytes, Err(PagerError::NotWriter { page, cause })),
        }
    }

    /// Writes a page back, if it is dirty, and keeps it.
    async fn clean(self: Arc<Self>, page: u64) -> Result<(), PagerError> {
        loop {
            let permit = self.movers.acquire().await;
            let found = match self.cache.lock().find_dirty(page) {
                Dirty::Here(moving, bytes) => Ok((moving, bytes)),
                Dirty::Moving(flight) => Err(flight),
                Dirty::No => return Ok(()),
            };
            match found {
                Ok((moving, bytes)) => {
                    let (bytes, result) = self.write_back(page, bytes).await;
                    self.meter.count(|counters| counters.written_back += u64::from(result.is_ok()));
                    self.cache.lock().land(moving, Frame { bytes, dirty: result.is_err() });
                    return result;
                }
                Err(mut flight) => {
                    // Whoever moves it may need the permit.
                    drop(permit);
                    let end = flight.wait_for(Option::is_some).await;
                    end.map(drop).map_err(|_| PagerError::Runtime { page })?;
                }
            }
        }
    }
}
