//! A send, receive or shared receive queue: posting, room, and who is in flight.

#![allow(unsafe_code)]

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;

use smallvec::SmallVec;

use super::drain::CqShared;
use super::in_flight::InFlight;
use super::request::{Limits, Patience, Refusal, Request, What, WorkQueueCounters, data_of};
use super::room::Room;
use super::slot::{Finished, Generation, NONE, Outcome, Slot};
use super::slots::{Cursor, INDEX_BITS, Slots};
use super::wake::WakeList;
use crate::error::{LimitError, OpErrorKind, VerbError};
use crate::sync::{AtomicU32, Mutex, MutexGuard, Ordering, lock};
use crate::types::{
    Data, Qkey, Qpn, RecvWr, SendFlags, SendOp, SendWr, Sge, WcStatus, WindowBind, WorkCompletion, WrId,
};
use crate::verbs::{AddressHandle, PdKey, PostError, Qp, SgeList, Source, Srq};

/// No queue is given the other kind of work.
const WRONG_QUEUE: PostError =
    PostError { posted: 0, error: VerbError::new("post to the wrong queue", VerbError::EINVAL) };

/// What posts to the device.
#[derive(Debug, Clone)]
pub(crate) enum Poster {
    /// Send queue.
    Send(Arc<Qp>),
    /// Receive queue.
    Receive(Arc<Qp>),
    /// Shared receive queue.
    Shared(Srq),
}

/// A work queue of a device and all that is in flight on it.
pub(crate) struct WorkQueue {
    pub(super) slots: Slots,
    pub(super) limits: Limits,
    /// Upper bits of its work request numbers: where the completion queue finds it.
    label: u64,
    /// Shared receives complete in any order, others as posted.
    shared: bool,
    pub(super) room: Room,
    /// Completions that were errors; of those, flushed ones.
    failed: AtomicU32,
    flushed: AtomicU32,
    pub(super) posting: Mutex<Posting>,
    cq: Arc<CqShared>,
}

pub(super) struct Posting {
    /// `None` once closed.
    pub(super) poster: Option<Poster>,
    pub(super) cursor: Cursor,
    /// Work requests given to the device. Modulo 2^32 it is the position of the next.
    pub(super) posted: u64,
    pub(super) waited: u64,
    pub(super) queued: VecDeque<Queued>,
}

/// A work request that waits for room.
pub(super) struct Queued {
    pub(super) index: u32,
    pub(super) generation: Generation,
    pub(super) what: What,
    pub(super) flags: SendFlags,
    pub(super) sges: SgeList,
    pub(super) inline: Option<SmallVec<[u8; 64]>>,
    pub(super) window: Option<Box<WindowBind>>,
    pub(super) to: Option<(AddressHandle, Qpn, Qkey)>,
    /// Part of a batch: what is refused of it must not be overtaken by the rest.
    pub(super) batch: bool,
}

/// Where in its completion queue's table a work queue is, as part of a work request number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Owner(pub(super) u32);

const OWNER_SHIFT: u32 = INDEX_BITS + Generation::BITS;

impl Owner {
    /// Work queues of one completion queue.
    pub(super) const MAX: u32 = 1 << (64 - OWNER_SHIFT);

    #[inline]
    pub(super) fn of(id: WrId) -> Self {
        Self((id.0 >> OWNER_SHIFT) as u32)
    }
}

impl Generation {
    /// Life of the slot of a work request.
    #[inline]
    pub(super) fn of(id: WrId) -> Self {
        Self::new((id.0 >> INDEX_BITS) as u32)
    }
}

/// Slot of a work request.
#[inline]
pub(super) fn index_of(id: WrId) -> u32 {
    id.0 as u32 & ((1 << INDEX_BITS) - 1)
}

impl WorkQueue {
    pub(super) fn new(owner: Owner, poster: Poster, limits: Limits, cq: Arc<CqShared>) -> Self {
        Self {
            slots: Slots::new(),
            limits,
            label: u64::from(owner.0) << OWNER_SHIFT,
            shared: matches!(poster, Poster::Shared(_)),
            room: Room::new(limits.depth),
            failed: AtomicU32::new(0),
            flushed: AtomicU32::new(0),
            posting: Mutex::new(Posting {
                poster: Some(poster),
                cursor: Cursor::default(),
                posted: 0,
                waited: 0,
                queued: VecDeque::new(),
            }),
            cq,
        }
    }

    pub(super) fn owner(&self) -> Owner {
        Owner::of(WrId(self.label))
    }

    pub(super) fn is_shared(&self) -> bool {
        self.shared
    }

    pub(crate) fn cq(&self) -> &Arc<CqShared> {
        &self.cq
    }

    pub(super) fn slots(&self) -> &Slots {
        &self.slots
    }

    #[inline]
    pub(super) fn wr_id(&self, index: u32, generation: Generation) -> WrId {
        WrId(self.label | u64::from(generation.value()) << INDEX_BITS | u64::from(index))
    }

    /// Posts one work request if that is simple: one buffer, nothing to complain about, room in the queue. Gives the
    /// buffer back in any other case, which [`submit`](Self::submit) goes through with more care; nothing was posted then.
    #[inline(always)]
    pub(crate) fn submit_now<B: Source>(
        self: &Arc<Self>,
        what: What,
        flags: SendFlags,
        room: u64,
        buffer: B,
    ) -> Result<InFlight<B>, B> {
        match self.post_now(what, flags, room, &buffer) {
            Some(id) => Ok(InFlight::new(self.clone(), id, buffer)),
            None => Err(buffer),
        }
    }

    #[inline(always)]
    fn post_now<B: Source>(&self, what: What, flags: SendFlags, room: u64, buffer: &B) -> Option<WrId> {
        let (sge, pd) = buffer.single()?;
        match what {
            What::Send(op) if self.is_plain(sge, pd, room) => self.send_now(op, flags, sge),
            What::Receive if self.is_plain(sge, pd, u64::MAX) => self.receive_now(sge),
            _ => None,
        }
    }

    /// True if there is nothing to complain about in this one element. To some devices one of no bytes means 2^31.
    #[inline(always)]
    pub(super) fn is_plain(&self, sge: Sge, pd: PdKey, room: u64) -> bool {
        pd == self.limits.pd
            && sge.length > 0
            && self.limits.max_sge > 0
            && u64::from(sge.length) <= room.min(self.limits.max_message)
    }

    /// Gives a send to the device if there is room. In place: a call would cost as much as what it keeps out of line.
    #[inline(always)]
    fn send_now(&self, op: SendOp, flags: SendFlags, sge: Sge) -> Option<WrId> {
        let mut posting = lock(&self.posting);
        let posting = &mut *posting;
        if !self.is_clear(posting) {
            return None;
        }
        let Some(Poster::Send(qp)) = &posting.poster else { return None };
        let (slot, index, generation) = self.slots.claim(&mut posting.cursor, NONE)?;
        slot.place(posting.posted as u32);
        let wr_id = self.wr_id(index, generation);
        let wr = SendWr { wr_id, op, flags, data: Data::Sges(&[sge]), target: None };
        // SAFETY: S1: the element names a buffer that the operation owns. It keeps it until the slot is COMPLETE,
        // or leaves it in the slot, which is emptied only when the device is done or the queue was destroyed.
        if unsafe { qp.post_send_one(wr) }.is_err() {
            slot.unclaim();
            return None;
        }
        posting.posted += 1;
        trace_posted(wr_id, What::Send(op));
        Some(wr_id)
    }

    /// Gives a receive to the device if there is room.
    #[inline(never)]
    fn receive_now(&self, sge: Sge) -> Option<WrId> {
        let mut posting = lock(&self.posting);
        let posting = &mut *posting;
        if !self.is_clear(posting) {
            return None;
        }
        let poster = posting.poster.as_ref()?;
        let (slot, index, generation) = self.slots.claim(&mut posting.cursor, NONE)?;
        slot.place(posting.posted as u32);
        let wr_id = self.wr_id(index, generation);
        let list = [RecvWr { wr_id, sges: &[sge] }];
        let posted = match poster {
            // SAFETY: S1: as for sends.
            Poster::Receive(qp) => unsafe { qp.post_recv(&list) },
            // SAFETY: S1: as for sends; the shared receive queue is destroyed first.
            Poster::Shared(srq) => unsafe { srq.post_recv(&list) },
            Poster::Send(_) => Err(WRONG_QUEUE),
        };
        if posted.is_err() {
            slot.unclaim();
            return None;
        }
        posting.posted += 1;
        trace_posted(wr_id, What::Receive);
        Some(wr_id)
    }

    /// True if the next work request can go to the device now.
    #[inline]
    fn is_clear(&self, posting: &Posting) -> bool {
        posting.queued.is_empty() && self.room.left(posting.posted as u32) > 0
    }

    /// Posts one work request of any kind, or lines it up if there is no room.
    #[inline(never)]
    pub(crate) fn submit<B: Source>(
        self: &Arc<Self>,
        request: Request<'_>,
        buffer: B,
        patience: Patience,
    ) -> Result<InFlight<B>, Refusal<B>> {
        let mut sges = SgeList::new();
        let gathered = self.gather(&buffer, &mut sges);
        if let Err(error) = gathered.and_then(|()| self.check(&sges, request.inline, request.room)) {
            return Err(Refusal::Error(error, buffer));
        }

        let mut posting = lock(&self.posting);
        if posting.poster.is_none() {
            return Err(Refusal::Error(OpErrorKind::Closed, buffer));
        }
        let direct = self.is_clear(&posting);
        if self.limits.depth == 0 {
            // There will never be room.
            let nothing = LimitError { field: "work requests", asked: 1, allowed: 0 };
            return Err(Refusal::Error(nothing.into(), buffer));
        }
        if !direct && patience == Patience::Try {
            return Err(Refusal::Full(buffer));
        }
        let Some((slot, index, generation)) = self.slots.claim(&mut posting.cursor, NONE) else {
            return Err(Refusal::Error(self.too_many(), buffer));
        };
        if direct {
            let data = data_of(&sges, request.inline, request.window);
            let target = request.to.map(|(handle, qpn, qkey)| handle.target(qpn, qkey));
            let wr =
                SendWr { wr_id: self.wr_id(index, generation), op: SendOp::Send, flags: request.flags, data, target };
            if let Err(error) = self.post_one(&mut posting, index, request.what, wr, &sges) {
                slot.unclaim();
                return Err(Refusal::Error(OpErrorKind::Post(error), buffer));
            }
        } else {
            let queued = Queued {
                index,
                generation,
                what: request.what,
                flags: request.flags,
                sges,
                inline: request.inline.map(SmallVec::from_slice),
                window: request.window.map(|bind| Box::new(*bind)),
                to: request.to.map(|(handle, qpn, qkey)| (handle.clone(), qpn, qkey)),
                batch: false,
            };
            self.line_up(&mut posting, queued);
            self.announce(posting);
        }
        Ok(InFlight::new(self.clone(), self.wr_id(index, generation), buffer))
    }

    /// Gives one work request to the device.
    #[inline]
    fn post_one(
        &self,
        posting: &mut Posting,
        index: u32,
        what: What,
        wr: SendWr<'_>,
        sges: &[Sge],
    ) -> Result<(), VerbError> {
        self.slots.slot(index).place(posting.posted as u32);
        let result = match (what, &posting.poster) {
            // SAFETY: S1: for all three: the elements name buffers that the operation owns, and what a window is bound
            // to, the window keeps until it is not bound any more. The operation keeps them until
            // the slot is COMPLETE, or leaves them in the slot, which `shutdown` empties only after the queue
            // pair is destroyed.
            (What::Send(op), Some(Poster::Send(qp))) => unsafe { qp.post_send(&[SendWr { op, ..wr }]) },
            // SAFETY: S1: as above.
            (What::Receive, Some(Poster::Receive(qp))) => unsafe { qp.post_recv(&[RecvWr { wr_id: wr.wr_id, sges }]) },
            // SAFETY: S1: as above; the shared receive queue is destroyed first.
            (What::Receive, Some(Poster::Shared(srq))) => unsafe { srq.post_recv(&[RecvWr { wr_id: wr.wr_id, sges }]) },
            _ => Err(WRONG_QUEUE),
        };
        result.map_err(|refused| refused.error)?;
        trace_posted(wr.wr_id, what);
        posting.posted += 1;
        Ok(())
    }

    /// Joins the line.
    #[cold]
    pub(super) fn line_up(&self, posting: &mut Posting, queued: Queued) {
        posting.queued.push_back(queued);
        posting.waited += 1;
        self.cq.now_waiting();
    }

    /// Tells the drainer that somebody waits for room, which need not be somebody who is polled; if room came up
    /// meanwhile, uses it.
    pub(super) fn announce(&self, mut posting: MutexGuard<'_, Posting>) {
        self.room.crowd();
        let mut woken = WakeList::new();
        self.post_queued(&mut posting, &mut woken);
        let waits = !posting.queued.is_empty();
        drop(posting);
        woken.finish();
        if waits {
            self.cq.attend();
        }
    }

    /// Posts those in line as far as there is room.
    fn post_queued(&self, posting: &mut Posting, woken: &mut WakeList) {
        while posting.poster.is_some()
            && self.room.left(posting.posted as u32) > 0
            && let Some(next) = posting.queued.pop_front()
        {
            self.cq.no_longer_waiting();
            let data = data_of(&next.sges, next.inline.as_deref(), next.window.as_deref());
            let target = next.to.as_ref().map(|(handle, qpn, qkey)| handle.target(*qpn, *qkey));
            let wr_id = self.wr_id(next.index, next.generation);
            let wr = SendWr { wr_id, op: SendOp::Send, flags: next.flags, data, target };
            if let Err(error) = self.post_one(posting, next.index, next.what, wr, &next.sges) {
                // The last of a batch ends with nothing but its completion: parts before it may be with the device. One
                // before it that nothing stands in for would count as done with the next completion behind it.
                let is_before = |behind: &Queued| self.slots.slot(behind.index).previous() == Some(next.index);
                let held = !posting.queued.front().is_some_and(is_before);
                if next.batch && (self.flush_behind(posting, next.index, wr, error, woken) || held) {
                    continue;
                }
                let failed = Outcome::Err(OpErrorKind::Post(error));
                self.settle(next.index, next.generation, failed, woken);
            }
        }
        if posting.queued.is_empty() {
            self.room.clear();
        }
    }

    /// Ends a work request by its completion, a success, in the hands of the operation that waits for it: the
    /// caller is both the drainer and the future, so nothing is handed over.
    #[inline(always)]
    pub(super) fn end_unwatched(&self, slot: &Slot, wc: &WorkCompletion, woken: &mut WakeList) {
        trace_completed(wc);
        let position = slot.position();
        self.slots.release(slot, index_of(wc.wr_id));
        self.retire(position, woken);
    }

    /// Room is free; who waits for it gets it. A completion stands for all unsignalled work before it.
    #[inline(always)]
    fn retire(&self, position: u32, woken: &mut WakeList) {
        let crowded = if self.shared { self.room.retire_one() } else { self.room.retire_through(position) };
        if crowded {
            self.post_queued(&mut lock(&self.posting), woken);
        }
    }

    /// A completion has come: its slot is finished, room is free, and who waits for room gets it.
    #[inline(always)]
    pub(super) fn complete(&self, wc: &WorkCompletion, woken: &mut WakeList) {
        let generation = Generation::of(wc.wr_id);
        let Some(slot) = self.slots.find(index_of(wc.wr_id)) else { return stale(wc) };
        if !wc.status.is_success() || !slot.is_unwatched_in(generation) {
            return self.complete_watched(slot, generation, wc, woken);
        }
        trace_completed(wc);
        // First the room, then the result: whoever has seen the result finds the room.
        self.retire(slot.position(), woken);
        if !slot.finish_unwatched(generation, wc) {
            self.settle(index_of(wc.wr_id), generation, Ok(*wc), woken);
        }
    }

    /// As [`complete`](Self::complete), if it failed or somebody waits for it.
    #[inline(never)]
    fn complete_watched(&self, slot: &Slot, generation: Generation, wc: &WorkCompletion, woken: &mut WakeList) {
        if !slot.is_current(generation) {
            return stale(wc);
        }
        trace_completed(wc);
        if !wc.status.is_success() {
            self.count_failure(wc);
        }
        self.retire(slot.position(), woken);
        self.settle(index_of(wc.wr_id), generation, Ok(*wc), woken);
    }

    #[cold]
    fn count_failure(&self, wc: &WorkCompletion) {
        self.failed.fetch_add(1, Ordering::Relaxed);
        if wc.status == WcStatus::WR_FLUSH_ERR {
            self.flushed.fetch_add(1, Ordering::Relaxed);
            tracing::debug!(qpn = %wc.qpn, wr_id = %wc.wr_id, "flushed");
        } else {
            tracing::warn!(qpn = %wc.qpn, wr_id = %wc.wr_id, status = %wc.status, vendor = wc.vendor_error, "work request failed");
        }
    }

    /// Hands the outcome to the operation; what that leaves to do is added to `woken`.
    #[inline]
    pub(super) fn settle(&self, index: u32, generation: Generation, outcome: Outcome, woken: &mut WakeList) {
        let finished = self.slots.slot(index).finish(generation, outcome);
        self.follow_up(index, finished, woken);
    }

    #[cold]
    fn follow_up(&self, index: u32, finished: Finished, woken: &mut WakeList) {
        match finished {
            Finished::Unwatched | Finished::Stale => {}
            Finished::Wake(waker) => {
                self.cq.no_longer_waiting();
                woken.wake(waker);
            }
            Finished::Detached { held, waker, batch } => {
                self.cq.no_longer_waiting();
                if batch {
                    self.slots.release_chain(index);
                }
                woken.dispose(held, waker);
            }
        }
    }

    /// Stops posting. What is posted stays with the device, and what is in line stays there: it may be the end of a
    /// batch of which a part is posted, and a batch gives its buffers back when its last work request ends.
    pub(super) fn close(&self) -> Option<Poster> {
        lock(&self.posting).poster.take()
    }

    /// Ends a shared receive queue that nothing draws from any more.
    pub(crate) fn shut(self: &Arc<Self>, kind: OpErrorKind) {
        drop(self.close());
        self.cq.abandon(self, kind, true);
    }

    /// Ends all that is in flight. The device must have forgotten it: the queue was destroyed or reset.
    pub(super) fn abandon(&self, kind: OpErrorKind, woken: &mut WakeList) {
        let mut posting = lock(&self.posting);
        while posting.queued.pop_front().is_some() {
            self.cq.no_longer_waiting();
        }
        self.room.clear();
        let mut chain = Vec::new();
        for (index, slot) in self.slots.iter() {
            // A batch ends with its last work request: those before it end first, wherever their slots are.
            let mut next = Some((index, slot));
            while let Some((index, slot)) = next
                && let Some(generation) = slot.in_flight()
            {
                chain.push((index, generation));
                next = slot.previous().map(|previous| (previous, self.slots.slot(previous)));
            }
            while let Some((index, generation)) = chain.pop() {
                self.settle(index, generation, Outcome::Err(kind), woken);
            }
        }
        self.room.retire_through((posting.posted as u32).wrapping_sub(1));
    }

    /// Wakes all that wait, to look again.
    pub(super) fn rouse(&self, woken: &mut WakeList) {
        // Keeps out those who finish what was never posted.
        let _posting = lock(&self.posting);
        for (_, slot) in self.slots.iter() {
            if let Some((waker, waits_no_more)) = slot.rouse() {
                if waits_no_more {
                    self.cq.no_longer_waiting();
                }
                woken.wake(waker);
            }
        }
    }

    pub(crate) fn counters(&self) -> WorkQueueCounters {
        let posting = lock(&self.posting);
        WorkQueueCounters {
            posted: posting.posted,
            in_flight: self.room.in_flight(posting.posted as u32),
            waiting: posting.queued.len(),
            waited: posting.waited,
            failed: self.failed.load(Ordering::Relaxed),
            flushed: self.flushed.load(Ordering::Relaxed),
        }
    }

    /// Adds the local elements of a buffer, or of a list of them, to `list`.
    pub(super) fn gather<B: Source, A: smallvec::Array<Item = Sge>>(
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
    pub(super) fn check(&self, sges: &[Sge], inline: Option<&[u8]>, room: u64) -> Result<(), OpErrorKind> {
        if let Some(bytes) = inline {
            LimitError::check("inline bytes", bytes.len() as u64, self.limits.max_inline.into())?;
            LimitError::check("bytes for the remote region", bytes.len() as u64, room)?;
            return Ok(());
        }
        let bytes: u64 = sges.iter().map(|sge| u64::from(sge.length)).sum();
        LimitError::check("scatter/gather elements", sges.len() as u64, self.limits.max_sge.into())?;
        LimitError::check("message bytes", bytes, self.limits.max_message)?;
        LimitError::check("bytes for the remote region", bytes, room)?;
        Ok(())
    }

    pub(super) fn too_many(&self) -> OpErrorKind {
        let allowed = 1 << INDEX_BITS;
        OpErrorKind::Limit(LimitError { field: "operations not yet awaited", asked: allowed + 1, allowed })
    }
}

/// At no cost but a comparison when off; out of line, to leave the path its registers.
#[inline]
fn trace_completed(wc: &WorkCompletion) {
    #[cold]
    fn trace(wc: &WorkCompletion) {
        tracing::trace!(wr_id = %wc.wr_id, status = ?wc.status, "completed");
    }
    if tracing::Level::TRACE <= tracing::level_filters::LevelFilter::current() {
        trace(wc);
    }
}

/// As [`trace_completed`].
#[inline]
fn trace_posted(id: WrId, what: What) {
    #[cold]
    fn trace(id: WrId, what: What) {
        tracing::trace!(wr_id = %id, ?what, "posted");
    }
    if tracing::Level::TRACE <= tracing::level_filters::LevelFilter::current() {
        trace(id, what);
    }
}

#[cold]
fn stale(wc: &WorkCompletion) {
    tracing::warn!(wr_id = %wc.wr_id, "completion of a work request that is not in flight");
}

impl fmt::Debug for WorkQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WorkQueue").field("limits", &self.limits).field("counters", &self.counters()).finish()
    }
}
