//! A send, receive or shared receive queue: posting, room, and who is in flight.

#![allow(unsafe_code)]

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::sync::Arc;

use smallvec::SmallVec;

use super::capacity::Room;
use super::drain::CqShared;
use super::slot::{Claim, FailedParts, Finished, OWNER_BITS, Outcome, PLACE_BITS, Slot};
use super::slot_table::{Cursor, INDEX_BITS, Slots};
use super::wait_queue::Queued;
use super::wake_list::WakeList;
use super::watch::Watch;
use super::work_request::{Limits, Patience, Refusal, Request, To, What, WorkQueueCounters, data_of};
use crate::error::{CompletionError, LimitError, OpErrorKind, ReceiveLengths, VerbError};
use crate::memory::{Gather, PdKey, SgeList};
use crate::sync::{AtomicU32, Mutex, Ordering, lock};
use crate::types::{Data, QpState, RecvWr, SendFlags, SendOp, SendWr, Sge, WcOpcode, WcStatus, WorkCompletion, WrId};
use crate::verbs::{PostError, Qp, Srq};

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
    /// Where the completion queue finds it.
    owner: Owner,
    /// Most bytes of a request of one element that nothing else need be asked about; 0 if there is always something.
    plain: u64,
    /// Shared receives complete in any order, others as posted.
    shared: bool,
    pub(super) room: Room,
    /// Completions that were errors; of those, flushed ones.
    pub(super) failed: AtomicU32,
    flushed: AtomicU32,
    /// The first failure since it was made that is no flush.
    cause: Mutex<Option<OpErrorKind>>,
    /// Parts of batches that failed, by slot.
    failed_parts: Mutex<BTreeMap<u32, FailedParts>>,
    pub(super) posting: Mutex<Posting>,
    cq: Arc<CqShared>,
}

pub(super) struct Posting {
    /// `None` once closed.
    pub(super) poster: Option<Poster>,
    pub(super) cursor: Cursor,
    /// Work requests given to the device. Modulo 2^32 it is the position of the next.
    pub(super) posted: u64,
    /// Up to where they are known to have room, and need not line up. Not beyond `posted` if somebody is in line, or nothing
    /// can be posted.
    pub(super) until: u64,
    pub(super) waited: u64,
    pub(super) queued: VecDeque<Queued>,
    pub(super) watch: Watch,
}

/// Where in its completion queue's table a work queue is, as part of a work request number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Owner(pub(super) u32);

impl Owner {
    /// Work queues of one completion queue.
    pub(super) const MAX: u32 = 1 << OWNER_BITS;

    #[inline]
    pub(super) fn of(id: WrId) -> Self {
        Self(((id.0 % (1 << PLACE_BITS)) >> INDEX_BITS) as u32)
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
            owner,
            plain: if limits.max_sge > 0 { limits.max_message } else { 0 },
            shared: matches!(poster, Poster::Shared(_)),
            room: Room::new(limits.depth, matches!(poster, Poster::Shared(_))),
            failed: AtomicU32::new(0),
            flushed: AtomicU32::new(0),
            cause: Mutex::new(None),
            failed_parts: Mutex::new(BTreeMap::new()),
            posting: Mutex::new(Posting {
                poster: Some(poster),
                cursor: Cursor::default(),
                posted: 0,
                until: 0,
                waited: 0,
                queued: VecDeque::new(),
                watch: Watch::default(),
            }),
            cq,
        }
    }

    pub(super) fn owner(&self) -> Owner {
        self.owner
    }

    pub(super) fn is_shared(&self) -> bool {
        self.shared
    }

    pub(crate) fn cq(&self) -> &Arc<CqShared> {
        &self.cq
    }

    /// True if a thread polls for all.
    pub(super) fn is_polled(&self) -> bool {
        !self.cq.mode().arms()
    }

    pub(super) fn slots(&self) -> &Slots {
        &self.slots
    }

    /// Number of the first work request in slot `index`.
    pub(super) fn first_id(&self, index: u32) -> WrId {
        WrId(u64::from(self.owner.0) << INDEX_BITS | u64::from(index))
    }

    /// Posts one work request if that is simple: one buffer, nothing to complain about, room in the queue. Nothing was
    /// posted in any other case, which [`submit`](Self::submit) goes through with more care.
    #[inline(always)]
    pub(crate) fn submit_now<B: Gather>(
        self: &Arc<Self>,
        what: What,
        flags: SendFlags,
        room: u64,
        buffer: &B,
    ) -> Option<Claim> {
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
        let length = u64::from(sge.length);
        pd == self.limits.pd && length > 0 && length <= room && length <= self.plain
    }

    /// Gives a send to the device if there is room. In place: a call would cost as much as what it keeps out of line.
    #[inline(always)]
    fn send_now(self: &Arc<Self>, op: SendOp, flags: SendFlags, sge: Sge) -> Option<Claim> {
        let mut posting = lock(&self.posting);
        let posting = &mut *posting;
        if posting.posted >= posting.until && !self.is_clear(posting) {
            return None;
        }
        let Some(Poster::Send(qp)) = &posting.poster else { return None };
        let claim = self.slots.claim_next()?;
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
            trace_posted(wr_id, What::Send(op));
        }
        Some(claim)
    }

    /// Gives a receive to the device if there is room.
    #[inline(never)]
    fn receive_now(self: &Arc<Self>, sge: Sge) -> Option<Claim> {
        let mut posting = lock(&self.posting);
        let posting = &mut *posting;
        if posting.posted >= posting.until && !self.is_clear(posting) {
            return None;
        }
        let poster = posting.poster.as_ref()?;
        let claim = self.slots.claim(&mut posting.cursor, self, 1)?;
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
            trace_posted(claim.id(), What::Receive);
        }
        Some(claim)
    }

    /// True if the next work request can go to the device now. Finds out how many can.
    #[inline(never)]
    pub(super) fn is_clear(&self, posting: &mut Posting) -> bool {
        let clear = posting.queued.is_empty() && posting.poster.is_some();
        let left = if clear { self.room.left(posting.posted as u32) } else { 0 };
        posting.until = posting.posted + u64::from(left);
        left > 0
    }

    /// As [`is_clear`](Self::is_clear), for `count` work requests.
    pub(super) fn has_room(&self, posting: &mut Posting, count: usize) -> bool {
        self.is_clear(posting) && posting.until - posting.posted >= count as u64
    }

    /// Posts one work request of any kind, or lines it up if there is no room.
    #[inline(never)]
    pub(crate) fn submit<B: Gather>(
        self: &Arc<Self>,
        request: Request<'_>,
        buffer: &B,
        patience: Patience,
    ) -> Result<Claim, Refusal> {
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
            return if self.cq.hand_out() { self.submit(request, buffer, patience) } else { Err(Refusal::Full) };
        }
        let Some(claim) = self.slots.claim(&mut posting.cursor, self, 1) else {
            return Err(self.too_many().into());
        };
        if direct {
            let data = data_of(&sges, request.inline, request.window);
            let target = request.to.map(To::target);
            let wr = SendWr { wr_id: claim.id(), op: SendOp::Send, flags: request.flags, data, target };
            if let Err(error) = self.post_one(&mut posting, request.what, wr, &sges) {
                claim.release();
                return Err(refusal(&posting, error).into());
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

    /// Gives one work request to the device.
    #[inline]
    pub(super) fn post_one(
        &self,
        posting: &mut Posting,
        what: What,
        wr: SendWr<'_>,
        sges: &[Sge],
    ) -> Result<(), VerbError> {
        self.slots.slot(index_of(wr.wr_id)).place_part(wr.wr_id, posting.posted as u32);
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
        posting.posted += 1;
        if is_traced() {
            trace_posted(wr.wr_id, what);
        }
        Ok(())
    }

    /// Ends a work request by its completion, a success, in the hands of the operation that waits for it: the
    /// caller is both the drainer and the future, so nothing is handed over. True if somebody waits for room, who is to be
    /// [let in](Self::let_in).
    #[inline(always)]
    pub(super) fn end_own(&self, slot: &Slot, wc: &WorkCompletion) -> bool {
        if is_traced() {
            trace_completed(wc);
        }
        slot.finish_own();
        // A completion stands for all unsignalled work before it.
        self.room.retire(slot.position())
    }

    /// A completion has come: its slot is finished, room is free, and who waits for room gets it.
    #[inline(always)]
    pub(super) fn complete(&self, wc: &WorkCompletion, woken: &mut WakeList) {
        let Some(slot) = self.slots.find(index_of(wc.wr_id)) else { return stale(wc) };
        if !wc.status.is_success() || !slot.is_unwatched_in(wc.wr_id) {
            return self.complete_watched(slot, wc, woken);
        }
        if is_traced() {
            trace_completed(wc);
        }
        // First the room, then the result: whoever has seen the result finds the room.
        if self.room.retire(slot.position()) {
            self.let_in(woken);
        }
        if !slot.finish_unwatched(wc.wr_id, wc) {
            self.settle(wc.wr_id, Ok(*wc), woken);
        }
    }

    /// As [`complete`](Self::complete), if it failed or somebody waits for it.
    #[inline(never)]
    fn complete_watched(&self, slot: &Slot, wc: &WorkCompletion, woken: &mut WakeList) {
        let Some(part) = slot.current_part(wc.wr_id) else { return stale(wc) };
        if is_traced() {
            trace_completed(wc);
        }
        if !wc.status.is_success() {
            self.count_failure(wc);
            self.tell_failure(woken);
        }
        let is_last = wc.wr_id == slot.id();
        let position = if is_last { slot.position() } else { slot.start().wrapping_add(part) };
        if self.room.retire(position) {
            self.let_in(woken);
        }
        if !wc.status.is_success() {
            let kind = OpErrorKind::Completion(self.failure(wc));
            if is_last { self.settle(wc.wr_id, Err(kind), woken) } else { self.fail_part(slot, part, kind) }
        } else if is_last {
            self.settle(wc.wr_id, Ok(*wc), woken);
        }
    }

    /// Notes why a part of a batch failed that is not its last, with which it ends. Under the lock of posting or of completions:
    /// else a future that is being roused might see it happen.
    #[cold]
    pub(super) fn fail_part(&self, slot: &Slot, part: u32, kind: OpErrorKind) {
        lock(&self.failed_parts).entry(index_of(slot.id())).or_default().push((part, kind));
        slot.fail_parts();
    }

    /// What was noted of the batch in the slot of `id`, once.
    #[cold]
    pub(super) fn take_failed_parts(&self, id: WrId) -> FailedParts {
        lock(&self.failed_parts).remove(&index_of(id)).unwrap_or_default()
    }

    /// What the completion says, and the lengths of a message that does not fit its receive, which the software device tells.
    #[cold]
    fn failure(&self, wc: &WorkCompletion) -> CompletionError {
        let told = wc.status == WcStatus::LOC_LEN_ERR && wc.opcode == WcOpcode::RECV && self.cq.verbs().is_software();
        let lengths = ReceiveLengths { capacity: wc.imm_or_rkey, arrived: wc.byte_len };
        CompletionError { lengths: told.then_some(lengths), ..failure(wc) }
    }

    #[cold]
    fn count_failure(&self, wc: &WorkCompletion) {
        self.failed.fetch_add(1, Ordering::Relaxed);
        if wc.status == WcStatus::WR_FLUSH_ERR {
            self.flushed.fetch_add(1, Ordering::Relaxed);
            tracing::debug!(qpn = %wc.qpn, wr_id = %wc.wr_id, "flushed");
        } else {
            tracing::warn!(qpn = %wc.qpn, wr_id = %wc.wr_id, status = %wc.status, vendor = wc.vendor_error, "work request failed");
            self.note_cause(OpErrorKind::Completion(self.failure(wc)));
        }
    }

    /// Work has failed that others are flushed behind.
    pub(super) fn note_cause(&self, kind: OpErrorKind) {
        lock(&self.cause).get_or_insert(kind);
    }

    /// Why work is flushed: the first failure since the queue was made that is no flush, whoever has posted what failed.
    pub(crate) fn cause(&self) -> Option<OpErrorKind> {
        *lock(&self.cause)
    }

    /// Hands the outcome to the operation; what that leaves to do is added to `woken`.
    #[inline]
    pub(super) fn settle(&self, id: WrId, outcome: Outcome, woken: &mut WakeList) {
        let finished = self.slots.slot(index_of(id)).finish(id, outcome);
        self.follow_up(finished, woken);
    }

    #[cold]
    fn follow_up(&self, finished: Finished, woken: &mut WakeList) {
        match finished {
            Finished::Unwatched | Finished::Stale => {}
            Finished::Wake(waker) => {
                self.cq.no_longer_waiting();
                woken.wake(waker);
            }
            Finished::Detached { held, waker } => {
                self.cq.no_longer_waiting();
                woken.dispose(held, waker);
            }
        }
    }

    /// Stops posting. What is posted stays with the device, and what is in line stays there: it may be the end of a
    /// batch of which a part is posted, and a batch gives its buffers back when its last work request ends.
    pub(crate) fn close(&self) -> Option<Poster> {
        let mut posting = lock(&self.posting);
        posting.until = posting.posted;
        posting.poster.take()
    }

    /// The completion queue forgets it, and nothing is in flight on it any more: it lives as long as somebody holds it, or
    /// an operation that was not looked at. The poster is for the caller to drop, without a lock.
    pub(super) fn orphan(self: &Arc<Self>) -> Option<Poster> {
        let poster = self.close();
        // None of them is the last reference: the caller has one.
        self.slots.iter().for_each(|(_, slot)| drop(slot.orphan()));
        poster
    }

    /// Ends a shared receive queue that nothing draws from any more.
    pub(crate) fn shut(self: &Arc<Self>, kind: OpErrorKind) {
        drop(self.close());
        self.cq.abandon(self, kind, true);
    }

    /// Ends all that is in flight. The device must have forgotten it: the queue was destroyed or reset.
    pub(super) fn abandon(&self, kind: OpErrorKind, woken: &mut WakeList) {
        let mut posting = lock(&self.posting);
        while let Some(next) = posting.queued.pop_front() {
            self.cq.no_longer_waiting();
            let slot = self.slots.slot(index_of(next.id));
            if let Some(part) = slot.part(next.id).filter(|_| next.id != slot.id()) {
                self.fail_part(slot, part, kind);
            }
        }
        self.room.clear();
        for (_, slot) in self.slots.iter() {
            if let Some(id) = slot.in_flight() {
                self.abandon_parts(slot, kind);
                self.settle(id, Outcome::Err(kind), woken);
            }
        }
        self.room.retire_all(posting.posted as u32);
        self.tell_idle(&mut posting, woken);
    }

    /// Ends those before the last of a batch, if it is one, that were posted, have not failed, and are not done: a completion
    /// behind them in the batch stands for those.
    fn abandon_parts(&self, slot: &Slot, kind: OpErrorKind) {
        let before_last = slot.parts() - 1;
        if before_last == 0 {
            return;
        }
        let done = self.room.done_from(slot.start());
        let mut failed: Vec<u32> = match lock(&self.failed_parts).get(&index_of(slot.id())) {
            Some(failed) => failed.iter().map(|&(part, _)| part).collect(),
            None => Vec::new(),
        };
        failed.sort_unstable();
        for part in (done..before_last).filter(|part| failed.binary_search(part).is_err()) {
            self.fail_part(slot, part, kind);
        }
    }

    /// Wakes all that wait, to look again.
    pub(super) fn rouse(&self, woken: &mut WakeList) {
        // Keeps out those who finish what was never posted.
        let posting = lock(&self.posting);
        posting.watch.rouse.iter().for_each(|waker| woken.wake(waker.clone()));
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
    pub(super) fn gather<B: Gather, A: smallvec::Array<Item = Sge>>(
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
            LimitError::check("inline bytes (max_inline)", bytes.len() as u64, self.limits.max_inline.into())?;
            LimitError::check("bytes for the remote region", bytes.len() as u64, room)?;
            return Ok(());
        }
        let bytes: u64 = sges.iter().map(|sge| u64::from(sge.length)).sum();
        LimitError::check("scatter/gather elements (max_sge)", sges.len() as u64, self.limits.max_sge.into())?;
        LimitError::check("message bytes", bytes, self.limits.max_message)?;
        LimitError::check("bytes for the remote region", bytes, room)?;
        Ok(())
    }

    pub(super) fn too_many(&self) -> OpErrorKind {
        let allowed = 1 << INDEX_BITS;
        OpErrorKind::Limit(LimitError { field: "operations not yet awaited", asked: allowed + 1, allowed })
    }
}

/// Why the device refused a work request: `error`, or the state of the queue pair, if it takes no such work in that state. A full
/// queue and a device that is gone have errors of their own.
#[cold]
pub(super) fn refusal(posting: &Posting, error: VerbError) -> OpErrorKind {
    if error.errno != VerbError::EINVAL {
        return OpErrorKind::Post(error);
    }
    let (qp, takes): (_, fn(QpState) -> bool) = match &posting.poster {
        Some(Poster::Send(qp)) => (qp, |state| matches!(state, QpState::Rts | QpState::Sqd)),
        Some(Poster::Receive(qp)) => (qp, |state| !matches!(state, QpState::Reset | QpState::Err)),
        Some(Poster::Shared(_)) | None => return OpErrorKind::Post(error),
    };
    match qp.query() {
        Ok((state, _)) if !takes(state) => OpErrorKind::State { qpn: qp.qpn(), state, error },
        _ => OpErrorKind::Post(error),
    }
}

/// True if somebody wants to see each work request.
#[inline(always)]
pub(super) fn is_traced() -> bool {
    tracing::Level::TRACE <= tracing::level_filters::LevelFilter::current()
}

#[cold]
fn trace_completed(wc: &WorkCompletion) {
    tracing::trace!(wr_id = %wc.wr_id, status = ?wc.status, "completed");
}

#[cold]
fn trace_posted(id: WrId, what: What) {
    tracing::trace!(wr_id = %id, ?what, "posted");
}

/// Why it is no success, if it is none.
#[inline]
pub(super) fn success(wc: &WorkCompletion) -> Result<&WorkCompletion, OpErrorKind> {
    if wc.status.is_success() { Ok(wc) } else { Err(OpErrorKind::Completion(failure(wc))) }
}

#[cold]
fn failure(wc: &WorkCompletion) -> CompletionError {
    let WorkCompletion { status, vendor_error, qpn, .. } = *wc;
    CompletionError { status, vendor_error, qpn, lengths: None }
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
