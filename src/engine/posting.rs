//! Giving work requests to the device: the side of a work queue that is under its lock.

#![allow(unsafe_code)]

use std::collections::VecDeque;
use std::sync::Arc;

use super::slot::Slot;
use super::slot_table::Cursor;
use super::wait_queue::Queued;
use super::watch::Watch;
use super::work_request::What;
use crate::error::{OpErrorKind, VerbError};
use crate::types::{QpState, RecvWr, SendWr, Sge, WrId};
use crate::verbs::{PostError, Qp, Srq};

/// No queue is given the other kind of work.
pub(super) const WRONG_QUEUE: PostError =
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

/// What a work queue gives to its device; under one lock.
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

impl Posting {
    pub(super) fn new(poster: Poster) -> Self {
        Self {
            poster: Some(poster),
            cursor: Cursor::default(),
            posted: 0,
            until: 0,
            waited: 0,
            queued: VecDeque::new(),
            watch: Watch::default(),
        }
    }

    /// Gives one work request, which is in `slot`, to the device.
    #[inline]
    pub(super) fn post_one<Q>(
        &mut self,
        slot: &Slot<Q>,
        what: What,
        wr: SendWr<'_>,
        sges: &[Sge],
    ) -> Result<(), VerbError> {
        slot.place_part(wr.wr_id, self.posted as u32);
        let result = match (what, &self.poster) {
            // SAFETY: S1: for all three: the elements name buffers that the operation owns, and what a window is bound
            // to, the window keeps until it is not bound any more. The operation keeps them until
            // the slot is COMPLETE, or leaves them in the slot, which `shutdown` empties only after the queue
            // pair is destroyed.
            (What::Send(op), Some(Poster::Send(qp))) => unsafe {
                qp.post_send(&[SendWr { op, ..wr }])
            },
            // SAFETY: S1: as above.
            (What::Receive, Some(Poster::Receive(qp))) => unsafe {
                qp.post_recv(&[RecvWr { wr_id: wr.wr_id, sges }])
            },
            // SAFETY: S1: as above; the shared receive queue is destroyed first.
            (What::Receive, Some(Poster::Shared(srq))) => unsafe {
                srq.post_recv(&[RecvWr { wr_id: wr.wr_id, sges }])
            },
            _ => Err(WRONG_QUEUE),
        };
        result.map_err(|refused| refused.error)?;
        self.posted += 1;
        if is_traced() {
            trace_posted(slot, wr.wr_id, what);
        }
        Ok(())
    }

    /// Why the device refused a work request: `error`, or the state of the queue pair, if it takes no such work in that state. A full
    /// queue and a device that is gone have errors of their own.
    #[cold]
    pub(super) fn refusal(&self, error: VerbError) -> OpErrorKind {
        if error.errno != VerbError::EINVAL {
            return OpErrorKind::Post(error);
        }
        let (qp, takes): (_, fn(QpState) -> bool) = match &self.poster {
            Some(Poster::Send(qp)) => (qp, |state| matches!(state, QpState::Rts | QpState::Sqd)),
            Some(Poster::Receive(qp)) => {
                (qp, |state| !matches!(state, QpState::Reset | QpState::Err))
            }
            Some(Poster::Shared(_)) | None => return OpErrorKind::Post(error),
        };
        match qp.query() {
            Ok((state, _)) if !takes(state) => OpErrorKind::State { qpn: qp.qpn(), state, error },
            _ => OpErrorKind::Post(error),
        }
    }
}

/// True if somebody wants to see each work request.
#[inline(always)]
pub(super) fn is_traced() -> bool {
    tracing::Level::TRACE <= tracing::level_filters::LevelFilter::current()
}

#[cold]
pub(super) fn trace_posted<Q>(slot: &Slot<Q>, id: WrId, what: What) {
    tracing::trace!(wr_id = %id, ?what, "posted");
    slot.trace();
}
