//! Many work requests, one doorbell: posting a batch.
//!
//! The slots of a batch are chained from the last to the first. Only the last is waited for: unsignalled work before
//! a completion is done.

#![allow(unsafe_code)]

use std::sync::Arc;

use smallvec::SmallVec;

use super::in_flight::InFlightBatch;
use super::slot::{Generation, NONE, Outcome};
use super::wake::WakeList;
use super::work_queue::{Patience, Poster, Posting, Queued, Refusal, What, WorkQueue};
use crate::error::{LimitError, OpErrorKind, VerbError};
use crate::sync::{MutexGuard, lock};
use crate::types::{Data, QpAttr, QpState, SendFlags, SendOp, SendWr, Sge};
use crate::verbs::{PostError, SgeList, Source};

/// Work requests of a batch for which posting needs no allocation.
const BATCH_INLINE: usize = 16;

/// One work request of a batch, without its buffer.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BatchEntry {
    pub(crate) op: SendOp,
    pub(crate) flags: SendFlags,
    pub(crate) room: u64,
}

impl WorkQueue {
    /// Posts a batch with one doorbell, or lines it up. `buffers` are those of `entries`, in order.
    pub(crate) fn submit_batch<B: Source>(
        self: &Arc<Self>,
        entries: &[BatchEntry],
        common: SendFlags,
        signal_every: u32,
        buffers: Vec<B>,
        patience: Patience,
    ) -> Result<InFlightBatch<B>, Refusal<Vec<B>>> {
        let mut sges: SmallVec<[Sge; 2 * BATCH_INLINE]> = SmallVec::new();
        let mut ends: SmallVec<[usize; BATCH_INLINE]> = SmallVec::new();
        if let Err(error) = self.check_batch(entries, &buffers, &mut sges, &mut ends) {
            return Err(Refusal::Error(error, buffers));
        }
        let mut posting = lock(&self.posting);
        if posting.poster.is_none() {
            return Err(Refusal::Error(OpErrorKind::Closed, buffers));
        }
        let direct = posting.queued.is_empty() && self.room.left(posting.posted as u32) as usize >= entries.len();
        if !direct && patience == Patience::Try {
            return Err(Refusal::Full(buffers));
        }

        let mut slots: SmallVec<[(u32, Generation); BATCH_INLINE]> = SmallVec::new();
        let mut previous = NONE;
        for _ in entries {
            let Some((_, index, generation)) = self.slots.claim(&mut posting.cursor, previous) else {
                slots.iter().for_each(|&(index, _)| self.slots.slot(index).unclaim());
                return Err(Refusal::Error(self.too_many(), buffers));
            };
            slots.push((index, generation));
            previous = index;
        }
        let last = entries.len() - 1;
        let flags = |at: usize| {
            let signaled = at == last || signal_every != 0 && (at as u32 + 1).is_multiple_of(signal_every);
            let flags = entries[at].flags | common;
            if signaled { flags | SendFlags::SIGNALED } else { flags - SendFlags::SIGNALED }
        };
        let pieces = |at: usize| &sges[if at == 0 { 0 } else { ends[at - 1] }..ends[at]];

        if direct {
            let list: SmallVec<[SendWr<'_>; BATCH_INLINE]> = (0..entries.len())
                .map(|at| SendWr {
                    wr_id: self.wr_id(slots[at].0, slots[at].1),
                    op: entries[at].op,
                    flags: flags(at),
                    data: Data::Sges(pieces(at)),
                    target: None,
                })
                .collect();
            self.post_list(posting, &list, &slots);
        } else {
            for at in 0..entries.len() {
                let queued = Queued {
                    index: slots[at].0,
                    generation: slots[at].1,
                    what: What::Send(entries[at].op),
                    flags: flags(at),
                    sges: SgeList::from_slice(pieces(at)),
                    inline: None,
                    window: None,
                    to: None,
                    batch: true,
                };
                self.line_up(&mut posting, queued);
            }
            self.announce(posting);
        }
        Ok(InFlightBatch::new(self.clone(), self.wr_id(slots[last].0, slots[last].1), entries.len(), buffers))
    }

    /// One doorbell for many. A refusal part-way ends the queue pair: of those already posted some are
    /// unsignalled, and only a completion behind them tells when their buffers are free.
    fn post_list(&self, mut posting: MutexGuard<'_, Posting>, list: &[SendWr<'_>], slots: &[(u32, Generation)]) {
        let Some(Poster::Send(qp)) = &posting.poster else {
            unreachable!("batches are of send queues, and the caller saw it open")
        };
        for (at, &(index, _)) in slots.iter().enumerate() {
            self.slots.slot(index).place((posting.posted as u32).wrapping_add(at as u32));
        }
        // SAFETY: S1: the elements name buffers that the batch owns; see `post_one`.
        let refused = unsafe { qp.post_send(list) }.err();
        let posted = refused.map_or(list.len(), |refused| refused.posted) as u32;
        tracing::trace!(posted, of = list.len(), "posted a batch");
        posting.posted += u64::from(posted);
        let Some(PostError { error, .. }) = refused else { return };
        let (mut woken, last) = (WakeList::new(), slots.len() - 1);
        let failed = Outcome::Err(OpErrorKind::Post(error));
        for &(index, generation) in &slots[posted as usize..last] {
            self.settle(index, generation, failed, &mut woken);
        }
        if posted > 0 {
            self.flush_behind(&mut posting, slots[last].0, list[last], error);
        } else {
            self.settle(slots[last].0, slots[last].1, failed, &mut woken);
        }
        drop(posting);
        woken.finish();
    }

    /// A part of a batch was refused, and parts before it may have been posted: ends the queue pair, with a work request
    /// that is flushed in the place of `wr`, so that the last slot of the batch is finished when the device is done with
    /// all before it. If even that is refused, it is finished when the queue pair is destroyed.
    pub(super) fn flush_behind(&self, posting: &mut Posting, index: u32, wr: SendWr<'_>, error: VerbError) {
        let Some(Poster::Send(qp)) = &posting.poster else { return };
        tracing::warn!(qpn = %qp.qpn(), %error, "batch refused part-way, ending the queue pair");
        if let Err(error) = qp.modify(&QpAttr::to_state(QpState::Err)) {
            tracing::warn!(%error, "its buffers are held until the queue pair is destroyed");
            return;
        }
        self.slots.slot(index).place(posting.posted as u32);
        let beacon = SendWr { data: Data::Sges(&[]), op: SendOp::Send, flags: SendFlags::SIGNALED, ..wr };
        // SAFETY: S1: it names no memory.
        match unsafe { qp.post_send(&[beacon]) } {
            Ok(()) => posting.posted += 1,
            Err(refused) => {
                tracing::warn!(error = %refused.error, "its buffers are held until the queue pair is destroyed")
            }
        }
    }

    fn check_batch<B: Source>(
        &self,
        entries: &[BatchEntry],
        buffers: &[B],
        sges: &mut SmallVec<[Sge; 2 * BATCH_INLINE]>,
        ends: &mut SmallVec<[usize; BATCH_INLINE]>,
    ) -> Result<(), OpErrorKind> {
        LimitError::check("work requests of a batch", entries.len() as u64, self.limits.depth.into())?;
        for (entry, buffer) in entries.iter().zip(buffers) {
            let start = sges.len();
            self.gather(buffer, sges)?;
            self.check(&sges[start..], None, entry.room)?;
            ends.push(sges.len());
        }
        Ok(())
    }
}
