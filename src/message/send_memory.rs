//! Registered buffers for copied frames. Their number follows use.

use super::budget::Share;
use super::config::ConnectionConfig;
use super::core::Core;
use super::error::MessageError;
use super::outbound::{Attempt, Block};
use super::window::FIRST_SIZE;
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
}

impl SendMemory {
    /// Creates it with all buffers if their number is fixed, else without any.
    pub(super) fn new(pool: Option<Pool>, config: &ConnectionConfig) -> Self {
        let most = config.send_buffers as usize;
        Self { pool, most, configured: most, is_elastic: config.is_elastic() }
    }

    /// Returns the maximum of buffers.
    pub(super) fn most(&self) -> usize {
        self.most
    }

    pub(super) fn memory(&self) -> u64 {
        self.pool.as_ref().map_or(0, Pool::bytes)
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
        let total = self.pool.as_ref().map_or(0, Pool::total);
        let more = total.max(FIRST).min(self.most.saturating_sub(total));
        if more == 0 {
            return Ok(false);
        }
        let bytes = (more * size) as u64;
        let is_least = total == 0 && size <= FIRST_SIZE as usize;
        if !is_least {
            share.grow(bytes)?;
        }
        let grown = match &self.pool {
            Some(pool) => pool.grow_by(more as u32),
            None => Pool::new(pd, size, more).map(|pool| self.pool = Some(pool)),
        };
        grown.inspect_err(|_| share.shrink(if is_least { 0 } else { bytes }))?;
        Ok(true)
    }

    /// Returns the buffers if they have another size than frames need now.
    pub(super) fn take_unless(&mut self, size: usize) -> Option<Pool> {
        self.pool.take_if(|pool| self.is_elastic && pool.buffer_size() != size)
    }

    /// Returns the buffers if none is in use.
    pub(super) fn take_idle(&mut self) -> Option<Pool> {
        self.most = self.configured;
        self.pool.take_if(|pool| self.is_elastic && pool.available() == pool.total())
    }
}

impl Core {
    /// Returns a registered buffer for one of `frames` frames.
    #[inline]
    pub(super) fn send_buffer(&mut self, len: usize, frames: usize) -> Attempt<BufMut> {
        match self.send_memory.take(len) {
            Ok(buffer) => Ok(Ok(buffer)),
            Err(PoolError::Empty) => self.grow_send_memory(len, frames),
            Err(PoolError::TooLong(limit) | PoolError::TooMany(limit)) => {
                Err(MessageError::TooLong(limit))
            }
            Err(PoolError::Register(error)) => Err(MessageError::Register(error)),
        }
    }

    #[cold]
    fn grow_send_memory(&mut self, len: usize, frames: usize) -> Attempt<BufMut> {
        let (pd, frame) = (self.qp.protection_domain(), self.limits.frame);
        let grown = self.send_memory.grow(pd, frame, &mut self.share);
        match grown {
            Ok(true) => {
                // It notices when the connection is idle.
                self.after.wake_driver = true;
                self.send_buffer(len, frames)
            }
            Ok(false) => Ok(Err(Block::Buffers { frames })),
            Err(error) => {
                self.note_failed_growth(&error);
                let total = self.send_memory.pool.as_ref().map_or(0, Pool::total);
                if total == 0 && frame <= FIRST_SIZE as usize {
                    return Err(MessageError::Register(error));
                }
                // The next attempt sends shorter frames, or offers a message of too many.
                if total > 0 {
                    self.send_memory.most = total;
                }
                self.set_frame(if total > 0 { frame as u32 } else { FIRST_SIZE });
                Ok(Err(Block::Buffers { frames: frames.min(total.max(1)) }))
            }
        }
    }

    /// Deregisters buffers that an idle side does not need.
    pub(super) fn shrink_send_memory(&mut self) {
        if let Some(pool) = self.send_memory.take_idle() {
            self.discard_pool(pool);
        }
        if self.limits.is_elastic {
            self.sizes.settle(self.protocol.flow.next_receive());
            self.set_frame(self.sizes.last());
        }
    }
}
