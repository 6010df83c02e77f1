//! A send window to one peer, shared by all queue pairs of a device that send to it.
//!
//! A peer's socket has one receive buffer for all senders, 208 KiB by default. So [`WINDOW`] limits
//! the bytes in flight from a device to a peer, whatever the number of queue pairs. A queue pair
//! with nothing in flight and no free window joins a FIFO, whose head is admitted as packets of
//! others are acknowledged. Sending queue pairs have equal quotas of at least one packet. While
//! others wait, a queue pair queues again once nothing of it is in flight. Admission after a wait
//! grants a quantum of several packets, because each switch has a cost.
//!
//! A window for each queue pair would need no FIFO, but fails when 1,000 queue pairs begin at once:
//! one packet of each takes 4 MiB, so most first packets are lost whatever the windows do later.
//!
//! ```text
//!  Idle ── window full ──▶ Queued ── admitted ──▶ Admitted ── sent ──▶ Sending
//!   └───── window free ──────────────────────────────▲                    │
//!   ▲───────────── all acknowledged, failed, or closed ───────────────────┘
//! ```
//!
//! Unanswered queue pairs must not block others. A socket delivers in arrival order, so bytes are
//! counted by epochs: once a packet of the current epoch is acknowledged, all of the previous one
//! were delivered or lost. They stop counting, and the next epoch begins. Without acknowledgements,
//! the epoch advances after [`EPOCH_TIMEOUT`] while queue pairs wait, which ends every wait.

mod epochs;

use std::collections::VecDeque;
use std::sync::{Arc, Weak};

use rdma_provider::locks::Mutex;
use smallvec::SmallVec;

use self::epochs::{Epochs, Load};
use crate::net::scheduler::{Job, Scheduled, Scheduler, Task};
use crate::roce::requester::{Flow, WindowRequest};
use rdma_provider::types::Mtu;

/// Maximum bytes in flight. With half of it the receiver drains its socket too early, and both ends
/// alternately sleep.
pub(super) const WINDOW: u32 = 128 << 10;
/// Maximum packets in flight of a queue pair: each also costs the receiver some hundred bytes.
pub(super) const MAX_PACKETS: u32 = 64;
/// Nanoseconds until an unacknowledged epoch ends. A peer is rarely descheduled for longer; packets
/// admitted too early are retransmitted at worst.
const EPOCH_TIMEOUT: u64 = 50_000_000;
/// Minimum of the timeout, which each unanswered epoch halves, so that an absent peer is found in
/// time.
const MIN_EPOCH_TIMEOUT: u64 = 5_000_000;

/// Returns the bytes that a packet counts: small ones occupy buffer besides their payload.
fn accounted_bytes(mtu: Mtu) -> u32 {
    (mtu.bytes() as u32).max(512)
}

#[derive(Debug)]
pub(crate) struct PeerLink {
    scheduler: Arc<Scheduler>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    epochs: Epochs,
    wait_queue: VecDeque<Request>,
    entries: Vec<Entry>,
    /// Unused indices.
    free_entries: Vec<usize>,
    /// Epoch to end at the scheduled tick if still current; `None` if no tick is scheduled.
    watched_epoch: Option<u64>,
    /// Epochs ended by timeout since the last acknowledgement.
    unanswered_epochs: u32,
}

#[derive(Debug)]
struct Request {
    index: usize,
    bytes: u32,
}

#[derive(Debug)]
struct Entry {
    /// `None` without a queue pair.
    qp: Option<Weak<dyn Scheduled>>,
    phase: Phase,
    /// Epoch of the latest quota.
    quota_epoch: u64,
}

#[derive(Debug, Clone, Copy)]
enum Phase {
    Idle,
    Queued,
    Admitted(Load),
    Sending(Load),
}

/// Queue pairs to notify.
type Admissions = SmallVec<[Weak<dyn Scheduled>; 4]>;

impl State {
    /// Removes a queue pair; `acknowledged`: all its packets were answered.
    fn remove(&mut self, index: usize, acknowledged: bool) {
        match std::mem::replace(&mut self.entries[index].phase, Phase::Idle) {
            Phase::Idle => {}
            Phase::Queued => self.wait_queue.retain(|request| request.index != index),
            Phase::Admitted(load) => self.epochs.remove(load),
            Phase::Sending(load) => {
                self.epochs.remove(load);
                if acknowledged {
                    self.unanswered_epochs = 0;
                    if load.epoch == Some(self.epochs.current()) {
                        self.epochs.advance();
                    }
                }
            }
        }
    }

    fn fits(&self, bytes: u32) -> bool {
        let (in_flight, _) = self.epochs.total();
        in_flight == 0 || in_flight.saturating_add(bytes) <= WINDOW
    }

    /// Admits queued requests in order while they fit. Returns all but `requester`.
    fn admit(&mut self, requester: Option<usize>) -> Admissions {
        let mut all = Admissions::new();
        while let Some(&Request { index, bytes }) =
            self.wait_queue.front().filter(|first| self.fits(first.bytes))
        {
            self.wait_queue.pop_front();
            let entry = &mut self.entries[index];
            entry.phase = Phase::Admitted(self.epochs.add(bytes, None));
            if requester != Some(index) {
                all.extend(entry.qp.clone());
            }
        }
        all
    }

    /// Queues a request. If the queue is empty and it fits, it is admitted at once, with its
    /// minimum.
    fn enqueue(
        &mut self,
        index: usize,
        request: WindowRequest,
        mtu: u32,
        acknowledged: bool,
    ) -> Admissions {
        if matches!(self.entries[index].phase, Phase::Queued | Phase::Admitted(_)) {
            return Admissions::new();
        }
        self.remove(index, acknowledged);
        let (min, quantum) = (request.min.saturating_mul(mtu), request.quantum.saturating_mul(mtu));
        let immediately = self.wait_queue.is_empty() && self.fits(min);
        self.entries[index].phase = Phase::Queued;
        self.wait_queue
            .push_back(Request { index, bytes: if immediately { min } else { quantum } });
        self.admit(Some(index))
    }

    fn quota(&mut self, index: usize, mtu: u32) -> Flow {
        self.entries[index].quota_epoch = self.epochs.current();
        let entry = &self.entries[index];
        let own = match entry.phase {
            Phase::Admitted(load) | Phase::Sending(load) if self.epochs.counts(load) => {
                Some(load.bytes)
            }
            _ => None,
        };
        let (bytes, pairs) = self.epochs.total();
        let pairs = pairs + u32::from(own.is_none());
        let others = bytes.saturating_sub(own.unwrap_or(0));
        let mut equal = WINDOW / (pairs + self.wait_queue.len() as u32);
        if let Some(first) = self.wait_queue.front() {
            // Quotas shrink until the first waiter fits.
            equal = equal.min(WINDOW.saturating_sub(first.bytes) / pairs);
        }
        // An admission guarantees its bytes.
        let admitted = if matches!(entry.phase, Phase::Admitted(_)) { own.unwrap_or(0) } else { 0 };
        Flow::with_window(
            (equal.min(WINDOW.saturating_sub(others)).max(admitted) / mtu).clamp(1, MAX_PACKETS),
        )
    }

    /// Sets the bytes in flight; `sent`: packets were sent or retransmitted.
    fn update(&mut self, index: usize, bytes: u32, sent: bool) {
        let Entry { phase, quota_epoch, .. } = self.entries[index];
        let phase = match phase {
            Phase::Queued => return,
            Phase::Idle if !sent => return,
            Phase::Idle => Phase::Sending(self.epochs.add(bytes, Some(quota_epoch))),
            Phase::Admitted(load) | Phase::Sending(load) if sent => {
                self.epochs.remove(load);
                Phase::Sending(self.epochs.add(bytes, Some(quota_epoch)))
            }
            Phase::Admitted(load) => Phase::Admitted(self.epochs.lower(load, bytes)),
            Phase::Sending(load) => Phase::Sending(self.epochs.lower(load, bytes)),
        };
        self.entries[index].phase = phase;
    }
}

impl PeerLink {
    pub(crate) fn new(scheduler: &Arc<Scheduler>) -> Self {
        Self { scheduler: Arc::clone(scheduler), state: Mutex::default() }
    }

    /// Adds a queue pair with nothing in flight.
    pub(crate) fn slot(self: &Arc<Self>, qp: Weak<dyn Scheduled>) -> WindowSlot {
        let entry = Entry { qp: Some(qp), phase: Phase::Idle, quota_epoch: 0 };
        let mut state = self.state.lock();
        let index = match state.free_entries.pop() {
            Some(index) => {
                state.entries[index] = entry;
                index
            }
            None => {
                state.entries.push(entry);
                state.entries.len() - 1
            }
        };
        drop(state);
        WindowSlot { link: Arc::clone(self), index, packets: 0 }
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        let admitted = {
            let mut state = self.state.lock();
            change(&mut state);
            state.admit(None)
        };
        self.notify(admitted);
    }

    /// Schedules a tick while queue pairs wait.
    fn tick(self: &Arc<Self>) {
        let mut state = self.state.lock();
        if state.watched_epoch.is_none() && !state.wait_queue.is_empty() {
            state.watched_epoch = Some(state.epochs.current());
            let timeout = EPOCH_TIMEOUT
                .checked_shr(state.unanswered_epochs)
                .unwrap_or(0)
                .max(MIN_EPOCH_TIMEOUT);
            drop(state);
            self.scheduler.run_at(self.scheduler.now() + timeout, self, Task::Timer);
        }
    }

    /// Notifies through the scheduler: the caller may hold another queue pair's lock.
    fn notify(&self, admitted: Admissions) {
        for qp in admitted {
            self.scheduler.schedule(self.scheduler.now(), Job::Run(qp, Task::Admitted));
        }
    }
}

impl Scheduled for PeerLink {
    /// Ends an unacknowledged epoch, so that old packets do not block waiters.
    fn run(self: Arc<Self>, _timer: Task) {
        self.change(|state| {
            if state.watched_epoch.take() == Some(state.epochs.current()) {
                state.epochs.advance();
                state.unanswered_epochs = state.unanswered_epochs.saturating_add(1);
            }
        });
        self.tick();
    }
}

/// A queue pair's slot in the window to its peer.
#[derive(Debug)]
pub(crate) struct WindowSlot {
    link: Arc<PeerLink>,
    index: usize,
    /// Packets ever sent.
    packets: u64,
}

impl WindowSlot {
    /// Returns the quota, or `None` if the queue pair was queued and will be notified. `request` is
    /// present if nothing is in flight; `acknowledged`: all was answered.
    pub(crate) fn request(
        &self,
        request: Option<WindowRequest>,
        acknowledged: bool,
        mtu: Mtu,
    ) -> Option<Flow> {
        let mtu = accounted_bytes(mtu);
        let mut state = self.link.state.lock();
        let admitted = request
            .map(|request| state.enqueue(self.index, request, mtu, acknowledged))
            .unwrap_or_default();
        let queued = request.is_some() && matches!(state.entries[self.index].phase, Phase::Queued);
        let flow = (!queued).then(|| state.quota(self.index, mtu));
        let tick = queued && state.watched_epoch.is_none();
        drop(state);
        self.link.notify(admitted);
        if tick {
            self.link.tick();
        }
        flow
    }

    /// Updates the packets or READ responses in flight; `sent`: packets ever sent.
    pub(crate) fn update(&mut self, in_flight: u32, sent: u64, mtu: Mtu) {
        let bytes = in_flight.saturating_mul(accounted_bytes(mtu));
        let before = std::mem::replace(&mut self.packets, sent);
        self.link.change(|state| state.update(self.index, bytes, before != sent));
    }

    /// Releases the window with nothing in flight, but keeps a queued request. `acknowledged`: all
    /// was answered.
    pub(crate) fn release(&self, acknowledged: bool) {
        self.link.change(|state| {
            if !matches!(state.entries[self.index].phase, Phase::Queued) {
                state.remove(self.index, acknowledged);
            }
        });
    }

    /// Releases window and queued request.
    pub(crate) fn withdraw(&self) {
        self.link.change(|state| state.remove(self.index, false));
    }

    #[cfg(test)]
    pub(crate) fn is_admitted(&self) -> bool {
        matches!(
            self.link.state.lock().entries[self.index].phase,
            Phase::Admitted(_) | Phase::Sending(_)
        )
    }
}

impl Drop for WindowSlot {
    fn drop(&mut self) {
        self.withdraw();
        let mut state = self.link.state.lock();
        state.entries[self.index].qp = None;
        state.free_entries.push(self.index);
    }
}

#[cfg(test)]
mod tests;
