//! The events of one id of the connection manager, and the tasks that wait for them.

use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use parking_lot::{Mutex, MutexGuard};
use smallvec::SmallVec;

use crate::contained::{contained, panics};
use crate::dispatch::Any;
use crate::op::{QueuePair, WeakQueuePair};
use crate::types::{QpAttr, QpState, RejectReason};
use rdma_provider::cm_contract::{CmEventKind, CmPeer};

use super::connection::Disconnection;
use super::listener::Incoming;

/// The events of an id so far. Each occurs at most once. `address` stays `None` if the provider has
/// resolved the route at once; `connect` takes `response`.
#[derive(Debug, Default)]
pub(super) struct IdState {
    pub(super) address: Option<Result<(), i32>>,
    pub(super) route: Option<Result<(), i32>>,
    pub(super) response: Option<CmPeer>,
    pub(super) established: bool,
    /// The first end event.
    pub(super) end: Option<EndReason>,
    /// True if the peer's connection manager knows of the end or cannot be notified; false after an
    /// address change or a failed probe.
    pub(super) peer_knows: bool,
    /// True if TIMEWAIT is over or did not begin.
    pub(super) exited: bool,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum EndReason {
    Rejected { reason: RejectReason, private_data: Vec<u8> },
    Unreachable(i32),
    Error(i32),
    Disconnected,
    TimewaitExit,
    DeviceRemoval,
    AddressChange,
    Keepalive(Disconnection),
}

/// The receiver of one id's events.
///
/// Tasks are woken and queue pairs modified without any lock held: both may call back into this
/// module.
#[derive(Debug)]
pub(super) struct Inbox {
    seen: Mutex<Seen>,
    attached: Mutex<AttachedQueuePair>,
    /// Only for listeners.
    pub(super) incoming: Option<Incoming>,
}

#[derive(Debug, Default)]
struct Seen {
    state: IdState,
    waiters: Waiters,
    next_ticket: u64,
}

/// The tasks that wait for the next event. Usually there is at most one.
type Waiters = SmallVec<[(u64, Waker); 1]>;

/// The queue pair that fails with the connection.
#[derive(Debug, Default)]
struct AttachedQueuePair {
    queue_pair: Option<WeakQueuePair>,
    /// True once the connection has ended; a queue pair attached later fails at once.
    ended: bool,
}

impl Inbox {
    pub(super) fn new(incoming: Option<Incoming>) -> Arc<Self> {
        Arc::new(Self { seen: Mutex::default(), attached: Mutex::default(), incoming })
    }

    /// Returns the events so far. Dispatch waits for this lock.
    pub(super) fn state(&self) -> StateGuard<'_> {
        StateGuard(self.seen.lock())
    }

    /// Begins a wait of one task for events.
    pub(super) fn wait(&self) -> Wait<'_> {
        Wait { inbox: self, ticket: None }
    }

    /// Wakes all tasks that wait.
    pub(super) fn wake_all(&self) {
        let waiters = std::mem::take(&mut self.seen.lock().waiters);
        for (_, waker) in waiters {
            wake(waker);
        }
    }

    /// Wakes the task that has waited longest. If its waker panics, wakes the next one.
    pub(super) fn wake_one(&self) {
        loop {
            let first = {
                let waiters = &mut self.seen.lock().waiters;
                (!waiters.is_empty()).then(|| waiters.remove(0))
            };
            let Some((_, waker)) = first else { return };
            if wake(waker) {
                return;
            }
        }
    }

    pub(super) fn on_event(&self, kind: CmEventKind<Any>) {
        if self.incoming.is_some() && matches!(kind, CmEventKind::AddressChange) {
            // Connection managers bind listeners to address and device, not to the network
            // interface.
            tracing::warn!(
                "address of a listener moved to another network interface; it still listens"
            );
            return;
        }
        let ends = kind.is_end();
        if ends {
            // Before waking: a task that sees the end must find the queue pair in the error state.
            let queue_pair = {
                let mut attached = self.attached.lock();
                attached.ended = true;
                attached.queue_pair.take()
            };
            fail_weak(queue_pair);
        }
        let changed = self.state().on_event(kind);
        if changed {
            self.wake_all();
        }
    }

    /// Records a failed probe. The queue pair is in the error state already.
    pub(super) fn probe_failed(&self, end: Disconnection) {
        self.state().end.get_or_insert(EndReason::Keepalive(end));
        self.wake_all();
    }

    /// Makes the queue pair fail with the connection, at once if that has ended.
    pub(super) fn attach_queue_pair(&self, queue_pair: &QueuePair) {
        let ended = {
            let mut attached = self.attached.lock();
            if !attached.ended {
                attached.queue_pair = Some(queue_pair.downgrade());
            }
            attached.ended
        };
        if ended {
            fail(queue_pair);
        }
    }

    /// Returns true if the end of the connection fails, or has failed, the queue pair.
    pub(super) fn is_ending(&self) -> bool {
        let attached = self.attached.lock();
        attached.ended || attached.queue_pair.is_none()
    }

    pub(super) fn fail_queue_pair(&self) {
        let queue_pair = self.attached.lock().queue_pair.take();
        fail_weak(queue_pair);
    }
}

/// The locked state of an id.
pub(super) struct StateGuard<'a>(MutexGuard<'a, Seen>);

impl Deref for StateGuard<'_> {
    type Target = IdState;

    fn deref(&self) -> &IdState {
        &self.0.state
    }
}

impl DerefMut for StateGuard<'_> {
    fn deref_mut(&mut self) -> &mut IdState {
        &mut self.0.state
    }
}

/// Calls a waker, without any lock held; returns false if it panicked.
fn wake(waker: Waker) -> bool {
    let panicked = panics(|| waker.wake_by_ref());
    // Separate: two panics at once would abort the process.
    contained(|| drop(waker));
    !panicked
}

/// The wait of one task. Dropping it ends the wait.
pub(super) struct Wait<'a> {
    inbox: &'a Inbox,
    /// Ticket of this wait's newest entry in the waiters. A wake-up removes the entry.
    ticket: Option<u64>,
}

impl Wait<'_> {
    /// Calls `find` with the events so far, under the lock. If it returns `None`, registers the
    /// task for the next wake-up.
    pub(super) fn poll<T>(
        &mut self,
        context: &mut Context<'_>,
        mut find: impl FnMut(&mut IdState) -> Option<T>,
    ) -> Poll<T> {
        // Cloned and dropped without the lock, because wakers are user code.
        let mut clone = None;
        loop {
            let mut seen = self.inbox.seen.lock();
            if let Some(found) = find(&mut seen.state) {
                drop(seen);
                contained(|| drop(clone));
                return Poll::Ready(found);
            }
            let own = seen.waiters.iter_mut().find(|(ticket, _)| Some(*ticket) == self.ticket);
            match (own, clone.take()) {
                (Some((_, waker)), _) if waker.will_wake(context.waker()) => {}
                (_, None) => {
                    drop(seen);
                    clone = Some(context.waker().clone());
                    continue;
                }
                (Some((_, waker)), Some(new)) => clone = Some(std::mem::replace(waker, new)),
                (None, Some(new)) => {
                    let ticket = seen.next_ticket;
                    seen.next_ticket += 1;
                    seen.waiters.push((ticket, new));
                    self.ticket = Some(ticket);
                }
            }
            drop(seen);
            contained(|| drop(clone));
            return Poll::Pending;
        }
    }
}

impl Drop for Wait<'_> {
    fn drop(&mut self) {
        let Some(own) = self.ticket else { return };
        let mut seen = self.inbox.seen.lock();
        let at = seen.waiters.iter().position(|(ticket, _)| *ticket == own);
        // Keeps the order of the others.
        let ended = at.map(|at| seen.waiters.remove(at));
        drop(seen);
        contained(|| drop(ended));
    }
}

fn fail_weak(queue_pair: Option<WeakQueuePair>) {
    if let Some(queue_pair) = queue_pair.and_then(|weak| weak.upgrade()) {
        fail(&queue_pair);
    }
}

pub(super) fn fail(queue_pair: &QueuePair) {
    if let Err(error) = queue_pair.modify(&QpAttr::to_state(QpState::Err)) {
        // Closed, or its device is gone, so nothing is in flight.
        tracing::debug!(
            %error,
            qpn = %queue_pair.qpn(),
            "failed to move queue pair to the error state; it is closed or its device is lost"
        );
    }
}

impl IdState {
    /// Records the event. Returns true if waiters must check it.
    fn on_event(&mut self, kind: CmEventKind<Any>) -> bool {
        let end = match kind {
            CmEventKind::AddressResolved => {
                self.address = Some(Ok(()));
                None
            }
            CmEventKind::AddressError(errno) => {
                self.address = Some(Err(errno));
                None
            }
            CmEventKind::RouteResolved => {
                self.route = Some(Ok(()));
                None
            }
            CmEventKind::RouteError(errno) => {
                self.route = Some(Err(errno));
                None
            }
            CmEventKind::ConnectResponse(peer) => {
                self.response = Some(peer);
                None
            }
            CmEventKind::Established => {
                self.established = true;
                None
            }
            CmEventKind::Rejected { reason, private_data } => {
                Some(EndReason::Rejected { reason, private_data })
            }
            CmEventKind::Unreachable(errno) => Some(EndReason::Unreachable(errno)),
            CmEventKind::ConnectError(errno) => Some(EndReason::Error(errno)),
            CmEventKind::Disconnected => Some(EndReason::Disconnected),
            CmEventKind::TimewaitExit => {
                self.exited = true;
                Some(EndReason::TimewaitExit)
            }
            CmEventKind::DeviceRemoval => {
                self.exited = true;
                Some(EndReason::DeviceRemoval)
            }
            CmEventKind::AddressChange => Some(EndReason::AddressChange),
            CmEventKind::ConnectRequest { .. } | CmEventKind::Other(_) => return false,
        };
        self.peer_knows |= end.as_ref().is_some_and(|end| *end != EndReason::AddressChange);
        if self.end.is_none() {
            self.end = end;
        }
        true
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::sync::atomic::Ordering;

    use super::*;
    use crate::contained::tests::Counts;

    fn rejection() -> CmEventKind<Any> {
        CmEventKind::Rejected { reason: RejectReason::CONSUMER, private_data: vec![1] }
    }

    #[test]
    fn every_event_is_recorded_and_first_end_wins() {
        let peer = CmPeer {
            private_data: vec![2],
            responder_resources: 1,
            initiator_depth: 1,
            srq: false,
        };
        let events: [fn() -> CmEventKind<Any>; 7] = [
            rejection,
            || CmEventKind::Unreachable(110),
            || CmEventKind::ConnectError(22),
            || CmEventKind::Disconnected,
            || CmEventKind::TimewaitExit,
            || CmEventKind::DeviceRemoval,
            || CmEventKind::AddressChange,
        ];
        let ends = [
            EndReason::Rejected { reason: RejectReason::CONSUMER, private_data: vec![1] },
            EndReason::Unreachable(110),
            EndReason::Error(22),
            EndReason::Disconnected,
            EndReason::TimewaitExit,
            EndReason::DeviceRemoval,
            EndReason::AddressChange,
        ];
        for (event, end) in events.into_iter().zip(ends) {
            assert!(event().is_end());
            let inbox = Inbox::new(None);
            inbox.on_event(event());
            inbox.on_event(CmEventKind::Disconnected);
            inbox.on_event(rejection());
            assert_eq!(inbox.state().end, Some(end));
        }
        let inbox = Inbox::new(None);
        let woken = Arc::new(Counts::default());
        let waker = Waker::from(woken.clone());
        let mut wait = inbox.wait();
        for event in [
            CmEventKind::AddressResolved,
            CmEventKind::RouteError(113),
            CmEventKind::ConnectResponse(peer.clone()),
            CmEventKind::Established,
        ] {
            assert!(!event.is_end());
            let polled = wait.poll(&mut Context::from_waker(&waker), |_| None::<()>);
            assert!(polled.is_pending());
            inbox.on_event(event);
        }
        assert_eq!(woken.0.load(Ordering::Relaxed), 4);
        let state = inbox.state();
        assert_eq!((state.address, state.route), (Some(Ok(())), Some(Err(113))));
        assert_eq!((&state.response, state.established), (&Some(peer), true));
        assert_eq!((&state.end, state.exited), (&None, false));
    }

    #[test]
    fn unknown_event_wakes_no_waiter() {
        let inbox = Inbox::new(None);
        let woken = Arc::new(Counts::default());
        let waker = Waker::from(woken.clone());
        let mut wait = inbox.wait();
        assert!(wait.poll(&mut Context::from_waker(&waker), |_| None::<()>).is_pending());
        inbox.on_event(CmEventKind::Other(99));
        assert_eq!(woken.0.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn longest_wait_is_woken_first_after_another_one_has_ended() {
        let inbox = Inbox::new(None);
        let wakers: [Arc<Counts>; 3] = Default::default();
        let [first, mut second, mut third] = wakers.each_ref().map(|woken| {
            let waker = Waker::from(woken.clone());
            let mut wait = inbox.wait();
            assert!(wait.poll(&mut Context::from_waker(&waker), |_| None::<()>).is_pending());
            wait
        });
        drop(first);
        for expected in [[0, 1, 0], [0, 1, 1], [0, 1, 1]] {
            inbox.wake_one();
            assert_eq!(wakers.each_ref().map(|woken| woken.0.load(Ordering::Relaxed)), expected);
        }
        for wait in [&mut second, &mut third] {
            let found = wait.poll(&mut Context::from_waker(Waker::noop()), |_| Some(()));
            assert!(found.is_ready());
        }
    }

    #[test]
    fn wait_holds_the_last_waker_until_it_ends() {
        let inbox = Inbox::new(None);
        let wakers: [Arc<Counts>; 3] = Default::default();
        let mut waits = [inbox.wait(), inbox.wait()];
        for (wait, woken) in [(0, 0), (0, 1), (0, 1), (1, 2)] {
            let waker = Waker::from(wakers[woken].clone());
            let mut context = Context::from_waker(&waker);
            assert!(waits[wait].poll(&mut context, |_| None::<()>).is_pending());
        }
        assert_eq!(wakers.each_ref().map(Arc::strong_count), [1, 2, 2]);
        drop(waits);
        assert_eq!(wakers.each_ref().map(Arc::strong_count), [1, 1, 1]);
        inbox.on_event(CmEventKind::Established);
        assert!(wakers.iter().all(|woken| woken.0.load(Ordering::Relaxed) == 0));
    }
}
