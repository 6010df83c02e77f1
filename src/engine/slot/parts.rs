//! The work requests of a batch, which are in one slot.
//!
//! Each has a number of its own, those of lives that follow each other: the last has the slot's, those before it the ones of the
//! lives before. So it is known which of them failed, though only the last ends the slot.

use super::{DETACHED, FAILED, PHASE, SUBMITTED, Slot, WAITING};
use crate::engine::work_request_id::{GENERATION, GENERATION_BITS};
use crate::error::OpErrorKind;
use crate::sync::Ordering;
use crate::types::WrId;

/// Work requests of a batch, which take a number of a life each: half of those, so that two lives are still told apart.
pub(in crate::engine) const MAX_PARTS: u32 = 1 << (GENERATION_BITS - 1);

/// Parts of a batch that failed, each once, in any order.
pub(in crate::engine) type FailedParts = Vec<(u32, OpErrorKind)>;

impl<Q> Slot<Q> {
    /// As [`place`](Self::place), if it may be a batch of which this is one work request, and the others are posted before and
    /// behind it.
    pub(in crate::engine) fn place_part(&self, id: WrId, position: u32) {
        let part = self.part(id).unwrap_or(0);
        let start = position.wrapping_sub(part);
        self.start.store(start, Ordering::Relaxed);
        self.place(start.wrapping_add(self.parts() - 1));
    }

    /// Number of work request `part`.
    pub(in crate::engine) fn id_of(&self, part: u32) -> WrId {
        WrId(self.id().0.wrapping_sub(u64::from(self.parts() - 1 - part) * GENERATION))
    }

    /// Numbers of its work requests, in order.
    #[inline]
    pub(in crate::engine) fn ids(&self) -> PartIds {
        PartIds(self.id_of(0))
    }

    /// Notes that parts of the batch have failed.
    pub(in crate::engine) fn fail_parts(&self) {
        self.state.fetch_or(FAILED, Ordering::Relaxed);
    }

    /// Position of the first work request.
    pub(in crate::engine) fn start(&self) -> u32 {
        self.start.load(Ordering::Relaxed)
    }

    /// Work requests in it.
    #[inline]
    pub(in crate::engine) fn parts(&self) -> u32 {
        self.parts.load(Ordering::Acquire)
    }

    /// Which of its work requests `id` is, if one of the life it is in.
    pub(in crate::engine) fn part(&self, id: WrId) -> Option<u32> {
        // Before the number of the last.
        let parts = self.parts();
        let behind = self.id().0.wrapping_sub(id.0);
        let part = u64::from(parts - 1).checked_sub(behind / GENERATION)?;
        behind.is_multiple_of(GENERATION).then_some(part as u32)
    }

    /// As [`part`](Self::part), if that life is not over.
    pub(in crate::engine) fn current_part(&self, id: WrId) -> Option<u32> {
        // As `phase_in`.
        let state = self.state.load(Ordering::Acquire);
        matches!(state & PHASE, SUBMITTED | WAITING | DETACHED).then(|| self.part(id))?
    }

    /// Leaves one work request in the slot of a batch that is over; true if its queue has noted parts that failed.
    #[inline]
    pub(in crate::engine) fn end_parts(&self) -> bool {
        if self.parts() == 1 {
            return false;
        }
        self.parts.store(1, Ordering::Release);
        self.state.load(Ordering::Relaxed) & FAILED != 0
    }
}

/// Numbers of the work requests of a batch.
pub(in crate::engine) struct PartIds(WrId);

impl PartIds {
    #[inline(always)]
    pub(in crate::engine) fn next(&mut self) -> WrId {
        let id = self.0;
        self.0 = WrId(id.0.wrapping_add(GENERATION));
        id
    }
}
