//! The contract of a provider's connection manager.
//!
//! The manager only exchanges messages; it neither owns nor changes queue pairs. The caller creates
//! the queue pair on the [device, port and GID](CmRoute) that the manager names, reports its
//! number, and applies the manager's [attributes](CmId::qp_attr). So queue pairs belong to a
//! context that the caller opened.
//!
//! ```text
//!  active                                              passive
//!  create_id                                           create_id, bind, listen
//!  resolve_addr   ──▶ AddressResolved (or at once RouteResolved)
//!  resolve_route  ──▶ RouteResolved
//!  route; queue pair to INIT
//!  connect                                    REQ ──▶  ConnectRequest { id } : queue pair to INIT,
//!                                                      qp_attr(Rtr), qp_attr(Rts), modify
//!                 ──▶ ConnectResponse     ◀── REP      accept
//!  qp_attr(Rtr), qp_attr(Rts), modify
//!  establish                                  RTU ──▶  Established
//!  disconnect                                DREQ ──▶  Disconnected
//!                 ──▶ Disconnected        ◀── DREP
//!                 ──▶ TimewaitExit                     TimewaitExit
//! ```
//!
//! Names and semantics follow librdmacm for ids without a queue pair; the text here defines what
//! its manual pages leave open. Ids of port space TCP make connections. Ids of port space UDP find
//! the queue pair that serves datagrams at an address (SIDR), or join multicast groups:
//!
//! ```text
//!  active                                              passive
//!  create_datagram_id                                  create_datagram_id, bind, listen
//!  resolve_addr, resolve_route, as above
//!  connect                               SIDR_REQ ──▶  ConnectRequest { id }
//!                 ──▶ ServiceFound      ◀── SIDR_REP   accept
//! ```
//!
//! The peer repeats a SIDR_REQ whose answer was lost, which is another connect request.
//!
//! # iWARP
//!
//! The manager of an iWARP device moves the queue pair itself, and there are only two messages. The
//! caller passes its number and does not modify it:
//!
//! - [`CmId::connect`] opens a TCP connection, which blocks. The queue pair is in RTS when
//!   [`ConnectResponse`](CmEventKind::ConnectResponse) arrives, and [`CmId::establish`] has nothing
//!   to send.
//! - [`CmId::accept`] moves the queue pair to RTS before the answer is sent.
//! - The caller then calls [`Qp::connected`](crate::contract::Qp::connected).
//! - Private data is not padded. There is no TIMEWAIT:
//!   [`TimewaitExit`](CmEventKind::TimewaitExit) follows `Disconnected` at once.
//! - The listener's side should send only after the first message of the peer has arrived
//!   (RFC 5044, 7.1.3), which is left to the application. siw does not depend on it.
//!
//! # Blocking
//!
//! Most calls are as short as a verb and wait for no peer. Three kinds of calls may take longer;
//! the layer above runs them on a blocking thread:
//!
//! - [`CmId::bind`], [`CmId::listen`] and `Drop` of a listener or an unanswered connect request, if
//!   [`CmChannel::may_block`] returns true;
//! - [`CmId::resolve_route`], if [`CmId::route_may_block`] returns true;
//! - [`CmId::connect`], if [`CmId::connect_may_block`] returns true.

use std::borrow::Cow;
use std::fmt::Debug;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

use super::contract::Provider;
use crate::error::VerbError;
use crate::types::{AddressVector, Gid, Mtu, PortNum, Qkey, QpAttr, QpState, Qpn, RejectReason};

/// An event channel, `rdma_create_event_channel(3)`. Ids keep what they need of it alive.
pub trait CmChannel<P: Provider>: Debug + Send + Sync {
    /// Returns a non-blocking descriptor, readable while events are pending. It need not report
    /// events raised by a call that fails: the caller takes them.
    fn fd(&self) -> BorrowedFd<'_>;

    /// Returns true if calls on listeners and unanswered requests may block; see the
    /// [module](self).
    fn may_block(&self) -> bool;

    /// Identifies the ports used by [`CmId::bind`] while an id of the channel exists. Ids with
    /// equal values compete for addresses; 0 is the process's network namespace.
    fn port_space(&self) -> usize;

    /// Returns the next event, `rdma_get_cm_event(3)`, copied and acknowledged; `None` if none is
    /// pending.
    ///
    /// Events of one id are in order, and its connect request is the first. The layer above
    /// serialises calls by a lock.
    fn take_event(&self) -> Result<Option<CmEvent<P>>, VerbError>;

    /// Returns true if no event is pending; false if one is, or if the provider cannot tell. Costs
    /// less than a [`take_event`](Self::take_event) that finds nothing.
    fn is_empty(&self) -> bool {
        false
    }

    /// Creates an unbound id that reports to this channel, `rdma_create_id(3)`.
    fn create_id(&self) -> Result<P::CmId, VerbError>;

    /// Creates such an id for datagrams (port space UDP).
    fn create_datagram_id(&self) -> Result<P::CmId, VerbError>;
}

/// A listener or connection, `struct rdma_cm_id`.
///
/// `Drop` is `rdma_destroy_id(3)`, which the peer sees:
///
/// - An unanswered request, or an unconfirmed answer, is rejected.
/// - A connection is disconnected as by [`disconnect`](Self::disconnect).
/// - Pending connect requests of a listener are rejected, at the latest when taken and dropped.
///
/// Events raised before may still be taken, under a [key](Self::key) that no longer names an id.
pub trait CmId: Debug + Send + Sync {
    /// Returns the key of the id's events: constant, and never reused in the channel.
    fn key(&self) -> u64;

    /// Binds to a local address, `rdma_bind_addr(3)`. Port 0 selects a free port. The unspecified
    /// address covers its family; the IPv6 one also covers IPv4.
    ///
    /// EADDRINUSE if taken, EADDRNOTAVAIL if not an address of the provider's devices, EINVAL if
    /// already bound.
    fn bind(&self, address: SocketAddr) -> Result<(), VerbError>;

    /// Listens on the bound address, `rdma_listen(3)`. At most `backlog` requests wait for an
    /// answer, or to be taken if the provider cannot tell. Further requests are dropped or delayed;
    /// their peers repeat them.
    fn listen(&self, backlog: u32) -> Result<(), VerbError>;

    /// Lets the provider answer requests of this listener as `admit` decides. Returns false if it
    /// cannot; the program then receives each request.
    ///
    /// An answered request is reported when the peer has confirmed, on an id with a [reserved
    /// number](Self::reserved). Until then the provider keeps a record. At its limit, it evicts the
    /// oldest record of the source with the most.
    fn answer(&self, admit: Arc<dyn Admit>) -> bool {
        let _ = admit;
        false
    }

    /// Lets the provider answer this connect request, which [`Admit`] left to the program. If true,
    /// the id is void, and a new one is reported when the peer has confirmed.
    fn answer_late(&self, answer: &CmAnswer) -> bool {
        let _ = answer;
        false
    }

    /// Returns the queue pair number with which the provider has answered this request, if any.
    ///
    /// The queue pair is created under that number. Until it is ready, packets are answered with
    /// "receiver not ready". [`accept`](Self::accept) then sends nothing, and
    /// [`reject`](Self::reject) disconnects.
    fn reserved(&self) -> Option<Qpn> {
        None
    }

    /// Binds to a local device by source and destination, `rdma_resolve_addr(3)`.
    /// [`AddressResolved`](CmEventKind::AddressResolved) or
    /// [`AddressError`](CmEventKind::AddressError) follows. EADDRNOTAVAIL if `source` is not an
    /// address of the provider's devices. The minimum `timeout` is 1 ms.
    ///
    /// If [`resolve_route`](Self::resolve_route) would not block, the provider may call it as soon
    /// as the address is resolved, with the same `timeout` again. Its event then follows instead of
    /// `AddressResolved`.
    fn resolve_addr(
        &self,
        source: Option<SocketAddr>,
        destination: SocketAddr,
        timeout: Duration,
    ) -> Result<(), VerbError>;

    /// Resolves the route, `rdma_resolve_route(3)`. [`RouteResolved`](CmEventKind::RouteResolved)
    /// or [`RouteError`](CmEventKind::RouteError) follows.
    fn resolve_route(&self, timeout: Duration) -> Result<(), VerbError>;

    /// Returns true if [`resolve_route`](Self::resolve_route) may block.
    fn route_may_block(&self) -> bool {
        false
    }

    /// Returns true if [`connect`](Self::connect) may block: on an iWARP device, it opens a TCP
    /// connection to the peer.
    fn connect_may_block(&self) -> bool {
        false
    }

    /// Requests a connection over the resolved route, `rdma_connect(3)`.
    /// [`ConnectResponse`](CmEventKind::ConnectResponse), [`Rejected`](CmEventKind::Rejected),
    /// [`Unreachable`](CmEventKind::Unreachable) or [`ConnectError`](CmEventKind::ConnectError)
    /// follows. EINVAL for more than [`MAX_REQUEST_DATA`] bytes of private data. On an iWARP device
    /// also the errors of `connect(2)`, such as ECONNREFUSED without a listener.
    ///
    /// An id of port space UDP asks for the queue pair that serves datagrams;
    /// [`ServiceFound`](CmEventKind::ServiceFound) follows instead of `ConnectResponse`. Only
    /// private data, at most [`MAX_QUERY_DATA`] bytes, and the timeout are used.
    fn connect(&self, params: &CmParams<'_>) -> Result<(), VerbError>;

    /// Accepts a connect request, `rdma_accept(3)`. The queue pair is already in RTS: the peer may
    /// send before [`Established`](CmEventKind::Established). [`Rejected`](CmEventKind::Rejected),
    /// [`Unreachable`](CmEventKind::Unreachable) or [`ConnectError`](CmEventKind::ConnectError) may
    /// follow instead. EINVAL for more than [`MAX_RESPONSE_DATA`] bytes of private data, or if the
    /// peer has abandoned the request.
    ///
    /// On an id of port space UDP, the answer is the number of the queue pair, with Q_Key
    /// [`Qkey::RDMA_UDP`] and at most [`MAX_FOUND_DATA`] bytes of private data. No event follows.
    fn accept(&self, params: &CmParams<'_>) -> Result<(), VerbError>;

    /// Rejects a connect request, `rdma_reject(3)`. The peer receives
    /// [`Rejected`](CmEventKind::Rejected) with reason [`CONSUMER`](RejectReason::CONSUMER). EINVAL
    /// for more than [`MAX_REJECT_DATA`] bytes of private data, or if the request was answered or
    /// abandoned.
    fn reject(&self, private_data: &[u8]) -> Result<(), VerbError>;

    /// Confirms the connection on the active id, `rdma_establish(3)`, after
    /// [`ConnectResponse`](CmEventKind::ConnectResponse) and with the queue pair in RTS. The id is
    /// then connected; no event follows. A later [`Rejected`](CmEventKind::Rejected) means that the
    /// listener's manager abandoned the request before the confirmation arrived.
    fn establish(&self) -> Result<(), VerbError>;

    /// Disconnects, `rdma_disconnect(3)`. [`Disconnected`](CmEventKind::Disconnected) follows the
    /// peer's reply or a timeout. `Ok` if already disconnected; EINVAL if never connected.
    fn disconnect(&self) -> Result<(), VerbError>;

    /// Joins a multicast group on the network interface of the bound address, for an id of port
    /// space UDP, `rdma_join_multicast(3)`. [`Joined`](CmEventKind::Joined) or
    /// [`JoinError`](CmEventKind::JoinError) follows. Dropping the id leaves the group. An id joins
    /// one group; EINVAL if it has joined one or is not bound, or if `group` is not multicast.
    ///
    /// The queue pair is [attached](crate::contract::Qp::attach_multicast) separately.
    fn join_multicast(&self, group: IpAddr) -> Result<(), VerbError>;

    /// Returns the attributes for the transition to `state`, `rdma_init_qp_attr(3)`: INIT once the
    /// route is known; RTR and RTS after [`ConnectResponse`](CmEventKind::ConnectResponse), or
    /// before a connect request is accepted.
    ///
    /// INIT has the `pkey_index` of the partition that the manager selects, or none if the
    /// connection takes the partition of its queue pair.
    ///
    /// RTR and RTS include everything that [`transition`](crate::types::transition()) requires for
    /// RC, with `rq_psn` and `sq_psn` of the handshake. The layer above may replace
    /// `min_rnr_timer`, `timeout`, `retry_count`, `rnr_retry` and, within the negotiated limits,
    /// `max_rd_atomic` and `max_dest_rd_atomic`.
    fn qp_attr(&self, state: QpState) -> Result<QpAttr, VerbError>;

    /// Returns the local address, `rdma_get_local_addr(3)`; `None` if unbound.
    fn local_addr(&self) -> Option<SocketAddr>;

    /// Returns the peer's address, `rdma_get_peer_addr(3)`; `None` without a peer.
    fn peer_addr(&self) -> Option<SocketAddr>;

    /// Returns device and addresses. `None` for a listener and before
    /// [`AddressResolved`](CmEventKind::AddressResolved); never for a connect request.
    fn route(&self) -> Option<CmRoute<'_>>;
}

/// A policy for connect requests, see [`CmId::answer`].
pub trait Admit: Debug + Send + Sync {
    /// Decides on a request from `source`. Runs under the manager's lock: it must return at once
    /// and not call the provider.
    fn admit(&self, source: IpAddr, private_data: &[u8]) -> Verdict;

    /// Reports that the record of an answered, unconfirmed request was evicted. Same restrictions
    /// as [`admit`](Self::admit).
    fn evicted(&self);
}

/// The decision of an [`Admit`].
#[derive(Debug)]
pub enum Verdict {
    /// The program decides.
    Ask,
    /// The provider answers.
    Answer(CmAnswer),
    /// The provider rejects with these private data and keeps no record.
    Reject(Vec<u8>),
}

/// An answer to connect requests, see [`CmParams`]. Counts are reduced to the peer's request.
#[derive(Debug, Clone, Default)]
pub struct CmAnswer {
    /// Private data of the response.
    pub private_data: Vec<u8>,
    /// READs and atomics that the listener's side serves at once.
    pub responder_resources: u8,
    /// READs and atomics that the listener's side issues at once.
    pub initiator_depth: u8,
    /// Retransmissions of unacknowledged packets by the listener's queue pair, 0 to 7.
    pub retry_count: u8,
    /// The peer's retransmissions after "receiver not ready", 0 to 6; 7 is unlimited.
    pub rnr_retry: u8,
}

/// Maximum private data of a request in bytes: 92 less the IP addresses of rdma_cm.
pub const MAX_REQUEST_DATA: usize = 56;
/// Maximum private data of a response in bytes.
pub const MAX_RESPONSE_DATA: usize = 196;
/// Maximum private data of a rejection in bytes.
pub const MAX_REJECT_DATA: usize = 148;

/// Maximum private data of a query for datagrams in bytes: 216 less the IP addresses of rdma_cm.
pub const MAX_QUERY_DATA: usize = 180;
/// Maximum private data of its answer in bytes.
pub const MAX_FOUND_DATA: usize = 136;

/// The device and addresses of a connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CmRoute<'a> {
    /// Name of the device.
    pub device: Cow<'a, str>,
    /// Port of the device.
    pub port: PortNum,
    /// Local GID, from the port's table.
    pub source: Gid,
    /// GID of the peer.
    pub destination: Gid,
    /// Path MTU, if known.
    pub mtu: Option<Mtu>,
}

/// The queue pair parameters of one side, `struct rdma_conn_param`.
#[derive(Debug, Clone, Copy)]
pub struct CmParams<'a> {
    /// Queue pair number.
    pub qpn: Qpn,
    /// Private data, at most [`MAX_REQUEST_DATA`] or [`MAX_RESPONSE_DATA`] bytes.
    pub private_data: &'a [u8],
    /// READs and atomics that this side serves at once.
    pub responder_resources: u8,
    /// READs and atomics that this side issues at once.
    pub initiator_depth: u8,
    /// The *peer's* retransmissions of unacknowledged packets, 0 to 7; read by `connect` only. The
    /// local queue pair uses the same value unless [replaced](CmId::qp_attr).
    pub retry_count: u8,
    /// The *peer's* retransmissions after "receiver not ready", 0 to 6; 7 is unlimited.
    pub rnr_retry: u8,
    /// Period in which `connect` repeats its request. The kernel's manager uses its own.
    pub timeout: Duration,
    /// True for a shared receive queue.
    pub srq: bool,
}

/// The queue pair parameters of the peer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CmPeer {
    /// Private data, padded with zeros to [`MAX_REQUEST_DATA`], [`MAX_QUERY_DATA`] or
    /// [`MAX_RESPONSE_DATA`] bytes.
    pub private_data: Vec<u8>,
    /// READs and atomics that the local side serves at once: the peer's `initiator_depth`.
    pub responder_resources: u8,
    /// READs and atomics that the local side may issue at once: the peer's `responder_resources`.
    pub initiator_depth: u8,
    /// True if the peer uses a shared receive queue.
    pub srq: bool,
}

/// A destination of datagrams, `struct rdma_ud_param`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CmDatagram {
    /// Route to the destination, for an address handle.
    pub address: AddressVector,
    /// Queue pair number, [`Qpn::MULTICAST`] of a group.
    pub qpn: Qpn,
    /// Q_Key of the destination.
    pub qkey: Qkey,
}

/// An event of an id, `rdma_get_cm_event(3)`.
#[derive(Debug)]
pub struct CmEvent<P: Provider> {
    /// [Key](CmId::key) of the id; for a connect request, of its listener.
    pub key: u64,
    /// Event.
    pub kind: CmEventKind<P>,
}

/// The kind of an event. Numbers are positive `errno(3)` values.
#[derive(Debug)]
#[allow(dead_code, reason = "some only real devices raise")]
pub enum CmEventKind<P: Provider> {
    /// [`CmId::resolve_addr`] succeeded: the id is bound to a device and has a
    /// [route](CmId::route).
    AddressResolved,
    /// [`CmId::resolve_addr`] failed.
    AddressError(i32),
    /// [`CmId::resolve_route`] succeeded: the id may connect.
    RouteResolved,
    /// [`CmId::resolve_route`] failed.
    RouteError(i32),
    /// A peer requests a connection. The new id reports to the listener's channel under its own
    /// key.
    ConnectRequest {
        /// New id, to be accepted, rejected or dropped.
        id: P::CmId,
        /// Parameters of the peer's queue pair.
        peer: CmPeer,
    },
    /// The peer accepted and waits for [`CmId::establish`].
    ConnectResponse(CmPeer),
    /// Passive side: the peer confirmed the connection or used it.
    Established,
    /// The peer rejected the connection, or abandoned its request.
    Rejected {
        /// Reason code of the rejection.
        reason: RejectReason,
        /// Private data, padded with zeros to [`MAX_REJECT_DATA`] bytes, or empty.
        private_data: Vec<u8>,
    },
    /// The peer did not answer.
    Unreachable(i32),
    /// The handshake failed for another reason.
    ConnectError(i32),
    /// The peer serves datagrams with this queue pair.
    ServiceFound {
        /// Queue pair, and the route to it.
        service: CmDatagram,
        /// Private data, padded with zeros to [`MAX_FOUND_DATA`] bytes.
        private_data: Vec<u8>,
    },
    /// [`CmId::join_multicast`] succeeded: the network forwards datagrams to the group.
    Joined(CmDatagram),
    /// [`CmId::join_multicast`] failed, or the membership has ended.
    JoinError(i32),
    /// Either side disconnected, or the peer does not reply to the disconnect.
    Disconnected,
    /// No packet of the connection remains in the network: the queue pair may be reused.
    TimewaitExit,
    /// The device is being removed. All its ids receive this and must be dropped.
    DeviceRemoval,
    /// The local address moved to another device.
    AddressChange,
    /// An unknown event, which may be ignored.
    Other(u32),
}

impl<P: Provider> CmEventKind<P> {
    /// Returns true if the event ends the connection or the attempt to connect.
    pub const fn is_end(&self) -> bool {
        match self {
            Self::Rejected { .. }
            | Self::Unreachable(_)
            | Self::ConnectError(_)
            | Self::Disconnected
            | Self::TimewaitExit
            | Self::DeviceRemoval
            | Self::AddressChange => true,
            Self::AddressResolved
            | Self::AddressError(_)
            | Self::RouteResolved
            | Self::RouteError(_)
            | Self::ConnectRequest { .. }
            | Self::ConnectResponse(_)
            | Self::Established
            | Self::ServiceFound { .. }
            | Self::Joined(_)
            | Self::JoinError(_)
            | Self::Other(_) => false,
        }
    }
}

impl<P: Provider> CmEvent<P> {
    /// Converts the event to provider `Q`, with its id mapped by `id_of`.
    pub fn map<Q: Provider>(self, id_of: impl FnOnce(P::CmId) -> Q::CmId) -> CmEvent<Q> {
        use CmEventKind as Kind;
        let kind = match self.kind {
            Kind::AddressResolved => Kind::AddressResolved,
            Kind::AddressError(errno) => Kind::AddressError(errno),
            Kind::RouteResolved => Kind::RouteResolved,
            Kind::RouteError(errno) => Kind::RouteError(errno),
            Kind::ConnectRequest { id, peer } => Kind::ConnectRequest { id: id_of(id), peer },
            Kind::ConnectResponse(peer) => Kind::ConnectResponse(peer),
            Kind::Established => Kind::Established,
            Kind::Rejected { reason, private_data } => Kind::Rejected { reason, private_data },
            Kind::Unreachable(errno) => Kind::Unreachable(errno),
            Kind::ConnectError(errno) => Kind::ConnectError(errno),
            Kind::ServiceFound { service, private_data } => {
                Kind::ServiceFound { service, private_data }
            }
            Kind::Joined(group) => Kind::Joined(group),
            Kind::JoinError(errno) => Kind::JoinError(errno),
            Kind::Disconnected => Kind::Disconnected,
            Kind::TimewaitExit => Kind::TimewaitExit,
            Kind::DeviceRemoval => Kind::DeviceRemoval,
            Kind::AddressChange => Kind::AddressChange,
            Kind::Other(code) => Kind::Other(code),
        };
        CmEvent { key: self.key, kind }
    }
}
