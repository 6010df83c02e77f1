//! Settings of a connection, with the reasons of their defaults.

use std::time::Duration;

use bytes::Bytes;

use super::flow_control::RESERVE;
use super::frame::{MAX_RECEIVES, OFFER_LEN};
use super::handshake::{Handshake, HandshakeError};
use crate::cm;
use crate::engine::{CompletionMode, CompletionQueue};
use crate::error::{LimitError, SetupError};
use crate::op::{ConnectOptions, Path};
use crate::types::{Gid, PortNum};
use crate::verbs::{Device, ProtectionDomain};

/// Settings of a [`Connection`](super::Connection). The two ends need not agree: each tells the other what it can receive.
///
/// What a connection takes, whatever its peer does: `receive_buffer_size` × (`receive_buffers` + `spare_buffers` + 4 +
/// `send_buffers`), `receive_memory` or the longest message if that is more, and as much as `receive_memory` in buffers kept
/// for reuse. Messages that were received belong to whoever received them.
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
    pub(super) max_connections: u32,
    pub(super) max_connections_per_source: u32,
    pub(super) first_message_timeout: Option<Duration>,
    pub(super) user_data: Bytes,
    pub(super) protection_domain: Option<ProtectionDomain>,
    pub(super) path: Path,
}

/// Maximum of [`ConnectionConfig::spare_buffers`] and of [`ConnectionConfig::send_buffers`].
const MAX_BUFFERS: u32 = 1 << 20;

/// Where completions arrive.
#[derive(Debug, Clone)]
pub(super) enum Completions {
    /// In a queue of the connection's own.
    Own(CompletionMode),
    /// In one that others use too.
    Shared(CompletionQueue),
}

impl Default for ConnectionConfig {
    fn default() -> Self {
        Self {
            receive_buffer_size: 8192,
            receive_buffers: 64,
            spare_buffers: 32,
            send_buffers: 64,
            max_send_wr: 128,
            max_inline: 64,
            max_message: 64 << 20,
            receive_memory: 16 << 20,
            send_memory: 64 << 20,
            keepalive: Some((Duration::from_secs(5), Duration::from_secs(10))),
            stall_timeout: None,
            close_timeout: Duration::from_secs(10),
            options: ConnectOptions::default(),
            completions: Completions::Own(CompletionMode::default()),
            connect_timeout: Duration::from_secs(15),
            handshakes: 32,
            max_connections: 4096,
            max_connections_per_source: 1024,
            first_message_timeout: None,
            user_data: Bytes::new(),
            protection_domain: None,
            path: Path::Any,
        }
    }
}

impl ConnectionConfig {
    /// Bytes of each receive buffer; 8192 unless set. Messages up to this length are sent at once, into a buffer; longer
    /// ones cost one more message and a READ, and no copy. At 8 KiB copying takes about as long as that.
    pub fn receive_buffer_size(mut self, bytes: u32) -> Self {
        self.receive_buffer_size = bytes;
        self
    }

    /// Messages that the peer may send before the service has received any; 64 unless set: enough for 32 each way
    /// and the time that news of free buffers takes. Four more receives are posted for the connection's own use.
    pub fn receive_buffers(mut self, buffers: u32) -> Self {
        self.receive_buffers = buffers;
        self
    }

    /// Received messages that the service may keep without a copy; 32 unless set. If it keeps more, the next ones are
    /// copied out of their buffer, so that a service that keeps messages for ever costs itself memory and nobody a wait. At most
    /// 1,048,576, and as many as the device registers at once with the other receive buffers (`DeviceAttr::max_mr_size`).
    pub fn spare_buffers(mut self, buffers: u32) -> Self {
        self.spare_buffers = buffers;
        self
    }

    /// Messages longer than `max_inline` that are copied and on their way; 64 unless set, as many as a peer with default
    /// settings takes at once. At most 1,048,576, and as many as the device registers at once (`DeviceAttr::max_mr_size`).
    pub fn send_buffers(mut self, buffers: u32) -> Self {
        self.send_buffers = buffers;
        self
    }

    /// Work requests that the send queue holds, the service's own operations included; 128 unless set: all messages to
    /// a peer with default settings, and as much again. More wait for room.
    pub fn max_send_wr(mut self, work_requests: u32) -> Self {
        self.max_send_wr = work_requests;
        self
    }

    /// Longest message that travels within its work request, in bytes; 64 unless set, which all devices have, and from
    /// which on the queue's memory grows. At least 20.
    pub fn max_inline(mut self, bytes: u32) -> Self {
        self.max_inline = bytes;
        self
    }

    /// Longest message that is received; 64 MiB unless set. A peer can make this end set aside as much memory. The limit holds
    /// for short messages, too: it may be below [`receive_buffer_size`](Self::receive_buffer_size), and with 0 only empty
    /// messages are received. The peer learns it when it connects, and its `send` refuses longer ones; a peer that sends one all
    /// the same ends the connection as a [`Violation`](super::Violation).
    pub fn max_message(mut self, bytes: u64) -> Self {
        self.max_message = bytes;
        self
    }

    /// Memory for long messages that were not received by the service yet; 16 MiB unless set: some messages ahead, and what is
    /// used again and again stays in the processor's cache. One message is fetched in any case, others wait at their sender.
    /// What the peer's [`keepalive`](Self::keepalive) asks for waits for what is being fetched: not more than the device fetches in
    /// that time.
    pub fn receive_memory(mut self, bytes: u64) -> Self {
        self.receive_memory = bytes;
        self
    }

    /// Bytes of long messages that the peer has not fetched yet, before `send` waits; 64 MiB unless set. One message is
    /// offered in any case.
    pub fn send_memory(mut self, bytes: u64) -> Self {
        self.send_memory = bytes;
        self
    }

    /// Asks the peer to answer when nothing was heard of it for `interval`, and ends the connection as
    /// [`CloseReason::Silent`](super::CloseReason::Silent) if nothing is heard for `timeout` after that; 5 s and 10 s unless
    /// set. The peer's end answers by itself, so only a peer whose runtime makes no progress for so long is taken for dead;
    /// one whose device is gone is noticed by its retries, in seconds. `None`: never; neither can be less than 1 ms.
    ///
    /// Its answer stands in line behind the READs and WRITEs that the peer's service has in flight on the connection, and behind the
    /// messages that it fetches. Whose device may take longer than `timeout` for all of these, and for
    /// [`receive_memory`](Self::receive_memory), has fewer in flight, or its peer a longer `timeout`.
    pub fn keepalive(mut self, times: Option<(Duration, Duration)>) -> Self {
        self.keepalive = times;
        self
    }

    /// Ends the connection as [`CloseReason::Stalled`](super::CloseReason::Stalled) if a `send` has waited for so long and
    /// the peer took nothing meanwhile; never unless set, for a peer may be slow for good reasons. A single `send` can be put
    /// under a timeout instead. At least 1 ms.
    pub fn stall_timeout(mut self, timeout: Option<Duration>) -> Self {
        self.stall_timeout = timeout;
        self
    }

    /// Time that `close` waits for the peer; 10 s unless set: above what retries take to find out that it is dead.
    pub fn close_timeout(mut self, timeout: Duration) -> Self {
        self.close_timeout = timeout;
        self
    }

    /// Timeouts and retries of the queue pair; see [`ConnectOptions`] for their defaults.
    pub fn options(mut self, options: ConnectOptions) -> Self {
        self.options = options;
        self
    }

    /// How the connection's own completion queue is watched; by events unless set.
    pub fn mode(mut self, mode: CompletionMode) -> Self {
        self.completions = Completions::Own(mode);
        self
    }

    /// Uses this completion queue, which other connections may use too, instead of one of its own. It needs room for
    /// `max_send_wr` + `receive_buffers` + 4 completions. Many connections on one queue share its channel and interrupts.
    pub fn completion_queue(mut self, queue: &CompletionQueue) -> Self {
        self.completions = Completions::Shared(queue.clone());
        self
    }

    /// Time for finding the peer and for the handshake, each, and for each of its addresses that is tried; 15 s unless set:
    /// the kernel's manager repeats a lost message after 4.3 s.
    pub fn connect_timeout(mut self, timeout: Duration) -> Self {
        self.connect_timeout = timeout;
        self
    }

    /// Handshakes that a [`Listener`](super::Listener) makes at once; 32 unless set. At least 1: 0 is refused. If there are as many and
    /// another peer asks, the oldest handshake of the source address with the most of them gives way: its peer is rejected.
    ///
    /// On the software device a handshake holds a connection's buffers only after its peer has confirmed the answer, and ends
    /// at once then. On other devices the peer confirms later: each handshake holds a connection's buffers meanwhile, for up to
    /// [`connect_timeout`](Self::connect_timeout) if its peer falls silent and does not give way.
    pub fn handshakes(mut self, handshakes: u32) -> Self {
        self.handshakes = handshakes;
        self
    }

    /// Connections that a [`Listener`](super::Listener) has open at once, in all; 4,096 unless set, which is 5.3 GiB with the
    /// other settings as they are. A connection counts until both ends have ended it and its handles are dropped. Peers
    /// beyond the limit are rejected as [`Refusal::ListenerFull`](super::Refusal::ListenerFull), and counted in
    /// [`ListenerStats`](super::ListenerStats). Peers that ask at the same time may all be answered while there is one place: those
    /// beyond the limit end as [`CloseReason::Refused`](super::CloseReason::Refused) then, when the service accepts, and the service
    /// sees nothing of them.
    pub fn max_connections(mut self, connections: u32) -> Self {
        self.max_connections = connections;
        self
    }

    /// Connections that a [`Listener`](super::Listener) has open at once from one source address; 1,024 unless set. Peers
    /// beyond the limit are rejected as [`Refusal::SourceFull`](super::Refusal::SourceFull), or end as
    /// [`CloseReason::Refused`](super::CloseReason::Refused), as with [`max_connections`](Self::max_connections).
    pub fn max_connections_per_source(mut self, connections: u32) -> Self {
        self.max_connections_per_source = connections;
        self
    }

    /// Ends the connection as [`CloseReason::NoFirstMessage`](super::CloseReason::NoFirstMessage) if no message of the peer has
    /// arrived for so long after it was made; never unless set. A service whose peers speak first sets it: a peer that
    /// connects and sends nothing holds the buffers of a connection no longer than that. An announcement of a long message
    /// counts as its arrival. At least 1 ms.
    pub fn first_message_timeout(mut self, timeout: Option<Duration>) -> Self {
        self.first_message_timeout = timeout;
        self
    }

    /// Bytes for the peer's service, which finds them in [`Connection::user_data`](super::Connection::user_data); none unless
    /// set. At most 32 with a request to connect, 172 with the answer.
    pub fn user_data(mut self, data: impl Into<Bytes>) -> Self {
        self.user_data = data.into();
        self
    }

    /// Makes the queue pair in this protection domain. Unless set, each connection has one of its own, so that what is
    /// exposed to one peer is out of reach for all others; and so that buffers of one connection are no use for another.
    pub fn protection_domain(mut self, pd: &ProtectionDomain) -> Self {
        self.protection_domain = Some(pd.clone());
        self
    }

    /// Chooses port and GID to reach this peer, for [`Connection::prepare`](super::Connection::prepare): as
    /// [`QueuePairBuilder::peer`](crate::op::QueuePairBuilder::peer) does. Unless this or [`source`](Self::source) is set they are those
    /// of [`Device::default_path`]. The last one set counts.
    ///
    /// By address, the connection manager chooses them. There, this is the only peer to connect to, or to accept: any other is
    /// [`SetupError::Mismatch`], and a listener rejects it.
    pub fn peer(mut self, peer: impl Into<Gid>) -> Self {
        self.path = Path::To(peer.into());
        self
    }

    /// Sends from this entry of this port's GID table, for [`Connection::prepare`](super::Connection::prepare): as
    /// [`QueuePairBuilder::source`](crate::op::QueuePairBuilder::source) does. The last of this and [`peer`](Self::peer) counts.
    ///
    /// By address, the connection manager chooses them. There, any other choice is [`SetupError::Mismatch`], and a listener
    /// rejects the peer.
    pub fn source(mut self, port: PortNum, gid_index: u8) -> Self {
        self.path = Path::From(port, gid_index);
        self
    }

    /// Checks that port and GID index, by which the connection manager reaches `peer`, are what was asked for.
    pub(super) fn check_path(
        &self,
        (port, gid_index): (PortNum, u8),
        peer: Gid,
    ) -> Result<(), SetupError> {
        let (what, ours, theirs) = match self.path {
            Path::To(asked) if asked != peer => ("peer", asked.to_string(), peer.to_string()),
            Path::From(asked, index) if (asked, index) != (port, gid_index) => {
                let name = |port, index| format!("port {port}, GID index {index}");
                ("source", name(asked, index), name(port, gid_index))
            }
            Path::Any | Path::To(_) | Path::From(..) => return Ok(()),
        };
        Err(SetupError::Mismatch { what, ours, theirs })
    }

    /// True if peers need not be looked at before they are answered.
    pub(super) const fn answers_all(&self) -> bool {
        matches!(self.path, Path::Any)
    }

    /// Where to make the queue pair.
    pub(super) fn domain(&self, device: &Device) -> Result<ProtectionDomain, SetupError> {
        self.check(device)?;
        match &self.protection_domain {
            Some(pd) => Ok(pd.clone()),
            None => Ok(device.protection_domain()?),
        }
    }

    /// What the connection manager is told, and tells the peer: with a request or an answer, which has so much `room`.
    pub(super) fn cm_options(&self, room: usize) -> Result<cm::Options, HandshakeError> {
        let (len, allowed) = (self.user_data.len(), room - Handshake::LEN);
        if len > allowed {
            return Err(HandshakeError::UserData { len, allowed });
        }
        let handshake = self.handshake().encode(&self.user_data)?;
        let options = cm::Options::default()
            .resolve_timeout(self.connect_timeout)
            .timeout(self.connect_timeout);
        Ok(options.transport(self.options).private_data(handshake))
    }

    /// Receives that are posted.
    pub(super) fn receives(&self) -> u32 {
        self.receive_buffers.saturating_add(RESERVE)
    }

    /// What the peer is told.
    pub(super) fn handshake(&self) -> Handshake {
        Handshake {
            buffer_size: self.receive_buffer_size,
            receives: self.receives(),
            max_message: self.max_message,
        }
    }

    /// Checks that all of it is possible, and possible on this device.
    pub(super) fn check(&self, device: &Device) -> Result<(), SetupError> {
        let foreign = |what, of: &Device| {
            if of.same(device) { Ok(()) } else { Err(SetupError::Foreign { what }) }
        };
        self.protection_domain
            .as_ref()
            .map_or(Ok(()), |pd| foreign("protection domain", pd.device()))?;
        if let Completions::Shared(queue) = &self.completions {
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
        // Timers tick in milliseconds; one that is always due would never let go of its processor.
        let times = [
            ("keepalive interval in milliseconds", self.keepalive.map(|(interval, _)| interval)),
            ("keepalive timeout in milliseconds", self.keepalive.map(|(_, timeout)| timeout)),
            ("stall_timeout in milliseconds", self.stall_timeout),
            ("first_message_timeout in milliseconds", self.first_message_timeout),
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
        LimitError::check("receive_buffers", self.receives().into(), attr.max_qp_wr.into())?;
        LimitError::check("max_send_wr", self.max_send_wr.into(), attr.max_qp_wr.into())?;
        LimitError::check("max_inline", self.max_inline.into(), attr.max_inline.into())?;
        LimitError::check("max_message", self.max_message, isize::MAX as u64)?;
        LimitError::check("spare_buffers", self.spare_buffers.into(), MAX_BUFFERS.into())?;
        LimitError::check("send_buffers", self.send_buffers.into(), MAX_BUFFERS.into())?;
        // Each pool is one registration, in which a buffer takes whole cache lines.
        let buffers = attr.max_mr_size / u64::from(self.receive_buffer_size).next_multiple_of(64);
        LimitError::check("receive_buffers", self.receives().into(), buffers)?;
        LimitError::check(
            "spare_buffers",
            self.spare_buffers.into(),
            buffers - u64::from(self.receives()),
        )?;
        LimitError::check("send_buffers", self.send_buffers.into(), buffers)?;
        self.options.check()?;
        Ok(())
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::message::{Connection, EstablishError, Listener};
    use crate::software::Network;

    #[test]
    fn buffers_that_no_pool_can_have_are_refused_by_name_at_both_ends() {
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
