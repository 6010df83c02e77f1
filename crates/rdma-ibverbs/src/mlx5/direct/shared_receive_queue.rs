//! Shared receive queues: a list of entries, linked by index, because receives complete in any
//! order.
//!
//! ```text
//! head ─▶ entry ─▶ entry ─▶ … ─▶ tail      free entries; the adapter follows the same links
//! ```

use std::fmt;

use rdma_provider::VerbError;
use rdma_provider::contract::PostError;
use rdma_provider::locks::Mutex;
use rdma_provider::types::{RecvWr, WrId};

use super::doorbell::Record;
use super::errors::BadEntry;
use super::layout::{Be16, DataSegment, Next};
use super::receive_queue::Entries;

/// A shared receive queue that this crate posts to.
pub(crate) struct SharedReceiveQueue {
    entries: Entries,
    record: Record,
    state: Mutex<State>,
}

// SAFETY: S3: the lock protects the entries.
unsafe impl Send for SharedReceiveQueue {}
// SAFETY: S3: as above.
unsafe impl Sync for SharedReceiveQueue {}

struct State {
    /// The entry of the next receive. Outside the queue if its link was overwritten; then nothing
    /// can be posted any more.
    head: u16,
    /// The last free entry, which stays unused: the list always has one.
    tail: u16,
    /// Receives posted, modulo 2^16.
    counter: u16,
    /// The receive in each entry.
    posted: Box<[Option<WrId>]>,
}

impl SharedReceiveQueue {
    /// Creates a queue whose free entries are linked from `head` to `tail`.
    pub(super) fn new(entries: Entries, record: Record, head: u16, tail: u16) -> Self {
        let posted = vec![None; entries.count as usize].into_boxed_slice();
        let state = Mutex::new(State { head, tail, counter: 0, posted });
        Self { entries, record, state }
    }

    pub(super) fn entries(&self) -> &Entries {
        &self.entries
    }

    /// Posts a list up to the first refused request. Fails with EIO from a link outside the queue
    /// on.
    ///
    /// # Safety
    ///
    /// See [`Srq::post_recv`](rdma_provider::contract::Srq::post_recv): memory
    /// that the requests name stays valid.
    pub(crate) unsafe fn post(&self, list: &[RecvWr<'_>]) -> Result<(), PostError> {
        let state = &mut *self.state.lock();
        let refuse = |errno| VerbError::new("ibv_post_srq_recv", errno);
        let before = state.counter;
        let mut result = Ok(());
        for (posted, wr) in list.iter().enumerate() {
            let full = state.head == state.tail;
            let Some(receive) = state.posted.get_mut(usize::from(state.head)) else {
                result = Err(PostError { posted, error: bad_link() });
                break;
            };
            if full || !self.entries.write(state.head.into(), 1, wr) {
                let errno = if full { VerbError::ENOMEM } else { VerbError::EINVAL };
                result = Err(PostError { posted, error: refuse(errno) });
                break;
            }
            *receive = Some(wr.wr_id);
            self.advance(state);
        }
        if state.counter != before {
            self.record.publish(state.counter.into());
        }
        result
    }

    /// Moves the head, which is in the queue, to the next free entry and counts a receive.
    fn advance(&self, state: &mut State) {
        // SAFETY: S3: an entry of the queue; the adapter only reads it.
        let next = unsafe { self.entries.segment::<Next>(state.head.into(), 0).read() };
        state.head = next.index.get();
        state.counter = state.counter.wrapping_add(1);
    }

    /// Retires the receive in entry `index`, which is free after `fill` has used it. Returns `None`
    /// if it has none.
    pub(super) fn retire<T>(&self, index: u16, fill: impl FnOnce() -> T) -> Option<(WrId, T)> {
        let state = &mut *self.state.lock();
        let wr_id = state.posted.get_mut(usize::from(index))?.take()?;
        let filled = fill();
        self.append(state, index);
        Some((wr_id, filled))
    }

    /// Makes `index` the last free entry.
    fn append(&self, state: &mut State, index: u16) {
        let tail = self.entries.segment::<Next>(state.tail.into(), 0);
        // SAFETY: S3: an entry of the queue. The adapter follows the link of an entry only after a
        // receive was posted to it.
        unsafe { (&raw mut (*tail.as_ptr()).index).write(Be16::new(index)) };
        state.tail = index;
    }

    /// Posts the receive of `qpn` in entry `index` again, after a page fault.
    ///
    /// # Errors
    ///
    /// [`BadEntry::Counter`] if the entry has no receive, [`BadEntry::Link`] if no entry can be
    /// found for it.
    pub(super) fn post_again(&self, qpn: u32, index: u16) -> Result<(), BadEntry> {
        let state = &mut *self.state.lock();
        let head = state.head;
        let receive = state.posted.get_mut(usize::from(index)).filter(|receive| receive.is_some());
        let unknown = BadEntry::Counter { qpn, counter: index };
        let receive = receive.ok_or(unknown)?;
        if u32::from(head) >= self.entries.count {
            return Err(BadEntry::Link { qpn, entry: head });
        }
        let wr_id = receive.take();
        self.append(state, index);
        for segment in 1..self.entries.segments() {
            // SAFETY: S3: segments of two entries of the queue, or twice the same.
            unsafe {
                let from = self.entries.segment::<DataSegment>(index.into(), segment).read();
                self.entries.segment(head.into(), segment).write(from);
            }
        }
        state.posted[usize::from(head)] = wr_id;
        self.advance(state);
        self.record.publish(state.counter.into());
        Ok(())
    }
}

/// Returns the error of all posts after the link of an entry was overwritten.
#[cold]
fn bad_link() -> VerbError {
    VerbError::new("ibv_post_srq_recv (entries of the queue were overwritten)", VerbError::EIO)
}

impl fmt::Debug for SharedReceiveQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SharedReceiveQueue")
            .field("entries", &self.entries.count)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
