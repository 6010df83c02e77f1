//! Registered buffers for copied frames. Their number follows use.

use rdma_message_proto::window::FIRST_SIZE;

use super::budget::Share;
use super::config::ConnectionConfig;
use super::core::Core;
use super::error::MessageError;
use super::outbound::Attempt;
use super::waiting::Block;
use crate::error::SetupError;
use crate::memory::{BufMut, Pool, PoolError};
use crate::verbs::ProtectionDomain;

/// The buffers registered first.
const FIRST: usize = 4;

#[derive(Debug)]
pub(super) struct SendMemory {
    /// `None` until the first copied frame, and when idle.
    pool: Option<Pool>,
    /// The maximum of buffers; fewer after a failed registration.
    most: usize,
    /// The configured maximum.
    configured: usize,
    is_elastic: bool,
    /// Bytes taken from the budget.
    charged: u64,
}

impl SendMemory {
    /// Creates it with all buffers if their number is fixed, else without any.
    pub(super) fn new(pool: Option<Pool>, config: &ConnectionConfig) -> Self {
        let most = config.send_buffers as usize;
        Self { pool, most, configured: most, is_elastic: config.is_elastic(), charged: 0 }
    }

    /// Returns the maximum of buffers.
    pub(super) fn most(&self) -> usize {
        self.most
    }

    pub(super) fn memory(&self) -> u64 {
        self.pool.as_ref().map_or(0, Pool::bytes)
    }

    /// Returns true if `frames` buffers are free.
    pub(super) fn has_free(&self, frames: usize) -> bool {
        self.pool.as_ref().is_some_and(|pool| pool.available() >= frames)
    }

    /// Returns true if `frames` buffers are free or can be registered.
    pub(super) fn has(&self, frames: usize) -> bool {
        let (free, total) =
            self.pool.as_ref().map_or((0, 0), |pool| (pool.available(), pool.total()));
        free + self.most.saturating_sub(total) >= frames
    }

    /// Returns true if buffers are registered that are not needed when idle.
    pub(super) fn is_grown(&self) -> bool {
        self.is_elastic && self.pool.is_some()
    }

    /// Returns a free buffer of whichever length.
    fn take_whole(&self) -> Option<BufMut> {
        self.pool.as_ref().and_then(|pool| pool.try_alloc(pool.buffer_size()).ok())
    }

    #[inline]
    fn take(&self, len: usize) -> Result<BufMut, PoolError> {
        self.pool.as_ref().map_or(Err(PoolError::Empty), |pool| pool.try_alloc(len))
    }

    /// Registers more buffers of `size` bytes. Returns false if there are as many as permitted.
    #[cold]
    fn grow(
        &mut self,
        pd: &ProtectionDomain,
        size: usize,
        share: &mut Share,
    ) -> Result<bool, SetupError> {
        let (total, size) =
            self.pool.as_ref().map_or((0, size), |pool| (pool.total(), pool.buffer_size()));
        let more = total.max(FIRST).min(self.most.saturating_sub(total));
        if more == 0 {
            return Ok(false);
        }
        // The first short ones are free of charge, so that a connection can always send.
        let is_least = total == 0 && size <= FIRST_SIZE as usize;
        let bytes = if is_least { 0 } else { (more * size) as u64 };
        if !is_least {
            share.grow(bytes)?;
        }
        let grown = match &self.pool {
            Some(pool) => pool.grow_by(more as u32),
            None => Pool::new(pd, size, more).map(|pool| self.pool = Some(pool)),
        };
        grown.inspect_err(|_| share.shrink(bytes))?;
        self.charged += bytes;
        Ok(true)
    }

    /// Permits the configured number of buffers again after a failed registration.
    fn renew(&mut self) {
        self.most = self.configured;
    }

    /// Returns the buffers if `unused` permits it.
    fn take_if(&mut self, share: &mut Share, unused: impl Fn(&Pool) -> bool) -> Option<Pool> {
        let pool = self.pool.take_if(|pool| self.is_elastic && unused(pool))?;
        share.shrink(std::mem::take(&mut self.charged));
        Some(pool)
    }
}

impl Core {
    /// Returns a registered buffer for one of `frames` frames.
    #[inline]
    pub(super) fn send_buffer(&mut self, len: usize, frames: usize) -> Attempt<BufMut> {
        match self.memory.send.take(len) {
            Ok(buffer) => Ok(Ok(buffer)),
            Err(PoolError::Empty) => self.grow_send_memory(len, frames),
            Err(PoolError::TooLong(limit) | PoolError::TooMany(limit)) => {
                Err(MessageError::TooLong(limit))
            }
            Err(PoolError::Register(error)) => Err(MessageError::Register(error)),
        }
    }

    /// Returns a registered buffer for bytes that wait for a credit. Short first receives of the
    /// peer do not limit how much is held: once the short buffers are used up, longer ones replace
    /// them, of which half are left for frames.
    pub(super) fn held_buffer(&mut self) -> Attempt<BufMut> {
        if !self.memory.send.has_free(1) {
            self.reap();
        }
        let (frame, held) = (self.protocol.framing().frame(), self.limits.held);
        if let Err(block) = self.check_held_buffer() {
            return Ok(Err(block));
        }
        if let Some(buffer) = self.memory.send.take_whole() {
            return Ok(Ok(buffer));
        }
        let len = if self.memory.send.memory() > 0 { frame.max(held) } else { frame };
        self.drop_shorter_send_memory(len);
        self.grow_send_memory(len, 1)
    }

    /// Returns an error unless [`held_buffer`](Self::held_buffer) may take a buffer.
    pub(super) fn check_held_buffer(&self) -> Result<(), Block> {
        let (frame, held) = (self.protocol.framing().frame(), self.limits.held);
        let frames = if held > frame { self.memory.send.most() / 2 + 1 } else { 1 };
        if self.memory.send.has(frames) { Ok(()) } else { Err(Block::Buffers { frames }) }
    }

    #[cold]
    fn grow_send_memory(&mut self, len: usize, frames: usize) -> Attempt<BufMut> {
        let (pd, frame) = (self.io.qp.protection_domain(), self.protocol.framing().frame());
        let size = frame.max(len);
        let grown = self.memory.send.grow(pd, size, &mut self.memory.share);
        match grown {
            Ok(true) => {
                // The driver deregisters them when the connection is idle.
                self.after.wake_driver();
                self.send_buffer(len, frames)
            }
            Ok(false) => Ok(Err(Block::Buffers { frames })),
            Err(error) => {
                self.note_failed_growth(&error);
                let total = self.memory.send.pool.as_ref().map_or(0, Pool::total);
                if total == 0 && size <= FIRST_SIZE as usize {
                    return Err(MessageError::Register(error));
                }
                // The next attempt sends shorter frames, or offers a message of too many.
                if total > 0 {
                    self.memory.send.most = total;
                }
                self.limits.held = frame.min(FIRST_SIZE as usize);
                self.limit_frames(Some(if total > 0 { frame as u32 } else { FIRST_SIZE }));
                Ok(Err(Block::Buffers { frames: frames.min(total.max(1)) }))
            }
        }
    }

    /// Deregisters buffers that an idle side does not need.
    pub(super) fn shrink_send_memory(&mut self) {
        let is_unused = |pool: &Pool| pool.available() == pool.total();
        let unused = self.memory.send.take_if(&mut self.memory.share, is_unused);
        self.after.drop_pool(unused);
    }

    /// Permits as many and as long buffers as the configuration and the peer do, after a failed
    /// registration.
    pub(super) fn renew_send_memory(&mut self) {
        self.memory.send.renew();
        self.limits.held = self.protocol.framing().longest();
        self.limit_frames(None);
    }

    /// Limits frames to receives of `size` bytes, or to those that the peer has announced last.
    pub(super) fn limit_frames(&mut self, size: Option<u32>) {
        self.protocol.limit_frames(size, self.memory.send.most());
        let frame = self.protocol.framing().frame();
        if frame > FIRST_SIZE as usize {
            self.limits.held = frame;
        }
        // Longer ones stay until the side is idle: the peer may alternate.
        self.drop_shorter_send_memory(frame);
    }

    fn drop_shorter_send_memory(&mut self, len: usize) {
        let other =
            self.memory.send.take_if(&mut self.memory.share, |pool| pool.buffer_size() < len);
        self.after.drop_pool(other);
    }
}
