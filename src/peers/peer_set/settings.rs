use std::fmt;
use std::io;
use std::time::Duration;

use tokio::sync::Semaphore;

use crate::connection::EstablishError;

/// The limits and timeouts of a [`PeerSet`](super::PeerSet).
#[derive(Debug, Clone)]
#[must_use]
pub struct PeerSetConfig {
    pub(super) max_peers: usize,
    pub(super) max_in_flight: usize,
    pub(super) max_in_flight_per_peer: usize,
    pub(super) idle_timeout: Option<Duration>,
    pub(super) attempt_timeout: Duration,
    pub(super) wait: Option<Duration>,
}

impl Default for PeerSetConfig {
    fn default() -> Self {
        Self {
            max_peers: 1024,
            max_in_flight: Semaphore::MAX_PERMITS,
            max_in_flight_per_peer: Semaphore::MAX_PERMITS,
            idle_timeout: Some(Duration::from_secs(60)),
            attempt_timeout: Duration::from_secs(10),
            wait: Some(Duration::from_secs(10)),
        }
    }
}

impl PeerSetConfig {
    /// Sets the maximum of peers that have a link or are being connected; at least 1, default
    /// 1,024. As many more links may be closing.
    pub fn max_peers(mut self, peers: usize) -> Self {
        self.max_peers = peers.max(1);
        self
    }

    /// Sets the maximum of guards, at least 1; default without limit.
    pub fn max_in_flight(mut self, guards: usize) -> Self {
        self.max_in_flight = guards.clamp(1, Semaphore::MAX_PERMITS);
        self
    }

    /// Sets the maximum of guards of one peer, at least 1; default without limit.
    pub fn max_in_flight_per_peer(mut self, guards: usize) -> Self {
        self.max_in_flight_per_peer = guards.clamp(1, Semaphore::MAX_PERMITS);
        self
    }

    /// Sets how long an idle link is kept; default 60 s, `None` without limit.
    pub fn idle_timeout(mut self, timeout: Option<Duration>) -> Self {
        self.idle_timeout = timeout;
        self
    }

    /// Sets how long resolving and connecting may take; default 10 s.
    pub fn attempt_timeout(mut self, timeout: Duration) -> Self {
        self.attempt_timeout = timeout;
        self
    }

    /// Sets how long a caller waits while a limit is reached; default 10 s, with `None` not at all.
    pub fn wait(mut self, wait: Option<Duration>) -> Self {
        self.wait = wait;
        self
    }
}

/// Counters of a [`PeerSet`](super::PeerSet).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct PeerSetCounters {
    /// Peers that have a link or a caller that waits.
    pub peers: usize,
    /// Peers with a link and no guard.
    pub idle: usize,
    /// Guards.
    pub in_flight: usize,
    /// Links made.
    pub connected: u64,
    /// Failed attempts.
    pub failed: u64,
    /// Links found [ended](super::PeerLink::has_ended).
    pub lost: u64,
    /// Idle links closed for another peer.
    pub evicted: u64,
    /// Links closed after the idle timeout.
    pub expired: u64,
}

/// An error of [`PeerSet::get`](super::PeerSet::get).
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum PeerError {
    /// The peer could not be resolved or connected.
    Connect(EstablishError),
    /// The attempt exceeded [`attempt_timeout`](PeerSetConfig::attempt_timeout).
    ConnectTimedOut {
        /// Time allowed.
        after: Duration,
    },
    /// A limit was reached for as long as the caller waits.
    Busy {
        /// Name of the limit in [`PeerSetConfig`].
        field: &'static str,
        /// The limit.
        limit: usize,
        /// Time waited, if any.
        waited: Option<Duration>,
    },
}

impl fmt::Display for PeerError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Connect(error) => error.fmt(f),
            Self::ConnectTimedOut { after } => write!(
                f,
                "resolving and connecting the peer timed out after {after:?} \
                 (PeerSetConfig::attempt_timeout)"
            ),
            Self::Busy { field, limit, waited } => {
                write!(f, "set of peers is busy: limit {field} of {limit} reached")?;
                match waited {
                    Some(waited) => write!(f, " for {waited:?} (PeerSetConfig::wait)"),
                    None => f.write_str("; raise it, or set PeerSetConfig::wait"),
                }
            }
        }
    }
}

impl std::error::Error for PeerError {}

impl From<PeerError> for io::Error {
    fn from(error: PeerError) -> Self {
        let kind = match &error {
            PeerError::Connect(cause) => Self::from(cause.clone()).kind(),
            PeerError::ConnectTimedOut { .. } => io::ErrorKind::TimedOut,
            PeerError::Busy { waited: Some(_), .. } => io::ErrorKind::TimedOut,
            PeerError::Busy { waited: None, .. } => io::ErrorKind::WouldBlock,
        };
        Self::new(kind, error)
    }
}
