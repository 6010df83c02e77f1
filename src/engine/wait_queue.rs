//! Work that waits for room in the queue of the device, in line.

use smallvec::SmallVec;

use super::work_request::{Kept, What};
use crate::memory::SgeList;
use crate::types::{SendFlags, WindowBind, WrId};

/// A work request that waits for room.
pub(super) struct Queued {
    pub(super) id: WrId,
    pub(super) what: What,
    pub(super) flags: SendFlags,
    pub(super) sges: SgeList,
    pub(super) inline: Option<SmallVec<[u8; 64]>>,
    pub(super) window: Option<Box<WindowBind>>,
    pub(super) to: Option<Kept>,
    /// Part of a batch: if it is refused, so is the rest.
    pub(super) batch: bool,
}
