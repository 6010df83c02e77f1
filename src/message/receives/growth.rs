//! Growth and shrinking of the posted receives.

use rdma_message_proto::flow::RESERVE;
use rdma_message_proto::frame::Kind;
use rdma_message_proto::window::{FIRST_SIZE, Resize, is_reached};

use super::PAUSE;
use crate::error::SetupError;
use crate::memory::{BufMut, Pool};
use crate::message::after_unlock::Dropped;
use crate::message::core::Core;

impl Core {
    /// Posts a receive with `buffer`, or with one of the size announced last.
    pub(in crate::message) fn post_receive(&mut self, mut buffer: BufMut) {
        if let Some(used) = self.receives.replace_short(&mut buffer) {
            self.drop_buffer(used);
        }
        let receive = self.io.qp.recv(buffer);
        self.note_refusal(receive.refusal());
        self.receives.posted.push_back(receive);
    }

    /// Records a message of `frames` frames, the last one of `len` bytes, or the offer of one of
    /// `len` bytes.
    #[inline]
    pub(in crate::message) fn note_demand(&mut self, kind: Kind, len: u64, frames: u32) {
        if self.receives.is_full {
            return;
        }
        let more = self.protocol.flow.is_pressed();
        if more || self.receives.is_short_for(kind, self.protocol.content(), len, frames) {
            self.receives.demand(more);
        }
    }

    /// Registers and announces more or longer receives if they are of use.
    pub(in crate::message) fn grow_receives(&mut self) {
        let is_wanted = self.receives.wanted && self.protocol.phase().takes_messages();
        if !is_wanted || self.receives.leftovers() > 0 || !self.may_resize(self.receives.is_grown())
        {
            return;
        }
        self.receives.wanted = false;
        let more = std::mem::take(&mut self.receives.wants_more);
        let (most, is_first) = (self.receives.most, !self.receives.is_grown());
        // At first, receives of the same number suffice for some long messages. They become long
        // when frames have used the short ones.
        let factor = if is_first && !more { 1 } else { 2 };
        let messages = (self.receives.number - RESERVE).saturating_mul(factor);
        let receives = messages.saturating_add(RESERVE).min(most.receives);
        if let Err(error) = self.receives.register(receives, &mut self.memory.share) {
            self.note_failed_growth(&error);
            self.receives.pause = PAUSE;
            return;
        }
        let (from, before) = (self.posted_receives(), self.receives.number);
        self.receives.set_number(receives);
        self.post_more(receives - before);
        if is_first {
            self.receives.changed_at = Some(from);
        }
        let size = self.receives.size as u32;
        self.protocol.flow.resize(Resize { receives, skip: 0, from, size });
        self.after.wake_driver();
    }

    /// Returns to the first receives if all messages were received.
    pub(in crate::message) fn shrink_receives(&mut self) {
        let is_idle = self.protocol.flow.is_idle()
            && self.inbox.messages.is_empty()
            && self.protocol.incomplete_frames() == 0;
        if !self.receives.may_shrink() || !is_idle || !self.may_resize(true) {
            return;
        }
        let leftovers = self.receives.leftovers();
        if leftovers > 0 {
            return self.replace(leftovers, self.posted_receives());
        }
        if !self.receives.is_grown() {
            return;
        }
        if !self.may_resize(false) {
            return self.skip_first_receives();
        }
        let first = &self.receives.first;
        if first.available() < first.total() {
            return;
        }
        let from = self.posted_receives();
        let (skip, number) = (self.receives.number, self.receives.first_number);
        (self.receives.replacing, self.receives.wanted) = (false, false);
        // The first growth may be smaller than the one that failed.
        self.receives.pause = 0;
        let unused = self.receives.grown.take();
        self.receives.leaving += unused.as_ref().map_or(0, Pool::bytes);
        self.receives.extra = 0;
        self.after.drop_pool(unused);
        self.receives.set_number(number);
        self.post_more(number);
        self.receives.changed_at = Some(from);
        let receives = skip + number;
        self.protocol.flow.resize(Resize { receives, skip, from, size: FIRST_SIZE });
    }

    /// Replaces the first receives of a side that has grown, and has not used them since.
    fn skip_first_receives(&mut self) {
        let (Some(from), Some(pool)) = (self.receives.changed_at, &self.receives.grown) else {
            return;
        };
        let skip = from.wrapping_sub(self.protocol.flow.used_receives());
        let bytes = u64::from(skip) * self.receives.capacity as u64;
        // Frames may use first receives before the peer skips them, and then need their buffers.
        let extended = self.memory.share.grow_for_less(bytes).map_err(SetupError::from);
        match extended
            .and_then(|()| pool.grow_by(skip).inspect_err(|_| self.memory.share.shrink(bytes)))
        {
            Ok(()) => {
                self.receives.extra += skip;
                self.replace(skip, from);
            }
            Err(error) => self.note_failed_growth(&error),
        }
    }

    /// Posts `number` receives of the current size.
    pub(in crate::message) fn post_more(&mut self, number: u32) {
        for _ in 0..number {
            match self.receives.pool().try_alloc(self.receives.size) {
                Ok(buffer) => self.post_receive(buffer),
                Err(error) => unreachable!("the pool has a buffer for each receive: {error}"),
            }
        }
    }

    /// Forgets a change of size that the peer has reached, and returns the bytes of buffers that it
    /// has skipped to the budget.
    pub(in crate::message) fn settle_receives(&mut self) {
        let used = self.protocol.flow.used_receives();
        self.receives.changed_at.take_if(|from| is_reached(used, *from));
        if self.protocol.flow.may_resize() && self.receives.leftovers() == 0 {
            self.memory.share.shrink(std::mem::take(&mut self.receives.leaving));
        }
    }

    /// Posts `skip` receives of the current size, and has the peer skip as many, the oldest. `from`
    /// is a receive of the current size.
    fn replace(&mut self, skip: u32, from: u32) {
        self.post_more(skip);
        let (receives, size) = (self.receives.number + skip, self.receives.size as u32);
        self.protocol.flow.resize(Resize { receives, skip, from, size });
    }

    /// Returns true if the receives may change. The peer must have reached the last change of their
    /// size, unless that stays the `same`.
    fn may_resize(&self, same: bool) -> bool {
        let used = self.protocol.flow.used_receives();
        let is_passed = self.receives.changed_at.is_none_or(|from| is_reached(used, from));
        self.protocol.may_resize() && (same || is_passed)
    }

    /// Returns the number of receives posted since the start.
    fn posted_receives(&self) -> u32 {
        self.protocol.flow.used_receives().wrapping_add(self.receives.posted.len() as u32)
    }

    /// Drops a buffer. A long one may be the last of its memory; first ones are needed again.
    fn drop_buffer(&mut self, buffer: BufMut) {
        if buffer.capacity() == FIRST_SIZE as usize {
            drop(buffer);
        } else {
            self.after.drop(Dropped::Buffer(buffer));
        }
    }

    /// Handles a receive that the peer has skipped.
    pub(in crate::message) fn on_skip(&mut self, buffer: BufMut) {
        self.drop_buffer(buffer);
        if self.protocol.flow.may_resize() {
            self.settle_receives();
            if self.receives.leftovers() > 0 {
                self.shrink_receives();
            }
            // It tries again later.
            self.after.wake_driver();
        }
    }
}
