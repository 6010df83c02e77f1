//! Queue pairs: a requester half and a responder half, each with a lock.

// Implements `unsafe fn`s of the contract; contains no unsafe block.
#![allow(unsafe_code)]

mod modify;
mod path_share;

use std::borrow::Borrow;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::{array, fmt};

use rdma_provider::locks::Mutex;
use smallvec::SmallVec;

use rdma_provider::VerbError;
use rdma_provider::contract::{self, PostError, QpInit};
use rdma_provider::types::{
    Access, AckTimeout, AsyncEvent, Data, Gid, Mtu, Qkey, QpAttr, QpCaps, QpState, Qpn, RecvWr,
    RnrTimer, SendOp, SendTarget, SendWr, Transport, WorkCompletion,
};

use self::modify::state_of;
use super::completion_queue::{CqInner, Frees, Polled};
use super::dct::DctInner;
use super::deferred::Deferred;
use super::pump::Budget;
use super::shared_receive_queue::SrqInner;
use super::{ContextInner, DeviceInner, PORT};
use crate::Soft;
use crate::cm::Manager;
use crate::net::udp::WindowSlot;
use crate::roce::requester::{
    Destination, Flow, Requester, SendCompletions, SendConfig, SendCounters,
};
use crate::roce::responder::{ReceiveConfig, ReceiveCounters, ReceiveWqe, Receiver, Responder};

/// A post uses the fields up to the machine of `sender`, and the peer's from `destroyed` up to the
/// machine of `receiver`. Both are [prefetched](contract::Qp::post_state).
#[repr(C)]
pub(crate) struct QpInner {
    context: Arc<ContextInner>,
    send_cq: Arc<CqInner>,
    polled: Arc<Polled>,
    caps: QpCaps,
    qpn: Qpn,
    send_owner: u32,
    transport: Transport,
    pub(crate) sender: Mutex<Sender>,
    recv_owner: u32,
    /// The handle was dropped. Changes only under both locks.
    pub(crate) destroyed: AtomicBool,
    pub(crate) receiver: Mutex<ReceiverHalf>,
    recv_cq: Arc<CqInner>,
    srq: Option<Arc<SrqInner>>,
    /// Number of resets. Changes only under both locks.
    generation: AtomicU64,
}

impl Sender {
    /// Returns true if the queue has no free slot.
    #[inline(always)]
    fn is_full(&mut self, qp: &QpInner) -> bool {
        self.has_no_known_slot(qp) && {
            self.polled = qp.polled.send.load(Ordering::Acquire);
            self.has_no_known_slot(qp)
        }
    }

    #[inline(always)]
    fn has_no_known_slot(&self, qp: &QpInner) -> bool {
        self.machine.position().wrapping_sub(self.polled) >= qp.caps.max_send_wr
    }
}

impl fmt::Debug for QpInner {
    /// Omits the peer, which refers back.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("QueuePair")
            .field("qpn", &self.qpn)
            .field("transport", &self.transport)
            .field("caps", &self.caps)
            .finish_non_exhaustive()
    }
}

/// The fields that each operation uses come first, in few cache lines.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct Sender {
    /// The last destination, at `peer_at`. A strong reference avoids counting per packet; destroyed
    /// peers are replaced.
    pub(crate) peer: Option<Arc<QpInner>>,
    /// `Task::Continue` is scheduled, or another thread sends: posting only queues.
    pub(crate) continuing: bool,
    /// The last slice sent nothing: other queue pairs had used up the pace.
    pub(crate) passed_over: bool,
    notify_drained: bool,
    /// The responder half was notified of the failure.
    failed: bool,
    /// The value of `Polled::send` when last read.
    polled: u32,
    pub(crate) machine: Requester,
    /// The last destination of a DC initiator.
    pub(crate) target: Weak<DctInner>,
    pub(crate) peer_at: Destination,
    /// Times of scheduled timer jobs, the earliest last.
    pub(crate) scheduled: SmallVec<[u64; 2]>,
    /// Slot in the path's window, over UDP.
    window_slot: Option<WindowSlot>,
    attr: QpAttr,
}

/// The fields that each operation uses come first, in few cache lines.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct ReceiverHalf {
    /// The device of the queue pair. A peer that executes a request finds it with one load less.
    pub(crate) device: Arc<DeviceInner>,
    /// `Task::Reply` is scheduled.
    pub(crate) replying: bool,
    pub(crate) machine: Responder,
    /// A connection until its peer's first accepted request. The peer has not confirmed it, or may
    /// send before this queue pair is ready.
    pub(crate) unconfirmed: Option<u32>,
}

pub(crate) struct SendSide<'a> {
    pub(crate) qp: &'a QpInner,
    pub(crate) deferred: &'a Deferred,
}

impl SendCompletions for SendSide<'_> {
    #[inline(always)]
    fn complete(&mut self, position: u32, completion: &WorkCompletion) {
        let frees = Frees::Send(position.wrapping_add(1));
        if self.qp.send_cq.push(self.qp.send_owner, frees, completion, false).is_err() {
            self.qp.device().fail_overrun(&self.qp.send_cq, self.deferred);
        }
    }

    fn now(&mut self) -> u64 {
        self.qp.device().network.scheduler.now()
    }

    fn random(&mut self) -> Option<u64> {
        self.qp.device().network.random().ok()
    }
}

pub(crate) struct ReceiveSide<'a> {
    pub(crate) qp: &'a Arc<QpInner>,
    pub(crate) deferred: &'a Deferred,
}

impl Receiver for ReceiveSide<'_> {
    fn take_shared(&mut self, into: &mut ReceiveWqe) -> bool {
        self.qp.srq.as_ref().is_some_and(|srq| srq.take(into))
    }

    #[inline]
    fn complete(&mut self, position: u32, completion: &WorkCompletion, solicited: bool) {
        let frees = if self.qp.srq.is_some() {
            Frees::Shared
        } else {
            Frees::Recv(position.wrapping_add(1))
        };
        if self.qp.recv_cq.push(self.qp.recv_owner, frees, completion, solicited).is_err() {
            self.qp.device().fail_overrun(&self.qp.recv_cq, self.deferred);
        }
    }

    fn event(&mut self, event: AsyncEvent) {
        self.qp.context.event(event);
    }

    fn failed(&mut self) {
        self.qp.fail_later(self.deferred);
    }
}

/// Creates a queue pair in RESET, under the connection manager's reserved number, if any.
pub(crate) fn create(
    context: &Arc<ContextInner>,
    pd: u32,
    init: &QpInit<'_, Soft>,
    reserved: Option<Qpn>,
) -> Result<Qp, VerbError> {
    let refuse = || VerbError::new("ibv_create_qp", VerbError::EINVAL);
    let device = context.device();
    let limits = device.attr();
    let mut caps = init.caps;
    let initiator = init.transport == Transport::Dci;
    if init.streams.is_some() {
        return Err(VerbError::new("ibv_create_qp", VerbError::EOPNOTSUPP));
    }
    if initiator && (caps.max_recv_wr > 0 || init.srq.is_some()) {
        return Err(refuse());
    }
    if init.srq.is_some() {
        caps.max_recv_wr = 0;
        caps.max_recv_sge = 0;
    }
    let too_large = caps.max_send_wr > limits.max_qp_wr
        || caps.max_recv_wr > limits.max_qp_wr
        || caps.max_send_sge > limits.max_sge
        || caps.max_recv_sge > limits.max_sge
        || caps.max_inline > limits.max_inline;
    let foreign = [
        Some(init.send_cq.0.context()),
        Some(init.recv_cq.0.context()),
        init.srq.map(|srq| srq.0.context()),
    ]
    .into_iter()
    .flatten()
    .any(|other| !Arc::ptr_eq(other.device(), device));
    if too_large || foreign {
        return Err(refuse());
    }
    let srq = init.srq.map(|srq| Arc::clone(&srq.0));
    let incarnation = if initiator { device.network.random()? as u32 } else { 0 };
    let polled = Arc::new(Polled::default());
    let unconfirmed = reserved.and_then(|number| Manager::reserved_for(device, number));
    let inner = device.add_queue_pair(reserved, |qpn| {
        let send_cq = Arc::clone(&init.send_cq.0);
        let recv_cq = Arc::clone(&init.recv_cq.0);
        let recv_owner = recv_cq.attach(qpn, &polled, srq.as_ref());
        let send_owner = if Arc::ptr_eq(&send_cq, &recv_cq) {
            recv_owner
        } else {
            send_cq.attach(qpn, &polled, None)
        };
        let send = SendConfig {
            transport: if initiator { Transport::Rc } else { init.transport },
            qpn,
            pd,
            dest: Qpn(0),
            mtu: Mtu::Mtu4096,
            timeout: AckTimeout::from_code(0),
            retry_count: 0,
            rnr_retry: 0,
            max_rd_atomic: 0,
            qkey: Qkey(0),
            flow: Flow::MEMORY,
        };
        let receive = ReceiveConfig {
            transport: init.transport,
            qpn,
            gid: device.gid,
            pd,
            shared: srq.is_some(),
            receive_pd: srq.as_ref().map_or(pd, |srq| srq.pd()),
            access: Access::empty(),
            mtu: Mtu::Mtu4096,
            peer: Qpn(0),
            peer_gid: Gid::default(),
            qkey: Qkey(0),
            min_rnr_timer: RnrTimer::from_code(0),
            max_dest_rd_atomic: 0,
        };
        Arc::new(QpInner {
            qpn,
            transport: init.transport,
            caps,
            context: Arc::clone(context),
            send_cq,
            send_owner,
            recv_cq,
            recv_owner,
            srq: srq.clone(),
            polled: Arc::clone(&polled),
            destroyed: AtomicBool::new(false),
            generation: AtomicU64::new(0),
            sender: Mutex::new(Sender {
                machine: if initiator {
                    Requester::initiator(send, incarnation)
                } else {
                    Requester::new(send)
                },
                attr: QpAttr::default(),
                peer: None,
                target: Weak::new(),
                peer_at: Destination::default(),
                scheduled: SmallVec::new(),
                continuing: false,
                passed_over: false,
                notify_drained: false,
                failed: false,
                polled: 0,
                window_slot: None,
            }),
            receiver: Mutex::new(ReceiverHalf {
                device: Arc::clone(device),
                machine: Responder::new(receive),
                replying: false,
                unconfirmed,
            }),
        })
    })?;
    Ok(Qp(inner))
}

impl QpInner {
    pub(crate) const fn qpn(&self) -> Qpn {
        self.qpn
    }

    pub(crate) const fn transport(&self) -> Transport {
        self.transport
    }

    #[inline]
    pub(crate) fn device(&self) -> &Arc<DeviceInner> {
        self.context.device()
    }

    #[inline]
    pub(crate) fn is_destroyed(&self) -> bool {
        self.destroyed.load(Ordering::Relaxed)
    }

    pub(crate) fn generation(&self) -> u64 {
        self.generation.load(Ordering::Relaxed)
    }

    /// Moves the queue pair to ERR and flushes both queues, unless in RESET or reset after
    /// `generation`.
    pub(crate) fn fail(
        self: &Arc<Self>,
        generation: Option<u64>,
        event: Option<AsyncEvent>,
        deferred: &Deferred,
    ) {
        {
            let mut sender = self.sender.lock();
            let mut receiver = self.receiver.lock();
            if generation.is_some_and(|then| then != self.generation())
                || self.is_destroyed()
                || sender.machine.state() == QpState::Reset
            {
                return;
            }
            self.flush_both(&mut sender, &mut receiver, deferred);
        }
        if let Some(event) = event {
            self.context.event(event);
        }
    }

    /// Does the same when no lock is held, unless the queue pair is reset before.
    #[cold]
    fn fail_later(self: &Arc<Self>, deferred: &Deferred) {
        let (qp, generation) = (Arc::clone(self), self.generation());
        deferred.push(move |deferred| qp.fail(Some(generation), None, deferred));
    }

    fn flush_both(
        self: &Arc<Self>,
        sender: &mut Sender,
        receiver: &mut ReceiverHalf,
        deferred: &Deferred,
    ) {
        sender.failed = true;
        if let Some(slot) = &sender.window_slot {
            slot.withdraw();
        }
        if sender.machine.state() != QpState::Err {
            rdma_provider::debug!(
                qpn = %self.qpn,
                from = ?sender.machine.state(),
                "queue pair enters the error state"
            );
            sender.machine.set_state(QpState::Err, &mut SendSide { qp: self, deferred });
        }
        if receiver.machine.state() != QpState::Err {
            receiver.machine.set_state(QpState::Err, &mut ReceiveSide { qp: self, deferred });
        }
    }

    /// Schedules the timer, raises events and defers a failure, after any action of the requester.
    #[inline(always)]
    pub(crate) fn settle(self: &Arc<Self>, sender: &mut Sender, deferred: &Deferred) {
        let scheduler = &self.device().network.scheduler;
        // Otherwise the continuation settles.
        if !sender.continuing
            && let Some(deadline) = sender.machine.settle(|| scheduler.now())
        {
            self.schedule_timer(sender, deadline);
        }
        match sender.machine.state() {
            QpState::Rts => {}
            QpState::Err if !sender.failed => {
                sender.failed = true;
                self.fail_later(deferred);
            }
            QpState::Sqd
                if sender.machine.take_drained() && std::mem::take(&mut sender.notify_drained) =>
            {
                self.context.event(AsyncEvent::SendQueueDrained(self.qpn));
            }
            _ => {}
        }
    }

    pub(crate) fn counters(&self) -> (SendCounters, ReceiveCounters) {
        let sent = self.sender.lock().machine.counters;
        (sent, self.receiver.lock().machine.counters)
    }

    /// Returns the length of a work request that may be posted now, or the errno of the refusal.
    #[inline(always)]
    fn accept(&self, sender: &mut Sender, wr: &SendWr<'_>) -> Result<u32, i32> {
        if matches!(sender.machine.state(), QpState::Reset | QpState::Init | QpState::Rtr) {
            return Err(VerbError::EINVAL);
        }
        let length = self.check_send(wr).ok_or(VerbError::EINVAL)?;
        if sender.is_full(self) || self.device().refusals.send() {
            return Err(VerbError::ENOMEM);
        }
        Ok(length)
    }

    /// Returns the length of a valid send work request.
    #[inline(always)]
    fn check_send(&self, wr: &SendWr<'_>) -> Option<u32> {
        let length = match wr.data {
            Data::Sges([one]) if self.caps.max_send_sge > 0 && !wr.op.is_local() => one.length,
            _ => self.length(wr)?,
        };
        let allowed = match self.transport {
            Transport::Rc => true,
            Transport::Uc => !wr.op.reads_back() && !matches!(wr.op, SendOp::SendWithInvalidate(_)),
            Transport::Ud => {
                matches!(wr.op, SendOp::Send | SendOp::SendWithImm(_))
                    && length as usize <= Mtu::Mtu4096.bytes()
                    && matches!(wr.target, Some(SendTarget::Datagram(to))
                        if to.address.port == PORT && to.address.sgid_index == 0)
            }
            Transport::Dci => {
                !wr.op.is_local()
                    && !matches!(wr.op, SendOp::SendWithInvalidate(_))
                    && matches!(wr.target, Some(SendTarget::Dc(to))
                        if to.address.port == PORT
                            && to.address.sgid_index == 0
                            && to.number <= Qpn::MAX)
            }
        };
        allowed.then_some(length)
    }

    /// Returns the length if the operation permits the data.
    fn length(&self, wr: &SendWr<'_>) -> Option<u32> {
        match (wr.data, wr.op) {
            (Data::Window(_), SendOp::BindWindow)
            | (Data::Sges([]), SendOp::LocalInvalidate(_)) => Some(0),
            (Data::Window(_), _) | (_, SendOp::BindWindow | SendOp::LocalInvalidate(_)) => None,
            (Data::Sges(sges), _) => {
                let total: u64 = sges.iter().map(|sge| u64::from(sge.length)).sum();
                // Fails when it is processed: longer than any message.
                let length = u32::try_from(total).unwrap_or(u32::MAX);
                (sges.len() <= self.caps.max_send_sge as usize).then_some(length)
            }
            (Data::Inline(bytes), op) => {
                let fits = bytes.len() <= self.caps.max_inline as usize && !op.reads_back();
                fits.then_some(bytes.len() as u32)
            }
        }
    }
}

/// A queue pair, see [`contract::Qp`].
///
/// - Polling a completion frees the slots up to its work request, as strictly as mlx5: a program
///   that never requests a completion fills its send queue.
/// - Destroying or resetting the queue pair removes its completions from the completion queue.
/// - READ and atomics with `max_rd_atomic` 0 fail with `LOC_QP_OP_ERR`: they could never start.
/// - A `SendWithInvalidate` whose key is no window bound by the receiving queue pair completes the
///   receive with `REM_INV_REQ_ERR`. There is no NAK for this: the sender exhausts its retries.
/// - Destroying the queue pair unbinds its windows.
///
/// ```
/// use rdma_soft::Network;
/// use rdma_soft::contract::{Context as _, Pd as _, Qp as _, QpInit};
/// use rdma_soft::types::{QpCaps, QpState, Transport};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let context = Network::new().open("a")?;
/// let (pd, cq) = (context.create_pd()?, context.create_cq(16, None, 0, 0)?);
/// let caps =
///     QpCaps { max_send_wr: 4, max_recv_wr: 4, max_send_sge: 1, max_recv_sge: 1, max_inline: 0 };
/// let init = QpInit {
///     transport: Transport::Rc,
///     send_cq: &cq,
///     recv_cq: &cq,
///     srq: None,
///     caps,
///     streams: None,
/// };
/// // `examples/write.rs` continues from RESET.
/// let qp = pd.create_qp(&init)?;
/// assert_eq!(qp.query()?.0, QpState::Reset);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Qp(pub(crate) Arc<QpInner>);

impl Qp {
    /// Returns the counters of the requester and the responder.
    pub fn counters(&self) -> (SendCounters, ReceiveCounters) {
        self.0.counters()
    }

    /// Posts a list under the contract of [`post_send`](contract::Qp::post_send).
    ///
    /// The compiler removes the loop if the type of the list tells that its length is 1.
    #[inline(never)]
    fn post_list<'a>(
        &self,
        list: impl IntoIterator<Item = impl Borrow<SendWr<'a>>>,
    ) -> Result<(), PostError> {
        let qp = &self.0;
        let deferred = Deferred::new();
        let mut result = Ok(());
        {
            let mut sender = qp.sender.lock();
            let mut budget = Budget::slice();
            let mut queued = false;
            for (posted, wr) in list.into_iter().enumerate() {
                let wr = wr.borrow();
                match qp.accept(&mut sender, wr) {
                    Ok(length) => {
                        queued |=
                            qp.execute_or_queue(&mut sender, wr, length, &mut budget, &deferred);
                    }
                    Err(errno) => {
                        result = refuse("ibv_post_send", posted, errno);
                        break;
                    }
                }
            }
            if queued {
                qp.pump(sender, budget, &deferred);
            }
        }
        deferred.run();
        result
    }
}

impl contract::Qp for Qp {
    fn destroy(&mut self) -> Result<(), VerbError> {
        self.0.device().check_destroy("ibv_destroy_qp")
    }

    fn qpn(&self) -> Qpn {
        self.0.qpn
    }

    fn caps(&self) -> QpCaps {
        self.0.caps
    }

    fn post_state(&self) -> Option<*const ()> {
        Some(Arc::as_ptr(&self.0).cast())
    }

    fn peer_post_state(&self) -> Option<*const ()> {
        let at = self.0.sender.lock().peer_at;
        self.0.resolve(at).map(|peer| (&raw const peer.destroyed).cast())
    }

    fn modify(&self, attr: &QpAttr) -> Result<(), VerbError> {
        let qp = &self.0;
        qp.device().check_alive("ibv_modify_qp")?;
        let deferred = Deferred::new();
        let result = qp.modify(attr, &deferred);
        deferred.run();
        result
    }

    fn query(&self) -> Result<(QpState, QpAttr), VerbError> {
        let sender = self.0.sender.lock();
        let receiver = self.0.receiver.lock();
        let state = state_of(&sender, &receiver);
        Ok((state, QpAttr { state: Some(state), ..sender.attr }))
    }

    #[inline(always)]
    unsafe fn post_send<'a>(
        &self,
        list: impl IntoIterator<Item = impl Borrow<SendWr<'a>>>,
    ) -> Result<(), PostError> {
        let mut list = list.into_iter();
        if list.size_hint().1 != Some(1) {
            return self.post_list(list);
        }
        // By reference: a single request is written to memory once.
        list.next().map_or(Ok(()), |wr| self.post_list(array::from_ref(wr.borrow())))
    }

    unsafe fn post_recv(&self, list: &[RecvWr<'_>]) -> Result<(), PostError> {
        let qp = &self.0;
        let deferred = Deferred::new();
        let mut result = Ok(());
        {
            let mut receiver = qp.receiver.lock();
            for (posted, wr) in list.iter().enumerate() {
                let malformed = receiver.machine.state() == QpState::Reset
                    || qp.srq.is_some()
                    || wr.sges.len() > qp.caps.max_recv_sge as usize;
                if malformed {
                    result = refuse("ibv_post_recv", posted, VerbError::EINVAL);
                    break;
                }
                let polled = qp.polled.recv.load(Ordering::Acquire);
                if receiver.machine.position().wrapping_sub(polled) >= qp.caps.max_recv_wr {
                    result = refuse("ibv_post_recv", posted, VerbError::ENOMEM);
                    break;
                }
                receiver.machine.post(wr, &mut ReceiveSide { qp, deferred: &deferred });
            }
        }
        deferred.run();
        result
    }
}

#[cold]
const fn refuse(verb: &'static str, posted: usize, errno: i32) -> Result<(), PostError> {
    Err(PostError { posted, error: VerbError::new(verb, errno) })
}

impl Drop for Qp {
    fn drop(&mut self) {
        let qp = &self.0;
        qp.device().remove_queue_pair(qp.qpn);
        let deferred = Deferred::new();
        let peer = {
            let mut sender = qp.sender.lock();
            let mut receiver = qp.receiver.lock();
            let peer = sender.peer.take();
            qp.reset(&mut sender, &mut receiver, &deferred);
            qp.destroyed.store(true, Ordering::Relaxed);
            qp.device().keys.unbind_windows_of(qp.qpn);
            qp.send_cq.detach(qp.send_owner);
            if !Arc::ptr_eq(&qp.send_cq, &qp.recv_cq) {
                qp.recv_cq.detach(qp.recv_owner);
            }
            peer
        };
        deferred.run();
        // Outside the locks: possibly the last reference to another device's queue pair.
        drop(peer);
    }
}
