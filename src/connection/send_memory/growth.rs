use rdma_message_proto::frame::Kind;
use rdma_message_proto::sending::Blocked;
use rdma_message_proto::window::FIRST_SIZE;
use rdma_provider::later;

use crate::connection::error::MessageError;
use crate::connection::state::ConnectionState;
use crate::connection::waiting::Attempt;
use crate::memory::{BufMut, Pool, PoolError};

impl ConnectionState {
    #[inline]
    pub(in crate::connection) fn take_send_buffer(
        &mut self,
        len: usize,
        frames: usize,
    ) -> Attempt<BufMut> {
        match self.memory.send.take(len) {
            Ok(buffer) => Ok(Ok(buffer)),
            Err(PoolError::Empty) => self.grow_send_memory(len, frames),
            Err(PoolError::Limit(limit)) => Err(MessageError::TooLong(limit)),
            Err(PoolError::Register(error)) => Err(MessageError::Register(error)),
        }
    }

    /// Returns a buffer for bytes that wait for a credit.
    pub(in crate::connection) fn held_buffer(&mut self) -> Attempt<BufMut> {
        if !self.memory.send.has_free(1) {
            self.reap();
        }
        if let Err(block) = self.check_held_buffer() {
            return Ok(Err(block));
        }
        if let Some(buffer) = self.memory.send.take_whole() {
            return Ok(Ok(buffer));
        }
        let frame = self.protocol.framing().frame();
        let len = if self.memory.send.memory() > 0 { frame.max(self.limits.held) } else { frame };
        self.drop_shorter_send_memory(len);
        self.grow_send_memory(len, 1)
    }

    pub(in crate::connection) fn check_held_buffer(&self) -> Result<(), Blocked> {
        // Short first receives of the peer do not limit how much is held: once the short buffers
        // are used up, longer ones replace them, of which half are left for frames.
        let (frame, held) = (self.protocol.framing().frame(), self.limits.held);
        let has_credit = self.protocol.flow.may_send(Kind::Data);
        // With a credit, the peer may only not have announced that it has read everything.
        if !has_credit && self.protocol.has_unread(self.memory.send.most() * frame.max(held)) {
            return Err(Blocked::Credits(1));
        }
        let frames = if held > frame { self.memory.send.most() / 2 + 1 } else { 1 };
        let has = self.memory.send.is_shorter_than(held) || self.memory.send.has(frames);
        if has { Ok(()) } else { Err(Blocked::Buffers(frames)) }
    }

    #[cold]
    fn grow_send_memory(&mut self, len: usize, frames: usize) -> Attempt<BufMut> {
        let (pd, frame) = (self.io.qp.protection_domain(), self.protocol.framing().frame());
        let size = frame.max(len);
        let grown = self.memory.send.grow(pd, size, &mut self.memory.budget);
        match grown {
            Ok(true) => {
                // The driver deregisters them when the connection is idle.
                self.io.wake_driver();
                self.take_send_buffer(len, frames)
            }
            Ok(false) => Ok(Err(Blocked::Buffers(frames))),
            Err(error) => {
                self.note_failed_growth(&error);
                let total = self.memory.send.pool.as_ref().map_or(0, Pool::total);
                // The longest payload of a frame in the first buffers.
                let first = FIRST_SIZE as usize - self.io.trailer;
                if total == 0 && size <= first {
                    return Err(MessageError::Register(error));
                }
                // The next attempt sends shorter frames, or offers a message of too many.
                if total > 0 {
                    self.memory.send.most = total;
                }
                self.limits.held = frame.min(first);
                let receive = (frame + self.io.trailer) as u32;
                self.limit_frames(Some(if total > 0 { receive } else { FIRST_SIZE }));
                Ok(Err(Blocked::Buffers(frames.min(total.max(1)))))
            }
        }
    }

    pub(in crate::connection) fn shrink_send_memory(&mut self) {
        let is_unused = |pool: &Pool| pool.available() == pool.total();
        let unused = self.memory.send.take_if(&mut self.memory.budget, is_unused);
        unused.into_iter().for_each(later::dispose);
    }

    /// After a failed registration, permits as many and as long buffers as configuration and peer
    /// do.
    pub(in crate::connection) fn renew_send_memory(&mut self) {
        self.memory.send.renew();
        self.limits.held = self.protocol.framing().longest();
        self.limit_frames(None);
    }

    /// Without `size`, the peer's last announcement applies.
    pub(in crate::connection) fn limit_frames(&mut self, size: Option<u32>) {
        self.protocol.limit_frames(size, self.memory.send.most());
        let frame = self.protocol.framing().frame();
        if frame > FIRST_SIZE as usize {
            self.limits.held = frame;
        }
        // Longer ones stay until the side is idle: the peer may alternate.
        self.drop_shorter_send_memory(frame);
    }

    fn drop_shorter_send_memory(&mut self, len: usize) {
        let len = len + self.io.trailer;
        let other =
            self.memory.send.take_if(&mut self.memory.budget, |pool| pool.buffer_size() < len);
        other.into_iter().for_each(later::dispose);
    }
}
