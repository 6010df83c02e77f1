use smallvec::SmallVec;

use super::work_request::{OwnedReceiver, WorkKind};
use crate::memory::SgeList;
use crate::types::{SendFlags, WindowBind, WrId};

pub(super) struct Queued {
    pub(super) id: WrId,
    pub(super) kind: WorkKind,
    pub(super) flags: SendFlags,
    pub(super) sges: SgeList,
    pub(super) inline: Option<SmallVec<[u8; 64]>>,
    pub(super) window: Option<Box<WindowBind>>,
    pub(super) to: Option<OwnedReceiver>,
    /// True for a part of a batch: if it is refused, so are the following parts.
    pub(super) batch: bool,
}
