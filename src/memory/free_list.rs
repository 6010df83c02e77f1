//! The free chunks of a pool, and the tasks that wait for them.
//!
//! Taking or returning a chunk takes one lock. A waiting task sleeps in a semaphore, which keeps
//! the order: it grants a permit for each chunk that is *promised* to waiting tasks.

use std::sync::Arc;

use rdma_provider::later;
use rdma_provider::locks::{Mutex, MutexGuard};
use tokio::sync::Semaphore;

use super::buf::{BufMut, Chunk, Slab};
use crate::contained::wakes_contained;

/// Each free chunk keeps its slab alive, so dropping the pool empties the list.
pub(crate) struct FreeList {
    chunks: Mutex<Chunks>,
    /// One permit for each promised chunk. Panics of wakers are contained, so that they do not
    /// unwind into the task that returns a buffer.
    permits: Semaphore,
}

struct Chunks {
    free: Vec<Chunk>,
    total: usize,
    wanted: usize,
    /// Chunks of `free` that only holders of a permit may take. This can exceed `wanted` after a
    /// wait is cancelled; then a permit is available.
    promised: usize,
    closed: bool,
}

impl FreeList {
    pub(crate) fn new() -> Self {
        let chunks = Chunks { free: Vec::new(), total: 0, wanted: 0, promised: 0, closed: false };
        Self { chunks: Mutex::new(chunks), permits: Semaphore::new(0) }
    }

    pub(crate) fn available(&self) -> usize {
        self.chunks.lock().free.len()
    }

    pub(crate) fn total(&self) -> usize {
        self.chunks.lock().total
    }

    pub(crate) fn add(&self, slab: &Arc<Slab>, number: u32) {
        let mut chunks = self.chunks.lock();
        chunks.total += number as usize;
        // Capacity for all chunks: returning one never allocates.
        let in_use = chunks.total - chunks.free.len();
        chunks.free.reserve(in_use);
        chunks.free.extend((0..number).rev().map(|index| Chunk::new(slab.clone(), index)));
        self.keep_promises(chunks);
    }

    #[inline]
    pub(crate) fn take(&self, len: u32) -> Option<BufMut> {
        let mut chunks = self.claim(1)?;
        let buffer = chunks.pop().into_buffer(len);
        self.keep_promises(chunks);
        Some(buffer)
    }

    pub(crate) fn take_many(&self, buffers: &mut Vec<BufMut>, number: usize, len: u32) -> bool {
        let Some(mut chunks) = self.claim(number) else { return false };
        chunks.pop_many(buffers, number, len);
        self.keep_promises(chunks);
        true
    }

    /// Locks the chunks if `number` of them are free and not promised, or promised without a wait
    /// that uses the permits. The caller takes them, then calls `keep_promises`: a task may have
    /// begun to wait between the two locks and have counted on the permits.
    #[inline]
    fn claim(&self, number: usize) -> Option<MutexGuard<'_, Chunks>> {
        let chunks = self.chunks.lock();
        let unpromised = chunks.free.len() - chunks.promised;
        if number <= unpromised {
            return Some(chunks);
        }
        let missing = number - unpromised;
        if missing > chunks.promised {
            return None;
        }
        drop(chunks);
        let permits = self.permits.try_acquire_many(missing as u32).ok()?;
        let mut chunks = self.chunks.lock();
        if chunks.free.len() - chunks.promised < number - missing {
            // Another task took some of the others; the permits stay available.
            return None;
        }
        permits.forget();
        chunks.promised -= missing;
        Some(chunks)
    }

    pub(crate) async fn wait(&self, len: u32) -> BufMut {
        self.granted(1).await.pop().into_buffer(len)
    }

    pub(crate) async fn wait_many(&self, buffers: &mut Vec<BufMut>, number: u32, len: u32) {
        self.granted(number).await.pop_many(buffers, number as usize, len);
    }

    /// The caller must take `number` chunks with the returned lock.
    async fn granted(&self, number: u32) -> MutexGuard<'_, Chunks> {
        {
            let mut chunks = self.chunks.lock();
            chunks.wanted += number as usize;
            self.keep_promises(chunks);
        }
        let waiting = Waiting { list: self, number: number as usize };
        match wakes_contained(self.permits.acquire_many(number)).await {
            Ok(permits) => permits.forget(),
            Err(_) => unreachable!("the semaphore is never closed"),
        }
        // The wait is over, not cancelled.
        std::mem::forget(waiting);
        let mut chunks = self.chunks.lock();
        chunks.wanted -= number as usize;
        chunks.promised -= number as usize;
        chunks
    }

    /// The caller may hold a lock.
    #[inline]
    pub(super) fn return_chunk(chunk: Chunk) {
        // Keeps the list alive: once the lock is released, another thread may drop the slab.
        let Some(list) = chunk.free_list().cloned() else { return later::dispose(chunk) };
        let mut chunks = list.chunks.lock();
        if chunks.closed {
            // Unlocked first: this may be the last chunk of the slab, and deregistration is slow.
            drop(chunks);
            return later::dispose(chunk);
        }
        chunks.free.push(chunk);
        list.keep_promises(chunks);
    }

    pub(crate) fn return_last(buffers: &mut Vec<BufMut>) {
        let list = buffers.last().and_then(|last| last.slab().free_list()).cloned();
        if let Some(list) = list {
            let mut chunks = list.chunks.lock();
            if !chunks.closed {
                let own = Some(Arc::as_ptr(&list));
                let is_other = |buffer: &BufMut| buffer.slab().free_list().map(Arc::as_ptr) != own;
                let first = buffers.iter().rposition(is_other).map_or(0, |before| before + 1);
                chunks.free.extend(buffers.drain(first..).rev().map(BufMut::into_chunk));
                return list.keep_promises(chunks);
            }
        }
        buffers.pop();
    }

    /// Promises free chunks to waiting tasks, and unlocks. Called whenever more chunks are free, or
    /// more are asked for than promised, so that no chunk stays unpromised while a task waits.
    #[inline]
    fn keep_promises(&self, mut chunks: MutexGuard<'_, Chunks>) {
        if chunks.wanted > chunks.promised {
            let missing = chunks.wanted - chunks.promised;
            let promised = missing.min(chunks.free.len() - chunks.promised);
            chunks.promised += promised;
            drop(chunks);
            self.permits.add_permits(promised);
        }
    }

    pub(crate) fn close(&self) {
        let mut chunks = self.chunks.lock();
        chunks.closed = true;
        let free = std::mem::take(&mut chunks.free);
        drop(chunks);
        later::dispose(free);
    }
}

impl Chunks {
    #[inline]
    fn pop(&mut self) -> Chunk {
        let Some(chunk) = self.free.pop() else {
            unreachable!("more chunks are free than promised, or the caller had a permit")
        };
        chunk
    }

    fn pop_many(&mut self, buffers: &mut Vec<BufMut>, number: usize, len: u32) {
        let rest = self.free.len() - number;
        let taken = self.free.drain(rest..).rev();
        buffers.extend(taken.map(|chunk| chunk.into_buffer(len)));
    }
}

/// Dropping it cancels the wait; its permits return to the semaphore and so to the next task.
struct Waiting<'a> {
    list: &'a FreeList,
    number: usize,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.list.chunks.lock().wanted -= self.number;
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::pin::pin;
    use std::sync::Arc;
    use std::task::{Context, Poll, Waker};

    use crate::memory::gather::Sealed;
    use crate::memory::{BufMut, Pool, PoolError};
    use crate::software::Network;
    use crate::verbs::Device;

    fn pool(buffers: usize) -> Pool {
        let device = Device::software_in(&Network::new(), "free0").unwrap();
        Pool::new(&device.protection_domain().unwrap(), 64, buffers).unwrap()
    }

    fn poll<F: Future>(future: std::pin::Pin<&mut F>) -> Poll<F::Output> {
        future.poll(&mut Context::from_waker(Waker::noop()))
    }

    fn is_empty<T>(result: &Result<T, PoolError>) -> bool {
        matches!(result, Err(PoolError::Empty))
    }

    #[test]
    fn waits_are_served_in_order_and_later_calls_do_not_overtake() {
        let pool = pool(2);
        let (first, second) = (pool.try_alloc(1).unwrap(), pool.try_alloc(1).unwrap());
        let mut many = Vec::new();
        {
            let (mut waits, mut behind) =
                (pin!(pool.alloc_many(&mut many, 2, 1)), pin!(pool.alloc(1)));
            assert!(poll(waits.as_mut()).is_pending() && poll(behind.as_mut()).is_pending());
            drop(first);
            assert!(is_empty(&pool.try_alloc(1)), "the buffer is promised");
            assert!(is_empty(&pool.try_alloc_many(&mut Vec::new(), 1, 1)));
            assert!(poll(behind.as_mut()).is_pending() && poll(waits.as_mut()).is_pending());
            drop(second);
            assert!(poll(behind.as_mut()).is_pending());
            assert!(poll(waits.as_mut()).is_ready());
        }
        assert_eq!((many.len(), pool.available()), (2, 0));
    }

    #[test]
    fn cancelled_wait_returns_what_it_was_promised() {
        let pool = pool(3);
        let mut taken = Vec::new();
        pool.try_alloc_many(&mut taken, 3, 8).unwrap();
        let mut many = Vec::new();
        {
            let mut behind = pin!(pool.alloc(8));
            {
                let mut waits = pin!(pool.alloc_many(&mut many, 3, 8));
                assert!(poll(waits.as_mut()).is_pending() && poll(behind.as_mut()).is_pending());
                taken.truncate(1);
                assert!(poll(waits.as_mut()).is_pending() && poll(behind.as_mut()).is_pending());
            }
            let Poll::Ready(Ok(buffer)) = poll(behind.as_mut()) else { panic!("it is its turn") };
            taken.push(buffer);
        }
        // Of the two promised buffers, one is left, which no task waits for.
        assert!(is_empty(&pool.try_alloc_many(&mut many, 2, 8)) && many.is_empty());
        taken.push(pool.try_alloc(8).unwrap());
        assert!(is_empty(&pool.try_alloc(8)));
        taken.clear();
        pool.try_alloc_many(&mut many, 3, 8).unwrap();
        assert_eq!((many.len(), pool.available()), (3, 0));
    }

    #[test]
    fn promised_buffers_without_a_wait_are_taken_together_with_others() {
        let pool = pool(3);
        let mut taken = Vec::new();
        pool.try_alloc_many(&mut taken, 3, 8).unwrap();
        {
            let mut many = Vec::new();
            let mut waits = pin!(pool.alloc_many(&mut many, 2, 8));
            assert!(poll(waits.as_mut()).is_pending());
            taken.pop();
        }
        taken.pop();
        pool.try_alloc_many(&mut taken, 2, 8).unwrap();
        assert_eq!((taken.len(), pool.available()), (3, 0));
    }

    #[test]
    fn number_beyond_the_total_is_refused_unless_the_pool_grows() {
        let pool = pool(2);
        let mut buffers = Vec::new();
        assert!(matches!(
            pool.try_alloc_many(&mut buffers, 3, 8),
            Err(PoolError::Limit(limit)) if (limit.asked, limit.allowed) == (3, 2)
        ));
        assert!(matches!(pool.try_alloc_many(&mut buffers, 1, 65), Err(PoolError::Limit(_))));
        pool.try_alloc_many(&mut buffers, 0, 8).unwrap();
        assert!(buffers.is_empty());
        let device = Device::software_in(&Network::new(), "free1").unwrap();
        let pd = device.protection_domain().unwrap();
        let growing = Pool::builder(&pd).buffer_size(64).buffers(2).growing(true).build().unwrap();
        growing.try_alloc_many(&mut buffers, 5, 8).unwrap();
        assert_eq!((buffers.len(), growing.total(), growing.available()), (5, 6, 1));
    }

    // Shows S1.
    #[test]
    fn buffers_dropped_together_return_each_to_its_own_pool() {
        let (first, second, closed) = (pool(4), pool(4), pool(1));
        let user = |len| {
            let device = Device::software_in(&Network::new(), "free2").unwrap();
            device.protection_domain().unwrap().register(vec![0; len]).unwrap()
        };
        let list = Arc::downgrade(closed.free_list());
        let mut buffers = vec![user(8), closed.try_alloc(8).unwrap()];
        drop(closed);
        for pool in [&first, &second, &second, &first, &first] {
            buffers.push(pool.try_alloc(8).unwrap());
        }
        buffers.push(user(16));
        assert_eq!((first.available(), second.available()), (1, 2));
        BufMut::drop_all(&mut buffers);
        assert!(buffers.is_empty() && list.upgrade().is_none());
        assert_eq!((first.available(), second.available()), (4, 4));
        drop([(); 4].map(|()| first.try_alloc(8).unwrap()));
    }

    /// Threads take, wait, cancel and return at random.
    // Shows S1.
    #[test]
    fn no_buffer_is_lost_and_no_wait_hangs() {
        const BUFFERS: usize = 4;
        const ROUNDS: u32 = if cfg!(miri) { 40 } else { 20_000 };
        let pool = pool(BUFFERS);
        std::thread::scope(|scope| {
            for thread in 0..3_u32 {
                let pool = pool.clone();
                scope.spawn(move || {
                    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
                    runtime.block_on(async move {
                        let mut buffers: Vec<BufMut> = Vec::new();
                        let mut random = thread.wrapping_mul(0x9e37_79b9) | 1;
                        for _ in 0..ROUNDS {
                            // xorshift
                            random ^= random << 13;
                            random ^= random >> 17;
                            random ^= random << 5;
                            let number = random as usize % BUFFERS + 1;
                            match random >> 8 & 3 {
                                0 => {
                                    let mut wait = pin!(pool.alloc_many(&mut buffers, number, 8));
                                    let _ = poll(wait.as_mut());
                                }
                                1 => pool.alloc_many(&mut buffers, number, 8).await.unwrap(),
                                2 => drop(pool.try_alloc(8)),
                                _ => drop(pool.alloc(8).await),
                            }
                            if random >> 10 & 1 == 0 {
                                buffers.clear();
                            } else {
                                BufMut::drop_all(&mut buffers);
                            }
                        }
                    });
                });
            }
        });
        assert_eq!(pool.available(), BUFFERS);
        pool.try_alloc_many(&mut Vec::new(), BUFFERS, 8).unwrap();
    }
}
