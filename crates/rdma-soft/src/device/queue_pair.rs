//! Queue pairs: a requester half and a responder half, each with a lock.

mod modify;
mod path_share;

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use rdma_provider::locks::Mutex;
use smallvec::SmallVec;

use rdma_provider::types::{AsyncEvent, QpAttr, QpCaps, QpState, Qpn, Transport, WorkCompletion};

use super::DeviceInner;
use super::completion_queue::{CqInner, Frees, Polled};
use super::dct::DctInner;
use super::deferred::Deferred;
use super::events::Events;
use super::shared_receive_queue::SrqInner;
use crate::net::udp::WindowSlot;
use crate::roce::ip_fields::IpFields;
use crate::roce::requester::{Destination, Requester, SendCompletions, SendCounters};
use crate::roce::responder::{ReceiveCounters, ReceiveWqe, Receiver, Responder};

/// A post uses the fields up to the machine of `sender`, and the peer's from `destroyed` up to the
/// machine of `receiver`. Both are [prefetched](rdma_provider::contract::Qp::post_state).
#[repr(C)]
pub(crate) struct QpInner {
    pub(crate) device: Arc<DeviceInner>,
    pub(crate) send_cq: Arc<CqInner>,
    pub(crate) polled: Arc<Polled>,
    pub(crate) caps: QpCaps,
    pub(crate) qpn: Qpn,
    pub(crate) send_owner: u32,
    pub(crate) transport: Transport,
    pub(crate) sender: Mutex<Sender>,
    pub(crate) recv_owner: u32,
    /// The handle was dropped. Changes only under both locks.
    pub(crate) destroyed: AtomicBool,
    pub(crate) receiver: Mutex<ReceiverHalf>,
    pub(crate) recv_cq: Arc<CqInner>,
    pub(crate) srq: Option<Arc<SrqInner>>,
    /// Number of resets. Changes only under both locks.
    pub(crate) generation: AtomicU64,
    pub(crate) events: Arc<Events>,
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
    pub(crate) notify_drained: bool,
    /// The responder half was notified of the failure.
    pub(crate) failed: bool,
    /// The value of `Polled::send` when last read.
    pub(crate) polled: u32,
    pub(crate) machine: Requester,
    /// The last destination of a DC initiator.
    pub(crate) target: Weak<DctInner>,
    pub(crate) peer_at: Destination,
    /// Times of scheduled timer jobs, the earliest last.
    pub(crate) scheduled: SmallVec<[u64; 2]>,
    /// Slot in the path's window, over UDP.
    pub(crate) window_slot: Option<WindowSlot>,
    pub(crate) attr: QpAttr,
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
    pub(crate) ip_fields: IpFields,
    /// Time before which no further congestion notification is sent.
    pub(crate) notify_after: u64,
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
            self.qp.device.fail_overrun(&self.qp.send_cq, self.deferred);
        }
    }

    fn now(&mut self) -> u64 {
        self.qp.device.network.scheduler.now()
    }

    fn random(&mut self) -> Option<u64> {
        self.qp.device.network.random().ok()
    }

    fn count_bad_pkey(&mut self) {
        self.qp.device.pkeys.count_violation();
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

    #[inline(always)]
    fn complete(&mut self, position: u32, completion: &WorkCompletion, solicited: bool) {
        let frees = if self.qp.srq.is_some() {
            Frees::Shared
        } else {
            Frees::Recv(position.wrapping_add(1))
        };
        if self.qp.recv_cq.push(self.qp.recv_owner, frees, completion, solicited).is_err() {
            self.qp.device.fail_overrun(&self.qp.recv_cq, self.deferred);
        }
    }

    fn event(&mut self, event: AsyncEvent) {
        self.qp.events.raise(event);
    }

    fn count_bad_pkey(&mut self) {
        self.qp.device.pkeys.count_violation();
    }

    fn failed(&mut self) {
        self.qp.fail_later(self.deferred);
    }
}

impl QpInner {
    pub(crate) const fn qpn(&self) -> Qpn {
        self.qpn
    }

    pub(crate) const fn transport(&self) -> Transport {
        self.transport
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
            self.events.raise(event);
        }
    }

    /// Does the same when no lock is held, unless the queue pair is reset before.
    #[cold]
    fn fail_later(self: &Arc<Self>, deferred: &Deferred) {
        let (qp, generation) = (Arc::clone(self), self.generation());
        deferred.push(move |deferred| qp.fail(Some(generation), None, deferred));
    }

    pub(super) fn flush_both(
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
    #[inline]
    pub(crate) fn settle(self: &Arc<Self>, sender: &mut Sender, deferred: &Deferred) {
        let scheduler = &self.device.network.scheduler;
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
                self.events.raise(AsyncEvent::SendQueueDrained(self.qpn));
            }
            _ => {}
        }
    }

    pub(crate) fn pkey(&self) -> u16 {
        self.sender.lock().machine.config.pkey
    }

    pub(crate) fn counters(&self) -> (SendCounters, ReceiveCounters) {
        let sent = self.sender.lock().machine.counters;
        (sent, self.receiver.lock().machine.counters)
    }
}

/// Returns the state of a queue pair.
pub(crate) fn state_of(sender: &Sender, receiver: &ReceiverHalf) -> QpState {
    // A deferred action moves the requester half.
    if receiver.machine.state() == QpState::Err { QpState::Err } else { sender.machine.state() }
}
