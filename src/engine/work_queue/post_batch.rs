//! Posting a batch with one doorbell, and what follows if the device refuses a part.

#![allow(unsafe_code)]

use std::sync::Arc;

use super::WorkQueue;
use super::state::{DeviceQueue, WorkQueueState, is_traced};
use crate::engine::batch::{BatchEntry, Entries, Parts, Pieces};
use crate::engine::claim::Claim;
use crate::engine::slot::{MAX_PARTS, Outcome, Slot};
use crate::engine::wake_list::WakeList;
use crate::engine::work_request::{OnFull, Queued, Receiver, Refusal, WorkRequest};
use crate::engine::work_request_id::index_of;
use crate::error::{LimitError, OpErrorKind, VerbError};
use crate::memory::{Gather, SgeList};
use crate::sync::MutexGuard;
use crate::types::{Data, QpAttr, QpState, SendFlags, SendOp, SendTarget, SendWr, WrId};
use crate::verbs::PostError;

impl WorkQueue {
    pub(crate) fn submit_batch<B: Gather>(
        self: &Arc<Self>,
        entries: &Entries,
        buffers: &[B],
        common: SendFlags,
        signal_every: u32,
        to: Option<Receiver<'_>>,
        on_full: OnFull,
    ) -> Result<Claim<Self>, Refusal> {
        let allowed = self.limits.depth.min(MAX_PARTS);
        LimitError::check(
            "work requests of a batch (max_send_wr)",
            entries.len() as u64,
            allowed.into(),
        )
        .map_err(OpErrorKind::from)?;
        let parts = Parts { entries, pieces: None, common, signal_every, to };
        if entries.are_plain(self.limits.pd, self.max_plain) {
            self.post_batch(parts, on_full)
        } else {
            let pieces = self.gather_batch(entries, buffers)?;
            self.post_batch(Parts { pieces: Some(&pieces), ..parts }, on_full)
        }
    }

    fn post_batch(
        self: &Arc<Self>,
        parts: Parts<'_>,
        on_full: OnFull,
    ) -> Result<Claim<Self>, Refusal> {
        let count = parts.entries.len();
        let (mut state, direct) = self.lock_for(count, on_full)?;
        let Some(claim) = self.claim(&mut state.cursor, count as u32) else {
            return Err(self.too_many().into());
        };
        if direct {
            claim.set_start(state.posted as u32);
            self.post_list(state, parts, &claim);
        } else {
            for wr in parts.list(&claim) {
                let Data::Sges(sges) = wr.data else {
                    unreachable!("a batch consists of scatter/gather lists")
                };
                let request =
                    WorkRequest { flags: wr.flags, to: parts.to, ..WorkRequest::local(wr.op) };
                let sges = SgeList::from_slice(sges);
                let mut queued = Queued::new(wr.wr_id, &request, sges);
                queued.is_part = true;
                self.enqueue(&mut state, queued);
            }
            self.announce_queued(state);
        }
        Ok(claim)
    }

    #[inline(never)]
    fn post_list(
        &self,
        mut state: MutexGuard<'_, WorkQueueState>,
        parts: Parts<'_>,
        slot: &Slot<Self>,
    ) {
        let Some(DeviceQueue::Send(qp)) = &state.device else {
            unreachable!("the caller has checked that this send queue is open")
        };
        let (count, to) = (parts.entries.len(), parts.to);
        // SAFETY: S1: the batch owns the buffers, see `WorkQueueState::post_one`. The lock excludes
        // other posts, as in `send_by`.
        let posted = unsafe {
            match parts.plain() {
                Some(plain) if self.posts_plain && qp.post_plain(plain.short_list(slot)) => Ok(()),
                Some(plain) => qp.post_list(plain.list(slot)),
                None => qp.post_list(parts.list(slot)),
            }
        };
        let refused = posted.err();
        let posted = refused.map_or(count, |refused| refused.posted);
        state.posted += posted as u64;
        if is_traced() {
            rdma_provider::trace!(posted, of = count, "posted a batch");
        }
        if let Some(PostError { error, .. }) = refused {
            // The accepted parts may be unsignalled, so only a later completion shows when their
            // buffers are free: the queue pair is moved to the error state.
            let mut woken = WakeList::new();
            self.refuse_from(
                &mut state,
                slot,
                posted as u32,
                to.map(Receiver::target),
                error,
                &mut woken,
            );
            drop(state);
            woken.finish();
        }
    }

    #[inline(never)]
    fn gather_batch<B: Gather>(
        &self,
        entries: &[BatchEntry],
        buffers: &[B],
    ) -> Result<Pieces, OpErrorKind> {
        let mut pieces = Pieces::default();
        for (entry, buffer) in entries.iter().zip(buffers) {
            let start = pieces.sges.len();
            self.gather(buffer, &mut pieces.sges)?;
            let is_read = matches!(entry.op, SendOp::Read(_));
            self.check(&pieces.sges[start..], is_read, None, entry.remote_len)?;
            pieces.lengths.push(pieces.sges.len() - start);
        }
        Ok(pieces)
    }

    #[cold]
    pub(super) fn refuse_queued(
        &self,
        state: &mut WorkQueueState,
        refused: &Queued,
        error: VerbError,
        woken: &mut WakeList,
    ) {
        let slot = self.slots.slot(index_of(refused.id));
        let Some(part) = slot.part(refused.id) else {
            unreachable!("a queued part belongs to a batch in flight")
        };
        for _ in part + 1..slot.parts() {
            state.wait_queue.pop_front();
            self.cq().remove_waiter();
        }
        self.refuse_from(state, slot, part, refused.request().target(), error, woken);
    }

    #[cold]
    fn refuse_from(
        &self,
        state: &mut WorkQueueState,
        slot: &Slot<Self>,
        first: u32,
        target: Option<SendTarget<'_>>,
        error: VerbError,
        woken: &mut WakeList,
    ) {
        let kind = state.refusal(error);
        for part in first..slot.parts() - 1 {
            self.failures.fail_part(slot, part, kind);
        }
        let last = slot.id();
        if first > 0 {
            self.flush_behind(state, last, target, error, woken);
        } else {
            self.settle(last, Outcome::Err(kind), woken);
        }
    }

    /// Flushes the accepted beginning of a batch: moves the queue pair to the error state and posts
    /// a work request in place of the `last`, whose flush completes the batch. If the device
    /// refuses that too, the queue pair is destroyed after the locks are released.
    fn flush_behind(
        &self,
        state: &mut WorkQueueState,
        last: WrId,
        target: Option<SendTarget<'_>>,
        error: VerbError,
        woken: &mut WakeList,
    ) {
        let Some(DeviceQueue::Send(qp)) = &state.device else { return };
        rdma_provider::warn!(
            qpn = %qp.qpn(),
            %error,
            "device refused part of a batch; moving the queue pair to the error state"
        );
        self.failures.note_cause(OpErrorKind::Post(error));
        // A reset queue pair has no work in flight. The thread that resets it completes the batch
        // after this one releases the lock.
        let is_reset = || qp.query().is_ok_and(|(state, _)| state == QpState::Reset);
        if let Err(stuck) = qp.modify(&QpAttr::to_state(QpState::Err)) {
            if !is_reset() {
                self.schedule_teardown(&stuck, error, woken);
            }
            return;
        }
        self.slots.slot(index_of(last)).set_position(state.posted as u32);
        let marker = SendWr {
            wr_id: last,
            op: SendOp::Send,
            flags: SendFlags::SIGNALED,
            data: Data::Sges(&[]),
            target,
        };
        // SAFETY: S1: it names no memory.
        match unsafe { qp.post_send(&[marker]) } {
            Ok(()) => state.posted += 1,
            Err(refused) if !is_reset() => self.schedule_teardown(&refused.error, error, woken),
            Err(_) => {}
        }
    }

    pub(super) fn schedule_teardown(
        &self,
        stuck: &dyn std::fmt::Display,
        error: VerbError,
        woken: &mut WakeList,
    ) {
        rdma_provider::warn!(
            error = %stuck,
            "failed to flush queue pair after a refused batch; destroying it"
        );
        if let Some(queue_pair) = self.queue_pair() {
            woken.shut_down(queue_pair, OpErrorKind::Post(error));
        }
    }
}
