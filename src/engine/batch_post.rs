//! Many work requests, one doorbell: posting a batch.
//!
//! A batch is in one slot, which its last work request ends: unsignalled work before a completion is done. Which of those before
//! the last failed is noted aside.

#![allow(unsafe_code)]

use std::sync::Arc;

use smallvec::SmallVec;

use super::slot::{Claim, MAX_PARTS, Outcome, Slot};
use super::wait_queue::Queued;
use super::wake_list::WakeList;
use super::work_queue::{Poster, Posting, WorkQueue, index_of, is_traced, refusal};
use super::work_request::{Patience, Refusal, To, What};
use crate::error::{LimitError, OpErrorKind, VerbError};
use crate::memory::{Gather, SgeList};
use crate::sync::{MutexGuard, lock};
use crate::types::{Data, QpAttr, QpState, SendFlags, SendOp, SendTarget, SendWr, Sge, WrId};
use crate::verbs::PostError;

/// Work requests of a batch for which posting needs no allocation.
const BATCH_INLINE: usize = 32;

/// One work request of a batch, without its buffer.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BatchEntry {
    pub(crate) op: SendOp,
    pub(crate) flags: SendFlags,
    pub(crate) room: u64,
}

impl WorkQueue {
    /// Posts a batch with one doorbell, or lines it up. `buffers` are those of `entries`, in order; all of it goes to `to`,
    /// if the queue pair is not connected.
    pub(crate) fn submit_batch<B: Gather>(
        self: &Arc<Self>,
        entries: &[BatchEntry],
        buffers: &[B],
        common: SendFlags,
        signal_every: u32,
        to: Option<To<'_>>,
        patience: Patience,
    ) -> Result<Claim, Refusal> {
        let pieces = self.check_batch(entries, buffers)?;
        self.post_batch(&Parts { entries, pieces, common, signal_every, to }, patience)
    }

    fn post_batch(self: &Arc<Self>, parts: &Parts<'_>, patience: Patience) -> Result<Claim, Refusal> {
        let count = parts.entries.len();
        let mut posting = lock(&self.posting);
        if posting.poster.is_none() {
            return Err(OpErrorKind::Closed.into());
        }
        let direct = self.has_room(&mut posting, count);
        if !direct && patience == Patience::Try {
            drop(posting);
            // Completions that were taken and not handed out may stand for room.
            return if self.cq().hand_out() { self.post_batch(parts, patience) } else { Err(Refusal::Full) };
        }
        let Some(claim) = self.slots.claim(&mut posting.cursor, self, count as u32) else {
            return Err(self.too_many().into());
        };
        if direct {
            claim.place_part(claim.id_of(0), posting.posted as u32);
            if parts.is_plain() {
                self.post_list(posting, parts.plain_list(&claim), &claim, count, None);
            } else {
                self.post_list(posting, parts.list(&claim), &claim, count, parts.to);
            }
        } else {
            for wr in parts.list(&claim) {
                let Data::Sges(sges) = wr.data else { unreachable!("made so") };
                let queued = Queued {
                    id: wr.wr_id,
                    what: What::Send(wr.op),
                    flags: wr.flags,
                    sges: SgeList::from_slice(sges),
                    inline: None,
                    window: None,
                    to: parts.to.map(To::keep),
                    batch: true,
                };
                self.line_up(&mut posting, queued);
            }
            self.announce(posting);
        }
        Ok(claim)
    }

    /// One doorbell for many. A refusal part-way ends the queue pair: of those already posted some are
    /// unsignalled, and only a completion behind them tells when their buffers are free.
    fn post_list<'a>(
        &self,
        mut posting: MutexGuard<'_, Posting>,
        list: impl Iterator<Item = SendWr<'a>>,
        slot: &Slot,
        count: usize,
        to: Option<To<'_>>,
    ) {
        let Some(Poster::Send(qp)) = &posting.poster else {
            unreachable!("batches are of send queues, and the caller saw it open")
        };
        // SAFETY: S1: the elements name buffers that the batch owns; see `post_one`.
        let refused = unsafe { qp.post_in_place(list) }.err();
        let posted = refused.map_or(count, |refused| refused.posted);
        posting.posted += posted as u64;
        if is_traced() {
            tracing::trace!(posted, of = count, "posted a batch");
        }
        if let Some(PostError { error, .. }) = refused {
            let mut woken = WakeList::new();
            self.refuse_from(&mut posting, slot, posted as u32, to.map(To::target), error, &mut woken);
            drop(posting);
            woken.finish();
        }
    }

    /// The first in line, which is a part of a batch, was refused: so is the rest of it, behind it in line.
    #[cold]
    pub(super) fn refuse_in_line(&self, posting: &mut Posting, wr: SendWr<'_>, error: VerbError, woken: &mut WakeList) {
        let slot = self.slots.slot(index_of(wr.wr_id));
        let Some(part) = slot.part(wr.wr_id) else { unreachable!("it is in flight until its last ends") };
        for _ in part + 1..slot.parts() {
            posting.queued.pop_front();
            self.cq().no_longer_waiting();
        }
        self.refuse_from(posting, slot, part, wr.target, error, woken);
    }

    /// All of the batch in `slot` from part `first` on was refused.
    #[cold]
    fn refuse_from(
        &self,
        posting: &mut Posting,
        slot: &Slot,
        first: u32,
        target: Option<SendTarget<'_>>,
        error: VerbError,
        woken: &mut WakeList,
    ) {
        let kind = refusal(posting, error);
        for part in first..slot.parts() - 1 {
            self.fail_part(slot, part, kind);
        }
        let last = slot.id();
        if first > 0 {
            self.flush_behind(posting, last, target, error, woken);
        } else {
            self.settle(last, Outcome::Err(kind), woken);
        }
    }

    /// A part of a batch was refused, and parts before it were posted: ends the queue pair, with a work request
    /// that is flushed in the place of the `last`, so that the batch is finished when the device is done with
    /// all of it. If even that is refused, the queue pair is destroyed as soon as the locks are released, after
    /// which the device is done with all of it, and that finishes the batch.
    fn flush_behind(
        &self,
        posting: &mut Posting,
        last: WrId,
        target: Option<SendTarget<'_>>,
        error: VerbError,
        woken: &mut WakeList,
    ) {
        let Some(Poster::Send(qp)) = &posting.poster else { return };
        tracing::warn!(qpn = %qp.qpn(), %error, "batch refused part-way, ending the queue pair");
        self.note_cause(OpErrorKind::Post(error));
        // Then the device has forgotten all of it, and whoever resets it ends what was in flight, as soon as we let go of
        // the lock.
        let is_reset = || qp.query().is_ok_and(|(state, _)| state == QpState::Reset);
        if let Err(stuck) = qp.modify(&QpAttr::to_state(QpState::Err)) {
            if !is_reset() {
                self.give_up(&stuck, error, woken);
            }
            return;
        }
        self.slots.slot(index_of(last)).place(posting.posted as u32);
        let beacon =
            SendWr { wr_id: last, op: SendOp::Send, flags: SendFlags::SIGNALED, data: Data::Sges(&[]), target };
        // SAFETY: S1: it names no memory.
        match unsafe { qp.post_send(&[beacon]) } {
            Ok(()) => posting.posted += 1,
            Err(refused) if !is_reset() => self.give_up(&refused.error, error, woken),
            Err(_) => {}
        }
    }

    /// The device refuses to flush what is behind work that it refused for `error`.
    fn give_up(&self, stuck: &dyn std::fmt::Display, error: VerbError, woken: &mut WakeList) {
        tracing::warn!(error = %stuck, "a queue pair that cannot be flushed is destroyed");
        woken.end_queue_pair_of(self.cq().clone(), self.owner(), OpErrorKind::Post(error));
    }

    fn check_batch<B: Gather>(&self, entries: &[BatchEntry], buffers: &[B]) -> Result<Pieces, OpErrorKind> {
        let allowed = self.limits.depth.min(MAX_PARTS);
        LimitError::check("work requests of a batch (max_send_wr)", entries.len() as u64, allowed.into())?;
        let mut pieces = Pieces::default();
        let all = entries.iter().zip(buffers);
        // What there is most of.
        pieces.sges.extend(all.clone().map_while(|(entry, buffer)| {
            let (sge, pd) = buffer.single()?;
            self.is_plain(sge, pd, entry.room).then_some(sge)
        }));
        let plain = pieces.sges.len();
        if plain < entries.len() {
            pieces.lengths.extend(std::iter::repeat_n(1, plain));
            for (entry, buffer) in all.skip(plain) {
                let start = pieces.sges.len();
                self.gather(buffer, &mut pieces.sges)?;
                self.check(&pieces.sges[start..], None, entry.room)?;
                pieces.lengths.push(pieces.sges.len() - start);
            }
        }
        Ok(pieces)
    }
}

/// Scatter/gather elements of a batch, one work request after the other.
#[derive(Default)]
struct Pieces {
    sges: SmallVec<[Sge; BATCH_INLINE]>,
    /// How many are of each work request; empty if one is of each.
    lengths: SmallVec<[usize; BATCH_INLINE]>,
}

/// A batch that may be posted.
struct Parts<'a> {
    entries: &'a [BatchEntry],
    pieces: Pieces,
    common: SendFlags,
    signal_every: u32,
    to: Option<To<'a>>,
}

impl Parts<'_> {
    /// True if each has one element and none a receiver of its own.
    fn is_plain(&self) -> bool {
        self.pieces.lengths.is_empty() && self.to.is_none()
    }

    /// Its work requests, put together one by one, with the numbers that those in `slot` have.
    fn list(&self, slot: &Slot) -> impl Iterator<Item = SendWr<'_>> {
        let (mut sges, mut lengths) = (&self.pieces.sges[..], self.pieces.lengths.iter());
        let target = self.to.map(To::target);
        let (mut ids, mut flags) = (slot.ids(), self.flags());
        self.entries.iter().map(move |entry| {
            let length = lengths.next().copied().unwrap_or(1);
            let (own, behind) = sges.split_at_checked(length).unwrap_or_default();
            sges = behind;
            SendWr { wr_id: ids.next(), op: entry.op, flags: flags.next(entry), data: Data::Sges(own), target }
        })
    }

    /// As [`list`](Self::list), if all [are plain](Self::is_plain): what they have in common, the compiler knows.
    fn plain_list(&self, slot: &Slot) -> impl Iterator<Item = SendWr<'_>> {
        let (mut ids, mut flags) = (slot.ids(), self.flags());
        self.entries.iter().zip(&self.pieces.sges).map(move |(entry, sge)| {
            let data = Data::Sges(std::slice::from_ref(sge));
            SendWr { wr_id: ids.next(), op: entry.op, flags: flags.next(entry), data, target: None }
        })
    }

    fn flags(&self) -> Flags {
        let left = self.entries.len();
        let every = if self.signal_every == 0 { left } else { self.signal_every as usize };
        Flags { common: self.common - SendFlags::SIGNALED, every, left, until: every.min(left) }
    }
}

/// Flags of the work requests of a batch: the last is signalled, and each so many.
struct Flags {
    common: SendFlags,
    every: usize,
    /// From behind the last that was signalled.
    left: usize,
    /// The next to be signalled.
    until: usize,
}

impl Flags {
    #[inline(always)]
    fn next(&mut self, entry: &BatchEntry) -> SendFlags {
        let flags = entry.flags | self.common;
        self.until -= 1;
        if self.until > 0 {
            return flags;
        }
        self.left = self.left.saturating_sub(self.every);
        self.until = self.every.min(self.left);
        flags | SendFlags::SIGNALED
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::pin::pin;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::task::{Context, Poll, Wake, Waker};

    use super::*;
    use crate::engine::{CompletionMode, CompletionQueue};
    use crate::memory::{ExposedRegion, Pool};
    use crate::op::{Batch, QueuePair};
    use crate::software::{Faults, Network};
    use crate::types::Access;
    use crate::verbs::Device;

    #[test]
    fn batch_that_was_done_before_a_reset_has_succeeded() {
        let device = Device::software_in(&Network::new(), "device").unwrap();
        let pd = device.protection_domain().unwrap();
        let queue = CompletionQueue::new(&device, CompletionMode::Event).unwrap();
        let [a, b] = [(); 2].map(|()| QueuePair::new(&pd, &queue).unwrap());
        a.connect(&b.endpoint()).unwrap();
        b.connect(&a.endpoint()).unwrap();
        let pool = Pool::new(&pd, 64, 8).unwrap();
        let region = ExposedRegion::new(&pd, vec![0; 64], Access::REMOTE_ALL).unwrap();
        for every in [0, 2] {
            let mut batch = Batch::new();
            batch.signal_every(every);
            for _ in 0..5 {
                batch.write(pool.try_alloc(64).unwrap(), region.grant());
            }
            let mut batch = pin!(a.post_batch(batch));
            queue.shared().drain();
            assert_eq!(a.send_counters().in_flight, 0);
            a.modify(&QpAttr::to_state(QpState::Reset)).unwrap();
            let mut context = Context::from_waker(Waker::noop());
            let Poll::Ready(result) = batch.as_mut().poll(&mut context) else { panic!("it is done") };
            assert!(result.is_ok(), "{:?}", result.results());
            drop(result);
            assert_eq!(pool.available(), 8);
            // Up again for the next turn, with both ends anew.
            b.modify(&QpAttr::to_state(QpState::Reset)).unwrap();
            for qp in [&a, &b] {
                let path = qp.path().0;
                let access = Some(Access::REMOTE_ALL);
                let attr = QpAttr { pkey_index: Some(0), port: Some(path), access, ..QpAttr::to_state(QpState::Init) };
                qp.modify(&attr).unwrap();
            }
            a.connect(&b.endpoint()).unwrap();
            b.connect(&a.endpoint()).unwrap();
        }
    }

    #[test]
    fn batch_of_a_queue_pair_that_cannot_be_flushed_ends_and_keeps_its_buffers_until_that_is_destroyed() {
        // Nothing moves there.
        let network = Network::simulated(1, Faults::none());
        let device = Device::software_in(&network, "stuck").unwrap();
        let pd = device.protection_domain().unwrap();
        let queue = CompletionQueue::new(&device, CompletionMode::Event).unwrap();
        let [a, b] = [(); 2].map(|()| QueuePair::new(&pd, &queue).unwrap());
        a.connect(&b.endpoint()).unwrap();
        b.connect(&a.endpoint()).unwrap();
        let pool = Pool::new(&pd, 64, 2).unwrap();
        let region = ExposedRegion::new(&pd, vec![0; 64], Access::REMOTE_ALL).unwrap();
        let mut batch = Batch::new();
        for _ in 0..2 {
            batch.read(pool.try_alloc(64).unwrap(), region.grant());
        }
        let mut batch = pin!(a.post_batch(batch));
        let mut context = Context::from_waker(Waker::noop());
        assert!(batch.as_mut().poll(&mut context).is_pending());

        let give_up = || {
            let mut woken = WakeList::new();
            let [stuck, refused] =
                ["ibv_modify_qp", "ibv_post_send"].map(|verb| VerbError::new(verb, VerbError::ENOMEM));
            a.send_queue().give_up(&stuck, refused, &mut woken);
            woken
        };
        // What is left to do is done when the locks are released.
        let woken = give_up();
        assert!(batch.as_mut().poll(&mut context).is_pending() && pool.available() == 0);
        woken.finish();
        let Poll::Ready(result) = batch.as_mut().poll(&mut context) else { panic!("it hangs") };
        assert!(
            result.results().iter().all(|part| matches!(part, Err(OpErrorKind::Post(_) | OpErrorKind::Completion(_))))
        );
        drop(result);
        assert_eq!(pool.available(), 2);
        // Again, it is no harm.
        give_up().finish();
    }

    #[test]
    fn part_in_flight_before_one_that_was_refused_has_not_succeeded() {
        // Nothing moves there.
        let device = Device::software_in(&Network::simulated(1, Faults::none()), "stuck").unwrap();
        let pd = device.protection_domain().unwrap();
        let queue = CompletionQueue::new(&device, CompletionMode::Event).unwrap();
        let [a, b] = [(); 2].map(|()| QueuePair::new(&pd, &queue).unwrap());
        a.connect(&b.endpoint()).unwrap();
        b.connect(&a.endpoint()).unwrap();
        let pool = Pool::new(&pd, 64, 3).unwrap();
        let region = ExposedRegion::new(&pd, vec![0; 64], Access::REMOTE_ALL).unwrap();
        let mut batch = Batch::new();
        for _ in 0..3 {
            batch.read(pool.try_alloc(64).unwrap(), region.grant());
        }
        let mut batch = pin!(a.post_batch(batch));
        // As `refuse_from` leaves it: the first part and what stands for the last are with the device.
        let refused = OpErrorKind::Post(VerbError::new("ibv_post_send", VerbError::ENOMEM));
        a.send_queue().fail_part(a.send_queue().slots().slot(0), 1, refused);
        let mut context = Context::from_waker(Waker::noop());
        assert!(batch.as_mut().poll(&mut context).is_pending());
        a.modify(&QpAttr::to_state(QpState::Reset)).unwrap();
        let Poll::Ready(result) = batch.as_mut().poll(&mut context) else { panic!("it hangs") };
        assert_eq!(result.results(), [Err(OpErrorKind::Closed), Err(refused), Err(OpErrorKind::Closed)]);
        drop(result);
        assert_eq!(pool.available(), 3);
    }

    /// Panics at each event.
    struct Panics;

    impl tracing::Subscriber for Panics {
        fn enabled(&self, _: &tracing::Metadata<'_>) -> bool {
            true
        }

        fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
            tracing::span::Id::from_u64(1)
        }

        fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}

        fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}

        fn event(&self, _: &tracing::Event<'_>) {
            std::panic::resume_unwind(Box::new("a subscriber"));
        }

        fn enter(&self, _: &tracing::span::Id) {}

        fn exit(&self, _: &tracing::span::Id) {}
    }

    #[test]
    fn what_is_posted_while_a_subscriber_panics_is_not_dropped() {
        // Nothing moves there.
        let device = Device::software_in(&Network::simulated(1, Faults::none()), "stuck").unwrap();
        let pd = device.protection_domain().unwrap();
        let queue = CompletionQueue::new(&device, CompletionMode::Event).unwrap();
        let [a, b] = [(); 2].map(|()| QueuePair::builder(&pd, &queue).max_send_wr(2).build().unwrap());
        a.connect(&b.endpoint()).unwrap();
        b.connect(&a.endpoint()).unwrap();
        let pool = Pool::new(&pd, 64, 4).unwrap();
        let region = ExposedRegion::new(&pd, vec![0; 64], Access::REMOTE_ALL).unwrap();
        let alloc = || pool.try_alloc(64).unwrap();
        // Of one subscriber alone, an event that the thread of another test reaches first would never be given to any.
        let _second = tracing::Dispatch::new(tracing::subscriber::NoSubscriber::new());
        for left in [3, 2] {
            let posts = std::panic::AssertUnwindSafe(|| {
                if left == 3 {
                    drop(a.write(alloc(), region.grant()));
                } else {
                    let mut batch = Batch::new();
                    batch.write(alloc(), region.grant());
                    drop(a.post_batch(batch));
                }
            });
            tracing::subscriber::with_default(Panics, || std::panic::catch_unwind(posts)).unwrap_err();
            assert_eq!(pool.available(), left, "the buffer is handed out again");
        }
    }

    #[derive(Default)]
    struct PanicsWhenWoken(AtomicBool);

    impl Wake for PanicsWhenWoken {
        fn wake(self: Arc<Self>) {
            if self.0.load(Ordering::Relaxed) {
                std::panic::resume_unwind(Box::new("a waker"));
            }
        }
    }

    #[test]
    fn poster_that_wakes_a_waker_that_panics_does_not_notice() {
        // Nothing moves there.
        let device = Device::software_in(&Network::simulated(1, Faults::none()), "stuck").unwrap();
        let pd = device.protection_domain().unwrap();
        let queue = CompletionQueue::new(&device, CompletionMode::Event).unwrap();
        let [a, b] = [(); 2].map(|()| QueuePair::builder(&pd, &queue).max_send_wr(1).build().unwrap());
        a.connect(&b.endpoint()).unwrap();
        b.connect(&a.endpoint()).unwrap();
        let pool = Pool::new(&pd, 64, 4).unwrap();
        let region = ExposedRegion::new(&pd, vec![0; 64], Access::REMOTE_ALL).unwrap();
        let alloc = || pool.try_alloc(64).unwrap();
        let _first = a.write(alloc(), region.grant());
        // Waits for room; the device refuses it, which has none, once the queue believes that it has.
        let mut waits = pin!(a.write(alloc(), region.grant()));
        let panics = Arc::new(PanicsWhenWoken::default());
        assert!(waits.as_mut().poll(&mut Context::from_waker(&panics.clone().into())).is_pending());
        panics.0.store(true, Ordering::Relaxed);
        a.send_queue().room.retire(0);
        let posted = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| a.write(alloc(), region.grant())));
        let mut posted = pin!(posted.expect("the panic of another task's waker"));
        for write in [&mut waits, &mut posted] {
            let Poll::Ready(refused) = write.as_mut().poll(&mut Context::from_waker(Waker::noop())) else { panic!() };
            drop(refused.unwrap_err().into_buffer());
        }
        assert_eq!(pool.available(), 3);
    }
}
