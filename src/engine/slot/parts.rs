//! The work requests of a batch, which share one slot. The last part has the id of the slot, the
//! parts before it have the preceding generations. So a failed completion identifies its part,
//! although only the last part completes the slot.

use super::{DETACHED, FAILED, PHASE, SUBMITTED, Slot, WAITING};
use crate::engine::work_request_id::{GENERATION, GENERATION_BITS};
use crate::error::OpErrorKind;
use crate::sync::Ordering;
use crate::types::WrId;

/// Each part takes one generation; at most half of all, so that two successive uses of a slot stay
/// distinguishable.
pub(in crate::engine) const MAX_PARTS: u32 = u16::MAX as u32;
const _: () = assert!(MAX_PARTS < 1 << (GENERATION_BITS - 1));

pub(in crate::engine) type FailedParts = Vec<(u32, OpErrorKind)>;

impl<Q> Slot<Q> {
    /// The other parts are posted directly before and after the part `id`.
    pub(in crate::engine) fn set_part_position(&self, id: WrId, position: u32) {
        let part = self.part(id).unwrap_or(0);
        self.set_start(position.wrapping_sub(part));
    }

    pub(in crate::engine) fn set_start(&self, start: u32) {
        self.start.store(start, Ordering::Relaxed);
        self.set_position(start.wrapping_add(self.parts() - 1));
    }

    pub(in crate::engine) fn id_of(&self, part: u32) -> WrId {
        WrId(self.id().0.wrapping_sub(u64::from(self.parts() - 1 - part) * GENERATION))
    }

    #[inline]
    pub(in crate::engine) fn ids(&self) -> PartIds {
        PartIds(self.id_of(0))
    }

    pub(in crate::engine) fn fail_parts(&self) {
        self.state.fetch_or(FAILED, Ordering::Relaxed);
    }

    pub(in crate::engine) fn start(&self) -> u32 {
        self.start.load(Ordering::Relaxed)
    }

    #[inline]
    pub(in crate::engine) fn parts(&self) -> u32 {
        self.parts.load(Ordering::Acquire).into()
    }

    pub(in crate::engine) fn part(&self, id: WrId) -> Option<u32> {
        // Loaded before the id of the last part.
        let parts = self.parts();
        let behind = self.id().0.wrapping_sub(id.0);
        let part = u64::from(parts - 1).checked_sub(behind / GENERATION)?;
        behind.is_multiple_of(GENERATION).then_some(part as u32)
    }

    pub(in crate::engine) fn current_part(&self, id: WrId) -> Option<u32> {
        // Same order of loads as in `phase_in`.
        let state = self.state.load(Ordering::Acquire);
        matches!(state & PHASE, SUBMITTED | WAITING | DETACHED).then(|| self.part(id))?
    }

    /// Returns true if parts have failed.
    #[inline]
    pub(in crate::engine) fn end_parts(&self) -> bool {
        if self.parts() == 1 {
            return false;
        }
        self.parts.store(1, Ordering::Release);
        self.state.load(Ordering::Relaxed) & FAILED != 0
    }
}

pub(in crate::engine) struct PartIds(WrId);

impl PartIds {
    #[inline]
    pub(in crate::engine) fn next(&mut self) -> WrId {
        let id = self.0;
        self.0 = WrId(id.0.wrapping_add(GENERATION));
        id
    }
}
