//! Queue pairs.

// Implements `unsafe fn`s of the contract; contains no unsafe block.
#![allow(unsafe_code)]

use std::array;
use std::borrow::Borrow;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use rdma_provider::locks::Mutex;
use smallvec::SmallVec;

use rdma_provider::VerbError;
use rdma_provider::contract::{self, PostError, QpInit};
use rdma_provider::types::{
    Access, AckTimeout, Data, Gid, Mtu, Qkey, QpAttr, QpCaps, QpState, Qpn, RecvWr, RnrTimer,
    SendOp, SendTarget, SendWr, Transport,
};

use crate::Soft;
use crate::device::DeviceInner;
use crate::device::completion_queue::Polled;
use crate::device::deferred::Deferred;
use crate::device::events::Events;
use crate::device::pump::Budget;
use crate::device::queue_pair::{QpInner, ReceiveSide, ReceiverHalf, Sender, state_of};
use crate::net::node::PORT;
use crate::roce::ip_fields::IpFields;
use crate::roce::partition::DEFAULT_PKEY;
use crate::roce::requester::{Destination, Flow, Requester, SendConfig, SendCounters};
use crate::roce::responder::{ReceiveConfig, ReceiveCounters, Responder};

/// Creates a queue pair in RESET, under the connection manager's reserved number, if any.
pub(crate) fn create(
    (device, events): (&Arc<DeviceInner>, &Arc<Events>),
    pd: u32,
    init: &QpInit<'_, Soft>,
    reserved: Option<Qpn>,
) -> Result<Qp, VerbError> {
    let refuse = || VerbError::new("ibv_create_qp", VerbError::EINVAL);
    let limits = device.attr();
    let mut caps = init.caps;
    let initiator = init.transport == Transport::Dci;
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
    let foreign =
        [Some(&init.send_cq.device), Some(&init.recv_cq.device), init.srq.map(|srq| &srq.device)]
            .into_iter()
            .flatten()
            .any(|other| !Arc::ptr_eq(other, device));
    if too_large || foreign {
        return Err(refuse());
    }
    let srq = init.srq.map(|srq| Arc::clone(&srq.queue));
    let incarnation = if initiator { device.network.random()? as u32 } else { 0 };
    let polled = Arc::new(Polled::default());
    let unconfirmed = reserved.and_then(|number| device.cm.reserved_for(number));
    let inner = device.add_queue_pair(reserved, |qpn| {
        let send_cq = Arc::clone(&init.send_cq.queue);
        let recv_cq = Arc::clone(&init.recv_cq.queue);
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
            pkey: DEFAULT_PKEY,
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
            pkey: DEFAULT_PKEY,
            min_rnr_timer: RnrTimer::from_code(0),
            max_dest_rd_atomic: 0,
        };
        Arc::new(QpInner {
            qpn,
            transport: init.transport,
            caps,
            device: Arc::clone(device),
            events: Arc::clone(events),
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
                ip_fields: IpFields::default(),
                notify_after: 0,
            }),
        })
    })?;
    Ok(Qp(inner))
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
/// use rdma_soft::contract::{Context as _, CqInit, Pd as _, Qp as _, QpInit};
/// use rdma_soft::types::{DirectConfig, QpCaps, QpState, Transport};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let context = Network::new().open("a")?;
/// let (pd, cq) = (context.create_pd()?, context.create_cq(&CqInit::new(16))?);
/// let caps =
///     QpCaps { max_send_wr: 4, max_recv_wr: 4, max_send_sge: 1, max_recv_sge: 1, max_inline: 0 };
/// let init = QpInit {
///     transport: Transport::Rc,
///     send_cq: &cq,
///     recv_cq: &cq,
///     srq: None,
///     caps,
///     direct: DirectConfig::DEFAULT,
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
        self.0.device.check_destroy("ibv_destroy_qp")
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
        qp.device.check_alive("ibv_modify_qp")?;
        let deferred = Deferred::new();
        let result = qp.modify(attr, &deferred);
        deferred.run();
        result
    }

    fn attach_multicast(&self, group: Gid, _lid: u16) -> Result<(), VerbError> {
        const VERB: &str = "ibv_attach_mcast";
        let (qp, device) = (&self.0, &self.0.device);
        device.check_alive(VERB)?;
        if qp.transport != Transport::Ud || !group.is_multicast() {
            return Err(VerbError::new(VERB, VerbError::EINVAL));
        }
        let join = || device.endpoint().map(|endpoint| endpoint.join(group)).transpose();
        device.groups.attach(group, (qp.qpn, qp), join)
    }

    fn detach_multicast(&self, group: Gid, _lid: u16) -> Result<(), VerbError> {
        let detached = self.0.device.groups.detach(group, self.0.qpn);
        if detached { Ok(()) } else { Err(VerbError::new("ibv_detach_mcast", VerbError::EINVAL)) }
    }

    fn query(&self) -> Result<(QpState, QpAttr), VerbError> {
        let sender = self.0.sender.lock();
        let receiver = self.0.receiver.lock();
        let state = state_of(&sender, &receiver);
        Ok((state, QpAttr { state: Some(state), ..sender.attr }))
    }

    #[inline]
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
        if qp.transport == Transport::Ud {
            qp.device.groups.detach_all(qp.qpn);
        }
        let deferred = Deferred::new();
        let (peer, counters) = {
            let mut sender = qp.sender.lock();
            let mut receiver = qp.receiver.lock();
            let peer = sender.peer.take();
            qp.reset(&mut sender, &mut receiver, &deferred);
            qp.destroyed.store(true, Ordering::Relaxed);
            qp.device.keys.unbind_windows_of(qp.qpn);
            qp.send_cq.detach(qp.send_owner);
            if !Arc::ptr_eq(&qp.send_cq, &qp.recv_cq) {
                qp.recv_cq.detach(qp.recv_owner);
            }
            // Nothing counts any more.
            (peer, (sender.machine.counters, receiver.machine.counters))
        };
        qp.device.remove_queue_pair(qp.qpn, counters);
        deferred.run();
        // Outside the locks: possibly the last reference to another device's queue pair.
        drop(peer);
    }
}

impl Sender {
    /// Returns true if the queue has no free slot.
    #[inline]
    fn is_full(&mut self, qp: &QpInner) -> bool {
        self.has_no_known_slot(qp) && {
            self.polled = qp.polled.send.load(Ordering::Acquire);
            self.has_no_known_slot(qp)
        }
    }

    #[inline]
    fn has_no_known_slot(&self, qp: &QpInner) -> bool {
        self.machine.position().wrapping_sub(self.polled) >= qp.caps.max_send_wr
    }
}

impl QpInner {
    /// Returns the length of a work request that may be posted now, or the errno of the refusal.
    #[inline(always)]
    fn accept(&self, sender: &mut Sender, wr: &SendWr<'_>) -> Result<u32, i32> {
        if matches!(sender.machine.state(), QpState::Reset | QpState::Init | QpState::Rtr) {
            return Err(VerbError::EINVAL);
        }
        let length = self.check_send(wr).ok_or(VerbError::EINVAL)?;
        if sender.is_full(self) || self.device.refusals.send() {
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
