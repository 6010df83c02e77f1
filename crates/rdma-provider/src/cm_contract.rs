//! What every provider's connection manager guarantees.
//!
//! It signals, and that is all: it never owns a queue pair, nor touches one. Who connects makes the queue pair on the
//! [device, port and GID](CmRoute) that the manager names, tells the manager its number, and applies the
//! [attributes](CmId::qp_attr) that the manager gives. So queue pairs are always those of an opening of ours.
//!
//! ```text
//!  active                                              passive
//!  create_id                                           create_id, bind, listen
//!  resolve_addr   ──▶ AddressResolved
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
//! The names and the semantics are those of librdmacm for ids without a queue pair (port space TCP); where its manual
//! pages leave a choice, the text here makes it.
//!
//! # Blocking
//!
//! No call waits for a peer. If [`CmChannel::may_block`] says so, the calls of a channel's ids, and their drop, may
//! wait for locks of the kernel, and the layer above makes them where that holds up nobody (`spawn_blocking`).
//! [`CmChannel::take_event`], [`CmChannel::create_id`], [`CmId::key`], [`CmId::local_addr`], [`CmId::peer_addr`] and
//! [`CmId::route`] never do.

use std::fmt::Debug;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

use super::contract::Provider;
use crate::error::VerbError;
use crate::types::{Gid, Mtu, PortNum, QpAttr, QpState, Qpn, RejectReason};

/// Event channel, `rdma_create_event_channel(3)`. Ids keep what they need of it alive.
pub trait CmChannel<P: Provider>: Debug + Send + Sync {
    /// Readable while there are events, but for those that a call which fails has raised: who made it takes them. Does not
    /// block.
    fn fd(&self) -> BorrowedFd<'_>;

    /// True if calls of the ids, and their drop, may wait for locks; see the module.
    fn may_block(&self) -> bool;

    /// Identifies the set of ports that [`CmId::bind`] takes from, as long as an id of the channel exists. Two ids compete for an
    /// address if it is the same for both. 0 is the network namespace of the process.
    fn port_space(&self) -> usize;

    /// Takes the next event, `rdma_get_cm_event(3)`; copied and acknowledged already. `None` if there is none now.
    ///
    /// Events of one id come in the order in which they happened, and a connect request before all others of its id.
    /// One caller at a time: the layer above holds a lock.
    fn take_event(&self) -> Result<Option<CmEvent<P>>, VerbError>;

    /// `rdma_create_id(3)`: an id whose events come by this channel, bound to nothing.
    fn create_id(&self) -> Result<P::CmId, VerbError>;
}

/// Listener or connection, `struct rdma_cm_id`.
///
/// Its drop is `rdma_destroy_id(3)` and is seen by the peer: a request that was not answered, or whose answer was not
/// confirmed, is rejected; a connection is disconnected as by [`disconnect`](Self::disconnect). Events that were raised
/// before may still be taken, under a [key](Self::key) that names nothing any more. A connect request that is not taken
/// when its listener is dropped is rejected, at the latest when it is taken and dropped.
pub trait CmId: Debug + Send + Sync {
    /// What its events carry: unique in its channel for ever, and constant.
    fn key(&self) -> u64;

    /// `rdma_bind_addr(3)`. Port 0 takes one that is free. EADDRINUSE: taken. EADDRNOTAVAIL: not an address of the
    /// provider's devices. EINVAL: bound already.
    ///
    /// The unspecified address is every one of its family, and that of IPv6 every IPv4 one too.
    fn bind(&self, address: SocketAddr) -> Result<(), VerbError>;

    /// `rdma_listen(3)` on the address bound to. `backlog` requests at most wait to be answered (or to be taken, if the
    /// provider can tell no more); requests beyond that are dropped unseen or put off, so that the peer repeats them.
    fn listen(&self, backlog: u32) -> Result<(), VerbError>;

    /// Has the provider answer the requests of this listener as `admit` decides. The connect request of a peer that was
    /// answered comes when that peer has confirmed, on an id with a [reserved number](Self::reserved): until then the
    /// provider keeps a record of bounded size, and the oldest records of the source with the most of them give way.
    ///
    /// False: the provider cannot, and each request comes to the program.
    fn answer(&self, admit: Arc<dyn Admit>) -> bool {
        let _ = admit;
        false
    }

    /// Has the provider answer this connect request, which came to the program because nothing else had been decided then. If
    /// true, the id names nothing any more, and another one comes when the peer has confirmed.
    fn answer_late(&self, answer: &CmAnswer) -> bool {
        let _ = answer;
        false
    }

    /// Number that the peer of this connect request was told, if the provider has answered it. The queue pair is made under
    /// that number; what the peer sends before the queue pair is ready is answered as "receiver not ready". Then
    /// [`accept`](Self::accept) sends nothing, and [`reject`](Self::reject) disconnects.
    fn reserved(&self) -> Option<Qpn> {
        None
    }

    /// `rdma_resolve_addr(3)`: binds to a local device by source and destination.
    /// [`AddressResolved`](CmEventKind::AddressResolved) or [`AddressError`](CmEventKind::AddressError) follows, unless
    /// the call fails, with EADDRNOTAVAIL for a source that is not an address of the provider's devices. Timeouts of less than 1 ms count as that.
    fn resolve_addr(
        &self,
        source: Option<SocketAddr>,
        destination: SocketAddr,
        timeout: Duration,
    ) -> Result<(), VerbError>;

    /// `rdma_resolve_route(3)`. [`RouteResolved`](CmEventKind::RouteResolved) or [`RouteError`](CmEventKind::RouteError)
    /// follows, unless the call fails.
    fn resolve_route(&self, timeout: Duration) -> Result<(), VerbError>;

    /// `rdma_connect(3)`, after the route was resolved. [`ConnectResponse`](CmEventKind::ConnectResponse),
    /// [`Rejected`](CmEventKind::Rejected), [`Unreachable`](CmEventKind::Unreachable) or
    /// [`ConnectError`](CmEventKind::ConnectError) follows, unless the call fails. EINVAL for private data of more than
    /// [`MAX_REQUEST_DATA`] bytes.
    fn connect(&self, params: &CmParams<'_>) -> Result<(), VerbError>;

    /// `rdma_accept(3)` on an id of a connect request, whose queue pair is in RTS already: the peer may send before
    /// [`Established`](CmEventKind::Established) comes. If it does not, [`Rejected`](CmEventKind::Rejected),
    /// [`Unreachable`](CmEventKind::Unreachable) or [`ConnectError`](CmEventKind::ConnectError) does. EINVAL for private
    /// data of more than [`MAX_RESPONSE_DATA`] bytes, and if the peer has given up meanwhile.
    fn accept(&self, params: &CmParams<'_>) -> Result<(), VerbError>;

    /// `rdma_reject(3)` on an id of a connect request: the peer gets [`Rejected`](CmEventKind::Rejected) with reason
    /// [`CONSUMER`](RejectReason::CONSUMER). EINVAL for private data of more than [`MAX_REJECT_DATA`] bytes, and if the
    /// request was answered or the peer has given up.
    fn reject(&self, private_data: &[u8]) -> Result<(), VerbError>;

    /// `rdma_establish(3)` on the active id after [`ConnectResponse`](CmEventKind::ConnectResponse), when the queue pair
    /// is in RTS. It is connected when this returns; no event follows. [`Rejected`](CmEventKind::Rejected) comes later if the
    /// listener's manager had given the request up before it heard the confirmation.
    fn establish(&self) -> Result<(), VerbError>;

    /// `rdma_disconnect(3)`: says goodbye. [`Disconnected`](CmEventKind::Disconnected) follows when the peer has answered
    /// or did not for too long. `Ok` also if it is disconnected already; EINVAL if it never was connected.
    fn disconnect(&self) -> Result<(), VerbError>;

    /// Attributes for the transition to `state`, `rdma_init_qp_attr(3)`: INIT after the route is known, RTR and RTS
    /// after [`ConnectResponse`](CmEventKind::ConnectResponse), or on an id of a connect request before it is accepted.
    ///
    /// Those of RTR and RTS have all that [`transition`](crate::types::transition()) requires for RC; `rq_psn` and
    /// `sq_psn` are those of the handshake. What is a matter of taste (`min_rnr_timer`, `timeout`, `retry_count`, `rnr_retry`,
    /// `max_rd_atomic`, `max_dest_rd_atomic` within what was agreed) the layer above may replace.
    fn qp_attr(&self, state: QpState) -> Result<QpAttr, VerbError>;

    /// `rdma_get_local_addr(3)`; `None` if it is not bound.
    fn local_addr(&self) -> Option<SocketAddr>;

    /// `rdma_get_peer_addr(3)`; `None` if there is no peer yet.
    fn peer_addr(&self) -> Option<SocketAddr>;

    /// Over which device and addresses it goes; `None` before [`AddressResolved`](CmEventKind::AddressResolved), and of
    /// a listener. The id of a connect request always has one.
    fn route(&self) -> Option<CmRoute>;
}

/// Decides about connect requests for a listener, see [`CmId::answer`].
pub trait Admit: Debug + Send + Sync {
    /// Decides about a request from `source`. The caller holds the lock of the manager: implementations return at once, and
    /// call nothing of the provider.
    fn admit(&self, source: IpAddr, private_data: &[u8]) -> Verdict;

    /// The handshake of a request that was answered gave way to another one. The same restriction holds.
    fn gave_way(&self);
}

/// What an [`Admit`] decides.
#[derive(Debug)]
pub enum Verdict {
    /// The program decides.
    Ask,
    /// The provider answers.
    Answer(CmAnswer),
    /// The provider rejects with these private data, and remembers nothing.
    Reject(Vec<u8>),
}

/// An answer to connect requests; fields as in [`CmParams`], counts cut to what the peer asks for.
#[derive(Debug, Clone, Default)]
pub struct CmAnswer {
    /// Private data of the response.
    pub private_data: Vec<u8>,
    /// READ and atomic requests that the listener's side serves at once.
    pub responder_resources: u8,
    /// READ and atomic requests that the listener's side issues at once.
    pub initiator_depth: u8,
    /// Retransmissions of what was not acknowledged, 0 to 7, by the listener's queue pair.
    pub retry_count: u8,
    /// Retransmissions of what found no receive, 0 to 7, that the peer shall make.
    pub rnr_retry: u8,
}

/// Most bytes of private data in a request: 92 less the IP addresses that rdma_cm puts before them.
pub const MAX_REQUEST_DATA: usize = 56;
/// Most bytes of private data in a response.
pub const MAX_RESPONSE_DATA: usize = 196;
/// Most bytes of private data in a rejection.
pub const MAX_REJECT_DATA: usize = 148;

/// Over which device a connection goes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CmRoute {
    /// Name of the device.
    pub device: String,
    /// Port of the device.
    pub port: PortNum,
    /// Our GID; an entry of the port's table.
    pub source: Gid,
    /// GID of the peer.
    pub destination: Gid,
    /// Path MTU, if it is known yet.
    pub mtu: Option<Mtu>,
}

/// What one side says of its queue pair, `struct rdma_conn_param`.
#[derive(Debug, Clone, Copy)]
pub struct CmParams<'a> {
    /// Number of the queue pair.
    pub qpn: Qpn,
    /// Bytes for the peer's program, at most [`MAX_REQUEST_DATA`] or [`MAX_RESPONSE_DATA`].
    pub private_data: &'a [u8],
    /// READ and atomic requests that it serves at once.
    pub responder_resources: u8,
    /// READ and atomic requests that it issues at once.
    pub initiator_depth: u8,
    /// Repetitions of what was not acknowledged, 0 to 7, that the *peer* shall make; read by `connect` only. Our own queue
    /// pair gets it, too, until the layer above [replaces](CmId::qp_attr) it.
    pub retry_count: u8,
    /// Repetitions of what found no receive, 0 to 7, that the *peer* shall make.
    pub rnr_retry: u8,
    /// How long `connect` repeats its request. The kernel's manager has times of its own.
    pub timeout: Duration,
    /// Receives come from a shared queue.
    pub srq: bool,
}

/// What the peer said of its queue pair.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CmPeer {
    /// As it travels: filled up with zeros to [`MAX_REQUEST_DATA`] or [`MAX_RESPONSE_DATA`] bytes.
    pub private_data: Vec<u8>,
    /// READ and atomic requests that *we* may be asked to serve at once: the peer's `initiator_depth`.
    pub responder_resources: u8,
    /// READ and atomic requests that *we* may issue at once: the peer's `responder_resources`.
    pub initiator_depth: u8,
    /// Receives of the peer come from a shared queue.
    pub srq: bool,
}

/// Something that happened to an id, `rdma_get_cm_event(3)`.
#[derive(Debug)]
pub struct CmEvent<P: Provider> {
    /// [Key](CmId::key) of the id; of the listener for a connect request.
    pub key: u64,
    /// What happened.
    pub kind: CmEventKind<P>,
}

/// What happened. Numbers are those of `errno(3)`, positive.
#[derive(Debug)]
#[allow(dead_code, reason = "some only real devices raise")]
pub enum CmEventKind<P: Provider> {
    /// [`CmId::resolve_addr`] has succeeded: the id is bound to a device and has a [route](CmId::route).
    AddressResolved,
    /// [`CmId::resolve_addr`] has failed.
    AddressError(i32),
    /// [`CmId::resolve_route`] has succeeded: the id may connect.
    RouteResolved,
    /// [`CmId::resolve_route`] has failed.
    RouteError(i32),
    /// A peer asks; the new id reports by the listener's channel under its own key.
    ConnectRequest {
        /// The new id, which is accepted, rejected or dropped.
        id: P::CmId,
        /// What the peer said of its queue pair.
        peer: CmPeer,
    },
    /// The peer has accepted and waits for [`CmId::establish`].
    ConnectResponse(CmPeer),
    /// Passive side: the peer has confirmed, or used the connection.
    Established,
    /// The peer refused, or gave up its request.
    Rejected {
        /// Reason code of the rejection.
        reason: RejectReason,
        /// As it travels: filled up with zeros to [`MAX_REJECT_DATA`] bytes, or empty.
        private_data: Vec<u8>,
    },
    /// No answer, after all repetitions.
    Unreachable(i32),
    /// The handshake failed for another reason.
    ConnectError(i32),
    /// Either side has said goodbye, or the peer does not answer ours.
    Disconnected,
    /// What was underway is gone: the queue pair may be used for another connection.
    TimewaitExit,
    /// The device is being taken away: the id must be dropped. Every id of it gets this.
    DeviceRemoval,
    /// The local address was moved to another device.
    AddressChange,
    /// One that this crate does not know, and may ignore.
    Other(u32),
}

impl<P: Provider> CmEventKind<P> {
    /// True if the connection, or the attempt at one, is over.
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
            | Self::Other(_) => false,
        }
    }
}

impl<P: Provider> CmEvent<P> {
    /// The same event, with its id as that of provider `Q`.
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
            Kind::Disconnected => Kind::Disconnected,
            Kind::TimewaitExit => Kind::TimewaitExit,
            Kind::DeviceRemoval => Kind::DeviceRemoval,
            Kind::AddressChange => Kind::AddressChange,
            Kind::Other(code) => Kind::Other(code),
        };
        CmEvent { key: self.key, kind }
    }
}
