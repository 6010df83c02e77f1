//! The contract of a device provider: one trait per object type.
//!
//! Names and semantics follow libibverbs; the text here defines what its manual pages leave open.
//! All objects may be used from several threads at once. `Drop` destroys an object and never
//! panics; afterwards the device no longer uses it. The layer above drops children first.

// Declares `unsafe fn`; contains no unsafe block.
#![allow(unsafe_code)]

use std::borrow::Borrow;
use std::collections::BTreeMap;
use std::fmt::{self, Debug};
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::task::Waker;

use super::cm_contract::{CmChannel, CmId};
use crate::error::VerbError;
use crate::types::{
    Access, AddressVector, AsyncEvent, DcKey, DeviceAttr, DirectConfig, Gid, Lkey, PortAttr,
    PortNum, QpAttr, QpCaps, QpState, Qpn, RecvWr, RemoteAddr, Rkey, SendFlags, SendOp, SendWr,
    Sge, SrqCaps, Timestamp, TimestampedCompletion, Transport, WorkCompletion, WrId,
};

/// The object types of a provider.
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
    /// Returns limits and identity, constant while the device is open.
    fn attr(&self) -> &DeviceAttr;

    /// Returns true if the device raises `LAST_WQE_REACHED` when a queue pair in the error state
    /// stops taking receives from its shared queue. Completions of all receives taken are queued by
    /// then.
    fn reports_last_receive(&self) -> bool;

    /// Returns true if work that is posted to a queue pair in the error state completes, as
    /// flushed. If false, [`Qp::modify`] to this state returns only after all earlier work has its
    /// completion and the device uses no buffer; posts after it fail with EINVAL.
    fn flushes_late_work(&self) -> bool {
        true
    }

    /// Returns true if registering memory, deregistering it, and creating a channel of the
    /// connection manager may take milliseconds.
    fn may_block(&self) -> bool;

    /// Returns a number that peers cannot predict, for packet sequence numbers. Simulations draw it
    /// from their seed.
    fn random(&self) -> Result<u64, VerbError>;

    /// Returns the state of a port, `ibv_query_port(3)`. EINVAL for a port that does not exist.
    fn port(&self, port: PortNum) -> Result<PortAttr, VerbError>;

    /// Returns a port's partition key table, `ibv_query_pkey(3)`. EINVAL for a port that does not
    /// exist.
    fn pkey_table(&self, port: PortNum) -> Result<Vec<u16>, VerbError>;

    /// Returns the counters of a port by the provider's names; none if there are none. EINVAL for
    /// a port that does not exist.
    fn port_counters(&self, port: PortNum) -> Result<BTreeMap<String, u64>, VerbError>;

    /// Allocates a protection domain, `ibv_alloc_pd(3)`.
    fn create_pd(&self) -> Result<P::Pd, VerbError>;

    /// Creates a completion channel, `ibv_create_comp_channel(3)`, with a non-blocking descriptor.
    fn create_channel(&self) -> Result<P::Channel, VerbError>;

    /// Creates a completion queue, `ibv_create_cq(3)`. EINVAL for a capacity of 0 or above the
    /// device's limit; EOPNOTSUPP for timestamps if [`DeviceAttr::clock`] is `None`.
    fn create_cq(&self, init: &CqInit<'_, P>) -> Result<P::Cq, VerbError>;

    /// Reads the clock that stamps completions, `ibv_query_rt_values_ex(3)`. EOPNOTSUPP if
    /// [`DeviceAttr::clock`] is `None`, or the clock cannot be read.
    fn read_clock(&self) -> Result<Timestamp, VerbError>;

    /// Creates an event channel of the connection manager, `rdma_create_event_channel(3)`. Its ids
    /// may use other devices, see [`CmRoute`](super::cm_contract::CmRoute). EOPNOTSUPP without a
    /// connection manager.
    fn create_cm_channel(&self) -> Result<P::CmChannel, VerbError>;

    /// Returns a non-blocking descriptor, readable while [`next_event`](Self::next_event) has an
    /// event.
    fn event_fd(&self) -> BorrowedFd<'_>;

    /// Returns the next asynchronous event, already acknowledged; `None` if none is pending. ENODEV
    /// after the last event of a lost device.
    fn next_event(&self) -> Result<Option<AsyncEvent>, VerbError>;

    /// Returns a descriptor that is readable while packets wait for
    /// [`process_packets`](Self::process_packets); `None` for hardware and in-memory devices.
    fn packet_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// Processes arrived packets in place of the device's own thread, without blocking; returns
    /// true if there were any. Optional.
    fn process_packets(&self) -> bool {
        false
    }

    /// Makes the device's own thread take over at once: the caller of
    /// [`process_packets`](Self::process_packets) goes to sleep without watching
    /// [`packet_fd`](Self::packet_fd).
    fn stop_processing(&self) {}
}

/// A protection domain, `ibv_alloc_pd(3)`: its objects may be used together.
pub trait Pd<P: Provider>: Debug + Send + Sync {
    /// Registers memory, which work requests and peers address as `iova..iova + len`:
    /// `ibv_reg_mr(3)` if `iova` is the address of the memory, else `ibv_reg_mr_iova(3)`. EINVAL if
    /// `access` is not [legal](Access::is_legal), a range wraps around, or `iova` and `addr` differ
    /// modulo the page size.
    ///
    /// `shared`: the caller accesses the memory at the same time, or posts work that names the same
    /// bytes more than once. A software device then uses atomic accesses, as for memory that peers
    /// may write. Memory that is neither shared nor writable by the device (LOCAL_WRITE,
    /// REMOTE_WRITE, REMOTE_ATOMIC) is only read, so it need not be valid for writes.
    ///
    /// # Safety
    ///
    /// `addr..addr + len` stays allocated until the registration is dropped. While the device may
    /// write it (a posted work request names it, or `access` admits peers), no reference to it
    /// exists.
    unsafe fn register(
        &self,
        addr: NonNull<u8>,
        len: usize,
        iova: u64,
        access: Access,
        shared: bool,
    ) -> Result<P::Mr, VerbError>;

    /// Registers `range` of the dma-buf `fd`, `ibv_reg_dmabuf_mr(3)`. The registration keeps the
    /// memory alive without `fd`. Programs access it by their own mappings, if at all.
    ///
    /// EOPNOTSUPP if [`DeviceAttr::dma_buf`] is false. EINVAL if `iova` and `offset` differ modulo
    /// the page size, or the range exceeds the memory.
    fn register_dma_buf(
        &self,
        fd: BorrowedFd<'_>,
        range: DmaBufRange,
        access: Access,
    ) -> Result<P::Mr, VerbError>;

    /// Allocates an unbound memory window of type 2, `ibv_alloc_mw(3)`. Fails if the device's
    /// `max_mw` is 0.
    fn create_mw(&self) -> Result<P::Mw, VerbError>;

    /// Creates a queue pair in RESET, `ibv_create_qp(3)`. EINVAL if a size exceeds the device's
    /// limit.
    ///
    /// A DC initiator ([`Transport::Dci`]):
    ///
    /// - EOPNOTSUPP if [`DeviceAttr::dc`] is `None`. `max_recv_wr` is 0 and `srq` is `None`.
    /// - Each work request names a [DC target](crate::types::SendTarget). EINVAL otherwise, and for
    ///   `BindWindow`, `LocalInvalidate` and `SendWithInvalidate`. The address handle is used only
    ///   while posting.
    /// - Work completes in posting order, whatever its targets.
    /// - A failure at any target puts the initiator in ERR; RESET and the transitions to RTS repair
    ///   it.
    fn create_qp(&self, init: &QpInit<'_, P>) -> Result<P::Qp, VerbError>;

    /// Creates a queue pair under a number [reserved](super::cm_contract::CmId::reserved) by the
    /// connection manager, like [`create_qp`](Self::create_qp). EINVAL for any other number.
    fn create_numbered_qp(&self, number: Qpn, init: &QpInit<'_, P>) -> Result<P::Qp, VerbError> {
        let _ = (number, init);
        Err(VerbError::new("ibv_create_qp", VerbError::EINVAL))
    }

    /// Creates a DC target in RESET, `mlx5dv_create_qp(3)`. EOPNOTSUPP if [`DeviceAttr::dc`] is
    /// `None`.
    fn create_dct(&self, init: &DctInit<'_, P>) -> Result<P::Dct, VerbError>;

    /// Creates a shared receive queue, `ibv_create_srq(3)`.
    fn create_srq(&self, caps: SrqCaps) -> Result<P::Srq, VerbError>;

    /// Creates an address handle, `ibv_create_ah(3)`.
    fn create_ah(&self, address: &AddressVector) -> Result<P::Ah, VerbError>;
}

/// A range of a dma-buf and its address in work requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DmaBufRange {
    /// Offset of the first byte in the dma-buf.
    pub offset: u64,
    /// Length in bytes.
    pub len: usize,
    /// Address of the first byte for work requests and peers.
    pub iova: u64,
}

/// Parameters of a new completion queue, `struct ibv_cq_init_attr_ex`.
#[derive(Debug)]
pub struct CqInit<'a, P: Provider> {
    /// Minimum capacity in completions.
    pub capacity: u32,
    /// Channel of its events.
    pub channel: Option<&'a P::Channel>,
    /// Completion vector of its events.
    pub vector: u32,
    /// Number that its events carry.
    pub cookie: u64,
    /// Completions have timestamps, `ibv_create_cq_ex(3)`.
    pub timestamps: bool,
}

impl<'a, P: Provider> CqInit<'a, P> {
    /// Returns the parameters of a queue without channel and timestamps.
    #[must_use]
    pub const fn new(capacity: u32) -> Self {
        Self { capacity, channel: None, vector: 0, cookie: 0, timestamps: false }
    }

    /// Converts the parameters to provider `Q`, with its channel.
    ///
    /// # Errors
    ///
    /// Errors of `channel` for a channel of another provider.
    pub fn with_channel_of<Q: Provider>(
        &self,
        channel: impl Fn(&'a P::Channel) -> Result<&'a Q::Channel, VerbError>,
    ) -> Result<CqInit<'a, Q>, VerbError> {
        Ok(CqInit {
            capacity: self.capacity,
            channel: self.channel.map(channel).transpose()?,
            vector: self.vector,
            cookie: self.cookie,
            timestamps: self.timestamps,
        })
    }
}

/// Parameters of a new queue pair, `struct ibv_qp_init_attr`.
#[derive(Debug)]
pub struct QpInit<'a, P: Provider> {
    /// Transport service.
    pub transport: Transport,
    /// Completion queue of send work requests.
    pub send_cq: &'a P::Cq,
    /// Completion queue of receive work requests; may equal `send_cq`.
    pub recv_cq: &'a P::Cq,
    /// Shared receive queue; if `None`, the queue pair has its own receive queue.
    pub srq: Option<&'a P::Srq>,
    /// Minimum queue sizes.
    pub caps: QpCaps,
    /// Use of the direct data path; the default on other devices.
    pub direct: DirectConfig,
}

impl<'a, P: Provider> QpInit<'a, P> {
    /// Converts the parameters to provider `Q`, with its queues.
    ///
    /// # Errors
    ///
    /// Errors of `cq` and `srq` for queues of another provider.
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
            direct: self.direct,
        })
    }
}

/// Parameters of a new DC target.
#[derive(Debug)]
pub struct DctInit<'a, P: Provider> {
    /// Shared receive queue of incoming messages.
    pub srq: &'a P::Srq,
    /// Completion queue of receives.
    pub recv_cq: &'a P::Cq,
    /// Access key of the target.
    pub key: DcKey,
}

impl<'a, P: Provider> DctInit<'a, P> {
    /// Converts like [`QpInit::with_queues_of`].
    ///
    /// # Errors
    ///
    /// Errors of `cq` and `srq` for queues of another provider.
    pub fn with_queues_of<Q: Provider>(
        &self,
        cq: impl Fn(&'a P::Cq) -> Result<&'a Q::Cq, VerbError>,
        srq: impl Fn(&'a P::Srq) -> Result<&'a Q::Srq, VerbError>,
    ) -> Result<DctInit<'a, Q>, VerbError> {
        Ok(DctInit { srq: srq(self.srq)?, recv_cq: cq(self.recv_cq)?, key: self.key })
    }
}

/// A memory registration, `ibv_reg_mr(3)`. `Drop` deregisters it, but cannot report a failure.
///
/// Drop bound windows first: a device may refuse to deregister memory under them.
pub trait Mr: Debug + Send + Sync {
    /// Returns the key that names the memory in local work requests.
    fn lkey(&self) -> Lkey;

    /// Returns the key that names the memory for peers.
    fn rkey(&self) -> Rkey;

    /// Returns the value for [`WindowBind::region`](crate::types::WindowBind::region).
    fn handle(&self) -> usize;

    /// Deregisters the memory, `ibv_dereg_mr(3)`. After `Ok` the device no longer accesses the
    /// memory, work that names it fails with a protection or access error, and no other method may
    /// be called. After an error the device may still access the memory, which must not be reused
    /// before a later attempt succeeds.
    fn deregister(&mut self) -> Result<(), VerbError>;
}

/// A memory window of type 2, `ibv_alloc_mw(3)`. Deallocation, even while bound, ends all access of
/// peers through it. Drop it before the registration and the queue pair that bound it.
///
/// A binding belongs to the queue pair that made it (type 2B): only its peer can use the key.
pub trait Mw: Debug + Send + Sync {
    /// Returns the key of the allocation; the first binding has the [next](Rkey::next) key.
    fn rkey(&self) -> Rkey;
    /// Returns the value for [`WindowBind::window`](crate::types::WindowBind::window).
    fn handle(&self) -> usize;

    /// Deallocates the window, `ibv_dealloc_mw(3)`; `Drop` then does nothing. After an error peers
    /// may retain access.
    fn deallocate(&mut self) -> Result<(), VerbError>;
}

/// A completion channel, `ibv_create_comp_channel(3)`.
pub trait Channel: Debug + Send + Sync {
    /// Returns a non-blocking descriptor, readable while events are pending.
    fn fd(&self) -> BorrowedFd<'_>;

    /// Returns the cookie of the next completion queue with an event, `ibv_get_cq_event(3)`; `None`
    /// if no event is pending. Acknowledge each by [`Cq::ack`].
    fn next_event(&self) -> Result<Option<u64>, VerbError>;

    /// Announces that the caller polls for events: the descriptor may stay unreadable until
    /// [`release`](Self::release), which must follow.
    fn hold(&self) {}

    /// Ends a [`hold`](Self::hold): pending events make the descriptor readable.
    fn release(&self) {}

    /// Wakes `waker` at each event from now on, in place of the descriptor, which may stay
    /// unreadable while a waker is registered. Returns the key to remove it with, or `None` if the
    /// provider only has descriptors.
    ///
    /// The waker is called when the thread of the event holds no lock. A hold delays the call until
    /// the release.
    fn add_waker(&self, _waker: &Waker) -> Option<u64> {
        None
    }

    /// Removes the waker that was added under `_key`. After the last one is removed, pending events
    /// make the descriptor readable.
    fn remove_waker(&self, _key: u64) {}
}

/// A completion queue, `ibv_create_cq(3)`.
pub trait Cq: Debug + Send + Sync {
    /// Returns the number that asynchronous events carry.
    fn id(&self) -> u64;

    /// Returns the capacity; at least the requested one.
    fn capacity(&self) -> u32;

    /// Moves the oldest completions to `out`, `ibv_poll_cq(3)`, and returns their number. Less than
    /// `out.len()` means that the queue is empty.
    ///
    /// Fails permanently after an overrun, and for a lost device once the queue is empty.
    fn poll(&self, out: &mut [WorkCompletion]) -> Result<usize, VerbError>;

    /// Polls a queue with timestamps like [`poll`](Self::poll), `ibv_start_poll(3)`. EINVAL for a
    /// queue without timestamps.
    fn poll_timestamped(&self, out: &mut [TimestampedCompletion]) -> Result<usize, VerbError>;

    /// Returns whether a poll would find neither a completion nor a failure. `None` if only a poll
    /// shows that, or a write to memory that is shared with the device or other pollers.
    fn is_empty(&self) -> Option<bool> {
        None
    }

    /// Requests one event for the next completion, or the next solicited or failed one,
    /// `ibv_req_notify_cq(3)`. Queued completions raise no event: poll after arming.
    fn arm(&self, solicited_only: bool) -> Result<(), VerbError>;

    /// Changes the capacity to at least `capacity`, `ibv_resize_cq(3)`. On error it is unchanged:
    /// EOPNOTSUPP if unsupported, EINVAL if more completions wait or the device has less.
    fn resize(&self, capacity: u32) -> Result<(), VerbError>;

    /// Moderates events: one per `completions` completions or `period` µs, `ibv_modify_cq(3)`.
    /// EOPNOTSUPP if unsupported.
    fn moderate(&self, completions: u16, period: u16) -> Result<(), VerbError>;

    /// Acknowledges `events` events, `ibv_ack_cq_events(3)`; a surplus is logged as an error.
    /// `Drop` acknowledges the rest.
    fn ack(&self, events: u32);
}

/// The error of a partly posted list, `bad_wr` of `ibv_post_send(3)`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PostError {
    /// Number of work requests posted before the refused one.
    pub posted: usize,
    /// Reason of the refusal. EINVAL: malformed, or wrong state. ENOMEM: queue full.
    pub error: VerbError,
}

impl fmt::Display for PostError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { posted, error } = self;
        write!(f, "failed to post a work request (posted before it: {posted}): {error}")
    }
}

impl std::error::Error for PostError {}

/// The operation of a [`PlainWr`].
#[derive(Debug, Clone, Copy)]
pub enum PlainOp {
    /// SEND.
    Send,
    /// WRITE.
    Write(RemoteAddr),
    /// READ.
    Read(RemoteAddr),
}

impl PlainOp {
    /// Returns `op` as a plain operation, or `None`.
    #[inline]
    #[must_use]
    pub const fn of(op: SendOp) -> Option<Self> {
        match op {
            SendOp::Send => Some(Self::Send),
            SendOp::Write(remote) => Some(Self::Write(remote)),
            SendOp::Read(remote) => Some(Self::Read(remote)),
            _ => None,
        }
    }
}

/// A send work request of one buffer to the connected peer, the most common kind.
#[derive(Debug, Clone, Copy)]
pub struct PlainWr {
    /// Returned in the completion.
    pub wr_id: WrId,
    /// Operation.
    pub op: PlainOp,
    /// Flags.
    pub flags: SendFlags,
    /// Registered memory, not empty: to some devices, length 0 means 2^31.
    pub buffer: Sge,
}

/// Number of cache lines at [`Qp::post_state`].
pub const STATE_LINES: usize = 4;

/// Number of cache lines at [`Qp::peer_post_state`].
pub const PEER_LINES: usize = 4;

/// A queue pair, `ibv_create_qp(3)`.
pub trait Qp: Debug + Send + Sync {
    /// Returns the queue pair number, which is constant.
    fn qpn(&self) -> Qpn;

    /// Returns the granted sizes; at least the requested ones.
    fn caps(&self) -> QpCaps;

    /// Changes state and attributes, `ibv_modify_qp(3)`; on error nothing changes.
    fn modify(&self, attr: &QpAttr) -> Result<(), VerbError>;

    /// Returns the current state and all attributes set so far, `ibv_query_qp(3)`.
    fn query(&self) -> Result<(QpState, QpAttr), VerbError>;

    /// Notes that the connection manager has moved the queue pair to RTS, as that of an iWARP
    /// device does.
    fn connected(&self) {}

    /// Posts work requests with one doorbell, `ibv_post_send(3)`. Polling a completion frees its
    /// slot and all earlier slots.
    ///
    /// The iterator may build each request as it is posted. A single request passed as `Some` lets
    /// an inlined provider know the count, and most fields, at compile time.
    ///
    /// - EINVAL: `BindWindow` without [`Data::Window`](crate::types::Data::Window) and vice versa;
    ///   `LocalInvalidate` with data.
    /// - Work posted after a binding sees it bound. `LocalInvalidate` waits for earlier work; after
    ///   its completion no peer can use the key.
    /// - A bad binding fails with `MW_BIND_ERR`, a bad key with `LOC_QP_OP_ERR`; the queue pair
    ///   enters ERR.
    ///
    /// # Safety
    ///
    /// The memory named stays valid and untouched until the completion is polled or the queue pair
    /// is dropped. The registration of a bound window outlives the window.
    unsafe fn post_send<'a>(
        &self,
        list: impl IntoIterator<Item = impl Borrow<SendWr<'a>>>,
    ) -> Result<(), PostError>;

    /// Returns the address of the [`STATE_LINES`] cache lines that each post uses, to be
    /// [prefetched](crate::prefetch()). `None` if that saves no time.
    fn post_state(&self) -> Option<*const ()> {
        None
    }

    /// Returns the address of the [`PEER_LINES`] cache lines that each post uses of the connected
    /// peer, if that is in the same process. The peer may be gone when they are prefetched.
    fn peer_post_state(&self) -> Option<*const ()> {
        None
    }

    /// Returns true if the provider implements [`post_plain`](Self::post_plain) for the queue pair.
    /// Constant: the work queue asks once.
    fn has_plain(&self) -> bool {
        false
    }

    /// Posts work requests with one doorbell, like [`post_send`](Self::post_send), without a lock
    /// and without other checks than for capacity. A work queue uses it under its own lock, for
    /// requests that it has checked.
    ///
    /// Returns false, and posts nothing, if the queue is full, the queue pair has not been in RTS
    /// since its last reset, or an earlier request requires a flag: `post_send` then posts or
    /// refuses them. That is no error.
    ///
    /// # Safety
    ///
    /// See [`post_send`](Self::post_send). The caller also excludes all other posts of sends, and
    /// changes to RESET. Each buffer is one element of registered memory, and not empty.
    #[inline]
    unsafe fn post_plain(&self, _list: impl ExactSizeIterator<Item = PlainWr>) -> bool {
        false
    }

    /// Posts receive work requests, `ibv_post_recv(3)`.
    ///
    /// # Safety
    ///
    /// As for [`post_send`](Self::post_send).
    unsafe fn post_recv(&self, list: &[RecvWr<'_>]) -> Result<(), PostError>;

    /// Attaches a datagram queue pair to a multicast group, `ibv_attach_mcast(3)`. It gets a copy
    /// of each datagram to the group with its Q_Key, even of its own. Repeating it has no effect.
    ///
    /// `lid` is the group's on InfiniBand. EINVAL for another transport, or if `group` is not
    /// [multicast](crate::types::Gid::is_multicast). ENOMEM beyond
    /// [`DeviceAttr::max_mcast_grp`] or [`DeviceAttr::max_mcast_qp_attach`].
    fn attach_multicast(&self, group: Gid, lid: u16) -> Result<(), VerbError>;

    /// Detaches it from the group, `ibv_detach_mcast(3)`. EINVAL if it is not attached.
    fn detach_multicast(&self, group: Gid, lid: u16) -> Result<(), VerbError>;

    /// Detaches the queue pair from its multicast groups and destroys it, `ibv_destroy_qp(3)`; drop
    /// it after success. After an error the device may still execute posted work, so nothing that
    /// the work uses may be freed.
    fn destroy(&mut self) -> Result<(), VerbError>;
}

/// A target of dynamic connections (DC). Initiators that know its number and key reach it as if
/// each had a reliable connection. Receives come from its shared receive queue; completions carry
/// its number as `qpn`.
///
/// A wrong key or a forbidden operation fails at the initiator; the target continues.
pub trait Dct: Debug + Send + Sync {
    /// Returns the number, constant from RTR on; `None` before.
    fn number(&self) -> Option<Qpn>;

    /// Changes state and attributes, `ibv_modify_qp(3)`, by
    /// [`dct_transition`](crate::types::dct_transition); on error nothing changes.
    fn modify(&self, attr: &QpAttr) -> Result<(), VerbError>;

    /// Returns the current state and all attributes set so far, `ibv_query_qp(3)`.
    fn query(&self) -> Result<(QpState, QpAttr), VerbError>;

    /// Stops accepting messages before destruction. Afterwards no message takes a receive, and
    /// completions of all receives taken are queued, so destruction loses none. Does nothing on a
    /// device that cannot stop.
    fn quiesce(&self) {}

    /// Destroys the target, `ibv_destroy_qp(3)`, like [`Qp::destroy`]. After `Ok` no message takes
    /// a receive and no initiator reaches memory through the target: its work fails when retries
    /// run out. Unpolled completions may be lost.
    fn destroy(&mut self) -> Result<(), VerbError>;
}

/// The target type of a provider without DC.
#[derive(Debug)]
pub enum NoDct {}

impl NoDct {
    /// The error of creating a target.
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

/// A shared receive queue, `ibv_create_srq(3)`.
pub trait Srq: Debug + Send + Sync {
    /// Returns the number that asynchronous events carry.
    fn id(&self) -> u64;

    /// Returns the granted sizes; at least the requested ones.
    fn caps(&self) -> SrqCaps;

    /// Arms the limit event, raised once when fewer than `limit` receives remain,
    /// `ibv_modify_srq(3)`. EINVAL above `max_wr`.
    fn set_limit(&self, limit: u32) -> Result<(), VerbError>;

    /// Returns the armed limit; 0 after the event.
    fn limit(&self) -> Result<u32, VerbError>;

    /// Posts receive work requests, `ibv_post_srq_recv(3)`.
    ///
    /// # Safety
    ///
    /// The memory named stays valid and untouched until the completion is polled or the shared
    /// receive queue is dropped.
    unsafe fn post_recv(&self, list: &[RecvWr<'_>]) -> Result<(), PostError>;

    /// Destroys the queue after its queue pairs, `ibv_destroy_srq(3)`; `Drop` then does nothing.
    /// After an error the device may still use posted receives.
    fn destroy(&mut self) -> Result<(), VerbError>;
}

/// An address handle, `ibv_create_ah(3)`.
pub trait Ah: Debug + Send + Sync {
    /// Returns the value for [`UdTarget::handle`](crate::types::UdTarget) and
    /// [`DctTarget::handle`](crate::types::DctTarget).
    fn handle(&self) -> usize;
}
