//! Posting: passes a work request to the device, or queues it until an entry is free.

#![allow(unsafe_code)]

use std::iter;
use std::sync::Arc;

use smallvec::SmallVec;

use super::WorkQueue;
use super::state::{DeviceQueue, WRONG_QUEUE, WorkQueueState, is_traced, trace_posted};
use crate::engine::claim::Claim;
use crate::engine::slot_table::MAX_SLOTS;
use crate::engine::work_request::{OnFull, Queued, Refusal, WorkKind, WorkRequest};
use crate::error::{LimitError, OpErrorKind};
use crate::memory::{Gather, PdKey, SgeList};
use crate::sync::{MutexGuard, lock};
use crate::types::{Data, Lkey, RecvWr, RemoteAddr, SendFlags, SendOp, SendWr, Sge, WrId};
use crate::verbs::Qp;
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
        if !request.may_be_plain() || !self.is_plain(sge, pd, request.remote_len) {
            return None;
        }
        match request.kind {
            WorkKind::Send(op) => {
                // In parts, to stay in registers.
                let (flags, Sge { addr, length, lkey }) = (request.flags, sge);
                match op {
                    SendOp::Write(at) if self.posts_plain => {
                        self.plain_now(PlainOp::Write, at, flags, addr, length, lkey)
                    }
                    SendOp::Read(at) if self.posts_plain => {
                        self.plain_now(PlainOp::Read, at, flags, addr, length, lkey)
                    }
                    SendOp::Send if self.posts_plain => {
                        let no_remote = RemoteAddr::default();
                        self.plain_now(|_| PlainOp::Send, no_remote, flags, addr, length, lkey)
                    }
                    op => self.send_now(op, flags, sge),
                }
            }
            WorkKind::Receive => self.receive_now(sge),
        }
    }

    #[inline]
    pub(in crate::engine) fn is_plain(&self, sge: Sge, pd: PdKey, remote_len: u64) -> bool {
        let length = u64::from(sge.length);
        // Some devices take length 0 for 2^31.
        pd == self.pd && length > 0 && length <= remote_len && length <= self.max_plain
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

    /// Calls `post`, which returns true if the device has the request.
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

    /// Also returns whether the device has free entries for `count` work requests, which must be
    /// queued otherwise.
    pub(super) fn lock_for(
        &self,
        count: usize,
        on_full: OnFull,
    ) -> Result<(MutexGuard<'_, WorkQueueState>, bool), Refusal> {
        loop {
            let mut state = lock(&self.state);
            if state.device.is_none() {
                return Err(OpErrorKind::Closed.into());
            }
            let needed = state.posted + count as u64;
            if state.until < needed {
                self.renew_capacity(&mut state);
            }
            let free = state.until >= needed;
            if free || on_full == OnFull::Queue {
                return Ok((state, free));
            }
            drop(state);
            // Dispatching completions may free capacity.
            if !self.cq().dispatch_available() {
                return Err(Refusal::Full);
            }
        }
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
        let is_read = matches!(request.kind, WorkKind::Send(SendOp::Read(_)));
        self.check(&sges, is_read, request.inline, request.remote_len)?;

        // With a depth of 0 it could never be posted.
        let depth = self.limits.depth.into();
        LimitError::check("work requests (max_send_wr, max_recv_wr)", 1, depth)
            .map_err(OpErrorKind::from)?;
        let (mut state, direct) = self.lock_for(1, on_full)?;
        let Some(claim) = self.claim(&mut state.cursor, 1) else {
            return Err(self.too_many().into());
        };
        if direct {
            if let Err(error) = state.post_one(&claim, claim.id(), &request, &sges) {
                claim.release();
                return Err(state.refusal(error).into());
            }
        } else {
            self.enqueue(&mut state, Queued::new(claim.id(), &request, sges));
            self.announce_queued(state);
        }
        Ok(claim)
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
    pub(super) fn check(
        &self,
        sges: &[Sge],
        is_read: bool,
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
        if is_read {
            LimitError::check(
                "scatter elements of a READ (max_read_sge of the device)",
                sges.len() as u64,
                self.limits.max_read_sge.into(),
            )?;
        }
        LimitError::check(
            "message bytes (the path MTU for datagrams)",
            bytes,
            self.limits.max_message,
        )?;
        LimitError::check("bytes for the remote region", bytes, remote_len)?;
        Ok(())
    }

    pub(super) fn too_many(&self) -> OpErrorKind {
        let allowed = u64::from(MAX_SLOTS);
        OpErrorKind::Limit(LimitError {
            field: "operations not yet awaited",
            asked: allowed + 1,
            allowed,
        })
    }
}
