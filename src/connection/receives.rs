//! The posted receives and their buffers, whose number and size follow use. `growth.rs` of
//! rdma-message-proto decides when they change, and `window.rs` describes how the peer learns of
//! it.

mod growth;

use std::collections::VecDeque;

use rdma_message_proto::flow::RESERVE;
use rdma_message_proto::window::{FIRST_SIZE, first_receives};

use super::budget::BudgetGuard;
use super::config::ConnectionConfig;
use crate::error::SetupError;
use crate::memory::{BufMut, Pool};
use crate::op::Recv;

/// Unposted buffers of the first size. They replace longer ones while the receives shrink, because
/// frames use some of the first ones meanwhile.
const SPARES: usize = 2;

/// The divisor of the size of receives that cannot be registered.
const SHORTER: usize = 4;

/// A copy of up to this length costs less than replacing the buffer.
const COPIED_OUT: usize = 256;

#[derive(Debug)]
pub(super) struct Receives {
    /// Kept after termination until the queue pair is closed: dropping flushed ones costs less.
    pub(super) posted: VecDeque<Recv<BufMut>>,
    /// Buffers of an idle connection, or of one whose receives are fixed.
    first: Pool,
    grown: Option<Pool>,
    /// Frames use buffers of `first`, for which `grown` keeps others.
    replaces_first: bool,
    /// Long buffers after shrinking, until the peer has skipped their receives.
    leaving: Option<Pool>,
    size: usize,
    /// The configured receives, including the reserve, the bytes of each, and spare buffers.
    most: u32,
    longest: usize,
    spares: u32,
}

impl Receives {
    pub(super) fn new(first: Pool, config: &ConnectionConfig) -> Self {
        Self {
            posted: VecDeque::with_capacity(config.first_receives() as usize),
            size: first.buffer_size(),
            first,
            grown: None,
            replaces_first: false,
            leaving: None,
            most: config.receives(),
            longest: config.receive_buffer_size as usize,
            spares: config.spare_buffers,
        }
    }

    /// Includes buffers that the peer still has to skip.
    pub(super) fn memory(&self) -> u64 {
        let others = [&self.grown, &self.leaving].into_iter().flatten();
        self.first.bytes() + others.map(Pool::bytes).sum::<u64>()
    }

    pub(super) fn are_leaving(&self) -> bool {
        self.leaving.is_some()
    }

    fn pool(&self) -> &Pool {
        self.grown.as_ref().unwrap_or(&self.first)
    }

    fn has_longest(&self) -> bool {
        self.size == self.longest
    }

    pub(super) fn spare(&mut self) -> Option<BufMut> {
        if !self.has_longest() {
            return None;
        }
        if self.replaces_first {
            // The next receives of frames in first buffers need one each.
            let needed = self.first.total() - self.first.available();
            self.replaces_first = needed > 0;
            if self.pool().available() <= needed {
                return None;
            }
        }
        self.pool().try_alloc(self.size).ok()
    }

    pub(super) fn copies_out(&self, buffer: &BufMut) -> bool {
        buffer.len() <= COPIED_OUT || !self.may_give(buffer)
    }

    /// Returns true if the application may keep `buffer`. While shrinking, the first ones are
    /// needed.
    pub(super) fn may_give(&self, buffer: &BufMut) -> bool {
        self.has_longest() && buffer.capacity() == self.capacity()
    }

    /// Returns how many of the first `receives` have long buffers. Others were used by frames while
    /// the receives shrank, and were reposted or hold waiting messages.
    fn long_receives_left(&self, receives: u32) -> u32 {
        if self.leaving.is_none() {
            return 0;
        }
        let in_use = self.first.total() - self.first.available();
        receives.saturating_sub(in_use as u32)
    }

    fn capacity(&self) -> usize {
        self.size.next_multiple_of(64)
    }

    #[inline]
    fn replace_other(&self, buffer: &mut BufMut) {
        if buffer.capacity() != self.capacity()
            && let Ok(other) = self.pool().try_alloc(self.size)
        {
            *buffer = other;
        }
        let whole = buffer.resize(self.size);
        debug_assert!(whole.is_ok(), "the pool has a buffer for each receive");
    }

    /// There were `before` receives.
    fn register(
        &mut self,
        receives: u32,
        before: u32,
        budget: &mut BudgetGuard,
    ) -> Result<(), SetupError> {
        if let Some(grown) = &self.grown {
            let all = receives + self.spares_of(receives, self.size);
            let more = (receives - before).max(all.saturating_sub(grown.total() as u32));
            return charged(budget, self.size, more, || grown.grow_by(more));
        }
        let pd = self.first.protection_domain();
        let mut size = self.longest;
        // If the budget or the device refuses the configured size, shorter buffers may do.
        loop {
            // Frames use some receives before the peer skips them, whose next receives need
            // buffers, too.
            let buffers = receives + self.spares_of(receives, size).max(before);
            match charged(budget, size, buffers, || Pool::new(pd, size, buffers as usize)) {
                Ok(pool) => {
                    (self.grown, self.size) = (Some(pool), size);
                    self.replaces_first = true;
                    return Ok(());
                }
                Err(_) if size / SHORTER > FIRST_SIZE as usize => size /= SHORTER,
                Err(error) => return Err(error),
            }
        }
    }

    /// Proportional to `receives`, or 0 if `size` is not the configured one.
    fn spares_of(&self, receives: u32, size: usize) -> u32 {
        if size != self.longest {
            return 0;
        }
        let part = u64::from(self.spares) * u64::from(receives - RESERVE);
        part.div_ceil(u64::from(self.most - RESERVE)) as u32
    }
}

/// If `register` fails, returns the bytes to the budget.
fn charged<T>(
    budget: &mut BudgetGuard,
    size: usize,
    buffers: u32,
    register: impl FnOnce() -> Result<T, SetupError>,
) -> Result<T, SetupError> {
    let bytes = u64::from(buffers) * (size as u64).next_multiple_of(64);
    budget.grow(bytes)?;
    register().inspect_err(|_| budget.shrink(bytes))
}

impl ConnectionConfig {
    /// Registering buffers with use does not pay for small ones.
    pub(super) fn is_elastic(&self) -> bool {
        !self.preallocate && self.receive_buffer_size > FIRST_SIZE
    }

    pub(super) fn first_receives(&self) -> u32 {
        if self.is_elastic() { first_receives(self.receives()) } else { self.receives() }
    }

    pub(super) fn first_buffers(&self) -> (usize, usize) {
        if self.is_elastic() {
            (FIRST_SIZE as usize, self.first_receives() as usize + SPARES)
        } else {
            let buffers = self.receives().saturating_add(self.spare_buffers);
            (self.receive_buffer_size as usize, buffers as usize)
        }
    }

    pub(super) fn first_send_buffers(&self) -> (usize, usize) {
        let buffers = if self.is_elastic() { 0 } else { self.send_buffers };
        (self.receive_buffer_size as usize, buffers as usize)
    }

    pub(super) fn first_bytes(&self) -> u64 {
        let bytes = |(size, buffers): (usize, usize)| size as u64 * buffers as u64;
        bytes(self.first_buffers()).saturating_add(bytes(self.first_send_buffers()))
    }

    pub(super) fn most_receives(&self) -> u32 {
        let shrinking = if self.is_elastic() { self.first_receives() } else { 0 };
        self.receives().saturating_add(shrinking)
    }
}
