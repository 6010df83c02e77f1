//! Streams of a DC initiator: a failed work request ends its stream instead of the queue pair.
//!
//! ```text
//!  sound ── work fails ─▶ failed ── all its work is flushed, and the device has reset it ─▶ sound
//! ```
//!
//! - New work for a failed stream is refused, so its work in flight soon ends.
//! - The thread that dispatches the last flush resets the stream after it releases the locks.
//! - Work is posted, and streams are reset, under the lock of the posting state.

use std::fmt;
use std::sync::Arc;

use super::capacity::Capacity;
use super::posting::{Poster, Posting};
use super::work_request::{OwnedReceiver, Receiver, ReceiverKey, StreamUse};
use crate::error::{CompletionError, OpErrorKind};
use crate::sync::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use crate::types::SendTarget;

/// The streams of one initiator, as its peers see them.
pub(crate) struct Streams {
    each: Box<[Stream]>,
    /// True if the device has refused to reset a stream, or the whole queue pair has failed.
    broken: AtomicBool,
    resets: AtomicU64,
}

struct Stream {
    /// Incremented at each failure and each restoration, modulo 2^32: odd while it has failed. One
    /// value, so that no reader sees a failure without its count. Changes under the lock of the
    /// posting state.
    changes: AtomicU32,
    peers: AtomicU32,
}

impl Stream {
    fn new() -> Self {
        Self { changes: AtomicU32::new(0), peers: AtomicU32::new(0) }
    }

    fn changes(&self) -> u32 {
        self.changes.load(Ordering::Relaxed)
    }

    fn has_failed(&self) -> bool {
        self.changes() % 2 == 1
    }

    /// Returns a number that each failure changes.
    fn generation(&self) -> u32 {
        self.changes().div_ceil(2)
    }

    /// Returns false if it has failed already.
    fn fail(&self) -> bool {
        self.changes.fetch_or(1, Ordering::Relaxed).is_multiple_of(2)
    }

    fn restore(&self) {
        if self.has_failed() {
            self.changes.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn peers(&self) -> u32 {
        self.peers.load(Ordering::Relaxed)
    }
}

impl Streams {
    pub(crate) fn new(count: u16) -> Arc<Self> {
        let each = (0..count).map(|_| Stream::new()).collect();
        Arc::new(Self { each, broken: AtomicBool::new(false), resets: AtomicU64::new(0) })
    }

    pub(crate) fn count(&self) -> u16 {
        self.each.len() as u16
    }

    pub(crate) fn has_failed(&self, stream: u16) -> bool {
        self.each[usize::from(stream)].has_failed()
    }

    /// Returns a number that each failure of the stream changes.
    pub(crate) fn generation(&self, stream: u16) -> u32 {
        self.each[usize::from(stream)].generation()
    }

    /// Returns the number of streams that were reset since the initiator was created.
    pub(crate) fn resets(&self) -> u64 {
        self.resets.load(Ordering::Relaxed)
    }

    pub(crate) fn is_broken(&self) -> bool {
        self.broken.load(Ordering::Relaxed)
    }

    /// Assigns a stream to a new peer: one that has not failed, if possible, with the fewest peers.
    pub(crate) fn assign(self: &Arc<Self>) -> PeerStream {
        loop {
            let load = |number: u16| {
                let stream = &self.each[usize::from(number)];
                let changes = stream.changes();
                (changes % 2 == 1, stream.peers(), number, changes)
            };
            let (_, peers, number, changes) = (0..self.count()).map(load).min().unwrap_or_default();
            let count = &self.each[usize::from(number)].peers;
            // Two peers assigned at once do not share a stream while others are free.
            let assigned =
                count.compare_exchange(peers, peers + 1, Ordering::Relaxed, Ordering::Relaxed);
            if assigned.is_ok() {
                return PeerStream { streams: self.clone(), number, assigned: changes / 2 };
            }
        }
    }

    /// Returns the number of peers of the stream that has the fewest, or `None` if all streams have
    /// failed.
    pub(crate) fn fewest_peers(&self) -> Option<u32> {
        self.each.iter().filter(|stream| !stream.has_failed()).map(Stream::peers).min()
    }

    /// Makes all streams sound, after a reset of the queue pair.
    pub(super) fn restore_all(&self) {
        self.each.iter().for_each(Stream::restore);
        self.broken.store(false, Ordering::Relaxed);
    }

    pub(super) fn restore(&self, stream: u16) {
        self.resets.fetch_add(1, Ordering::Relaxed);
        self.each[usize::from(stream)].restore();
    }

    pub(super) fn set_broken(&self) {
        self.broken.store(true, Ordering::Relaxed);
    }

    pub(super) fn failed(&self) -> impl Iterator<Item = u16> + '_ {
        (0..self.count()).filter(|&stream| self.has_failed(stream))
    }
}

impl fmt::Debug for Streams {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let failed: Vec<_> = self.failed().collect();
        f.debug_struct("Streams")
            .field("count", &self.count())
            .field("failed", &failed)
            .finish_non_exhaustive()
    }
}

/// A stream that a peer uses, perhaps together with other peers.
pub(crate) struct PeerStream {
    streams: Arc<Streams>,
    number: u16,
    /// The generation of the stream when it was assigned, or before its failure if it had failed.
    assigned: u32,
}

impl PeerStream {
    /// Returns the stream of `streams` that the peer uses: its own, or the same number, modulo the
    /// count, on another initiator.
    pub(crate) fn number_in(&self, streams: &Streams) -> u16 {
        self.number % streams.count()
    }

    pub(crate) fn number(&self) -> u16 {
        self.number
    }

    pub(crate) fn has_failed(&self) -> bool {
        self.streams.has_failed(self.number)
    }

    /// Returns a number that each failure of the stream changes.
    pub(crate) fn generation(&self) -> u32 {
        self.streams.generation(self.number)
    }

    /// Returns true if the stream has failed since it was assigned, even if it was reset, or had
    /// failed then.
    pub(crate) fn has_failed_since(&self) -> bool {
        self.generation() != self.assigned
    }

    /// Returns true if other peers use the stream too.
    pub(crate) fn is_shared(&self) -> bool {
        self.streams.each[usize::from(self.number)].peers() > 1
    }
}

impl Drop for PeerStream {
    fn drop(&mut self) {
        self.streams.each[usize::from(self.number)].peers.fetch_sub(1, Ordering::Relaxed);
    }
}

impl fmt::Debug for PeerStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.number.fmt(f)
    }
}

/// The work in flight of the streams, under the lock of the posting state.
pub(super) struct StreamWork {
    pub(super) streams: Arc<Streams>,
    /// The stream of each work request in flight, by its position modulo the depth.
    of: Box<[u16]>,
    /// The position of the last work request of each stream.
    last: Box<[Option<u32>]>,
}

impl StreamWork {
    pub(super) fn new(streams: Arc<Streams>, depth: u32) -> Self {
        let last = vec![None; streams.count().into()].into();
        Self { streams, of: vec![0; depth.max(1) as usize].into(), last }
    }

    pub(super) fn record(&mut self, stream: u16, position: u32) {
        let at = position as usize % self.of.len();
        self.of[at] = stream;
        self.last[usize::from(stream)] = Some(position);
    }

    fn has_ended(&self, stream: u16, done: u32) -> bool {
        self.last[usize::from(stream)].is_none_or(|last| done.wrapping_sub(last) as i32 > 0)
    }
}

fn stream_of(to: &Receiver<'_>) -> Option<StreamUse> {
    match to.key {
        ReceiverKey::Dc(_, stream) => Some(stream),
        ReceiverKey::Datagram(_) => None,
    }
}

impl Posting {
    /// Returns why the stream of `to` refuses work: the work requires a generation of the stream
    /// that has ended. Checked under the lock, because the stream may have failed and been reset
    /// since the caller last found it sound.
    #[inline]
    pub(super) fn stream_refusal(&self, to: Option<Receiver<'_>>) -> Option<OpErrorKind> {
        if !self.has_outlived(stream_of(&to?)?) {
            return None;
        }
        let Some(Poster::Send(qp)) = &self.poster else { return Some(OpErrorKind::Closed) };
        Some(OpErrorKind::Completion(CompletionError::flushed(qp.qpn())))
    }

    /// Returns true if the stream has failed since the generation that `used` requires.
    #[inline]
    pub(super) fn has_outlived(&self, used: StreamUse) -> bool {
        let (Some(generation), Some(work)) = (used.generation, &self.streams) else { return false };
        work.streams.generation(used.number) != generation
    }

    /// Records the receiver of the next `count` work requests, and returns it for posting. If the
    /// device refuses them, the record of the stream's last position is too high by what it
    /// refused; [`forget_refused`](Self::forget_refused) corrects it.
    pub(super) fn target<'a>(&mut self, to: Receiver<'a>, count: u32) -> SendTarget<'a> {
        if let Some(work) = &mut self.streams
            && let Some(stream) = stream_of(&to)
        {
            for part in 0..count {
                work.record(stream.number, (self.posted as u32).wrapping_add(part));
            }
        }
        to.target()
    }

    /// Lowers the last positions of the streams to what was posted.
    #[cold]
    pub(super) fn forget_refused(&mut self) {
        let posted = self.posted as u32;
        for last in self.streams.iter_mut().flat_map(|work| &mut work.last) {
            if last.is_some_and(|last| last.wrapping_sub(posted) as i32 >= 0) {
                *last = Some(posted.wrapping_sub(1));
            }
        }
    }

    /// Marks the stream of the work request at `position` as failed, and returns it; `None` without
    /// streams.
    ///
    /// Called before the work request is [retired](Capacity::retire): after that, a peer may leave
    /// the stream, and later work may replace the record.
    #[cold]
    pub(super) fn fail_stream(&mut self, position: u32) -> Option<u16> {
        let work = self.streams.as_ref()?;
        let stream = work.of[position as usize % work.of.len()];
        if work.streams.each[usize::from(stream)].fail() {
            rdma_provider::debug!(stream, "stream failed");
        }
        Some(stream)
    }

    /// Returns true if no work of the stream is in flight or queued.
    pub(super) fn is_drained(&self, stream: u16, capacity: &Capacity) -> bool {
        let Some(work) = &self.streams else { return false };
        let posted = self.posted as u32;
        let done = posted.wrapping_sub(capacity.in_flight(posted));
        let queued = |to: &OwnedReceiver| {
            stream_of(&to.borrowed()).is_some_and(|used| used.number == stream)
        };
        work.has_ended(stream, done)
            && !self.wait_queue.iter().any(|next| next.to.as_ref().is_some_and(queued))
    }

    /// Returns the failed streams that can be reset: no work of them is in flight or queued.
    pub(super) fn drained_streams(&self, capacity: &Capacity) -> Vec<u16> {
        let Some(work) = &self.streams else { return Vec::new() };
        let drained = |&stream: &u16| self.is_drained(stream, capacity);
        work.streams.failed().filter(drained).collect()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::collections::VecDeque;

    use super::super::slot_table::Cursor;
    use super::super::watch::Watch;
    use super::*;

    /// Returns the state of a queue that has posted `posted` work requests, all of them complete.
    fn posting(streams: &Arc<Streams>, posted: u64) -> (Posting, Capacity) {
        let capacity = Capacity::new(4, false);
        capacity.retire_all(posted as u32);
        let posting = Posting {
            poster: None,
            cursor: Cursor::default(),
            posted,
            until: 0,
            waited: 0,
            wait_queue: VecDeque::new(),
            watch: Watch::default(),
            streams: Some(Box::new(StreamWork::new(streams.clone(), 4))),
        };
        (posting, capacity)
    }

    fn record(posting: &mut Posting, stream: u16, position: u64) {
        posting.streams.as_mut().unwrap().record(stream, position as u32);
    }

    #[test]
    fn peer_gets_the_sound_stream_with_the_fewest_peers() {
        let streams = Streams::new(3);
        let mut peers: Vec<_> = (0..4).map(|_| streams.assign()).collect();
        assert!(peers.iter().map(PeerStream::number).eq([0, 1, 2, 0]));
        assert!(peers[0].is_shared() && !peers[1].is_shared());
        peers.remove(1);
        assert_eq!(streams.fewest_peers(), Some(0));
        // The free stream has failed.
        assert!(streams.each[1].fail());
        assert_eq!(streams.fewest_peers(), Some(1));
        assert_eq!(streams.assign().number(), 2);
        assert!(streams.each.iter().filter(|stream| stream.fail()).count() == 2);
        let assigned = streams.assign();
        assert_eq!((assigned.number(), streams.fewest_peers()), (1, None));
        assert!(assigned.has_failed_since());
        streams.restore_all();
        assert_eq!(streams.failed().count(), 0);
    }

    #[test]
    fn peer_learns_of_a_failure_after_the_stream_was_reset_too() {
        for changes in [0, u32::MAX - 1] {
            let streams = Streams::new(1);
            streams.each[0].changes.store(changes, Ordering::Relaxed);
            let before = streams.assign();
            assert!(!before.has_failed_since());
            let generation = before.generation();
            assert!(streams.each[0].fail() && !streams.each[0].fail(), "one failure");
            let during = streams.assign();
            assert!([&before, &during].map(PeerStream::has_failed) == [true; 2]);
            streams.restore(0);
            // The stream is sound already.
            streams.restore(0);
            let after = streams.assign();
            let failed = [&before, &during, &after].map(PeerStream::has_failed_since);
            assert_eq!(failed, [true, true, false]);
            assert_ne!(after.generation(), generation);
            assert!(!after.has_failed());
        }
    }

    #[test]
    fn stream_is_drained_after_its_last_work_although_positions_wrap() {
        let (streams, start) = (Streams::new(2), u64::from(u32::MAX) - 1);
        let (mut posting, capacity) = posting(&streams, start);
        for (stream, position) in [0, 1, 0].into_iter().zip(start..) {
            record(&mut posting, stream, position);
            posting.posted += 1;
        }
        assert_eq!(posting.fail_stream(start as u32), Some(0));
        for (retired, drained) in [(0, [false, false]), (1, [false, true]), (2, [true, true])] {
            capacity.retire((start + retired) as u32);
            let found = [0, 1].map(|stream| posting.is_drained(stream, &capacity));
            assert_eq!(found, drained, "after {retired}");
            // Only the failed stream is to be reset.
            assert_eq!(posting.drained_streams(&capacity).len(), usize::from(drained[0]));
        }
    }

    #[test]
    fn work_that_the_device_refused_does_not_prevent_the_reset_of_its_stream() {
        for start in [5, u64::from(u32::MAX)] {
            let streams = Streams::new(2);
            let (mut posting, capacity) = posting(&streams, start);
            // Of a list of three the device has taken one.
            (start..start + 3).for_each(|position| record(&mut posting, 1, position));
            posting.posted += 1;
            posting.forget_refused();
            assert!(!posting.is_drained(1, &capacity), "one is in flight");
            posting.fail_stream(start as u32);
            capacity.retire(start as u32);
            assert_eq!(posting.drained_streams(&capacity), [1]);
        }
    }
}
