//! The posted receives of a side. Their number, size and memory follow use.
//!
//! ```text
//!   first receives ── grow ──▶ more and longer ones ── grow ──▶ … the configured number
//!         ▲                            │
//!         └──────── idle: shrink ──────┘
//! ```
//!
//! `window.rs` of rdma-message-proto describes how the peer learns of it.

mod growth;

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use rdma_message_proto::flow::RESERVE;
use rdma_message_proto::frame::Kind;
use rdma_message_proto::handshake::Content;
use rdma_message_proto::window::{FIRST_SIZE, first_receives};

use super::budget::Share;
use super::config::ConnectionConfig;
use crate::clock;
use crate::error::SetupError;
use crate::memory::{BufMut, Pool};
use crate::op::Recv;

/// The messages that call for more after a failed registration, before the next attempt.
const PAUSE: u32 = 1 << 10;

/// The time between `Ack`s below which they are frequent.
const ACKS_APART: Duration = Duration::from_millis(20);

/// The buffers of the first size that are not posted. They replace longer ones, of which frames use
/// some while a side shrinks.
const SPARES: usize = 2;

/// The messages of several frames that the receives hold. With so many, the headers of answers
/// announce released receives, and separate `Ack`s are rare.
const LONG_MESSAGES: u32 = 8;

/// The divisor of the size of receives that cannot be registered.
const SHORTER: usize = 4;

/// The longest copied message: copying costs less than replacing the buffer.
const COPIED_OUT: usize = 256;

/// The receives of a side and their buffers.
#[derive(Debug)]
pub(super) struct Receives {
    /// Kept after termination until the queue pair is closed: dropping flushed ones costs less.
    pub(super) posted: VecDeque<Recv<BufMut>>,
    /// Buffers of the receives of a side that is not in use, or whose number is fixed.
    first: Pool,
    first_number: u32,
    /// Buffers of a side that is in use.
    grown: Option<Pool>,
    /// Some frames use buffers of `first`. `grown` keeps a buffer for each of them.
    replacing: bool,
    /// The receives, including the reserve.
    number: u32,
    /// The size of receives posted from now on, and the capacity of their buffers.
    size: usize,
    capacity: usize,
    /// The number is the configured one, and no growth can make the receives longer.
    is_full: bool,
    /// The number of the first receive of the current size, until the peer has reached it.
    changed_at: Option<u32>,
    /// Buffers of `grown` beyond the number of receives and spare ones.
    extra: u32,
    /// Bytes taken from the budget for buffers that the peer has not skipped yet.
    leaving: u64,
    most: Most,
    /// The next [`grow_receives`](Core::grow_receives) registers more or longer receives.
    wanted: bool,
    /// Some demand was for more receives.
    wants_more: bool,
    /// The last time when they were of use, and how long it counts.
    demanded: Option<Instant>,
    patience: Duration,
    /// The time of the last `Ack`.
    acked: Option<Instant>,
    /// Demands until the next attempt to register memory.
    pause: u32,
}

/// The configured maximum of a side.
#[derive(Debug, Clone, Copy)]
struct Most {
    /// Receives, including the reserve.
    receives: u32,
    /// Bytes of each.
    size: u32,
    spares: u32,
    /// Longest message in several frames.
    eager: u64,
}

impl Receives {
    /// Creates the receives of a side with the buffers of `first`, without posting them.
    pub(super) fn new(first: Pool, config: &ConnectionConfig) -> Self {
        let most = Most {
            receives: config.receives(),
            size: config.receive_buffer_size,
            spares: config.spare_buffers,
            eager: config.max_eager.into(),
        };
        let number = config.first_receives();
        let posted = VecDeque::with_capacity(number as usize);
        let mut receives = Self {
            posted,
            first,
            first_number: number,
            grown: None,
            replacing: false,
            number,
            size: 0,
            capacity: 0,
            is_full: false,
            changed_at: None,
            extra: 0,
            leaving: 0,
            most,
            wanted: false,
            wants_more: false,
            demanded: None,
            patience: config.shrink_after,
            acked: None,
            pause: 0,
        };
        receives.set_number(number);
        receives
    }

    fn set_number(&mut self, number: u32) {
        self.number = number;
        self.size = self.pool().buffer_size();
        self.capacity = self.size.next_multiple_of(64);
        self.is_full = number >= self.most.receives && !self.can_be_longer();
    }

    /// Returns the number of receives, including the reserve.
    pub(super) fn number(&self) -> u32 {
        self.number
    }

    /// Returns the registered bytes of the receives and spare buffers, until the peer has skipped
    /// them.
    pub(super) fn memory(&self) -> u64 {
        let grown = self.grown.as_ref().map_or(0, Pool::bytes);
        self.first.bytes() + grown + self.leaving
    }

    pub(super) fn is_grown(&self) -> bool {
        self.grown.is_some()
    }

    /// Returns true if a growth can make the receives longer.
    fn can_be_longer(&self) -> bool {
        !self.is_grown() && !self.has_longest()
    }

    /// Returns the number of long receives of a side that has shrunk. Frames have used others
    /// meanwhile, which were posted again.
    fn leftovers(&self) -> u32 {
        if !self.can_be_longer() {
            return 0;
        }
        let in_use = self.first.total() - self.first.available();
        self.first_number.saturating_sub(in_use as u32)
    }

    /// Returns true if an idle side needs less memory.
    pub(super) fn may_shrink(&self) -> bool {
        self.is_grown() || self.leaving > 0 || self.leftovers() > 0
    }

    fn pool(&self) -> &Pool {
        self.grown.as_ref().unwrap_or(&self.first)
    }

    fn has_longest(&self) -> bool {
        self.size == self.most.size as usize
    }

    /// Returns a buffer that no receive needs.
    pub(super) fn spare(&mut self) -> Option<BufMut> {
        if !self.has_longest() {
            return None;
        }
        let pool = self.grown.as_ref().unwrap_or(&self.first);
        if self.replacing {
            let left = self.first.total() - self.first.available();
            self.replacing = left > 0;
            if pool.available() <= left {
                return None;
            }
        }
        pool.try_alloc(pool.buffer_size()).ok()
    }

    /// Records that the service takes messages in their buffers, of which the first have no spares.
    pub(super) fn want_spares(&mut self) {
        if self.grown.is_none() && !self.is_full {
            self.demand(false);
        }
    }

    /// Returns true if the message in `buffer` is copied out of it.
    pub(super) fn copies_out(&self, buffer: &BufMut) -> bool {
        buffer.len() <= COPIED_OUT || !self.may_give(buffer)
    }

    /// Returns true if the service may keep `buffer`. A side that shrinks needs its first ones.
    pub(super) fn may_give(&self, buffer: &BufMut) -> bool {
        self.has_longest() && buffer.capacity() == self.capacity
    }

    /// Makes `buffer` one of the current size for the next receive. Returns it if it was replaced.
    #[inline]
    fn replace_short(&self, buffer: &mut BufMut) -> Option<BufMut> {
        let mut used = None;
        if buffer.capacity() != self.capacity
            && let Ok(other) = self.pool().try_alloc(self.size)
        {
            used = Some(std::mem::replace(buffer, other));
        }
        let whole = buffer.resize(self.size);
        debug_assert!(whole.is_ok(), "the pool has a buffer for each receive");
        used
    }

    /// Returns true if the last frame of a message, one of `frames`, or the offer of a message of
    /// `len` bytes, calls for longer receives.
    fn is_short_for(&self, kind: Kind, content: Content, len: u64, frames: u32) -> bool {
        match kind {
            Kind::Offer => len <= self.most.eager,
            _ if frames > 1 => frames.saturating_mul(LONG_MESSAGES) > self.number - RESERVE,
            _ => content == Content::Bytes && !self.has_longest() && len >= self.size as u64,
        }
    }

    /// Records that longer receives, or `more`, are of use. A side that has not grown waits for the
    /// second time: growth costs more than a rare message.
    fn demand(&mut self, more: bool) {
        self.wants_more |= more;
        if self.pause > 0 {
            self.pause -= 1;
            return;
        }
        let now = clock::now();
        let again = |at: Instant| now.duration_since(at) < self.patience;
        self.wanted |= self.grown.is_some() || self.demanded.is_some_and(again);
        self.demanded = Some(now);
    }

    /// Records an `Ack` for credits. Frequent ones show a stream that more receives may let flow
    /// faster: its sender may wait for them.
    #[inline]
    pub(super) fn note_ack(&mut self) {
        if self.is_full {
            return;
        }
        let now = clock::now();
        if self.acked.replace(now).is_some_and(|at| now.duration_since(at) < ACKS_APART) {
            self.demand(true);
        }
    }

    /// Registers the buffers of `receives` receives. The first growth tries shorter ones if the
    /// budget or the device refuses the configured size.
    fn register(&mut self, receives: u32, share: &mut Share) -> Result<(), SetupError> {
        if self.is_grown() {
            return self.register_of(self.size, receives, share);
        }
        let mut size = self.most.size as usize;
        loop {
            match self.register_of(size, receives, share) {
                Err(_) if size / SHORTER > FIRST_SIZE as usize => size /= SHORTER,
                result => return result,
            }
        }
    }

    /// Registers the buffers of `receives` receives of `size` bytes, and of spare ones if `size` is
    /// the configured one.
    fn register_of(
        &mut self,
        size: usize,
        receives: u32,
        share: &mut Share,
    ) -> Result<(), SetupError> {
        let Most { receives: most, size: longest, spares, .. } = self.most;
        let spares = if size == longest as usize { spares } else { 0 };
        let part = u64::from(spares) * u64::from(receives - RESERVE);
        let spares = part.div_ceil(u64::from(most - RESERVE)) as usize;
        let buffers = receives as usize + spares + self.extra as usize;
        let more = buffers.saturating_sub(self.grown.as_ref().map_or(0, Pool::total));
        let bytes = more as u64 * (size as u64).next_multiple_of(64);
        share.grow(bytes)?;
        match &self.grown {
            Some(pool) => pool.grow_by(more as u32),
            None => Pool::new(self.first.protection_domain(), size, buffers).map(|pool| {
                self.grown = Some(pool);
                self.replacing = true;
            }),
        }
        .inspect_err(|_| share.shrink(bytes))
    }
}

impl ConnectionConfig {
    /// Returns true if buffers are registered with use. Small ones are not worth it.
    pub(super) fn is_elastic(&self) -> bool {
        !self.preallocate && self.receive_buffer_size > FIRST_SIZE
    }

    /// Returns the receives, including the reserve, with which a connection starts.
    pub(super) fn first_receives(&self) -> u32 {
        if self.is_elastic() { first_receives(self.receives()) } else { self.receives() }
    }

    /// Returns the size and number of the first buffers.
    pub(super) fn first_buffers(&self) -> (usize, usize) {
        if self.is_elastic() {
            (FIRST_SIZE as usize, self.first_receives() as usize + SPARES)
        } else {
            let buffers = self.receives().saturating_add(self.spare_buffers);
            (self.receive_buffer_size as usize, buffers as usize)
        }
    }

    /// Returns the size and number of send buffers registered in advance.
    pub(super) fn first_send_buffers(&self) -> (usize, usize) {
        let buffers = if self.is_elastic() { 0 } else { self.send_buffers };
        (self.receive_buffer_size as usize, buffers as usize)
    }

    /// Returns the bytes registered when connecting.
    pub(super) fn first_bytes(&self) -> u64 {
        let bytes = |(size, buffers): (usize, usize)| size as u64 * buffers as u64;
        bytes(self.first_buffers()).saturating_add(bytes(self.first_send_buffers()))
    }

    /// Returns the maximum of receives posted at once.
    pub(super) fn most_receives(&self) -> u32 {
        let shrinking = if self.is_elastic() { self.first_receives() } else { 0 };
        self.receives().saturating_add(shrinking)
    }
}
