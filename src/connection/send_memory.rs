//! Registered buffers for copied frames, whose number follows use.

mod growth;

use rdma_message_proto::window::FIRST_SIZE;

use super::budget::BudgetGuard;
use super::config::ConnectionConfig;
use crate::error::SetupError;
use crate::memory::{BufMut, Pool, PoolError};
use crate::verbs::ProtectionDomain;

const FIRST: usize = 4;

#[derive(Debug)]
pub(super) struct SendMemory {
    /// `None` until the first copied frame, and when idle.
    pool: Option<Pool>,
    /// Below `configured` after a failed registration.
    most: usize,
    configured: usize,
    is_elastic: bool,
    charged: u64,
    trailer: usize,
}

impl SendMemory {
    pub(super) fn new(pool: Option<Pool>, config: &ConnectionConfig, trailer: usize) -> Self {
        let most = config.send_buffers as usize;
        let is_elastic = config.is_elastic();
        Self { pool, most, configured: most, is_elastic, charged: 0, trailer }
    }

    fn frame_of(&self, pool: &Pool) -> usize {
        pool.buffer_size() - self.trailer
    }

    pub(super) fn most(&self) -> usize {
        self.most
    }

    pub(super) fn memory(&self) -> u64 {
        self.pool.as_ref().map_or(0, Pool::bytes)
    }

    pub(super) fn has_free(&self, frames: usize) -> bool {
        self.pool.as_ref().is_some_and(|pool| pool.available() >= frames)
    }

    /// Returns true if `frames` buffers are free or can be registered, or if all are that there may
    /// be: the maximum may have been lowered since `frames` was chosen.
    pub(super) fn has(&self, frames: usize) -> bool {
        let (free, total) =
            self.pool.as_ref().map_or((0, 0), |pool| (pool.available(), pool.total()));
        free + self.most.saturating_sub(total) >= frames.min(self.most)
    }

    /// Returns true if these have less than `len` bytes and can be replaced.
    pub(super) fn is_shorter_than(&self, len: usize) -> bool {
        self.is_elastic && self.pool.as_ref().is_some_and(|pool| self.frame_of(pool) < len)
    }

    pub(super) fn is_grown(&self) -> bool {
        self.is_elastic && self.pool.is_some()
    }

    fn take_whole(&self) -> Option<BufMut> {
        self.pool.as_ref().and_then(|pool| pool.try_alloc(self.frame_of(pool)).ok())
    }

    #[inline]
    fn take(&self, len: usize) -> Result<BufMut, PoolError> {
        self.pool.as_ref().map_or(Err(PoolError::Empty), |pool| pool.try_alloc(len))
    }

    /// Returns false if the maximum is reached.
    #[cold]
    fn grow(
        &mut self,
        pd: &ProtectionDomain,
        size: usize,
        budget: &mut BudgetGuard,
    ) -> Result<bool, SetupError> {
        // `size` is of the payload: a frame in a receive of the first size needs no more than that.
        let size = size + self.trailer;
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
            budget.grow(bytes)?;
        }
        let grown = match &self.pool {
            Some(pool) => pool.grow_by(more as u32),
            None => Pool::new(pd, size, more).map(|pool| self.pool = Some(pool)),
        };
        grown.inspect_err(|_| budget.shrink(bytes))?;
        self.charged += bytes;
        Ok(true)
    }

    fn renew(&mut self) {
        self.most = self.configured;
    }

    fn take_if(
        &mut self,
        budget: &mut BudgetGuard,
        unused: impl Fn(&Pool) -> bool,
    ) -> Option<Pool> {
        let pool = self.pool.take_if(|pool| self.is_elastic && unused(pool))?;
        budget.shrink(std::mem::take(&mut self.charged));
        Some(pool)
    }
}
