//! The 64 bits by which a completion finds the slot of its work request, `wr_id` of `ibv_post_send(3)`.
//!
//! ```text
//!   63            44 43               20 19             0
//!  ┌────────────────┬───────────────────┬────────────────┐
//!  │  generation    │  work queue       │  slot          │
//!  └────────────────┴───────────────────┴────────────────┘
//! ```
//!
//! The work queue is a number in the table of its completion queue, the slot one in the table of that work queue. The
//! generation changes with each use of the slot, so that a late completion of an earlier use is told apart.

use crate::types::WrId;

/// Bits that number the slots of a work queue.
pub(super) const INDEX_BITS: u32 = 20;
/// Bits that tell the uses of a slot apart.
pub(super) const GENERATION_BITS: u32 = 20;
/// One generation more.
pub(super) const GENERATION: u64 = 1 << PLACE_BITS;
/// Bits below the generation.
const PLACE_BITS: u32 = u64::BITS - GENERATION_BITS;
const OWNER_BITS: u32 = PLACE_BITS - INDEX_BITS;

/// Which work queue of its completion queue a work request belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Owner(pub(super) u32);

impl Owner {
    /// Most work queues of one completion queue.
    pub(super) const MAX: u32 = 1 << OWNER_BITS;

    #[inline]
    pub(super) fn of(id: WrId) -> Self {
        Self(((id.0 % (1 << PLACE_BITS)) >> INDEX_BITS) as u32)
    }

    /// The first number of a work request in slot `index` of this work queue.
    pub(super) fn first_id(self, index: u32) -> WrId {
        WrId(u64::from(self.0) << INDEX_BITS | u64::from(index))
    }
}

/// Slot of a work request.
#[inline]
pub(super) fn index_of(id: WrId) -> u32 {
    id.0 as u32 & ((1 << INDEX_BITS) - 1)
}
