//! Posting: passes a work request to the device, or queues it until an entry is free.

#![allow(unsafe_code)]

use std::iter;
use std::sync::Arc;

use smallvec::SmallVec;

use super::WorkQueue;
use super::state::{DeviceQueue, Queued, WRONG_QUEUE, WorkQueueState, is_traced, trace_posted};
use crate::engine::batch::{BatchEntry, Entries, Parts, Pieces};
use crate::engine::claim::Claim;
use crate::engine::slot::{MAX_PARTS, Outcome, Slot};
use crate::engine::slot_table::MAX_SLOTS;
use crate::engine::wake_list::WakeList;
use crate::engine::work_request::{OnFull, Receiver, Refusal, WorkKind, WorkRequest, data_of};
use crate::engine::work_request_id::index_of;
use crate::error::{LimitError, OpErrorKind, VerbError};
use crate::memory::{Gather, PdKey, SgeList};
use crate::sync::{MutexGuard, lock};
use crate::types::{
    Data, Lkey, QpAttr, QpState, RecvWr, RemoteAddr, SendFlags, SendOp, SendTarget, SendWr, Sge,
    WrId,
};
use crate::verbs::{PostError, Qp};
use rdma_provider::contract::{PlainOp, PlainWr};

impl WorkQueue {
    /// Posts one work request in the common case: one buffer within all limits, and free capacity.
    /// Otherwise posts nothing, and the caller uses [`submit`](Self::submit).
    #[inline(always)]
    pub(crate) fn submit_now(
        self: &Arc<Self>,
        request: &WorkRequest<'_>,
        buffer: Option<(Sge, PdKey)>,
    ) -> Option<Claim<Self>> {
        let (sge, pd) = buffer?;
        if !request.is_simple() || !self.is_plain(sge, pd, request.remote_len) {
            return None;
        }
        match request.kind {
            WorkKind::Send(op) => {
                // In parts, to stay in registers.
                let (flags, Sge { addr, length, lkey }) = (request.flags, sge);
                match op {
                    SendOp::Write(at) if self.has_plain => {
                        self.plain_now(PlainOp::Write, at, flags, addr, length, lkey)
                    }
                    SendOp::Read(at) if self.has_plain => {
                        self.plain_now(PlainOp::Read, at, flags, addr, length, lkey)
                    }
                    SendOp::Send if self.has_plain => {
                        let no_remote = RemoteAddr::default();
                        self.plain_now(|_| PlainOp::Send, no_remote, flags, addr, length, lkey)
                    }
                    op => self.send_now(op, flags, sge),
                }
            }
            WorkKind::Receive => self.receive_now(sge),
        }
    }

    /// Returns true if this single element needs no further check.
    #[inline]
    pub(in crate::engine) fn is_plain(&self, sge: Sge, pd: PdKey, remote_len: u64) -> bool {
        let length = u64::from(sge.length);
        // Some devices take length 0 for 2^31.
        pd == self.pd && length > 0 && length <= remote_len && length <= self.plain
    }

    /// `make` makes the operation of each kind in code of its own.
    #[inline(never)]
    fn plain_now(
        self: &Arc<Self>,
        make: impl Fn(RemoteAddr) -> PlainOp,
        remote: RemoteAddr,
        flags: SendFlags,
        addr: u64,
        length: u32,
        lkey: Lkey,
    ) -> Option<Claim<Self>> {
        let claim = self.send_by(|qp, wr_id| {
            let buffer = Sge { addr, length, lkey };
            let list = iter::once(PlainWr { wr_id, op: make(remote), flags, buffer });
            // SAFETY: S1: see `send_by`.
            unsafe { qp.post_plain(list) }
        })?;
        if is_traced() {
            trace_posted(&claim, claim.id(), make(remote));
        }
        Some(claim)
    }

    #[inline(always)]
    fn send_now(self: &Arc<Self>, op: SendOp, flags: SendFlags, sge: Sge) -> Option<Claim<Self>> {
        let claim = self.send_by(|qp, wr_id| {
            let sges = [sge];
            let wr = SendWr { wr_id, op, flags, data: Data::Sges(&sges), target: None };
            // SAFETY: S1: see `send_by`.
            unsafe { qp.post_list(Some(wr)) }.is_ok()
        })?;
        if is_traced() {
            trace_posted(&claim, claim.id(), WorkKind::Send(op));
        }
        Some(claim)
    }

    /// Claims a slot and calls `post`, which returns true if the device has the request.
    // Without this and that of `send_now`, an awaited WRITE takes 5 % more (`scripts/instructions`:
    // 877 instead of 833).
    #[inline(always)]
    fn send_by(self: &Arc<Self>, post: impl FnOnce(&Qp, WrId) -> bool) -> Option<Claim<Self>> {
        let mut state = lock(&self.state);
        let state = &mut *state;
        if state.posted >= state.until && !self.renew_capacity(state) {
            return None;
        }
        let Some(DeviceQueue::Send(qp)) = &state.device else { return None };
        // SAFETY: C1: just claimed.
        let claim = unsafe { Claim::new(self, self.slots.claim_next()?) };
        claim.set_position(state.posted as u32);
        // The operation owns the buffer until its slot is COMPLETE or emptied, see
        // `WorkQueueState::post_one`. All posts to the queue pair happen under the lock, and its
        // resets too (`QueuePairCore::modify`).
        if !post(qp, claim.id()) {
            claim.release();
            return None;
        }
        state.posted += 1;
        Some(claim)
    }

    #[inline(never)]
    fn receive_now(self: &Arc<Self>, sge: Sge) -> Option<Claim<Self>> {
        let mut state = lock(&self.state);
        let state = &mut *state;
        if state.posted >= state.until && !self.renew_capacity(state) {
            return None;
        }
        let device = state.device.as_ref()?;
        let claim = self.claim(&mut state.cursor, 1)?;
        claim.set_position(state.posted as u32);
        let list = [RecvWr { wr_id: claim.id(), sges: &[sge] }];
        let posted = match device {
            // SAFETY: S1: as for sends.
            DeviceQueue::Receive(qp) => unsafe { qp.post_recv(&list) },
            // SAFETY: S1: as for sends; the shared receive queue is destroyed before its slots are
            // emptied.
            DeviceQueue::Shared(srq) => unsafe { srq.post_recv(&list) },
            DeviceQueue::Send(_) => Err(WRONG_QUEUE),
        };
        if posted.is_err() {
            claim.release();
            return None;
        }
        state.posted += 1;
        if is_traced() {
            trace_posted(&claim, claim.id(), WorkKind::Receive);
        }
        Some(claim)
    }

    #[inline(never)]
    pub(in crate::engine) fn renew_capacity(&self, state: &mut WorkQueueState) -> bool {
        let may_post = state.wait_queue.is_empty() && state.device.is_some();
        let free = if may_post { self.capacity.free(state.posted as u32) } else { 0 };
        state.until = state.posted + u64::from(free);
        free > 0
    }

    fn has_capacity(&self, state: &mut WorkQueueState, count: usize) -> bool {
        let needed = state.posted + count as u64;
        if state.until < needed {
            self.renew_capacity(state);
        }
        state.until >= needed
    }

    #[inline(never)]
    pub(crate) fn submit<B: Gather>(
        self: &Arc<Self>,
        request: WorkRequest<'_>,
        buffer: &B,
        on_full: OnFull,
    ) -> Result<Claim<Self>, Refusal> {
        let mut sges = SgeList::new();
        self.gather(buffer, &mut sges)?;
        self.check(&sges, request.inline, request.remote_len)?;

        let mut state = lock(&self.state);
        if state.device.is_none() {
            return Err(OpErrorKind::Closed.into());
        }
        let direct = self.renew_capacity(&mut state);
        if self.limits.depth == 0 {
            // It could never be posted.
            return Err(OpErrorKind::from(LimitError {
                field: "work requests (max_send_wr, max_recv_wr)",
                asked: 1,
                allowed: 0,
            })
            .into());
        }
        if !direct && on_full == OnFull::Try {
            drop(state);
            // Dispatching completions may free capacity.
            return if self.cq.dispatch_available() {
                self.submit(request, buffer, on_full)
            } else {
                Err(Refusal::Full)
            };
        }
        let Some(claim) = self.claim(&mut state.cursor, 1) else {
            return Err(self.too_many().into());
        };
        if direct {
            let data = data_of(&sges, request.inline, request.window);
            let target = request.to.map(Receiver::target);
            let wr =
                SendWr { wr_id: claim.id(), op: SendOp::Send, flags: request.flags, data, target };
            if let Err(error) = state.post_one(&claim, request.kind, wr, &sges) {
                claim.release();
                return Err(state.refusal(error).into());
            }
        } else {
            let queued = Queued {
                id: claim.id(),
                kind: request.kind,
                flags: request.flags,
                sges,
                inline: request.inline.map(SmallVec::from_slice),
                window: request.window.map(|bind| Box::new(*bind)),
                to: request.to.map(Receiver::into_owned),
                batch: false,
            };
            self.enqueue(&mut state, queued);
            self.announce_queued(state);
        }
        Ok(claim)
    }

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
        if entries.are_plain(self.limits.pd, self.plain) {
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
        let mut state = lock(&self.state);
        if state.device.is_none() {
            return Err(OpErrorKind::Closed.into());
        }
        let direct = self.has_capacity(&mut state, count);
        if !direct && on_full == OnFull::Try {
            drop(state);
            // Dispatching completions may free capacity.
            return if self.cq().dispatch_available() {
                self.post_batch(parts, on_full)
            } else {
                Err(Refusal::Full)
            };
        }
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
                let queued = Queued {
                    id: wr.wr_id,
                    kind: WorkKind::Send(wr.op),
                    flags: wr.flags,
                    sges: SgeList::from_slice(sges),
                    inline: None,
                    window: None,
                    to: parts.to.map(Receiver::into_owned),
                    batch: true,
                };
                self.enqueue(&mut state, queued);
            }
            self.announce_queued(state);
        }
        Ok(claim)
    }

    /// Posts a list with one doorbell.
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
                Some(plain) if self.has_plain && qp.post_plain(plain.short_list(slot)) => Ok(()),
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

    #[cold]
    fn enqueue(&self, state: &mut WorkQueueState, queued: Queued) {
        state.wait_queue.push_back(queued);
        state.until = state.posted;
        state.waited += 1;
        self.cq().add_waiter();
    }

    /// Announces queued work to the drainer and posts as much as possible.
    pub(in crate::engine) fn announce_queued(&self, mut state: MutexGuard<'_, WorkQueueState>) {
        self.capacity.announce_waiter();
        let mut woken = WakeList::new();
        self.post_queued(&mut state, &mut woken);
        let waits = !state.wait_queue.is_empty();
        drop(state);
        woken.finish();
        if waits {
            // The operations may not be polled.
            self.cq().ensure_watched();
        }
    }

    pub(super) fn post_queued(&self, state: &mut WorkQueueState, woken: &mut WakeList) {
        while state.device.is_some()
            && self.capacity.free(state.posted as u32) > 0
            && let Some(next) = state.wait_queue.pop_front()
        {
            self.cq().remove_waiter();
            let data = data_of(&next.sges, next.inline.as_deref(), next.window.as_deref());
            let target = next.to.as_ref().map(|to| to.borrowed().target());
            let wr = SendWr { wr_id: next.id, op: SendOp::Send, flags: next.flags, data, target };
            if let Err(error) =
                state.post_one(self.slots.slot(index_of(next.id)), next.kind, wr, &next.sges)
            {
                if next.batch {
                    self.refuse_queued(state, wr, error, woken);
                } else {
                    let kind = state.refusal(error);
                    self.settle(next.id, Outcome::Err(kind), woken);
                }
            }
        }
        self.notify_idle(state, woken);
        if state.wait_queue.is_empty() && state.watch.idle.is_none() {
            self.capacity.clear_waiters();
        }
    }

    #[cold]
    pub(in crate::engine) fn admit_queued(&self, woken: &mut WakeList) {
        self.post_queued(&mut lock(&self.state), woken);
    }

    pub(in crate::engine) fn is_queued(&self, id: WrId) -> bool {
        lock(&self.state).wait_queue.iter().any(|queued| queued.id == id)
    }

    /// Fails the queued work of a [closed](Self::close) queue that was not destroyed. The rest of a
    /// partly posted batch stays queued.
    pub(in crate::engine) fn fail_queued(&self, kind: OpErrorKind) {
        let mut woken = WakeList::new();
        let mut state = lock(&self.state);
        // The batch of which all parts are queued.
        let mut whole = None;
        for queued in std::mem::take(&mut state.wait_queue) {
            let slot = self.slots.slot(index_of(queued.id));
            let part = slot.part(queued.id).unwrap_or(0);
            if part > 0 && whole != Some(slot.id()) {
                state.wait_queue.push_back(queued);
                continue;
            }
            whole = Some(slot.id());
            self.cq().remove_waiter();
            if queued.id == slot.id() {
                self.settle(queued.id, Outcome::Err(kind), &mut woken);
            } else {
                self.failures.fail_part(slot, part, kind);
            }
        }
        drop(state);
        woken.finish();
    }

    #[cold]
    fn refuse_queued(
        &self,
        state: &mut WorkQueueState,
        wr: SendWr<'_>,
        error: VerbError,
        woken: &mut WakeList,
    ) {
        let slot = self.slots.slot(index_of(wr.wr_id));
        let Some(part) = slot.part(wr.wr_id) else {
            unreachable!("a queued part belongs to a batch in flight")
        };
        for _ in part + 1..slot.parts() {
            state.wait_queue.pop_front();
            self.cq().remove_waiter();
        }
        self.refuse_from(state, slot, part, wr.target, error, woken);
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
            self.check(&pieces.sges[start..], None, entry.remote_len)?;
            pieces.lengths.push(pieces.sges.len() - start);
        }
        Ok(pieces)
    }

    pub(in crate::engine) fn gather<B: Gather, A: smallvec::Array<Item = Sge>>(
        &self,
        buffer: &B,
        list: &mut SmallVec<A>,
    ) -> Result<(), OpErrorKind> {
        let mut foreign = false;
        buffer.pieces(&mut |sge, pd| {
            foreign |= pd != self.limits.pd;
            // See `is_plain`.
            if sge.length > 0 {
                list.push(sge);
            }
        });
        if foreign { Err(OpErrorKind::Foreign { what: "buffer" }) } else { Ok(()) }
    }

    #[inline]
    fn check(
        &self,
        sges: &[Sge],
        inline: Option<&[u8]>,
        remote_len: u64,
    ) -> Result<(), OpErrorKind> {
        if let Some(bytes) = inline {
            LimitError::check(
                "inline bytes (max_inline)",
                bytes.len() as u64,
                self.limits.max_inline.into(),
            )?;
            LimitError::check("bytes for the remote region", bytes.len() as u64, remote_len)?;
            return Ok(());
        }
        let bytes: u64 = sges.iter().map(|sge| u64::from(sge.length)).sum();
        LimitError::check(
            "scatter/gather elements (max_sge)",
            sges.len() as u64,
            self.limits.max_sge.into(),
        )?;
        LimitError::check(
            "message bytes (the path MTU for datagrams)",
            bytes,
            self.limits.max_message,
        )?;
        LimitError::check("bytes for the remote region", bytes, remote_len)?;
        Ok(())
    }

    fn too_many(&self) -> OpErrorKind {
        let allowed = u64::from(MAX_SLOTS);
        OpErrorKind::Limit(LimitError {
            field: "operations not yet awaited",
            asked: allowed + 1,
            allowed,
        })
    }
}
