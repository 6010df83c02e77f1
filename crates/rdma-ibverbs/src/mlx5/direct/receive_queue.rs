//! Receive queues of a queue pair: receives complete in the order of posting.

use std::fmt;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use rdma_provider::VerbError;
use rdma_provider::contract::PostError;
use rdma_provider::locks::Mutex;
use rdma_provider::types::{RecvWr, Sge, WrId};

use super::doorbell::Record;
use super::entry::data_segment;
use super::layout::{DataSegment, SEGMENT};

/// The memory of a queue of receives: entries of equal size.
#[derive(Debug, Clone, Copy)]
pub(super) struct Entries {
    start: NonNull<u8>,
    /// Bytes of an entry.
    stride: u32,
    /// Number of entries.
    pub(super) count: u32,
}

impl Entries {
    /// Wraps memory that libmlx5 has allocated.
    ///
    /// # Safety
    ///
    /// `start` is aligned to 16 bytes, and valid for reads and writes of `count * stride` bytes as
    /// long as the value is used.
    pub(super) unsafe fn new(start: NonNull<u8>, stride: u32, count: u32) -> Self {
        Self { start, stride, count }
    }

    /// Returns segment `segment` of entry `index`.
    ///
    /// # Panics
    ///
    /// Panics beyond the last entry or the last segment.
    #[inline]
    pub(super) fn segment<T>(&self, index: u32, segment: usize) -> NonNull<T> {
        const { assert!(size_of::<T>() == SEGMENT) };
        assert!(index < self.count && segment < self.segments(), "outside the queue");
        // SAFETY: S3: within the queue, as just checked.
        unsafe { self.start.add(index as usize * self.stride as usize + segment * SEGMENT) }.cast()
    }

    #[inline]
    pub(super) fn segments(&self) -> usize {
        self.stride as usize / SEGMENT
    }

    /// Writes a list of one buffer, which is not empty, to entry `index`.
    #[inline]
    fn write_one(&self, index: u32, buffer: &Sge) {
        // SAFETY: S3: segments of the queue.
        unsafe {
            self.segment(index, 0).write(data_segment(buffer));
            if self.segments() > 1 {
                self.segment(index, 1).write(DataSegment::END);
            }
        }
    }

    /// Writes the list of a receive after the first `skipped` segments of entry `index`. Returns
    /// false if it is too long.
    pub(super) fn write(&self, index: u32, skipped: usize, wr: &RecvWr<'_>) -> bool {
        // The adapter takes length 0 for 2^31.
        let used = wr.sges.iter().filter(|buffer| buffer.length > 0);
        let mut at = skipped;
        if wr.sges.len() > self.segments() - skipped {
            return false;
        }
        for buffer in used {
            // SAFETY: S3: a segment of the queue.
            unsafe { self.segment(index, at).write(data_segment(buffer)) };
            at += 1;
        }
        if at < self.segments() {
            // SAFETY: S3: as above.
            unsafe { self.segment(index, at).write(DataSegment::END) };
        }
        true
    }
}

/// A receive queue of one queue pair that this crate posts to.
pub(crate) struct ReceiveQueue {
    entries: Entries,
    record: Record,
    /// The work request at each entry. Read by completions without the producer's lock.
    wr_ids: Box<[AtomicU64]>,
    /// Receives completed, modulo 2^32.
    consumed: AtomicU32,
    /// Receives posted, modulo 2^32. Read by completions without the lock.
    posted: AtomicU32,
    producer: Mutex<()>,
}

// SAFETY: S3: the producer's lock protects the entries; all else is atomic.
unsafe impl Send for ReceiveQueue {}
// SAFETY: S3: as above.
unsafe impl Sync for ReceiveQueue {}

impl ReceiveQueue {
    /// Creates a queue; the number of entries is a power of two.
    pub(super) fn new(entries: Entries, record: Record) -> Self {
        debug_assert!(entries.count.is_power_of_two());
        Self {
            wr_ids: (0..entries.count).map(|_| AtomicU64::new(0)).collect(),
            entries,
            record,
            consumed: AtomicU32::new(0),
            posted: AtomicU32::new(0),
            producer: Mutex::new(()),
        }
    }

    pub(super) fn entries(&self) -> &Entries {
        &self.entries
    }

    /// Forgets all receives, after a reset of the queue pair.
    pub(super) fn reset(&self) {
        let _producer = self.producer.lock();
        self.consumed.store(0, Ordering::Relaxed);
        self.posted.store(0, Ordering::Relaxed);
        self.record.store(0);
    }

    /// Posts a list up to the first refused request.
    ///
    /// # Safety
    ///
    /// See [`Qp::post_recv`](rdma_provider::contract::Qp::post_recv): memory
    /// that the requests name stays valid.
    #[inline]
    pub(crate) unsafe fn post(&self, list: &[RecvWr<'_>]) -> Result<(), PostError> {
        match list {
            &[RecvWr { wr_id, sges: &[buffer] }] if self.post_one(wr_id, buffer) => Ok(()),
            // SAFETY: S1: the caller's promise.
            _ => unsafe { self.post_list(list) },
        }
    }

    /// Posts a receive with one buffer. Returns false, and posts nothing, if the queue is full or
    /// the buffer is empty.
    #[inline]
    fn post_one(&self, wr_id: WrId, buffer: Sge) -> bool {
        let _producer = self.producer.lock();
        let next = self.posted.load(Ordering::Relaxed);
        let index = next & (self.entries.count - 1);
        if buffer.length == 0 || self.is_full(next) {
            return false;
        }
        self.entries.write_one(index, &buffer);
        self.wr_ids[index as usize].store(wr_id.0, Ordering::Relaxed);
        let next = next.wrapping_add(1);
        self.posted.store(next, Ordering::Release);
        self.record.publish(next & 0xffff);
        true
    }

    #[inline]
    fn is_full(&self, next: u32) -> bool {
        next.wrapping_sub(self.consumed.load(Ordering::Acquire)) >= self.entries.count
    }

    /// Posts any list.
    ///
    /// # Safety
    ///
    /// See [`post`](Self::post).
    #[inline(never)]
    unsafe fn post_list(&self, list: &[RecvWr<'_>]) -> Result<(), PostError> {
        let _producer = self.producer.lock();
        let first = self.posted.load(Ordering::Relaxed);
        let refuse = |errno| VerbError::new("ibv_post_recv", errno);
        let mut next = first;
        let mut result = Ok(());
        for (posted, wr) in list.iter().enumerate() {
            let index = next & (self.entries.count - 1);
            let full = self.is_full(next);
            if full || !self.entries.write(index, 0, wr) {
                let errno = if full { VerbError::ENOMEM } else { VerbError::EINVAL };
                result = Err(PostError { posted, error: refuse(errno) });
                break;
            }
            self.wr_ids[index as usize].store(wr.wr_id.0, Ordering::Relaxed);
            next = next.wrapping_add(1);
        }
        if next != first {
            self.posted.store(next, Ordering::Release);
            self.record.publish(next & 0xffff);
        }
        result
    }

    /// Returns the oldest receive, or `None` if none is posted. Called under the lock of the
    /// completion queue.
    #[inline]
    pub(super) fn oldest(&self) -> Option<Oldest> {
        let number = self.consumed.load(Ordering::Relaxed);
        if number == self.posted.load(Ordering::Acquire) {
            return None;
        }
        let place = number & (self.entries.count - 1);
        let wr_id = WrId(self.wr_ids[place as usize].load(Ordering::Relaxed));
        Some(Oldest { number, place, wr_id })
    }

    /// Retires the oldest receive: its entry can be used again.
    #[inline]
    pub(super) fn retire(&self, oldest: &Oldest) {
        self.consumed.store(oldest.number.wrapping_add(1), Ordering::Release);
    }
}

/// The oldest receive of a queue.
#[derive(Debug)]
pub(super) struct Oldest {
    number: u32,
    /// Its entry.
    pub(super) place: u32,
    pub(super) wr_id: WrId,
}

impl fmt::Debug for ReceiveQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReceiveQueue")
            .field("entries", &self.entries.count)
            .field("posted", &self.posted)
            .field("consumed", &self.consumed)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
