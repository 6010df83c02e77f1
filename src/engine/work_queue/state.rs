//! The state of a work queue under its lock, and the calls that post to the device.

#![allow(unsafe_code)]

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;

use super::watch::Watch;
use crate::engine::slot::Slot;
use crate::engine::slot_table::Cursor;
use crate::engine::work_request::{Queued, WorkKind, WorkRequest};
use crate::error::{CompletionError, OpErrorKind, VerbError};
use crate::types::{QpState, RecvWr, Sge, WrId};
use crate::verbs::{PostError, Qp, Srq};

pub(super) const WRONG_QUEUE: PostError =
    PostError { posted: 0, error: VerbError::new("post to the wrong queue", VerbError::EINVAL) };

#[derive(Debug, Clone)]
pub(crate) enum DeviceQueue {
    Send(Arc<Qp>),
    Receive(Arc<Qp>),
    Shared(Srq),
}

/// The fields that each operation uses come first, in few cache lines.
#[repr(C)]
pub(in crate::engine) struct WorkQueueState {
    /// Work requests posted so far. The low 32 bits are the position of the next one.
    pub(in crate::engine) posted: u64,
    /// The value of `posted` up to which there is known capacity; not above `posted` if work is
    /// queued or the queue is closed.
    pub(in crate::engine) until: u64,
    pub(in crate::engine) device: Option<DeviceQueue>,
    pub(in crate::engine) cursor: Cursor,
    pub(in crate::engine) waited: u64,
    pub(in crate::engine) wait_queue: VecDeque<Queued>,
    pub(in crate::engine) watch: Watch,
}

impl WorkQueueState {
    pub(in crate::engine) fn new(device: DeviceQueue) -> Self {
        Self {
            device: Some(device),
            cursor: Cursor::default(),
            posted: 0,
            until: 0,
            waited: 0,
            wait_queue: VecDeque::new(),
            watch: Watch::default(),
        }
    }

    #[inline]
    pub(in crate::engine) fn post_one<Q>(
        &mut self,
        slot: &Slot<Q>,
        id: WrId,
        request: &WorkRequest<'_>,
        sges: &[Sge],
    ) -> Result<(), VerbError> {
        slot.set_part_position(id, self.posted as u32);
        let result = match (request.kind, &self.device) {
            // SAFETY: S1: for all three: the operation owns the buffers that the elements name, and
            // a bound window keeps its memory until unbound. The operation keeps its buffers until
            // the slot is COMPLETE, or leaves them in the slot, which is emptied only at the
            // completion or after the device has destroyed or reset the queue.
            (WorkKind::Send(op), Some(DeviceQueue::Send(qp))) => unsafe {
                qp.post_send(&[request.send_wr(id, op, sges)])
            },
            // SAFETY: S1: as above.
            (WorkKind::Receive, Some(DeviceQueue::Receive(qp))) => unsafe {
                qp.post_recv(&[RecvWr { wr_id: id, sges }])
            },
            // SAFETY: S1: as above; the shared receive queue is destroyed before its slots are
            // emptied.
            (WorkKind::Receive, Some(DeviceQueue::Shared(srq))) => unsafe {
                srq.post_recv(&[RecvWr { wr_id: id, sges }])
            },
            _ => Err(WRONG_QUEUE),
        };
        result.map_err(|refused| refused.error)?;
        self.posted += 1;
        if is_traced() {
            trace_posted(slot, id, request.kind);
        }
        Ok(())
    }

    /// Returns the state of the queue pair if `error` is EINVAL and the state forbids the work;
    /// otherwise `error`.
    #[cold]
    pub(in crate::engine) fn refusal(&self, error: VerbError) -> OpErrorKind {
        if error.errno != VerbError::EINVAL {
            return OpErrorKind::Post(error);
        }
        let (qp, takes): (_, fn(QpState) -> bool) = match &self.device {
            Some(DeviceQueue::Send(qp)) => {
                (qp, |state| matches!(state, QpState::Rts | QpState::Sqd))
            }
            Some(DeviceQueue::Receive(qp)) => {
                (qp, |state| !matches!(state, QpState::Reset | QpState::Err))
            }
            Some(DeviceQueue::Shared(_)) | None => return OpErrorKind::Post(error),
        };
        match qp.query() {
            Ok((QpState::Err, _)) if !qp.flushes_late_work() => {
                OpErrorKind::Completion(CompletionError::flushed(qp.qpn()))
            }
            Ok((state, _)) if !takes(state) => OpErrorKind::State { qpn: qp.qpn(), state, error },
            _ => OpErrorKind::Post(error),
        }
    }
}

#[inline]
pub(in crate::engine) fn is_traced() -> bool {
    tracing::Level::TRACE <= tracing::level_filters::LevelFilter::current()
}

#[cold]
pub(in crate::engine) fn trace_posted<Q>(slot: &Slot<Q>, id: WrId, work: impl fmt::Debug) {
    rdma_provider::trace!(wr_id = %id, ?work, "posted");
    slot.trace();
}
