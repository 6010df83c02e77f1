//! Settings of a listener.

use std::time::Duration;

use super::config::{ConnectionConfig, check_time};
use crate::error::SetupError;
use crate::verbs::Device;

/// Settings of a [`Listener`](super::Listener) or [`RdmaListener`](crate::RdmaListener): those of
/// its connections, and its limits. A [`ConnectionConfig`] converts into one with default limits.
///
/// ```
/// use tokio_rdma::{ConnectionConfig, ListenerConfig};
///
/// let connections = ConnectionConfig::default().receive_buffers(16);
/// let config = ListenerConfig::new(connections).max_connections(100).backlog(16);
/// ```
#[derive(Debug, Clone)]
#[must_use]
pub struct ListenerConfig {
    pub(super) connection: ConnectionConfig,
    pub(super) handshakes: u32,
    pub(super) backlog: u32,
    pub(super) max_connections: u32,
    pub(super) max_connections_per_source: u32,
    pub(super) first_message_timeout: Option<Duration>,
}

impl ListenerConfig {
    /// Returns default limits for connections with these settings.
    pub fn new(connections: ConnectionConfig) -> Self {
        Self {
            connection: connections,
            handshakes: 32,
            backlog: 128,
            max_connections: 4096,
            max_connections_per_source: 1024,
            first_message_timeout: None,
        }
    }

    /// Sets how many handshakes, at least one, run at once; default 32. A further request evicts
    /// the oldest handshake of the source address with the most handshakes, whose peer is rejected.
    ///
    /// Except on the software device, a handshake holds buffers until the peer's confirmation,
    /// eviction or [`connect_timeout`](ConnectionConfig::connect_timeout).
    pub fn handshakes(mut self, handshakes: u32) -> Self {
        self.handshakes = handshakes;
        self
    }

    /// Sets how many connections are established before the application accepts them; default 128,
    /// 512 KiB of buffers. When the backlog is full, running handshakes are completed and later
    /// requests wait. The peer may already send, up to its credits.
    ///
    /// With 0, nothing is established before [`accept`](super::Listener::accept) is called, for an
    /// application that decides about each [request](super::Listener::request).
    pub fn backlog(mut self, connections: u32) -> Self {
        self.backlog = connections;
        self
    }

    /// Sets how many connections may be open; default 4,096: 16 MiB of buffers while they are idle,
    /// and at most the [`budget`](ConnectionConfig::budget) otherwise. A connection counts until
    /// both peers have closed it and its handles are dropped. Further peers are rejected with
    /// [`RefusalReason::ListenerFull`](super::RefusalReason::ListenerFull).
    ///
    /// The device may answer simultaneous requests before the limit is checked. Those beyond it
    /// close with [`CloseReason::Refused`](super::CloseReason::Refused), and the application does
    /// not see them.
    pub fn max_connections(mut self, connections: u32) -> Self {
        self.max_connections = connections;
        self
    }

    /// Sets how many connections may be open per source address; default 1,024. Further peers get
    /// [`RefusalReason::SourceFull`](super::RefusalReason::SourceFull), like those beyond
    /// [`max_connections`](Self::max_connections).
    pub fn max_connections_per_source(mut self, connections: u32) -> Self {
        self.max_connections_per_source = connections;
        self
    }

    /// Closes a connection with [`CloseReason::NoFirstMessage`](super::CloseReason::NoFirstMessage)
    /// if the peer sends no message, or offer of a long one, within this time, at least 1 ms;
    /// disabled by default. It limits how long a silent peer holds buffers.
    pub fn first_message_timeout(mut self, timeout: Option<Duration>) -> Self {
        self.first_message_timeout = timeout;
        self
    }

    pub(crate) fn with_bytes(self) -> Self {
        Self { connection: self.connection.with_bytes(), ..self }
    }

    pub(super) fn check(&self, device: &Device) -> Result<(), SetupError> {
        SetupError::at_least("handshakes", self.handshakes.into(), 1)?;
        check_time("first_message_timeout in milliseconds", self.first_message_timeout)?;
        self.connection.check(device)
    }
}

impl Default for ListenerConfig {
    fn default() -> Self {
        Self::new(ConnectionConfig::default())
    }
}

impl From<ConnectionConfig> for ListenerConfig {
    fn from(connections: ConnectionConfig) -> Self {
        Self::new(connections)
    }
}

impl From<&ConnectionConfig> for ListenerConfig {
    fn from(connections: &ConnectionConfig) -> Self {
        Self::new(connections.clone())
    }
}

impl From<&Self> for ListenerConfig {
    fn from(config: &Self) -> Self {
        config.clone()
    }
}
