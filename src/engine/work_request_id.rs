//! The 64-bit `wr_id` (`ibv_post_send(3)`) by which a completion finds the slot of its work
//! request.
//!
//! ```text
//!   63            44 43               20 19             0
//!  ┌────────────────┬───────────────────┬────────────────┐
//!  │  generation    │  work queue       │  slot          │
//!  └────────────────┴───────────────────┴────────────────┘
//! ```
//!
//! The work queue is an index into the table of its completion queue, the slot an index into the
//! table of the work queue. The generation changes with each use of a slot, which exposes stale
//! completions.

use crate::types::WrId;

pub(super) const INDEX_BITS: u32 = 20;
pub(super) const GENERATION_BITS: u32 = 20;
pub(super) const GENERATION: u64 = 1 << LOW_BITS;
const LOW_BITS: u32 = u64::BITS - GENERATION_BITS;
const OWNER_BITS: u32 = LOW_BITS - INDEX_BITS;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Owner(pub(super) u32);

impl Owner {
    pub(super) const MAX: u32 = 1 << OWNER_BITS;

    #[inline]
    pub(super) fn of(id: WrId) -> Self {
        Self(((id.0 % (1 << LOW_BITS)) >> INDEX_BITS) as u32)
    }

    pub(super) fn first_id(self, index: u32) -> WrId {
        WrId(u64::from(self.0) << INDEX_BITS | u64::from(index))
    }
}

#[inline]
pub(super) fn index_of(id: WrId) -> u32 {
    id.0 as u32 & ((1 << INDEX_BITS) - 1)
}
