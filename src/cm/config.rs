use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use crate::error::{LimitError, SetupError};
use crate::op::{PathConfig, RetryConfig};

use super::error::ConnectError;

/// Settings for connecting to a listener, or for accepting a request ([example](super)).
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use]
pub struct ConnectConfig {
    source: Option<IpAddr>,
    pub(super) resolve_timeout: Duration,
    pub(super) timeout: Duration,
    private_data: Vec<u8>,
    pub(super) reads: Option<u8>,
    pub(super) keepalive: Option<Duration>,
    pub(super) retries: RetryConfig,
    pub(super) path: PathConfig,
}

impl Default for ConnectConfig {
    fn default() -> Self {
        Self {
            source: None,
            // A DNS lookup and ARP with one or two retransmissions.
            resolve_timeout: Duration::from_secs(5),
            // A few retransmissions by the kernel, 4.3 s apart.
            timeout: Duration::from_secs(15),
            private_data: Vec::new(),
            reads: None,
            keepalive: None,
            retries: RetryConfig::default(),
            path: PathConfig::default(),
        }
    }
}

impl ConnectConfig {
    /// Sets the device's address to connect from. By default the routing table selects it.
    pub const fn source(mut self, address: IpAddr) -> Self {
        self.source = Some(address);
        self
    }

    /// Sets the time limit of the host name lookup, and of resolving a route to each address;
    /// default 5 s.
    pub const fn resolve_timeout(mut self, timeout: Duration) -> Self {
        self.resolve_timeout = timeout;
        self
    }

    /// Sets the time limit of the handshake with each address, within which the peer's program must
    /// accept, and of the answer to a disconnect request; default 15 s.
    ///
    /// The kernel retransmits a lost message after 4.3 s, the software device after 0.27 s,
    /// doubling up to 4.3 s.
    pub const fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Sets bytes to send with the request (at most 56) or the answer (at most 196); default none.
    /// The peer receives them padded with zeros, except on an iWARP device, so include the length
    /// if trailing zeros matter.
    pub fn private_data(mut self, data: impl Into<Vec<u8>>) -> Self {
        self.private_data = data.into();
        self
    }

    /// Sets the maximum of outstanding READs and atomics in each direction; the peer may agree to
    /// fewer. The default is as many as both devices support; 0 disables them. More than
    /// [`DeviceAttr::max_qp_rd_atom`](crate::types::DeviceAttr) or `max_qp_init_rd_atom` are
    /// refused.
    pub const fn reads(mut self, reads: u8) -> Self {
        self.reads = Some(reads);
        self
    }

    /// Probes the peer when nothing was in flight and nothing has arrived for `interval`, at least
    /// 1 ms; default never. A side that only receives needs probes, because a killed process or
    /// crashed host sends no disconnect request.
    ///
    /// A probe is a WRITE of no bytes, which the peer's program does not see. If it is not
    /// acknowledged within the [`retries`](Self::retries), the connection ends with
    /// [`Disconnection::Silent`](super::Disconnection::Silent), and the queue pair goes to the
    /// error state. This takes at most two intervals plus the retries.
    ///
    /// - The peer's queue pair must allow REMOTE_WRITE, the default here and in librdmacm.
    ///   Otherwise, or on a queue pair in the error state, the first probe ends the connection with
    ///   [`Disconnection::ProbeFailed`](super::Disconnection::ProbeFailed). After a reset, probing
    ///   pauses until the queue pair can post again.
    /// - Arrivals in a shared receive queue do not defer a probe.
    /// - [`AckTimeout`](crate::types::AckTimeout) code 0 (infinite) is refused.
    /// - Each probe in flight uses an entry of
    ///   [`max_send_wr`](crate::op::QueuePairBuilder::max_send_wr).
    /// - An iWARP device fails with [`SetupError::Unsupported`], because a WRITE completes there
    ///   when TCP has it.
    /// - Intervals are in real time, even if Tokio's clock is paused, except in
    ///   [`software::drive`](crate::software::drive). Probes end when the runtime that established
    ///   the connection shuts down.
    pub const fn keepalive(mut self, interval: Option<Duration>) -> Self {
        self.keepalive = interval;
        self
    }

    /// Sets the timeouts and retries of this side, which override the peer's proposal. A peer
    /// without settings adopts this side's proposal: 6 retries, infinite RNR retries and, from the
    /// software device, an acknowledgement timeout of 537 ms. An iWARP device ignores them: TCP has
    /// its own, and a message without a receive ends the connection.
    pub const fn retries(mut self, retries: RetryConfig) -> Self {
        self.retries = retries;
        self
    }

    /// Sets the path of this side's packets; the peer's have the path of the peer's settings. Its
    /// fields override those of [`QueuePairBuilder::path`](crate::op::QueuePairBuilder::path), and
    /// both override what the connection manager selects. An iWARP device refuses any path but the
    /// default with [`SetupError::Unsupported`].
    ///
    /// Both queue pairs must be in the same partition. The connecting queue pair selects it (on a
    /// real device, the kernel does), and the request names it. An accepting queue pair of a
    /// [prepared](super::ConnectionRequest::prepare) builder joins it; another partition fails with
    /// [`SetupError::Mismatch`]. A listener whose port lacks it rejects the request with
    /// [`RejectReason::UNSUPPORTED`](crate::types::RejectReason::UNSUPPORTED).
    pub const fn path(mut self, path: PathConfig) -> Self {
        self.path = path;
        self
    }

    pub(super) fn source_to(
        &self,
        destination: SocketAddr,
    ) -> Result<Option<SocketAddr>, SetupError> {
        let Some(source) = self.source else { return Ok(None) };
        if source.is_ipv4() != destination.is_ipv4() {
            let what = "address families of the source and the destination";
            return Err(SetupError::mismatch(what, source, destination.ip()));
        }
        Ok(Some(SocketAddr::new(source, 0)))
    }

    pub(super) fn checked(&self, max_data: usize) -> Result<&[u8], ConnectError> {
        check_private_data(&self.private_data, max_data)?;
        self.retries.check()?;
        self.path.check()?;
        Ok(&self.private_data)
    }
}

pub(super) fn check_private_data(data: &[u8], max: usize) -> Result<(), LimitError> {
    LimitError::check("bytes of private_data", data.len() as u64, max as u64)
}

/// Settings of a [`Listener`](super::Listener), which has an example.
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use]
pub struct ListenConfig {
    backlog: u32,
}

impl Default for ListenConfig {
    fn default() -> Self {
        Self { backlog: 1024 }
    }
}

impl ListenConfig {
    /// Sets the maximum number of waiting requests, at about 2 KiB each; default 1024. 0 is
    /// refused.
    ///
    /// - The kernel counts requests that the program has not received, and rejects further ones
    ///   with reason [`CONSUMER`](crate::cm::RejectReason::CONSUMER).
    /// - The software device counts a request until it is accepted or rejected, and asks further
    ///   peers to retry until their deadline passes. It also does so beyond 256 requests of one
    ///   source, or 4,096 of all, that wait for an answer or its confirmation. While more than
    ///   2,048 wait, an accepted request is abandoned if its peer does not confirm within 1.1 s.
    ///
    /// An accepted request holds a queue pair until
    /// [`ConnectionRequest::accept`](super::ConnectionRequest::accept) returns, so limit how many
    /// you accept at a time. Later requests do not displace waiting ones, so forged requests can
    /// block a listener; [`tokio_rdma::Listener`](crate::Listener) withstands them.
    pub const fn backlog(mut self, requests: u32) -> Self {
        self.backlog = requests;
        self
    }

    pub(super) fn checked(&self) -> Result<u32, SetupError> {
        SetupError::at_least("backlog", self.backlog.into(), 1)?;
        Ok(self.backlog)
    }
}
