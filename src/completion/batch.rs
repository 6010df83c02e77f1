//! Many work requests, one doorbell: posting a batch.
//!
//! The slots of a batch are chained from the last to the first. Only the last is waited for: unsignalled work before
//! a completion is done.

#![allow(unsafe_code)]

use std::sync::Arc;

use smallvec::SmallVec;

use super::in_flight::InFlightBatch;
use super::request::{Patience, Refusal, To, What};
use super::slot::{NONE, Outcome};
use super::wake::WakeList;
use super::work_queue::{Poster, Posting, Queued, WorkQueue, index_of};
use crate::error::{LimitError, OpErrorKind, VerbError};
use crate::sync::{MutexGuard, lock};
use crate::types::{Data, QpAttr, QpState, SendFlags, SendOp, SendWr, Sge};
use crate::verbs::{PostError, SgeList, Source};

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
    #[allow(clippy::too_many_arguments, reason = "one call from one place")]
    pub(crate) fn submit_batch<B: Source>(
        self: &Arc<Self>,
        entries: &[BatchEntry],
        common: SendFlags,
        to: Option<To<'_>>,
        signal_every: u32,
        buffers: Vec<B>,
        patience: Patience,
    ) -> Result<InFlightBatch<B>, (Refusal, Vec<B>)> {
        let mut pieces = Pieces::default();
        if let Err(error) = self.check_batch(entries, &buffers, &mut pieces) {
            return Err((error.into(), buffers));
        }
        let mut posting = lock(&self.posting);
        if posting.poster.is_none() {
            return Err((OpErrorKind::Closed.into(), buffers));
        }
        let direct = self.has_room(&mut posting, entries.len());
        if !direct && patience == Patience::Try {
            drop(posting);
            // Completions that were taken and not handed out may stand for room.
            if self.cq().hand_out() {
                return self.submit_batch(entries, common, to, signal_every, buffers, patience);
            }
            return Err((Refusal::Full, buffers));
        }

        let mut list: SmallVec<[SendWr<'_>; BATCH_INLINE]> = SmallVec::new();
        let (mut previous, mut left, mut start) = (NONE, entries.len(), 0);
        for (entry, &end) in entries.iter().zip(&pieces.ends) {
            let Some(slot) = self.slots.claim(&mut posting.cursor, self) else {
                if previous != NONE {
                    self.slots.release_chain(previous);
                }
                return Err((self.too_many().into(), buffers));
            };
            slot.follow(previous);
            slot.place((posting.posted as u32).wrapping_add((entries.len() - left) as u32));
            left -= 1;
            let signaled =
                left == 0 || signal_every != 0 && ((entries.len() - left) as u32).is_multiple_of(signal_every);
            let flags = entry.flags | common;
            list.push(SendWr {
                wr_id: slot.id(),
                op: entry.op,
                flags: if signaled { flags | SendFlags::SIGNALED } else { flags - SendFlags::SIGNALED },
                data: Data::Sges(pieces.sges.get(start..end).unwrap_or_default()),
                target: to.map(To::target),
            });
            (previous, start) = (index_of(slot.id()), end);
        }

        let Some(&SendWr { wr_id: last, .. }) = list.last() else { unreachable!("an empty batch is not posted") };
        if direct {
            self.post_list(posting, &list);
        } else {
            for wr in &list {
                let Data::Sges(sges) = wr.data else { unreachable!("made above") };
                let queued = Queued {
                    id: wr.wr_id,
                    what: What::Send(wr.op),
                    flags: wr.flags,
                    sges: SgeList::from_slice(sges),
                    inline: None,
                    window: None,
                    to: to.map(To::keep),
                    batch: true,
                };
                self.line_up(&mut posting, queued);
            }
            self.announce(posting);
        }
        Ok(InFlightBatch::new(self.clone(), last, entries.len(), buffers))
    }

    /// One doorbell for many. A refusal part-way ends the queue pair: of those already posted some are
    /// unsignalled, and only a completion behind them tells when their buffers are free.
    fn post_list(&self, mut posting: MutexGuard<'_, Posting>, list: &[SendWr<'_>]) {
        let Some(Poster::Send(qp)) = &posting.poster else {
            unreachable!("batches are of send queues, and the caller saw it open")
        };
        // SAFETY: S1: the elements name buffers that the batch owns; see `post_one`.
        let refused = unsafe { qp.post_send(list) }.err();
        let posted = refused.map_or(list.len(), |refused| refused.posted);
        tracing::trace!(posted, of = list.len(), "posted a batch");
        posting.posted += posted as u64;
        if let Some(PostError { error, .. }) = refused {
            self.refused(posting, list, posted, error);
        }
    }

    /// All of `list` behind the first `posted` was refused.
    #[cold]
    fn refused(&self, mut posting: MutexGuard<'_, Posting>, list: &[SendWr<'_>], posted: usize, error: VerbError) {
        let mut woken = WakeList::new();
        let fail = |wr: &SendWr<'_>, woken: &mut WakeList| {
            let failed = Outcome::Err(OpErrorKind::Post(error));
            self.settle(wr.wr_id, failed, woken);
        };
        if let [between @ .., last] = &list[posted..] {
            between.iter().for_each(|wr| fail(wr, &mut woken));
            if posted > 0 {
                self.flush_behind(&mut posting, *last, error, &mut woken);
            } else {
                fail(last, &mut woken);
            }
        }
        drop(posting);
        woken.finish();
    }

    /// A part of a batch was refused, and parts before it may have been posted: ends the queue pair, with a work request
    /// that is flushed in the place of `wr`, so that the last slot of the batch is finished when the device is done with
    /// all before it. False if even that is refused: then the queue pair is destroyed as soon as the locks are released, after
    /// which the device is done with all of it, and that finishes the last slot.
    pub(super) fn flush_behind(
        &self,
        posting: &mut Posting,
        wr: SendWr<'_>,
        error: VerbError,
        woken: &mut WakeList,
    ) -> bool {
        let Some(Poster::Send(qp)) = &posting.poster else { return false };
        tracing::warn!(qpn = %qp.qpn(), %error, "batch refused part-way, ending the queue pair");
        self.note_cause(OpErrorKind::Post(error));
        // Then the device has forgotten all of it, and whoever resets it ends what was in flight, as soon as we let go of
        // the lock.
        let is_reset = || qp.query().is_ok_and(|(state, _)| state == QpState::Reset);
        if let Err(stuck) = qp.modify(&QpAttr::to_state(QpState::Err)) {
            return is_reset() || self.give_up(&stuck, error, woken);
        }
        self.slots.slot(index_of(wr.wr_id)).place(posting.posted as u32);
        let beacon = SendWr { data: Data::Sges(&[]), op: SendOp::Send, flags: SendFlags::SIGNALED, ..wr };
        // SAFETY: S1: it names no memory.
        if let Err(refused) = unsafe { qp.post_send(&[beacon]) } {
            return is_reset() || self.give_up(&refused.error, error, woken);
        }
        posting.posted += 1;
        true
    }

    /// The device refuses to flush what is behind work that it refused for `error`.
    fn give_up(&self, stuck: &dyn std::fmt::Display, error: VerbError, woken: &mut WakeList) -> bool {
        tracing::warn!(error = %stuck, "a queue pair that cannot be flushed is destroyed");
        woken.end_queue_pair_of(self.cq().clone(), self.owner(), OpErrorKind::Post(error));
        false
    }

    fn check_batch<B: Source>(
        &self,
        entries: &[BatchEntry],
        buffers: &[B],
        pieces: &mut Pieces,
    ) -> Result<(), OpErrorKind> {
        LimitError::check("work requests of a batch", entries.len() as u64, self.limits.depth.into())?;
        for (entry, buffer) in entries.iter().zip(buffers) {
            match buffer.single() {
                // What there is most of.
                Some((sge, pd)) if self.is_plain(sge, pd, entry.room) => pieces.sges.push(sge),
                _ => {
                    let start = pieces.sges.len();
                    self.gather(buffer, &mut pieces.sges)?;
                    self.check(&pieces.sges[start..], None, entry.room)?;
                }
            }
            pieces.ends.push(pieces.sges.len());
        }
        Ok(())
    }
}

/// Scatter/gather elements of a batch, one work request after the other.
#[derive(Default)]
struct Pieces {
    sges: SmallVec<[Sge; BATCH_INLINE]>,
    /// Where those of each work request end.
    ends: SmallVec<[usize; BATCH_INLINE]>,
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::pin::pin;
    use std::task::{Context, Poll, Waker};

    use super::*;
    use crate::completion::{CompletionMode, CompletionQueue};
    use crate::op::{Batch, QueuePair};
    use crate::software::{Faults, Network};
    use crate::types::Access;
    use crate::verbs::{Device, ExposedRegion, Pool};

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
            assert!(!a.send_queue().give_up(&stuck, refused, &mut woken));
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
        // As `refused` leaves it: the first part and what stands for the last are with the device.
        let refused = OpErrorKind::Post(VerbError::new("ibv_post_send", VerbError::ENOMEM));
        let mut woken = WakeList::new();
        a.send_queue().settle(a.send_queue().slots().slot(1).id(), Outcome::Err(refused), &mut woken);
        woken.finish();
        let mut context = Context::from_waker(Waker::noop());
        assert!(batch.as_mut().poll(&mut context).is_pending());
        a.modify(&QpAttr::to_state(QpState::Reset)).unwrap();
        let Poll::Ready(result) = batch.as_mut().poll(&mut context) else { panic!("it hangs") };
        assert_eq!(result.results(), [Err(OpErrorKind::Closed), Err(refused), Err(OpErrorKind::Closed)]);
        drop(result);
        assert_eq!(pool.available(), 3);
    }
}
