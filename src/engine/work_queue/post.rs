//! Posting: from an operation to the device, or in line behind those that wait for room.

#![allow(unsafe_code)]

use std::sync::Arc;

use smallvec::SmallVec;

use super::WorkQueue;
use crate::engine::batch::{BatchEntry, Parts, Pieces};
use crate::engine::claim::Claim;
use crate::engine::posting::{Poster, Posting, WRONG_QUEUE, is_traced, trace_posted};
use crate::engine::slot::{MAX_PARTS, Outcome, Slot};
use crate::engine::wait_queue::Queued;
use crate::engine::wake_list::WakeList;
use crate::engine::work_request::{Kept, Patience, Refusal, Request, To, What, data_of};
use crate::engine::work_request_id::{INDEX_BITS, index_of};
use crate::error::{LimitError, OpErrorKind, VerbError};
use crate::memory::{Gather, PdKey, SgeList};
use crate::sync::{MutexGuard, lock};
use crate::types::{
    Data, QpAttr, QpState, RecvWr, SendFlags, SendOp, SendTarget, SendWr, Sge, WrId,
};
use crate::verbs::PostError;

impl WorkQueue {
    /// Posts one work request if that is simple: one buffer, nothing to complain about, room in the queue. Nothing was
    /// posted in any other case, which [`submit`](Self::submit) goes through with more care.
    #[inline(always)]
    pub(crate) fn submit_now<B: Gather>(
        self: &Arc<Self>,
        what: What,
        flags: SendFlags,
        room: u64,
        buffer: &B,
    ) -> Option<Claim<Self>> {
        let (sge, pd) = buffer.single()?;
        match what {
            What::Send(op) if self.is_plain(sge, pd, room) => self.send_now(op, flags, sge),
            What::Receive if self.is_plain(sge, pd, u64::MAX) => self.receive_now(sge),
            _ => None,
        }
    }

    /// True if there is nothing to complain about in this one element. To some devices one of no bytes means 2^31.
    #[inline(always)]
    pub(in crate::engine) fn is_plain(&self, sge: Sge, pd: PdKey, room: u64) -> bool {
        let length = u64::from(sge.length);
        pd == self.limits.pd && length > 0 && length <= room && length <= self.plain
    }

    /// Gives a send to the device if there is room. In place: a call would cost as much as what it keeps out of line.
    #[inline(always)]
    fn send_now(self: &Arc<Self>, op: SendOp, flags: SendFlags, sge: Sge) -> Option<Claim<Self>> {
        let mut posting = lock(&self.posting);
        let posting = &mut *posting;
        if posting.posted >= posting.until && !self.is_clear(posting) {
            return None;
        }
        let Some(Poster::Send(qp)) = &posting.poster else { return None };
        // SAFETY: C1: claimed for this.
        let claim = unsafe { Claim::new(self, self.slots.claim_next()?) };
        claim.place(posting.posted as u32);
        let wr_id = claim.id();
        let sges = [sge];
        let wr = SendWr { wr_id, op, flags, data: Data::Sges(&sges), target: None };
        // SAFETY: S1: the element names a buffer that the operation owns. It keeps it until the slot is COMPLETE,
        // or leaves it in the slot, which is emptied only when the device is done or the queue was destroyed.
        if unsafe { qp.post_in_place(Some(wr)) }.is_err() {
            claim.release();
            return None;
        }
        posting.posted += 1;
        if is_traced() {
            trace_posted(&claim, wr_id, What::Send(op));
        }
        Some(claim)
    }

    /// Gives a receive to the device if there is room.
    #[inline(never)]
    fn receive_now(self: &Arc<Self>, sge: Sge) -> Option<Claim<Self>> {
        let mut posting = lock(&self.posting);
        let posting = &mut *posting;
        if posting.posted >= posting.until && !self.is_clear(posting) {
            return None;
        }
        let poster = posting.poster.as_ref()?;
        let claim = self.claim(&mut posting.cursor, 1)?;
        claim.place(posting.posted as u32);
        let list = [RecvWr { wr_id: claim.id(), sges: &[sge] }];
        let posted = match poster {
            // SAFETY: S1: as for sends.
            Poster::Receive(qp) => unsafe { qp.post_recv(&list) },
            // SAFETY: S1: as for sends; the shared receive queue is destroyed first.
            Poster::Shared(srq) => unsafe { srq.post_recv(&list) },
            Poster::Send(_) => Err(WRONG_QUEUE),
        };
        if posted.is_err() {
            claim.release();
            return None;
        }
        posting.posted += 1;
        if is_traced() {
            trace_posted(&claim, claim.id(), What::Receive);
        }
        Some(claim)
    }

    /// True if the next work request can go to the device now. Finds out how many can.
    #[inline(never)]
    pub(in crate::engine) fn is_clear(&self, posting: &mut Posting) -> bool {
        let clear = posting.queued.is_empty() && posting.poster.is_some();
        let left = if clear { self.room.left(posting.posted as u32) } else { 0 };
        posting.until = posting.posted + u64::from(left);
        left > 0
    }

    /// As [`is_clear`](Self::is_clear), for `count` work requests.
    fn has_room(&self, posting: &mut Posting, count: usize) -> bool {
        self.is_clear(posting) && posting.until - posting.posted >= count as u64
    }

    /// Posts one work request of any kind, or lines it up if there is no room.
    #[inline(never)]
    pub(crate) fn submit<B: Gather>(
        self: &Arc<Self>,
        request: Request<'_>,
        buffer: &B,
        patience: Patience,
    ) -> Result<Claim<Self>, Refusal> {
        let mut sges = SgeList::new();
        self.gather(buffer, &mut sges)?;
        self.check(&sges, request.inline, request.room)?;

        let mut posting = lock(&self.posting);
        if posting.poster.is_none() {
            return Err(OpErrorKind::Closed.into());
        }
        let direct = self.is_clear(&mut posting);
        if self.limits.depth == 0 {
            // There will never be room.
            return Err(OpErrorKind::from(LimitError {
                field: "work requests (max_send_wr, max_recv_wr)",
                asked: 1,
                allowed: 0,
            })
            .into());
        }
        if !direct && patience == Patience::Try {
            drop(posting);
            // Completions that were taken and not handed out may stand for room.
            return if self.cq.hand_out() {
                self.submit(request, buffer, patience)
            } else {
                Err(Refusal::Full)
            };
        }
        let Some(claim) = self.claim(&mut posting.cursor, 1) else {
            return Err(self.too_many().into());
        };
        if direct {
            let data = data_of(&sges, request.inline, request.window);
            let target = request.to.map(To::target);
            let wr =
                SendWr { wr_id: claim.id(), op: SendOp::Send, flags: request.flags, data, target };
            if let Err(error) = posting.post_one(&claim, request.what, wr, &sges) {
                claim.release();
                return Err(posting.refusal(error).into());
            }
        } else {
            let queued = Queued {
                id: claim.id(),
                what: request.what,
                flags: request.flags,
                sges,
                inline: request.inline.map(SmallVec::from_slice),
                window: request.window.map(|bind| Box::new(*bind)),
                to: request.to.map(To::keep),
                batch: false,
            };
            self.line_up(&mut posting, queued);
            self.announce(posting);
        }
        Ok(claim)
    }

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
    ) -> Result<Claim<Self>, Refusal> {
        let pieces = self.check_batch(entries, buffers)?;
        self.post_batch(&Parts { entries, pieces, common, signal_every, to }, patience)
    }

    fn post_batch(
        self: &Arc<Self>,
        parts: &Parts<'_>,
        patience: Patience,
    ) -> Result<Claim<Self>, Refusal> {
        let count = parts.entries.len();
        let mut posting = lock(&self.posting);
        if posting.poster.is_none() {
            return Err(OpErrorKind::Closed.into());
        }
        let direct = self.has_room(&mut posting, count);
        if !direct && patience == Patience::Try {
            drop(posting);
            // Completions that were taken and not handed out may stand for room.
            return if self.cq().hand_out() {
                self.post_batch(parts, patience)
            } else {
                Err(Refusal::Full)
            };
        }
        let Some(claim) = self.claim(&mut posting.cursor, count as u32) else {
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
        slot: &Slot<Self>,
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
            self.refuse_from(
                &mut posting,
                slot,
                posted as u32,
                to.map(To::target),
                error,
                &mut woken,
            );
            drop(posting);
            woken.finish();
        }
    }

    /// Joins the line.
    #[cold]
    fn line_up(&self, posting: &mut Posting, queued: Queued) {
        posting.queued.push_back(queued);
        posting.until = posting.posted;
        posting.waited += 1;
        self.cq().now_waiting();
    }

    /// Tells the drainer that somebody waits for room, which need not be somebody who is polled; if room came up
    /// meanwhile, uses it.
    pub(in crate::engine) fn announce(&self, mut posting: MutexGuard<'_, Posting>) {
        self.room.crowd();
        let mut woken = WakeList::new();
        self.post_queued(&mut posting, &mut woken);
        let waits = !posting.queued.is_empty();
        drop(posting);
        woken.finish();
        if waits {
            self.cq().attend();
        }
    }

    /// Posts those in line as far as there is room.
    fn post_queued(&self, posting: &mut Posting, woken: &mut WakeList) {
        while posting.poster.is_some()
            && self.room.left(posting.posted as u32) > 0
            && let Some(next) = posting.queued.pop_front()
        {
            self.cq().no_longer_waiting();
            let data = data_of(&next.sges, next.inline.as_deref(), next.window.as_deref());
            let target = next.to.as_ref().map(Kept::target);
            let wr = SendWr { wr_id: next.id, op: SendOp::Send, flags: next.flags, data, target };
            if let Err(error) =
                posting.post_one(self.slots.slot(index_of(next.id)), next.what, wr, &next.sges)
            {
                if next.batch {
                    self.refuse_in_line(posting, wr, error, woken);
                } else {
                    let kind = posting.refusal(error);
                    self.settle(next.id, Outcome::Err(kind), woken);
                }
            }
        }
        self.tell_idle(posting, woken);
        if posting.queued.is_empty() && posting.watch.idle.is_none() {
            self.room.clear();
        }
    }

    /// Posts for those who wait for room.
    #[cold]
    pub(in crate::engine) fn let_in(&self, woken: &mut WakeList) {
        self.post_queued(&mut lock(&self.posting), woken);
    }

    /// True if this work request waits for room.
    pub(in crate::engine) fn is_in_line(&self, id: WrId) -> bool {
        lock(&self.posting).queued.iter().any(|queued| queued.id == id)
    }

    /// Ends what is in line, which no device was given: for a queue that is [closed](Self::close) and not destroyed. But not the
    /// rest of a batch of which a part is posted, see there.
    pub(in crate::engine) fn end_line(&self, kind: OpErrorKind) {
        let mut woken = WakeList::new();
        let mut posting = lock(&self.posting);
        // The slot of the batch that is in line with its first.
        let mut whole = None;
        for queued in std::mem::take(&mut posting.queued) {
            let slot = self.slots.slot(index_of(queued.id));
            let place = slot.part(queued.id).unwrap_or(0);
            if place > 0 && whole != Some(slot.id()) {
                posting.queued.push_back(queued);
                continue;
            }
            whole = Some(slot.id());
            self.cq().no_longer_waiting();
            if queued.id == slot.id() {
                self.settle(queued.id, Outcome::Err(kind), &mut woken);
            } else {
                self.failures.fail_part(slot, place, kind);
            }
        }
        drop(posting);
        woken.finish();
    }

    /// The first in line, which is a part of a batch, was refused: so is the rest of it, behind it in line.
    #[cold]
    fn refuse_in_line(
        &self,
        posting: &mut Posting,
        wr: SendWr<'_>,
        error: VerbError,
        woken: &mut WakeList,
    ) {
        let slot = self.slots.slot(index_of(wr.wr_id));
        let Some(part) = slot.part(wr.wr_id) else {
            unreachable!("it is in flight until its last ends")
        };
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
        slot: &Slot<Self>,
        first: u32,
        target: Option<SendTarget<'_>>,
        error: VerbError,
        woken: &mut WakeList,
    ) {
        let kind = posting.refusal(error);
        for part in first..slot.parts() - 1 {
            self.failures.fail_part(slot, part, kind);
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
        self.failures.note_cause(OpErrorKind::Post(error));
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
        let beacon = SendWr {
            wr_id: last,
            op: SendOp::Send,
            flags: SendFlags::SIGNALED,
            data: Data::Sges(&[]),
            target,
        };
        // SAFETY: S1: it names no memory.
        match unsafe { qp.post_send(&[beacon]) } {
            Ok(()) => posting.posted += 1,
            Err(refused) if !is_reset() => self.give_up(&refused.error, error, woken),
            Err(_) => {}
        }
    }

    /// The device refuses to flush what is behind work that it refused for `error`.
    pub(super) fn give_up(
        &self,
        stuck: &dyn std::fmt::Display,
        error: VerbError,
        woken: &mut WakeList,
    ) {
        tracing::warn!(error = %stuck, "a queue pair that cannot be flushed is destroyed");
        if let Some(queue_pair) = self.queue_pair() {
            woken.end(queue_pair, OpErrorKind::Post(error));
        }
    }

    fn check_batch<B: Gather>(
        &self,
        entries: &[BatchEntry],
        buffers: &[B],
    ) -> Result<Pieces, OpErrorKind> {
        let allowed = self.limits.depth.min(MAX_PARTS);
        LimitError::check(
            "work requests of a batch (max_send_wr)",
            entries.len() as u64,
            allowed.into(),
        )?;
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

    /// Adds the local elements of a buffer, or of a list of them, to `list`.
    pub(in crate::engine) fn gather<B: Gather, A: smallvec::Array<Item = Sge>>(
        &self,
        buffer: &B,
        list: &mut SmallVec<A>,
    ) -> Result<(), OpErrorKind> {
        let mut foreign = false;
        buffer.pieces(&mut |sge, pd| {
            foreign |= pd != self.limits.pd;
            // To some devices an element of no bytes means one of 2^31.
            if sge.length > 0 {
                list.push(sge);
            }
        });
        if foreign { Err(OpErrorKind::Foreign { what: "buffer" }) } else { Ok(()) }
    }

    #[inline]
    fn check(&self, sges: &[Sge], inline: Option<&[u8]>, room: u64) -> Result<(), OpErrorKind> {
        if let Some(bytes) = inline {
            LimitError::check(
                "inline bytes (max_inline)",
                bytes.len() as u64,
                self.limits.max_inline.into(),
            )?;
            LimitError::check("bytes for the remote region", bytes.len() as u64, room)?;
            return Ok(());
        }
        let bytes: u64 = sges.iter().map(|sge| u64::from(sge.length)).sum();
        LimitError::check(
            "scatter/gather elements (max_sge)",
            sges.len() as u64,
            self.limits.max_sge.into(),
        )?;
        LimitError::check("message bytes", bytes, self.limits.max_message)?;
        LimitError::check("bytes for the remote region", bytes, room)?;
        Ok(())
    }

    fn too_many(&self) -> OpErrorKind {
        let allowed = 1 << INDEX_BITS;
        OpErrorKind::Limit(LimitError {
            field: "operations not yet awaited",
            asked: allowed + 1,
            allowed,
        })
    }
}
