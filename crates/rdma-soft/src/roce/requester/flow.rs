//! How much a requester has in flight, and its reaction to congestion.
//!
//! The specification leaves the reaction to the implementation (IBTA annex A17.9), and adapters
//! change a rate. Here it is a window, as in TCP. A congestion notification packet sets it to half
//! of the packets in flight; later ones are ignored until those are acknowledged. After a timeout,
//! [`PROBE`] packets probe the path: a whole window would fill the queue that lost the last one.
//! Each acknowledged window adds a packet, until the window is that of a path without congestion.

use rdma_provider::types::Psn;

/// The flow control of a reliable connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Flow {
    pub(super) window: i32,
    /// Packets between acknowledgement requests within a message, so that the window does not
    /// stall.
    pub(super) ack_every: u32,
    /// Maximum response packets per READ request. Longer READs are split, as nothing else paces
    /// responses.
    pub(super) read_packets: u32,
}

impl Flow {
    /// Within the process, where no buffer overflows. The window is rxe's.
    pub(crate) const MEMORY: Self = Self { window: 64, ack_every: 32, read_packets: u32::MAX };

    /// Over UDP, with paced responses.
    pub(crate) const fn with_window(window: u32) -> Self {
        Self { window: window as i32, ack_every: window / 4, read_packets: READ_PACKETS }
    }

    /// Returns the limits for what is sent next.
    #[inline]
    pub(super) fn limited_by(self, congestion: Option<Congestion>) -> Self {
        let Some(Congestion { window, .. }) = congestion else { return self };
        Self {
            window: self.window.min(window as i32),
            ack_every: self.ack_every.min(window / 4),
            ..self
        }
    }
}

/// Maximum response packets per READ request over UDP: 64 KiB at the largest MTU.
///
/// The first and last responses are longer than the others, so each request ends several segmented
/// messages.
///
/// It is constant: the requester computes from it which response ends a request.
const READ_PACKETS: u32 = 16;

/// The window after a timeout. With a single packet, no later one could show that it is lost, so
/// each further loss would take a timeout and a retry.
pub(super) const PROBE: u32 = 4;

/// A window that is narrower than that of the path.
#[derive(Debug, Clone, Copy)]
pub(super) struct Congestion {
    /// Maximum packets in flight, at least 1.
    window: u32,
    /// Packets acknowledged since the window changed.
    acknowledged: u32,
    /// Packets before this were in flight when the window was narrowed.
    narrowed_at: Psn,
}

impl Congestion {
    pub(super) fn new(window: u32, sent_end: Psn) -> Self {
        Self { window: window.max(1), acknowledged: 0, narrowed_at: sent_end }
    }

    /// Returns whether packets are unacknowledged that were in flight when the window was narrowed.
    /// A notification that arrives then is about congestion to which the window has reacted.
    pub(super) const fn is_recent(&self, unacked: Psn) -> bool {
        unacked.distance_from(self.narrowed_at) < 0
    }

    /// Widens the window. Returns `None` when it is [`Flow::MEMORY`]'s.
    pub(super) fn widened(mut self, packets: u32) -> Option<Self> {
        self.acknowledged += packets;
        while self.acknowledged >= self.window {
            self.acknowledged -= self.window;
            self.window += 1;
        }
        (self.window < Flow::MEMORY.window as u32).then_some(self)
    }
}
