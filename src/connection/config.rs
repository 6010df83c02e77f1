//! Settings of a connection.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use rdma_message_proto::flow::RESERVE;
use rdma_message_proto::frame::{MAX_RECEIVES, OFFER_LEN};
use rdma_message_proto::handshake::{Content, Handshake, HandshakeError};
use rdma_message_proto::protocol::Settings;
use rdma_message_proto::timers::Times;

use super::budget::{self, BufferBudget};
use super::resources::{ConnectionResources, ResourceCache};
use crate::cm;
use crate::engine::{CompletionMode, CompletionQueue};
use crate::error::{LimitError, SetupError};
use crate::op::{ConnectOptions, Path};
use crate::types::{Gid, PortNum};
use crate::verbs::{Device, ProtectionDomain};

/// Settings of a [`Connection`](super::Connection). The two sides may differ: each announces what
/// it can receive.
///
/// A connection registers buffers with use and deregisters them when it is idle, unless
/// [`preallocate`](Self::preallocate) is set. It uses at most this much memory, 6 KiB and, until it
/// is idle, eight more receive buffers, whatever its peer sends. Received messages held by the
/// service come on top.
///
/// - `receive_buffer_size` × (`receive_buffers` + `spare_buffers` + 4 + `send_buffers`)
/// - `receive_memory`, or the longest message if that is more
/// - `receive_memory` again, in buffers kept for reuse while it is in use
///
/// While a device has a connection or listener, it also keeps the protection domains and first
/// buffers of at most eight closed connections for later ones with the same settings, which need
/// not create any.
///
/// ```
/// use tokio_rdma::{CompletionMode, Connection, ConnectionConfig, Listener};
/// # use tokio_rdma::Device;
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let device = Device::software()?;
/// let config = ConnectionConfig::default()
///     .max_message(1 << 20)
///     .receive_buffers(16)
///     .mode(CompletionMode::Hybrid)
///     .user_data("client 7");
/// let listener = Listener::bind(&device, "127.0.0.1:0").await?;
/// let connecting = Connection::connect_with(&device, listener.local_addr(), &config);
/// let (theirs, _ours) = tokio::try_join!(listener.accept(), connecting)?;
/// assert_eq!(&theirs.user_data()[..], b"client 7");
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
#[must_use]
pub struct ConnectionConfig {
    pub(super) receive_buffer_size: u32,
    pub(super) receive_buffers: u32,
    pub(super) spare_buffers: u32,
    pub(super) send_buffers: u32,
    pub(super) max_send_wr: u32,
    pub(super) max_inline: u32,
    pub(super) max_eager: u32,
    pub(super) preallocate: bool,
    pub(super) budget: BufferBudget,
    pub(super) shrink_after: Duration,
    pub(super) max_message: u64,
    pub(super) receive_memory: u64,
    pub(super) send_memory: u64,
    pub(super) keepalive: Option<(Duration, Duration)>,
    pub(super) stall_timeout: Option<Duration>,
    pub(super) close_timeout: Duration,
    pub(super) options: ConnectOptions,
    pub(super) completions: Completions,
    pub(super) connect_timeout: Duration,
    pub(super) handshakes: u32,
    pub(super) backlog: u32,
    pub(super) max_connections: u32,
    pub(super) max_connections_per_source: u32,
    pub(super) first_message_timeout: Option<Duration>,
    pub(super) user_data: Bytes,
    pub(super) protection_domain: Option<ProtectionDomain>,
    pub(super) path: Path,
    pub(super) content: Content,
}

/// The maximum of `spare_buffers` and `send_buffers`.
const MAX_BUFFERS: u32 = 1 << 20;

#[derive(Debug, Clone)]
pub(super) enum Completions {
    /// The mode of queues shared with other connections.
    Mode(CompletionMode),
    Given(CompletionQueue),
}

impl Default for ConnectionConfig {
    fn default() -> Self {
        Self {
            receive_buffer_size: 16 << 10,
            receive_buffers: 64,
            spare_buffers: 32,
            send_buffers: 64,
            max_send_wr: 128,
            max_inline: 64,
            max_eager: 64 << 10,
            preallocate: false,
            budget: BufferBudget::process(),
            shrink_after: Duration::from_secs(5),
            max_message: 64 << 20,
            receive_memory: 16 << 20,
            send_memory: 64 << 20,
            keepalive: Some((Duration::from_secs(5), Duration::from_secs(10))),
            stall_timeout: None,
            close_timeout: Duration::from_secs(10),
            options: ConnectOptions::default(),
            completions: Completions::Mode(CompletionMode::default()),
            connect_timeout: Duration::from_secs(15),
            handshakes: 32,
            backlog: 128,
            max_connections: 4096,
            max_connections_per_source: 1024,
            first_message_timeout: None,
            user_data: Bytes::new(),
            protection_domain: None,
            path: Path::Any,
            content: Content::Messages,
        }
    }
}

impl ConnectionConfig {
    /// Returns the default settings of byte streams. They have fewer and larger buffers than
    /// [`default`](Self::default): 24 receive buffers of 32 KiB, 8 spare and 16 send buffers, 1.7
    /// MiB in all, when it is in use.
    ///
    /// [`max_message`](Self::max_message) limits the pieces that a side reads from the other's
    /// memory, not the stream.
    pub fn for_streams() -> Self {
        Self::default()
            .receive_buffer_size(32 << 10)
            .receive_buffers(24)
            .spare_buffers(8)
            .send_buffers(16)
    }

    /// Sets the size of each receive buffer of a connection in use, in bytes; default 16 KiB. They
    /// are shorter if the [budget](Self::budget) or the device refuses that.
    /// Messages up to this length are copied into a buffer, longer ones into several, see
    /// [`max_eager`](Self::max_eager).
    pub fn receive_buffer_size(mut self, bytes: u32) -> Self {
        self.receive_buffer_size = bytes;
        self
    }

    /// Sets how many messages the peer may send before the service receives any; default 64: 32 in
    /// flight each way plus the delay of credit updates. Four more receives are posted for control
    /// frames. Unless [`preallocate`](Self::preallocate) is set, a connection starts with at most
    /// four for messages. The peer may send one message more than receives for messages.
    pub fn receive_buffers(mut self, buffers: u32) -> Self {
        self.receive_buffers = buffers;
        self
    }

    /// Sets how many received messages the service may hold without a copy, when the connection has
    /// all its buffers; default 32. One that has grown less has spare buffers in proportion.
    /// Further messages are copied out of their buffers, so they never block the peer. At most
    /// 1,048,576; all receive buffers must fit one registration (`DeviceAttr::max_mr_size`).
    pub fn spare_buffers(mut self, buffers: u32) -> Self {
        self.spare_buffers = buffers;
        self
    }

    /// Sets how many copied messages longer than `max_inline` may be in flight; default 64, a
    /// peer's default window. At most 1,048,576; they must fit one registration
    /// (`DeviceAttr::max_mr_size`).
    pub fn send_buffers(mut self, buffers: u32) -> Self {
        self.send_buffers = buffers;
        self
    }

    /// Sets the capacity of the send queue in work requests, one-sided operations included; default
    /// 128, twice a peer's default window. Further work requests are queued.
    pub fn max_send_wr(mut self, work_requests: u32) -> Self {
        self.max_send_wr = work_requests;
        self
    }

    /// Sets the longest message copied into its work request, in bytes; default 64, which all
    /// devices support. Larger values increase the queue's memory. At least 20.
    pub fn max_inline(mut self, bytes: u32) -> Self {
        self.max_inline = bytes;
        self
    }

    /// Sets the longest message that `send` copies, in bytes; default 64 KiB. Above the peer's
    /// `receive_buffer_size` it takes several buffers of each side, at most three quarters of
    /// either's; the receiver copies it once more. Longer messages are registered in place, and the
    /// peer reads them, which copies nothing but takes more system calls.
    pub fn max_eager(mut self, bytes: u32) -> Self {
        self.max_eager = bytes;
        self
    }

    /// Registers all buffers when connecting and keeps them; default false, which starts with
    /// receives for four messages of 384 bytes and no send buffers, and registers more with use. A
    /// connection whose `receive_buffer_size` is at most 384 registers all.
    pub fn preallocate(mut self, preallocate: bool) -> Self {
        self.preallocate = preallocate;
        self
    }

    /// Takes buffers from this budget, which connections can share; default
    /// [`BufferBudget::process`], 1 GiB.
    pub fn budget(mut self, budget: &BufferBudget) -> Self {
        self.budget = budget.clone();
        self
    }

    /// Sets the interval of the checks for idle buffers; default 5 s, at least 1 ms. A connection
    /// that has sent and received no message since the previous check deregisters the buffers that
    /// it has registered with use. They are also deregistered when it closes.
    pub fn shrink_after(mut self, time: Duration) -> Self {
        self.shrink_after = time;
        self
    }

    /// Sets the longest accepted message in bytes; default 64 MiB. A peer can make this side
    /// allocate that much. The limit may be below
    /// [`receive_buffer_size`](Self::receive_buffer_size); 0 allows only empty messages. It is
    /// announced to the peer, whose `send` refuses longer messages; sending one anyway is a
    /// [`Violation`](super::Violation).
    pub fn max_message(mut self, bytes: u64) -> Self {
        self.max_message = bytes;
        self
    }

    /// Sets the memory for long messages that the service has not received, in bytes; default 16
    /// MiB, which fits processor caches. One message is always fetched; others wait at their
    /// sender. Answers to the peer's [`keepalive`](Self::keepalive) queue behind fetches: choose no
    /// more than the device fetches within its `timeout`.
    pub fn receive_memory(mut self, bytes: u64) -> Self {
        self.receive_memory = bytes;
        self
    }

    /// Sets how many bytes of long messages may await the peer's fetch before `send` waits; default
    /// 64 MiB. One message is always offered.
    pub fn send_memory(mut self, bytes: u64) -> Self {
        self.send_memory = bytes;
        self
    }

    /// Sends a `Ping` after `interval` without a frame from the peer, and closes the connection as
    /// [`CloseReason::Silent`](super::CloseReason::Silent) after another `timeout`. Default 5 s and
    /// 10 s; each at least 1 ms; `None` disables it. The peer's driver answers, so this detects a
    /// stuck runtime. Retransmission detects a lost device within seconds.
    ///
    /// The `interval` counts from the answer to the last `Ping`. If other frames have arrived
    /// since, it may begin anew once, because arrivals are counted and not timed.
    ///
    /// The answer queues behind READs and WRITEs of the peer's service and behind fetched messages.
    /// If these and [`receive_memory`](Self::receive_memory) may take longer than `timeout`, raise
    /// `timeout` or reduce the operations in flight.
    pub fn keepalive(mut self, times: Option<(Duration, Duration)>) -> Self {
        self.keepalive = times;
        self
    }

    /// Closes the connection as [`CloseReason::Stalled`](super::CloseReason::Stalled) if a `send`
    /// has waited this long while the peer accepted nothing; disabled by default, because slow
    /// peers are legitimate. At least 1 ms. A timeout on a single `send` is an alternative.
    pub fn stall_timeout(mut self, timeout: Option<Duration>) -> Self {
        self.stall_timeout = timeout;
        self
    }

    /// Sets how long `close` waits for the peer, and how long a dropped byte stream continues to
    /// send; default 10 s, longer than retransmissions take to detect a dead peer.
    pub fn close_timeout(mut self, timeout: Duration) -> Self {
        self.close_timeout = timeout;
        self
    }

    /// Sets the timeouts and retries of the queue pair; see [`ConnectOptions`] for defaults.
    pub fn options(mut self, options: ConnectOptions) -> Self {
        self.options = options;
        self
    }

    /// Sets how completion queues are polled; by events unless set. With events there are two, one
    /// for sends and one for receives, else one for both. Connections of the same runtime, device
    /// and mode share them; a runtime of many threads has as many pairs as worker threads.
    pub fn mode(mut self, mode: CompletionMode) -> Self {
        self.completions = Completions::Mode(mode);
        self
    }

    /// Uses `queue` instead of the shared completion queues, for example one whose interrupts have
    /// a vector of their own. Each connection needs `max_send_wr` + `receive_buffers` + 12 entries.
    pub fn completion_queue(mut self, queue: &CompletionQueue) -> Self {
        self.completions = Completions::Given(queue.clone());
        self
    }

    /// Sets the timeout for resolving the peer and for the handshake, each, per address tried;
    /// default 15 s, because the kernel retransmits after 4.3 s.
    pub fn connect_timeout(mut self, timeout: Duration) -> Self {
        self.connect_timeout = timeout;
        self
    }

    /// Sets how many handshakes a [`Listener`](super::Listener) runs at once; default 32,
    /// minimum 1. Beyond that a new request evicts the oldest handshake of the source address with
    /// the most: its peer is rejected.
    ///
    /// On the software device a handshake holds buffers only after the peer's confirmation, and
    /// completes at once. On other devices it holds them until the peer confirms, eviction, or
    /// [`connect_timeout`](Self::connect_timeout).
    pub fn handshakes(mut self, handshakes: u32) -> Self {
        self.handshakes = handshakes;
        self
    }

    /// Sets how many connections a [`Listener`](super::Listener) establishes before the service
    /// accepts them; default 128, 512 KiB of buffers. Handshakes that run when it is full are
    /// completed; later requests wait until the service accepts. The peer may send until its
    /// messages fill the receives of the connection.
    ///
    /// With 0, nothing is established before [`accept`](super::Listener::accept) is called, which a
    /// service that decides about each [request](super::Listener::request) may need.
    pub fn backlog(mut self, connections: u32) -> Self {
        self.backlog = connections;
        self
    }

    /// Sets how many connections a [`Listener`](super::Listener) has open; default 4,096 (16 MiB of
    /// buffers if they are idle; [`budget`](Self::budget) limits the others). A connection counts
    /// until both sides have closed it and its handles are dropped. Further peers are rejected with
    /// [`RefusalReason::ListenerFull`](super::RefusalReason::ListenerFull).
    ///
    /// Simultaneous requests may all be answered for one remaining connection. Those beyond the
    /// limit then close with [`CloseReason::Refused`](super::CloseReason::Refused) when the service
    /// accepts; the service does not see them.
    pub fn max_connections(mut self, connections: u32) -> Self {
        self.max_connections = connections;
        self
    }

    /// Sets how many connections a [`Listener`](super::Listener) has open per source address;
    /// default 1,024. Further peers get
    /// [`RefusalReason::SourceFull`](super::RefusalReason::SourceFull) as for
    /// [`max_connections`](Self::max_connections).
    pub fn max_connections_per_source(mut self, connections: u32) -> Self {
        self.max_connections_per_source = connections;
        self
    }

    /// Closes the connection as [`CloseReason::NoFirstMessage`](super::CloseReason::NoFirstMessage)
    /// if the peer sends no message within this time; disabled by default; at least 1 ms. It limits
    /// how long a peer that sends nothing holds buffers. The offer of a long message counts.
    pub fn first_message_timeout(mut self, timeout: Option<Duration>) -> Self {
        self.first_message_timeout = timeout;
        self
    }

    /// Sets bytes for the peer's [`Connection::user_data`](super::Connection::user_data); default
    /// empty. At most 32 bytes when connecting, 172 when accepting.
    pub fn user_data(mut self, data: impl Into<Bytes>) -> Self {
        self.user_data = data.into();
        self
    }

    /// Creates the queue pair in this protection domain. By default each connection has its own, so
    /// that memory exposed to one peer is inaccessible to others. Buffers of one connection are
    /// then unusable in another. It gets a closed connection's, if nothing else refers to that.
    pub fn protection_domain(mut self, pd: &ProtectionDomain) -> Self {
        self.protection_domain = Some(pd.clone());
        self
    }

    /// Selects the port and GID that reach this peer, for
    /// [`Connection::prepare`](super::Connection::prepare); see
    /// [`QueuePairBuilder::peer`](crate::op::QueuePairBuilder::peer). The last call of this or
    /// [`source`](Self::source) counts; default [`Device::default_path`].
    ///
    /// By address, the connection manager selects the path. Other peers then fail with
    /// [`SetupError::Mismatch`], or are rejected by a listener.
    pub fn peer(mut self, peer: impl Into<Gid>) -> Self {
        self.path = Path::To(peer.into());
        self
    }

    /// Sends from this entry of this port's GID table, for
    /// [`Connection::prepare`](super::Connection::prepare); see
    /// [`QueuePairBuilder::source`](crate::op::QueuePairBuilder::source). The last call of this or
    /// [`peer`](Self::peer) counts.
    ///
    /// By address, the connection manager selects the path. Other entries then fail with
    /// [`SetupError::Mismatch`], or the listener rejects the peer.
    pub fn source(mut self, port: PortNum, gid_index: u8) -> Self {
        self.path = Path::From(port, gid_index);
        self
    }

    /// Checks the path that the connection manager selected for `peer`.
    pub(super) fn check_path(
        &self,
        (port, gid_index): (PortNum, u8),
        peer: Gid,
    ) -> Result<(), SetupError> {
        let (what, ours, theirs) = match self.path {
            Path::To(asked) if asked != peer => {
                ("peer GIDs of the configuration and the path", asked.to_string(), peer.to_string())
            }
            Path::From(asked, index) if (asked, index) != (port, gid_index) => {
                let name = |port, index| format!("port {port}, GID index {index}");
                (
                    "sources of the configuration and the path",
                    name(asked, index),
                    name(port, gid_index),
                )
            }
            Path::Any | Path::To(_) | Path::From(..) | Path::At(..) => return Ok(()),
        };
        Err(SetupError::Mismatch { what, ours, theirs })
    }

    /// Returns true if requests can be answered without checking their path.
    pub(super) const fn accepts_any_peer(&self) -> bool {
        matches!(self.path, Path::Any)
    }

    /// Returns resources for a connection on the device of `cache`.
    pub(super) fn resources(
        &self,
        cache: &Arc<ResourceCache>,
    ) -> Result<ConnectionResources, SetupError> {
        match &self.protection_domain {
            Some(pd) => ConnectionResources::in_domain(pd, self),
            None => cache.clone().take(self),
        }
    }

    /// Returns the settings of a connection that carries bytes instead of messages.
    pub(crate) fn with_bytes(&self) -> Self {
        Self { content: Content::Bytes, ..self.clone() }
    }

    /// Returns the connection manager's options. The handshake must fit `capacity` bytes.
    pub(super) fn cm_options(
        &self,
        capacity: usize,
    ) -> Result<cm::ConnectionOptions, HandshakeError> {
        let (len, allowed) = (self.user_data.len(), capacity - Handshake::LEN);
        if len > allowed {
            return Err(HandshakeError::UserData { len, allowed });
        }
        let handshake = self.handshake().encode_for(self.content, &self.user_data)?;
        let options = cm::ConnectionOptions::default()
            .resolve_timeout(self.connect_timeout)
            .timeout(self.connect_timeout);
        Ok(options.transport(self.options).private_data(handshake))
    }

    /// Returns what the protocol needs to know.
    /// Returns the settings of the protocol for a queue pair that takes `max_inline` bytes.
    pub(super) fn protocol(&self, max_inline: u32) -> Settings {
        Settings {
            content: self.content,
            first_receives: self.first_receives(),
            receives: self.receives(),
            grows: self.is_elastic(),
            max_message: self.max_message,
            frame: self.receive_buffer_size as usize,
            eager: self.max_eager as usize,
            inline: max_inline.min(self.max_inline) as usize,
            max_offered: self.send_memory,
            times: Times {
                keepalive: self.keepalive,
                stall: self.stall_timeout,
                first_message: self.first_message_timeout,
                shrink: self.shrink_after,
            },
        }
    }

    pub(super) fn receives(&self) -> u32 {
        self.receive_buffers.saturating_add(RESERVE)
    }

    pub(super) fn handshake(&self) -> Handshake {
        Handshake {
            buffer_size: self.receive_buffer_size,
            receives: self.receives(),
            max_message: self.max_message,
            grows: self.is_elastic(),
        }
    }

    /// Checks all settings against the limits of protocol and device.
    pub(super) fn check(&self, device: &Device) -> Result<(), SetupError> {
        let foreign = |what, of: &Device| {
            if of.same(device) { Ok(()) } else { Err(SetupError::Foreign { what }) }
        };
        self.protection_domain
            .as_ref()
            .map_or(Ok(()), |pd| foreign("protection domain", pd.device()))?;
        if let Completions::Given(queue) = &self.completions {
            foreign("completion queue", queue.device())?;
        }
        let attr = device.attr();
        let at_least = SetupError::at_least;
        at_least("receive_buffer_size", self.receive_buffer_size.into(), OFFER_LEN as u64)?;
        at_least("receive_buffers", self.receive_buffers.into(), 1)?;
        at_least("send_buffers", self.send_buffers.into(), 1)?;
        at_least("handshakes", self.handshakes.into(), 1)?;
        at_least("max_send_wr", self.max_send_wr.into(), 2)?;
        at_least("max_inline", self.max_inline.into(), OFFER_LEN as u64)?;
        // A timer below the timers' resolution would always be due and occupy the processor.
        let times = [
            ("keepalive interval in milliseconds", self.keepalive.map(|(interval, _)| interval)),
            ("keepalive timeout in milliseconds", self.keepalive.map(|(_, timeout)| timeout)),
            ("stall_timeout in milliseconds", self.stall_timeout),
            ("first_message_timeout in milliseconds", self.first_message_timeout),
            ("shrink_after in milliseconds", Some(self.shrink_after)),
        ];
        for (field, time) in times {
            let millis =
                time.map_or(u64::MAX, |time| u64::try_from(time.as_millis()).unwrap_or(u64::MAX));
            at_least(field, millis, 1)?;
        }
        LimitError::check("receive_buffer_size", self.receive_buffer_size.into(), 1 << 31)?;
        LimitError::check(
            "receive_buffers",
            self.receive_buffers.into(),
            (MAX_RECEIVES - RESERVE).into(),
        )?;
        LimitError::check("receive_buffers", self.most_receives().into(), attr.max_qp_wr.into())?;
        LimitError::check("max_send_wr", self.max_send_wr.into(), attr.max_qp_wr.into())?;
        LimitError::check("max_inline", self.max_inline.into(), attr.max_inline.into())?;
        LimitError::check("max_message", self.max_message, isize::MAX as u64)?;
        LimitError::check("spare_buffers", self.spare_buffers.into(), MAX_BUFFERS.into())?;
        LimitError::check("send_buffers", self.send_buffers.into(), MAX_BUFFERS.into())?;
        // Each pool is one registration; buffers occupy whole cache lines.
        let buffers = attr.max_mr_size / u64::from(self.receive_buffer_size).next_multiple_of(64);
        LimitError::check("receive_buffers", self.receives().into(), buffers)?;
        LimitError::check(
            "spare_buffers",
            self.spare_buffers.into(),
            buffers - u64::from(self.receives()),
        )?;
        LimitError::check("send_buffers", self.send_buffers.into(), buffers)?;
        LimitError::check(budget::FIELD, self.first_bytes(), self.budget.limit())?;
        self.options.check()?;
        Ok(())
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::connection::{Connection, EstablishError, Listener};
    use crate::software::Network;

    #[test]
    fn buffer_counts_beyond_the_pool_limits_are_refused_when_binding_and_connecting() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let device = Device::software_in(&Network::new(), "buffers").unwrap();
            let long = ConnectionConfig::default().receive_buffer_size(1 << 31);
            let buffers = device.attr().max_mr_size >> 31;
            let receives = u64::from(long.receives());
            let most = u64::from(MAX_BUFFERS);
            let cases = [
                (
                    ConnectionConfig::default().spare_buffers(MAX_BUFFERS + 1),
                    "spare_buffers",
                    most + 1,
                    most,
                ),
                (
                    ConnectionConfig::default().spare_buffers(u32::MAX),
                    "spare_buffers",
                    u32::MAX.into(),
                    most,
                ),
                (
                    ConnectionConfig::default().send_buffers(MAX_BUFFERS + 1),
                    "send_buffers",
                    most + 1,
                    most,
                ),
                (
                    ConnectionConfig::default().send_buffers(u32::MAX),
                    "send_buffers",
                    u32::MAX.into(),
                    most,
                ),
                (long.clone().spare_buffers(1 << 20), "spare_buffers", 1 << 20, buffers - receives),
                (long.spare_buffers(0).send_buffers(1 << 20), "send_buffers", 1 << 20, buffers),
            ];
            for (config, field, asked, allowed) in cases {
                let refused = EstablishError::Setup(LimitError { field, asked, allowed }.into());
                let error = Listener::bind_with(&device, "127.0.0.1:0", &config).await.unwrap_err();
                assert_eq!(error, refused);
                let error =
                    Connection::connect_with(&device, "127.0.0.1:9", &config).await.unwrap_err();
                assert_eq!(error, refused);
            }
        });
    }
}
