//! Settings of a connection.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use rdma_message_proto::flow::RESERVE;
use rdma_message_proto::frame::{MAX_RECEIVES, OFFER_LEN, TRAILER};
use rdma_message_proto::handshake::{Handshake, HandshakeError, Service};
use rdma_message_proto::protocol::Settings;
use rdma_message_proto::timers::Times;

use super::budget::{self, BufferBudget};
use super::resources::{ConnectionResources, ResourceCache};
use crate::cm;
use crate::engine::{CompletionMode, CompletionQueue};
use crate::error::{LimitError, SetupError};
use crate::op::{PathConfig, RetryConfig, Source};
use crate::types::{Gid, PortNum};
use crate::verbs::{Device, ProtectionDomain};

/// Settings of a [`Connection`](super::Connection). The two peers may use different ones: each
/// announces what it can receive.
///
/// Sizes are in bytes. [`keepalive`](Self::keepalive), [`stall_timeout`](Self::stall_timeout) and
/// [`shrink_after`](Self::shrink_after) are at least 1 ms. Unsupported values fail with
/// [`SetupError`] when a connection or listener is created.
///
/// Unless [`preallocate`](Self::preallocate) is set, a connection registers buffers when it needs
/// them and deregisters them when it is idle. Whatever the peer sends, it uses at most the
/// following memory, 6 KiB and, until it is idle, eight more receive buffers, without received
/// messages that the application keeps:
///
/// - `receive_buffer_size` × (`receive_buffers` + `spare_buffers` + 4 + `send_buffers`)
/// - `receive_memory`, or the longest message if that is more
/// - `receive_memory` again, in buffers kept for reuse while the connection is in use
///
/// While a device has a connection or listener, it also keeps the protection domains and first
/// buffers of at most eight closed connections for later connections with the same settings.
///
/// ```
/// use tokio_rdma::{CompletionMode, ConnectionConfig};
///
/// let config = ConnectionConfig::default()
///     .max_message(1 << 20)
///     .receive_buffers(16)
///     .mode(CompletionMode::Hybrid)
///     .user_data("client 7");
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
    #[cfg(test)]
    pub(super) like_iwarp: bool,
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
    pub(super) retries: RetryConfig,
    pub(super) completions: Completions,
    pub(super) connect_timeout: Duration,
    pub(super) user_data: Bytes,
    pub(super) protection_domain: Option<ProtectionDomain>,
    pub(super) source: Source,
    pub(super) path: PathConfig,
    pub(super) service: Service,
}

const MAX_BUFFERS: u32 = 1 << 20;

#[derive(Debug, Clone)]
pub(super) enum Completions {
    Mode(CompletionMode),
    Given(CompletionQueue),
}

/// Refuses a timer below the timers' resolution: it would always be due and occupy the processor.
pub(super) fn check_time(field: &'static str, time: Option<Duration>) -> Result<(), SetupError> {
    let millis = time.map_or(u64::MAX, |time| u64::try_from(time.as_millis()).unwrap_or(u64::MAX));
    SetupError::at_least(field, millis, 1)
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
            #[cfg(test)]
            like_iwarp: false,
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
            retries: RetryConfig::default(),
            completions: Completions::Mode(CompletionMode::default()),
            connect_timeout: Duration::from_secs(15),
            user_data: Bytes::new(),
            protection_domain: None,
            source: Source::Any,
            path: PathConfig::default(),
            service: Service::Messages,
        }
    }
}

impl ConnectionConfig {
    /// Returns the default settings of byte streams: 24 receive buffers of 32 KiB, 8 spare and 16
    /// send buffers, 1.7 MiB in all when in use. [`max_message`](Self::max_message) limits only the
    /// pieces that the peer reads from memory.
    pub fn for_streams() -> Self {
        Self::default()
            .receive_buffer_size(32 << 10)
            .receive_buffers(24)
            .spare_buffers(8)
            .send_buffers(16)
    }

    /// Sets the size of each receive buffer; default 16 KiB. Buffers are shorter while the
    /// connection is idle, or if the [budget](Self::budget) or the device refuses this size.
    pub fn receive_buffer_size(mut self, bytes: u32) -> Self {
        self.receive_buffer_size = bytes;
        self
    }

    /// Sets how many messages the peer may have in flight before the application receives any;
    /// default 64: 32 in flight each way plus the delay of credit updates. The peer may send one
    /// more. Four further receives are for control frames.
    pub fn receive_buffers(mut self, buffers: u32) -> Self {
        self.receive_buffers = buffers;
        self
    }

    /// Sets how many received messages the application may hold without a copy; default 32, at most
    /// 1,048,576. Further messages are copied, so that they never block the peer. A connection with
    /// a part of its receive buffers has spare ones in proportion. All must fit one registration
    /// (`DeviceAttr::max_mr_size`).
    pub fn spare_buffers(mut self, buffers: u32) -> Self {
        self.spare_buffers = buffers;
        self
    }

    /// Sets how many copied messages longer than `max_inline` may be in flight; default 64, at most
    /// 1,048,576, in one registration (`DeviceAttr::max_mr_size`).
    pub fn send_buffers(mut self, buffers: u32) -> Self {
        self.send_buffers = buffers;
        self
    }

    /// Sets the capacity of the send queue in work requests, including one-sided operations;
    /// default 128. Further work requests are queued.
    pub fn max_send_wr(mut self, work_requests: u32) -> Self {
        self.max_send_wr = work_requests;
        self
    }

    /// Sets the longest message that is copied into its work request; default 64, which all devices
    /// support; at least 20. Larger values increase the queue's memory.
    pub fn max_inline(mut self, bytes: u32) -> Self {
        self.max_inline = bytes;
        self
    }

    /// Sets the longest message that `send` copies; default 64 KiB. The peer reads longer ones from
    /// their memory, with more system calls. A copied message longer than the peer's
    /// `receive_buffer_size` takes several buffers, at most three quarters of those of either peer,
    /// and the receiver copies it again.
    pub fn max_eager(mut self, bytes: u32) -> Self {
        self.max_eager = bytes;
        self
    }

    /// Registers all buffers when connecting and keeps them; default false. Otherwise a connection
    /// starts without send buffers and with receives for four messages of 384 bytes, unless
    /// `receive_buffer_size` is at most 384.
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

    /// Sets how often the connection checks for idle buffers; default 5 s. If no message was sent
    /// or received since the last check, it deregisters the buffers beyond its first ones.
    pub fn shrink_after(mut self, time: Duration) -> Self {
        self.shrink_after = time;
        self
    }

    /// Sets the longest accepted message; default 64 MiB. The peer can make this process allocate
    /// that much. With 0, only empty messages are accepted. The peer's `send` refuses longer
    /// messages; sending one anyway is a [`Violation`](super::Violation).
    pub fn max_message(mut self, bytes: u64) -> Self {
        self.max_message = bytes;
        self
    }

    /// Sets the memory for long messages that the application has not received yet; default 16 MiB,
    /// which fits processor caches. One message is always fetched; others wait at the sender.
    /// Choose no more than the device fetches within the `timeout` of the
    /// [`keepalive`](Self::keepalive), whose answers queue behind fetches.
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

    /// Sends a `Ping` if no frame has arrived from the peer for `interval`, and closes the
    /// connection with [`CloseReason::Silent`](super::CloseReason::Silent) after another `timeout`.
    /// Default 5 s and 10 s; `None` disables it. The peer's driver answers, so this detects a stuck
    /// runtime, whereas retransmission detects a lost device within seconds. The first `Ping` may
    /// be late by another `interval`.
    ///
    /// The answer queues behind READs, WRITEs and fetched messages of the peer's application. If
    /// these may take longer than `timeout`, raise it, or reduce the operations in flight or
    /// [`receive_memory`](Self::receive_memory).
    pub fn keepalive(mut self, times: Option<(Duration, Duration)>) -> Self {
        self.keepalive = times;
        self
    }

    /// Closes the connection with [`CloseReason::Stalled`](super::CloseReason::Stalled) if a `send`
    /// has waited this long while the peer accepted nothing; disabled by default, because slow
    /// peers are legitimate.
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

    /// Sets the timeouts and retries of the queue pair; see [`RetryConfig`] for defaults.
    pub fn retries(mut self, retries: RetryConfig) -> Self {
        self.retries = retries;
        self
    }

    /// Sets the path of this side's packets, for example their traffic class; see [`PathConfig`]
    /// for defaults.
    pub fn path(mut self, path: PathConfig) -> Self {
        self.path = path;
        self
    }

    /// Sets how shared completion queues are polled; by events unless set. With events there are
    /// two, for sends and receives, otherwise one. Connections of the same runtime (or worker
    /// thread of a multi-threaded one), device and mode share them.
    pub fn mode(mut self, mode: CompletionMode) -> Self {
        self.completions = Completions::Mode(mode);
        self
    }

    /// Uses `queue` instead of the shared completion queues, for example one with its own interrupt
    /// vector. Each connection needs `max_send_wr` + `receive_buffers` + 12 entries.
    pub fn completion_queue(mut self, queue: &CompletionQueue) -> Self {
        self.completions = Completions::Given(queue.clone());
        self
    }

    /// Sets the timeout for resolving the peer, and that for the handshake, per address; default 15
    /// s, because the kernel retransmits after 4.3 s.
    pub fn connect_timeout(mut self, timeout: Duration) -> Self {
        self.connect_timeout = timeout;
        self
    }

    /// Sets bytes for the peer's [`Connection::user_data`](super::Connection::user_data); default
    /// empty. At most 32 bytes when connecting, 172 when accepting.
    pub fn user_data(mut self, data: impl Into<Bytes>) -> Self {
        self.user_data = data.into();
        self
    }

    /// Creates the queue pair in this protection domain. By default each connection has its own, so
    /// memory exposed to one peer is inaccessible to others, and buffers cannot move between
    /// connections.
    pub fn protection_domain(mut self, pd: &ProtectionDomain) -> Self {
        self.protection_domain = Some(pd.clone());
        self
    }

    /// Selects the port and GID that reach this peer, as
    /// [`QueuePairBuilder::peer`](crate::op::QueuePairBuilder::peer) does; default
    /// [`Device::default_path`]. The last call of this or [`source`](Self::source) counts.
    ///
    /// This is for [`Connection::prepare`](super::Connection::prepare). By address, the connection
    /// manager selects the path: other peers fail with [`SetupError::Mismatch`], or are rejected by
    /// a listener.
    pub fn peer(mut self, peer: impl Into<Gid>) -> Self {
        self.source = Source::To(peer.into());
        self
    }

    /// Sends from this entry of this port's GID table, with the same restrictions as
    /// [`peer`](Self::peer).
    pub fn source(mut self, port: PortNum, gid_index: u8) -> Self {
        self.source = Source::From(port, gid_index);
        self
    }

    pub(super) fn check_path(
        &self,
        (port, gid_index): (PortNum, u8),
        peer: Gid,
    ) -> Result<(), SetupError> {
        let (what, ours, theirs) = match self.source {
            Source::To(asked) if asked != peer => {
                ("peer GIDs of the configuration and the path", asked.to_string(), peer.to_string())
            }
            Source::From(asked, index) if (asked, index) != (port, gid_index) => {
                let name = |port, index| format!("port {port}, GID index {index}");
                (
                    "sources of the configuration and the path",
                    name(asked, index),
                    name(port, gid_index),
                )
            }
            Source::Any | Source::To(_) | Source::From(..) | Source::At(..) => return Ok(()),
        };
        Err(SetupError::Mismatch { what, ours, theirs })
    }

    pub(super) const fn accepts_any_peer(&self) -> bool {
        matches!(self.source, Source::Any) && !self.path.names_partition()
    }

    pub(super) fn resources(
        &self,
        cache: &Arc<ResourceCache>,
    ) -> Result<ConnectionResources, SetupError> {
        match &self.protection_domain {
            Some(pd) => ConnectionResources::in_domain(pd, self),
            None => cache.clone().take(self),
        }
    }

    pub(crate) fn with_bytes(&self) -> Self {
        Self { service: Service::Bytes, ..self.clone() }
    }

    /// Leaves `capacity` bytes for the handshake.
    pub(super) fn cm_config(&self, capacity: usize) -> Result<cm::ConnectConfig, HandshakeError> {
        let (len, allowed) = (self.user_data.len(), capacity - Handshake::LEN);
        if len > allowed {
            return Err(HandshakeError::UserData { len, allowed });
        }
        let handshake = self.handshake().encode_for(self.service, &self.user_data)?;
        let cm = cm::ConnectConfig::default()
            .resolve_timeout(self.connect_timeout)
            .timeout(self.connect_timeout);
        Ok(cm.retries(self.retries).private_data(handshake))
    }

    /// For a queue pair that takes `max_inline` bytes, of which frames end with `trailer` bytes of
    /// header.
    pub(super) fn protocol(&self, max_inline: u32, trailer: usize) -> Settings {
        Settings {
            service: self.service,
            first_receives: self.first_receives(),
            receives: self.receives(),
            grows: self.is_elastic(),
            max_message: self.max_message,
            frame: self.receive_buffer_size as usize,
            eager: self.max_eager as usize,
            inline: (max_inline.min(self.max_inline) as usize).saturating_sub(trailer),
            max_offered: self.send_memory,
            trailer,
            times: Times {
                keepalive: self.keepalive,
                stall: self.stall_timeout,
                first_message: None,
                shrink: self.shrink_after,
            },
        }
    }

    /// The length of a header at the end of each frame: 0 if headers are immediate data. All iWARP
    /// devices agree, even those that have immediate data.
    pub(super) fn trailer(&self, device: &Device) -> usize {
        if self.is_iwarp(device) { TRAILER } else { 0 }
    }

    /// If true, frames end with their header, and the connecting side sends the first one.
    pub(super) fn is_iwarp(&self, device: &Device) -> bool {
        #[cfg(test)]
        if self.like_iwarp {
            return true;
        }
        device.attr().is_iwarp()
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
        let least = (OFFER_LEN + self.trailer(device)) as u64;
        at_least("receive_buffer_size", self.receive_buffer_size.into(), least)?;
        at_least("receive_buffers", self.receive_buffers.into(), 1)?;
        at_least("send_buffers", self.send_buffers.into(), 1)?;
        at_least("max_send_wr", self.max_send_wr.into(), 2)?;
        at_least("max_inline", self.max_inline.into(), least)?;
        check_time("keepalive interval in milliseconds", self.keepalive.map(|(every, _)| every))?;
        check_time("keepalive timeout in milliseconds", self.keepalive.map(|(_, within)| within))?;
        check_time("stall_timeout in milliseconds", self.stall_timeout)?;
        check_time("shrink_after in milliseconds", Some(self.shrink_after))?;
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
        self.retries.check()?;
        self.path.check_on(device)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::connection::{Connection, EstablishError, Listener};
    use crate::software::Network;
    use crate::stream::{RdmaListener, RdmaStream};

    fn run(test: impl AsyncFnOnce(Device)) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(test(Device::software_in(&Network::new(), "config").unwrap()));
    }

    #[test]
    fn connections_and_streams_have_the_path_of_their_own_settings() {
        run(async |device| {
            let at = "127.0.0.1:0";
            let with =
                |dscp| ConnectionConfig::for_streams().path(PathConfig::default().dscp(dscp));
            let (ours, theirs) = (with(26), with(46));
            let class = |qp: &crate::QueuePair| {
                let address = qp.query().unwrap().1.address.unwrap();
                (address.traffic_class, address.hop_limit)
            };

            let listener = Listener::bind_with(&device, at, &theirs).await.unwrap();
            let to = listener.local_addr().unwrap();
            let connecting = Connection::connect_with(&device, to, &ours);
            let (active, passive) = tokio::try_join!(connecting, listener.accept()).unwrap();
            assert_eq!((class(active.qp()), class(passive.qp())), ((104, 64), (184, 64)));

            let listener = RdmaListener::bind_with(&device, at, &theirs).await.unwrap();
            let to = listener.local_addr().unwrap();
            let connecting = RdmaStream::connect_with(&device, to, &ours);
            let accepting = async { Ok(listener.accept().await.unwrap().0) };
            let (active, passive) = tokio::try_join!(connecting, accepting).unwrap();
            let class = |stream: &RdmaStream| class(&stream.handle().shared.qp);
            assert_eq!((class(&active), class(&passive)), ((104, 64), (184, 64)));
        });
    }

    #[test]
    fn accepted_connections_join_the_partition_of_the_client() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let network = Network::new();
            let open = |name, pkeys: &[u16]| {
                let device = Device::software_in(&network, name).unwrap();
                network.control(name).unwrap().set_pkeys(pkeys);
                device
            };
            let client = open("client", &[0xffff, 0x8001, 0x8002]);
            let server = open("server", &[0xffff, 0x8003, 0x8001]);
            let at = (server.default_path().unwrap().1.gid.to_ip(), 0);
            let listener = Listener::bind(&server, at).await.unwrap();
            let to = listener.local_addr().unwrap();
            let with = |pkey| ConnectionConfig::default().path(PathConfig::default().pkey(pkey));

            let ours = with(0x8001);
            let connecting = Connection::connect_with(&client, to, &ours);
            let (active, passive) = tokio::try_join!(connecting, listener.accept()).unwrap();
            let index = |connection: &Connection| connection.qp().query().unwrap().1.pkey_index;
            assert_eq!((index(&active), index(&passive)), (Some(1), Some(2)));
            active.send("hello").await.unwrap();
            assert_eq!(passive.recv().await.unwrap().as_deref(), Some(&b"hello"[..]));

            let refused = Connection::connect_with(&client, to, &with(0x8002)).await.unwrap_err();
            assert!(refused.to_string().contains("unsupported request"), "{refused}");
            // A listener with a partition of its own rejects others instead of answering first.
            let own = Listener::bind_with(&server, at, with(0x8003)).await.unwrap();
            let connecting = Connection::connect_with(&client, own.local_addr().unwrap(), &ours);
            assert!(connecting.await.is_err());
            let refused = Connection::connect_with(&client, to, &with(0x8003)).await.unwrap_err();
            assert!(refused.to_string().contains("lacks the partition"), "{refused}");
            let bound = Listener::bind_with(&server, at, with(0x8002)).await.unwrap_err();
            assert!(bound.to_string().contains("lacks the partition"), "{bound}");
        });
    }

    #[test]
    fn path_out_of_range_is_refused_when_binding_and_connecting() {
        run(async |device| {
            let config = ConnectionConfig::default().path(PathConfig::default().dscp(64));
            let limit = LimitError { field: "dscp", asked: 64, allowed: 63 };
            let refused = EstablishError::Setup(limit.into());
            let bound = Listener::bind_with(&device, "127.0.0.1:0", &config).await;
            assert_eq!(bound.unwrap_err(), refused);
            let connected = Connection::connect_with(&device, "127.0.0.1:9", &config).await;
            assert_eq!(connected.unwrap_err(), refused);
        });
    }

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
