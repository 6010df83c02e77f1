//! What every provider guarantees, object by object.
//!
//! The names and the semantics are those of libibverbs; where its manual pages leave a choice, the
//! text here makes it. All objects may be used from any thread at once. Destruction is `Drop`: it
//! never panics, and when it returns the device uses nothing of the object any more. The layer above
//! keeps parents alive longer than their children.

// Declares `unsafe fn`; holds no unsafe block.
#![allow(unsafe_code)]

use std::borrow::Borrow;
use std::fmt::{self, Debug};
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;

use super::cm_contract::{CmChannel, CmId};
use crate::error::VerbError;
use crate::types::{
    Access, AddressVector, AsyncEvent, DcKey, DeviceAttr, Lkey, PortAttr, PortNum, QpAttr, QpCaps,
    QpState, Qpn, RecvWr, Rkey, SendWr, SrqCaps, Transport, WorkCompletion,
};

/// The object types of one provider.
pub trait Provider: Sized + 'static {
    /// An open device.
    type Context: Context<Self>;
    /// A protection domain.
    type Pd: Pd<Self>;
    /// A memory registration.
    type Mr: Mr;
    /// A memory window of type 2.
    type Mw: Mw;
    /// A completion channel.
    type Channel: Channel;
    /// A completion queue.
    type Cq: Cq;
    /// A queue pair.
    type Qp: Qp;
    /// A DC target; [`NoDct`] for a provider without DC.
    type Dct: Dct;
    /// A shared receive queue.
    type Srq: Srq;
    /// An address handle.
    type Ah: Ah;
    /// An event channel of the connection manager.
    type CmChannel: CmChannel<Self>;
    /// A listener or connection of the connection manager.
    type CmId: CmId;
}

/// An open device, `ibv_open_device(3)`.
pub trait Context<P: Provider>: Debug + Send + Sync {
    /// Limits and identity; constant while open.
    fn attr(&self) -> &DeviceAttr;

    /// True if it says by an event, `LAST_WQE_REACHED`, that a queue pair in the error state takes no more receives from its
    /// shared queue; what it has taken is in the completion queue then.
    fn reports_last_receive(&self) -> bool;

    /// A number that peers cannot predict, for packet sequence numbers; in a simulation it comes from the seed.
    fn random(&self) -> Result<u64, VerbError>;

    /// Current state of a port. EINVAL for a port the device does not have.
    fn port(&self, port: PortNum) -> Result<PortAttr, VerbError>;

    /// The partition key table of a port, `ibv_query_pkey(3)` of each entry. EINVAL as [`port`](Self::port).
    fn pkey_table(&self, port: PortNum) -> Result<Vec<u16>, VerbError>;

    /// `ibv_alloc_pd(3)`.
    fn create_pd(&self) -> Result<P::Pd, VerbError>;

    /// `ibv_create_comp_channel(3)`; its descriptor does not block.
    fn create_channel(&self) -> Result<P::Channel, VerbError>;

    /// `ibv_create_cq(3)`: room for at least `capacity` completions. `cookie` comes back in the
    /// channel's events. EINVAL if `capacity` is 0 or above the device's limit.
    fn create_cq(
        &self,
        capacity: u32,
        channel: Option<&P::Channel>,
        vector: u32,
        cookie: u64,
    ) -> Result<P::Cq, VerbError>;

    /// A connection manager's event channel, `rdma_create_event_channel(3)`; its descriptor does not block. Ids of it
    /// may turn out to go over another device: see [`CmRoute`](super::cm_contract::CmRoute). EOPNOTSUPP without one.
    fn create_cm_channel(&self) -> Result<P::CmChannel, VerbError>;

    /// Descriptor that is readable while [`next_event`](Self::next_event) has something to give; it
    /// does not block.
    fn event_fd(&self) -> BorrowedFd<'_>;

    /// Next asynchronous event, already acknowledged; `None` if there is none now.
    /// ENODEV once the device is gone and all events have been given.
    fn next_event(&self) -> Result<Option<AsyncEvent>, VerbError>;

    /// Of a device that is a program: readable when something has arrived that [`serve`](Self::serve) would see to.
    fn inlet(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// Does what the device would do by itself, a thread later: sees to what has arrived. True if there was anything. Waits
    /// for nothing; nobody needs to call it.
    fn serve(&self) -> bool {
        false
    }

    /// Whoever called [`serve`](Self::serve) goes to sleep, and what tells of arrivals does not wake it.
    fn leave(&self) {}
}

/// Protection domain, `ibv_alloc_pd(3)`: what belongs together may be used together.
pub trait Pd<P: Provider>: Debug + Send + Sync {
    /// `ibv_reg_mr(3)`. EINVAL if `access` is not legal or the range wraps around.
    ///
    /// `shared`: a device that is a program reaches the memory by atomic accesses, as it always does what peers may
    /// write, for the caller does so at the same time, or posts work that names the same bytes more than once. Memory that
    /// is neither shared nor writable by the device (no LOCAL_WRITE, REMOTE_WRITE or REMOTE_ATOMIC) is only read, as plain
    /// memory: it need not be valid for writes.
    ///
    /// # Safety
    ///
    /// `addr..addr + len` stays allocated until the registration is dropped. While it may be
    /// written by the device (a posted work request names it, or `access` lets peers in), nobody
    /// holds a reference to it.
    unsafe fn register(
        &self,
        addr: NonNull<u8>,
        len: usize,
        access: Access,
        shared: bool,
    ) -> Result<P::Mr, VerbError>;

    /// `ibv_reg_dmabuf_mr(3)`: `len` bytes from `offset` of what the dma-buf `fd` names, which work and peers know as
    /// `iova` and onwards. The registration keeps the memory, whatever becomes of `fd`; programs reach it by mappings of
    /// their own, if at all.
    ///
    /// EOPNOTSUPP if [`DeviceAttr::dma_buf`] is false; EINVAL if `iova` and `offset` are at different places in a page, or
    /// the range is not within the memory.
    fn register_dma_buf(
        &self,
        fd: BorrowedFd<'_>,
        range: DmaBufRange,
        access: Access,
    ) -> Result<P::Mr, VerbError>;

    /// `ibv_alloc_mw(3)` of type 2, bound to nothing. A device whose `max_mw` is 0 has none.
    fn create_mw(&self) -> Result<P::Mw, VerbError>;

    /// `ibv_create_qp(3)`, in RESET. EINVAL if a size is above the device's limit.
    ///
    /// An initiator of DC ([`Transport::Dci`]) has `max_recv_wr` 0 and no shared receive queue; EOPNOTSUPP if
    /// [`DeviceAttr::dc`] is `None`. Each of its work requests names a target
    /// ([`SendTarget::Dc`](crate::types::SendTarget)); one that names none, or a datagram's receiver, is EINVAL, and so
    /// is a `BindWindow`, a `LocalInvalidate` or a `SendWithInvalidate`. Of the target's address handle the device keeps
    /// nothing when the post returns. Work completes in the order in which it was posted, whatever its targets.
    /// A failure puts it in ERR as a whole, whichever target was at fault; RESET and the way back to RTS repair it.
    fn create_qp(&self, init: &QpInit<'_, P>) -> Result<P::Qp, VerbError>;

    /// As [`create_qp`](Self::create_qp), under a number that the connection manager has
    /// [reserved](super::cm_contract::CmId::reserved); EINVAL for any other.
    fn create_numbered_qp(&self, number: Qpn, init: &QpInit<'_, P>) -> Result<P::Qp, VerbError> {
        let _ = (number, init);
        Err(VerbError::new("ibv_create_qp", VerbError::EINVAL))
    }

    /// A target of DC, in RESET: a DCT of `mlx5dv_create_qp(3)`. EOPNOTSUPP if [`DeviceAttr::dc`] is `None`.
    fn create_dct(&self, init: &DctInit<'_, P>) -> Result<P::Dct, VerbError>;

    /// `ibv_create_srq(3)`.
    fn create_srq(&self, caps: SrqCaps) -> Result<P::Srq, VerbError>;

    /// `ibv_create_ah(3)`.
    fn create_ah(&self, address: &AddressVector) -> Result<P::Ah, VerbError>;
}

/// A part of a dma-buf, and how work names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DmaBufRange {
    /// First byte, counted from the start of the memory.
    pub offset: u64,
    /// Number of bytes.
    pub len: usize,
    /// What work and peers call the first byte.
    pub iova: u64,
}

/// What a queue pair is made of, `struct ibv_qp_init_attr`.
#[derive(Debug)]
pub struct QpInit<'a, P: Provider> {
    /// Transport service, which a queue pair keeps for its lifetime.
    pub transport: Transport,
    /// Completion queue of send work requests.
    pub send_cq: &'a P::Cq,
    /// Completion queue of receive work requests. May be the same as `send_cq`.
    pub recv_cq: &'a P::Cq,
    /// Source of receives. If `None`, the queue pair has a receive queue of its own.
    pub srq: Option<&'a P::Srq>,
    /// Sizes of its queues that are required at least.
    pub caps: QpCaps,
}

impl<'a, P: Provider> QpInit<'a, P> {
    /// The same for provider `Q`, with its queues in place of those of `P`.
    ///
    /// # Errors
    ///
    /// Those of `cq` and `srq`, which refuse a queue of another provider.
    pub fn with_queues_of<Q: Provider>(
        &self,
        cq: impl Fn(&'a P::Cq) -> Result<&'a Q::Cq, VerbError>,
        srq: impl Fn(&'a P::Srq) -> Result<&'a Q::Srq, VerbError>,
    ) -> Result<QpInit<'a, Q>, VerbError> {
        Ok(QpInit {
            transport: self.transport,
            send_cq: cq(self.send_cq)?,
            recv_cq: cq(self.recv_cq)?,
            srq: self.srq.map(srq).transpose()?,
            caps: self.caps,
        })
    }
}

/// What a target of DC is made of.
#[derive(Debug)]
pub struct DctInit<'a, P: Provider> {
    /// Where messages find receives.
    pub srq: &'a P::Srq,
    /// Where their completions go.
    pub recv_cq: &'a P::Cq,
    /// What an initiator must know.
    pub key: DcKey,
}

impl<'a, P: Provider> DctInit<'a, P> {
    /// The same for provider `Q`, with its queues in place of those of `P`.
    ///
    /// # Errors
    ///
    /// Those of `cq` and `srq`, which refuse a queue of another provider.
    pub fn with_queues_of<Q: Provider>(
        &self,
        cq: impl Fn(&'a P::Cq) -> Result<&'a Q::Cq, VerbError>,
        srq: impl Fn(&'a P::Srq) -> Result<&'a Q::Srq, VerbError>,
    ) -> Result<DctInit<'a, Q>, VerbError> {
        Ok(DctInit { srq: srq(self.srq)?, recv_cq: cq(self.recv_cq)?, key: self.key })
    }
}

/// Registration, `ibv_reg_mr(3)`. Its drop tries to end it, and cannot tell whether it did.
///
/// A window that is bound to it is dropped first: a device may refuse to end a registration under one.
pub trait Mr: Debug + Send + Sync {
    /// The key by which local work requests name the memory.
    fn lkey(&self) -> Lkey;

    /// The key by which peers name the memory.
    fn rkey(&self) -> Rkey;

    /// What [`WindowBind::region`](crate::types::WindowBind::region) carries.
    fn handle(&self) -> usize;

    /// `ibv_dereg_mr(3)`. When it returns `Ok`, the device does not touch the memory any more; work that names it fails
    /// with a protection or access error, and nothing may be asked of it any more. After an error it may go on, so the
    /// memory must never be used again unless a further attempt succeeds.
    fn deregister(&mut self) -> Result<(), VerbError>;
}

/// Memory window of type 2, `ibv_alloc_mw(3)`. When it is deallocated, bound or not, no peer reaches anything through
/// it any more; that is before the queue pair that bound it, and before the registration.
///
/// A binding belongs to the queue pair that made it (type 2B): the key is good for its peer only.
pub trait Mw: Debug + Send + Sync {
    /// As allocated; the first binding has the [next](Rkey::next) one.
    fn rkey(&self) -> Rkey;
    /// What [`WindowBind::window`](crate::types::WindowBind::window) carries.
    fn handle(&self) -> usize;

    /// `ibv_dealloc_mw(3)`; its drop does nothing more then. After an error peers may go on.
    fn deallocate(&mut self) -> Result<(), VerbError>;
}

/// Completion channel, `ibv_create_comp_channel(3)`.
pub trait Channel: Debug + Send + Sync {
    /// Readable while there are events; does not block.
    fn fd(&self) -> BorrowedFd<'_>;

    /// The cookie of the next completion queue that had an event, `ibv_get_cq_event(3)`; `None` if
    /// there is none now. Each event given is to be acknowledged by [`Cq::ack`].
    fn next_event(&self) -> Result<Option<u64>, VerbError>;

    /// The caller is about to look for events without being told: the descriptor need not say so until
    /// [`release`](Self::release), which follows.
    fn hold(&self) {}

    /// Ends a [`hold`](Self::hold): what is left is told.
    fn release(&self) {}
}

/// Completion queue, `ibv_create_cq(3)`.
pub trait Cq: Debug + Send + Sync {
    /// Number by which asynchronous events name it.
    fn id(&self) -> u64;

    /// Completions it holds; at least what was asked.
    fn capacity(&self) -> u32;

    /// Takes the oldest completions, `ibv_poll_cq(3)`; how many were written to `out`. Fewer than fit: there are no more.
    ///
    /// A queue that was overrun gives an error for ever, and so does one of a device that is lost, once it is empty.
    fn poll(&self, out: &mut [WorkCompletion]) -> Result<usize, VerbError>;

    /// Asks for one event at the next completion, or the next solicited or failed one,
    /// `ibv_req_notify_cq(3)`. Completions already in the queue raise none: poll again afterwards.
    fn arm(&self, solicited_only: bool) -> Result<(), VerbError>;

    /// Events only for so many `completions` or after `period` µs, `ibv_modify_cq(3)`. EOPNOTSUPP without moderation.
    fn moderate(&self, completions: u16, period: u16) -> Result<(), VerbError>;

    /// Acknowledges `events` events, `ibv_ack_cq_events(3)`; more than were given is an error in the log. Dropping the
    /// queue acknowledges the rest.
    fn ack(&self, events: u32);
}

/// A post that stopped part-way: `bad_wr` of `ibv_post_send(3)`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PostError {
    /// Work requests of the list that were posted, all before the refused one.
    pub posted: usize,
    /// Why the next one was refused. EINVAL: malformed, or wrong state. ENOMEM: queue full.
    pub error: VerbError,
}

impl fmt::Display for PostError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} after {} work requests", self.error, self.posted)
    }
}

impl std::error::Error for PostError {}

/// Queue pair, `ibv_create_qp(3)`.
pub trait Qp: Debug + Send + Sync {
    /// The number that peers address. It is constant.
    fn qpn(&self) -> Qpn;

    /// Sizes granted; at least what was asked.
    fn caps(&self) -> QpCaps;

    /// `ibv_modify_qp(3)`; a refused change changes nothing.
    fn modify(&self, attr: &QpAttr) -> Result<(), VerbError>;

    /// Current state and all attributes that have been set, `ibv_query_qp(3)`.
    fn query(&self) -> Result<(QpState, QpAttr), VerbError>;

    /// Posts work requests with one doorbell, `ibv_post_send(3)`. A slot of the send queue is free again when
    /// a completion at or after it has been polled.
    ///
    /// The iterator may build each work request as it is posted. A caller with a single one passes `Some` of it: a provider that
    /// is inlined then knows at compile time that there is only one, and most of its fields.
    ///
    /// A `BindWindow` without a window, one of another work request, and a `LocalInvalidate` with data are EINVAL.
    /// Work behind a binding finds it done; a `LocalInvalidate` waits for all work before it, and when it has completed
    /// no peer reaches anything by that key. A bad binding is `MW_BIND_ERR`, a bad key `LOC_QP_OP_ERR`, and the queue
    /// pair is in ERR then.
    ///
    /// # Safety
    ///
    /// The memory that the list names stays valid and untouched until its completion has been
    /// polled or the queue pair was dropped. The registration that a window is bound to outlives the window.
    unsafe fn post_send<'a>(
        &self,
        list: impl IntoIterator<Item = impl Borrow<SendWr<'a>>>,
    ) -> Result<(), PostError>;

    /// Posts a list, `ibv_post_recv(3)`.
    ///
    /// # Safety
    ///
    /// As [`post_send`](Self::post_send).
    unsafe fn post_recv(&self, list: &[RecvWr<'_>]) -> Result<(), PostError>;

    /// `ibv_destroy_qp(3)`, for those who drop it next if it succeeds. After an error the device may go on
    /// with what was posted, and nothing that the queue pair is made of may be freed.
    fn destroy(&mut self) -> Result<(), VerbError>;
}

/// Target of DC: any number of initiators that know its number and key reach it at once, each as if by a reliable
/// connection. Receives come from its shared receive queue; completions of them carry its number as their `qpn`.
///
/// What asks for more than it allows (a wrong key, an operation that its access flags or the memory key refuse) is an error of
/// the initiator: it goes on itself.
pub trait Dct: Debug + Send + Sync {
    /// Its number, once it is in RTR; it does not change any more.
    fn number(&self) -> Option<Qpn>;

    /// `ibv_modify_qp(3)`, by [`dct_transition`](crate::types::dct_transition); a refused change changes nothing.
    fn modify(&self, attr: &QpAttr) -> Result<(), VerbError>;

    /// Current state and all attributes that have been set, `ibv_query_qp(3)`.
    fn query(&self) -> Result<(QpState, QpAttr), VerbError>;

    /// The end begins. When it returns, no message takes a receive for it any more and completions of all that have are in
    /// their queue: so none is lost with it. A device that cannot be told so does nothing.
    fn quiesce(&self) {}

    /// `ibv_destroy_qp(3)`, as [`Qp::destroy`]. When it returns `Ok`, no message takes a receive for it any more and no
    /// initiator reaches memory through it: their work fails when retries run out. Completions not yet polled may be
    /// gone with it.
    fn destroy(&mut self) -> Result<(), VerbError>;
}

/// The target of a provider that has none.
#[derive(Debug)]
pub enum NoDct {}

impl NoDct {
    /// What such a provider answers.
    pub const REFUSED: VerbError = VerbError::new("mlx5dv_create_qp", VerbError::EOPNOTSUPP);
}

impl Dct for NoDct {
    fn number(&self) -> Option<Qpn> {
        match *self {}
    }

    fn modify(&self, _attr: &QpAttr) -> Result<(), VerbError> {
        match *self {}
    }

    fn query(&self) -> Result<(QpState, QpAttr), VerbError> {
        match *self {}
    }

    fn destroy(&mut self) -> Result<(), VerbError> {
        match *self {}
    }
}

/// Shared receive queue, `ibv_create_srq(3)`.
pub trait Srq: Debug + Send + Sync {
    /// Number by which asynchronous events name it.
    fn id(&self) -> u64;

    /// Sizes granted; at least what was asked.
    fn caps(&self) -> SrqCaps;

    /// Arms the limit event: raised once when fewer than `limit` receives are left,
    /// `ibv_modify_srq(3)`. EINVAL above `max_wr`.
    fn set_limit(&self, limit: u32) -> Result<(), VerbError>;

    /// The armed limit; 0 after the event.
    fn limit(&self) -> Result<u32, VerbError>;

    /// Posts a list, `ibv_post_srq_recv(3)`.
    ///
    /// # Safety
    ///
    /// The memory that the list names stays valid and untouched until its completion has been
    /// polled or the shared receive queue was dropped.
    unsafe fn post_recv(&self, list: &[RecvWr<'_>]) -> Result<(), PostError>;

    /// `ibv_destroy_srq(3)`, once its queue pairs are gone; its drop does nothing more then. After an error the device may go
    /// on with what was posted.
    fn destroy(&mut self) -> Result<(), VerbError>;
}

/// Address handle, `ibv_create_ah(3)`.
pub trait Ah: Debug + Send + Sync {
    /// What [`UdTarget::handle`](crate::types::UdTarget) and [`DctTarget::handle`](crate::types::DctTarget) carry.
    fn handle(&self) -> usize;
}
