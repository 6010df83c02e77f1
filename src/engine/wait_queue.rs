//! Work that waits for room in the queue of the device, in line.

use smallvec::SmallVec;

use super::slot::Outcome;
use super::wake_list::WakeList;
use super::work_queue::{Posting, WorkQueue, index_of, refusal};
use super::work_request::{Kept, What, data_of};
use crate::error::OpErrorKind;
use crate::memory::SgeList;
use crate::sync::{MutexGuard, lock};
use crate::types::{SendFlags, SendOp, SendWr, WindowBind, WrId};

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

impl WorkQueue {
    /// Joins the line.
    #[cold]
    pub(super) fn line_up(&self, posting: &mut Posting, queued: Queued) {
        posting.queued.push_back(queued);
        posting.until = posting.posted;
        posting.waited += 1;
        self.cq().now_waiting();
    }

    /// Tells the drainer that somebody waits for room, which need not be somebody who is polled; if room came up
    /// meanwhile, uses it.
    pub(super) fn announce(&self, mut posting: MutexGuard<'_, Posting>) {
        self.room.crowd();
        let mut woken = WakeList::new();
        self.post_queued(&mut posting, &mut woken);
        let waits = !posting.queued.is_empty();
        drop(posting);
        woken.finish();
        if waits {
            self.cq().attend();
        }
    }

    /// Posts those in line as far as there is room.
    fn post_queued(&self, posting: &mut Posting, woken: &mut WakeList) {
        while posting.poster.is_some()
            && self.room.left(posting.posted as u32) > 0
            && let Some(next) = posting.queued.pop_front()
        {
            self.cq().no_longer_waiting();
            let data = data_of(&next.sges, next.inline.as_deref(), next.window.as_deref());
            let target = next.to.as_ref().map(Kept::target);
            let wr = SendWr { wr_id: next.id, op: SendOp::Send, flags: next.flags, data, target };
            if let Err(error) = self.post_one(posting, next.what, wr, &next.sges) {
                if next.batch {
                    self.refuse_in_line(posting, wr, error, woken);
                } else {
                    let kind = refusal(posting, error);
                    self.settle(next.id, Outcome::Err(kind), woken);
                }
            }
        }
        self.tell_idle(posting, woken);
        if posting.queued.is_empty() && posting.watch.idle.is_none() {
            self.room.clear();
        }
    }

    /// Posts for those who wait for room.
    #[cold]
    pub(super) fn let_in(&self, woken: &mut WakeList) {
        self.post_queued(&mut lock(&self.posting), woken);
    }

    /// Ends what is in line, which no device was given: for a queue that is [closed](Self::close) and not destroyed. But not the
    /// rest of a batch of which a part is posted, see there.
    pub(super) fn end_line(&self, kind: OpErrorKind) {
        let mut woken = WakeList::new();
        let mut posting = lock(&self.posting);
        // The slot of the batch that is in line with its first.
        let mut whole = None;
        for queued in std::mem::take(&mut posting.queued) {
            let slot = self.slots.slot(index_of(queued.id));
            let place = slot.part(queued.id).unwrap_or(0);
            if place > 0 && whole != Some(slot.id()) {
                posting.queued.push_back(queued);
                continue;
            }
            whole = Some(slot.id());
            self.cq().no_longer_waiting();
            if queued.id == slot.id() {
                self.settle(queued.id, Outcome::Err(kind), &mut woken);
            } else {
                self.fail_part(slot, place, kind);
            }
        }
        drop(posting);
        woken.finish();
    }

    /// True if this work request waits for room.
    pub(super) fn is_in_line(&self, id: WrId) -> bool {
        lock(&self.posting).queued.iter().any(|queued| queued.id == id)
    }
}
