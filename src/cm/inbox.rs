use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use rdma_provider::later;
use rdma_provider::locks::Mutex;

use crate::dispatch::{Any, CmId};
use crate::op::{QueuePair, WeakQueuePair};
use crate::types::{QpAttr, QpState, RejectReason};
use crate::waiters::{Caller, Ticket, Waiters};
use rdma_provider::cm_contract::{CmDatagram, CmEventKind, CmPeer};

use super::disconnection::Disconnection;

/// Each event occurs at most once. `address` stays `None` if the provider resolves address and
/// route in one step.
#[derive(Debug, Default)]
pub(super) struct IdState {
    pub(super) address: Option<Result<(), i32>>,
    pub(super) route: Option<Result<(), i32>>,
    pub(super) response: Option<CmPeer>,
    pub(super) established: bool,
    pub(super) joined: Option<Result<CmDatagram, i32>>,
    pub(super) found: Option<(CmDatagram, Vec<u8>)>,
    pub(super) end: Option<EndReason>,
    /// The peer's connection manager knows of the end, or cannot be notified. False after an
    /// address change or a failed probe.
    pub(super) peer_knows: bool,
    /// TIMEWAIT is over or did not begin.
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

/// Holds no lock when it wakes a task or modifies a queue pair, because both may call back into
/// this module.
#[derive(Debug)]
pub(super) struct Inbox {
    seen: Mutex<Seen>,
    attached: Mutex<AttachedQueuePair>,
    /// Only for listeners.
    pub(super) requests: Option<Arc<dyn TakeRequests>>,
}

pub(super) trait TakeRequests: std::fmt::Debug + Send + Sync {
    /// Returns the id if the backlog is full.
    fn push(&self, id: CmId, peer: CmPeer) -> Option<CmId>;
}

#[derive(Debug, Default)]
struct Seen {
    state: IdState,
    /// A woken task leaves the queue, because it may never be polled again if its waker panics.
    waiters: Waiters,
}

#[derive(Debug, Default)]
struct AttachedQueuePair {
    queue_pair: Option<WeakQueuePair>,
    /// A queue pair that is attached later fails at once.
    ended: bool,
}

impl Inbox {
    pub(super) fn new(requests: Option<Arc<dyn TakeRequests>>) -> Arc<Self> {
        Arc::new(Self { seen: Mutex::default(), attached: Mutex::default(), requests })
    }

    pub(super) fn state<T>(&self, with: impl FnOnce(&mut IdState) -> T) -> T {
        with(&mut self.seen.lock().state)
    }

    pub(super) fn wait(&self) -> Wait<'_> {
        Wait { inbox: self, ticket: None }
    }

    pub(super) fn wake_all(&self) {
        later::wake(self.seen.lock().waiters.remove_all());
    }

    /// If the waker of the task that has waited longest panics, wakes the next one.
    pub(super) fn wake_one(&self) {
        loop {
            let first = self.seen.lock().waiters.remove_first();
            if first.is_none_or(wake) {
                return;
            }
        }
    }

    pub(super) fn on_event(&self, kind: CmEventKind<Any>) {
        if self.requests.is_some() && matches!(kind, CmEventKind::AddressChange) {
            // Connection managers bind listeners to address and device, not to the network
            // interface.
            rdma_provider::warn!(
                "address of a listener moved to another network interface; it still listens"
            );
            return;
        }
        if kind.is_end() {
            // Before the tasks are woken, because a task that sees the end must find the queue pair
            // in the error state.
            self.attached.lock().ended = true;
            self.fail_queue_pair();
        }
        if self.state(|state| state.on_event(kind)) {
            self.wake_all();
        }
    }

    pub(super) fn probe_failed(&self, end: Disconnection) {
        self.state(|state| {
            state.end.get_or_insert(EndReason::Keepalive(end));
        });
        self.wake_all();
    }

    pub(super) fn attach_queue_pair(&self, queue_pair: &QueuePair) {
        let mut attached = self.attached.lock();
        if !attached.ended {
            attached.queue_pair = Some(queue_pair.downgrade());
            return;
        }
        drop(attached);
        fail(queue_pair);
    }

    pub(super) fn is_ending(&self) -> bool {
        let attached = self.attached.lock();
        attached.ended || attached.queue_pair.is_none()
    }

    pub(super) fn fail_queue_pair(&self) {
        let queue_pair = self.attached.lock().queue_pair.take();
        if let Some(queue_pair) = queue_pair.and_then(|weak| weak.upgrade()) {
            fail(&queue_pair);
        }
    }
}

/// Returns false if the waker panicked. The caller must hold no lock.
fn wake(waker: Waker) -> bool {
    let panicked = later::reported_panic(|| waker.wake_by_ref());
    // Dropped separately, because a second panic during the first one would abort the process.
    later::discard([waker]);
    !panicked
}

pub(super) struct Wait<'a> {
    inbox: &'a Inbox,
    ticket: Option<Ticket>,
}

impl Wait<'_> {
    /// Calls `find` under the lock. If it returns `None`, registers the task for the next wake-up.
    pub(super) fn poll<T>(
        &mut self,
        context: &mut Context<'_>,
        mut find: impl FnMut(&mut IdState) -> Option<T>,
    ) -> Poll<T> {
        let mut caller = Caller::new(context.waker());
        if self.ticket.is_none() {
            caller.expect_wait();
        }
        let polled = loop {
            let mut seen = self.inbox.seen.lock();
            if let Some(found) = find(&mut seen.state) {
                let registered = seen.waiters.withdraw(&mut self.ticket);
                later::discard(registered);
                break Poll::Ready(found);
            }
            seen.waiters.wait(&mut self.ticket, &mut caller);
            drop(seen);
            if !caller.clone_if_needed() {
                break Poll::Pending;
            }
        };
        later::discard(caller.unused());
        polled
    }
}

impl Drop for Wait<'_> {
    fn drop(&mut self) {
        if self.ticket.is_some() {
            later::discard(self.inbox.seen.lock().waiters.withdraw(&mut self.ticket));
        }
    }
}

pub(super) fn fail(queue_pair: &QueuePair) {
    if let Err(error) = queue_pair.modify(&QpAttr::to_state(QpState::Err)) {
        // Closed, or its device is gone, so nothing is in flight.
        rdma_provider::debug!(
            %error,
            qpn = %queue_pair.qpn(),
            "failed to move queue pair to the error state; it is closed or its device is lost"
        );
    }
}

impl IdState {
    fn on_event(&mut self, kind: CmEventKind<Any>) -> bool {
        self.exited |= matches!(kind, CmEventKind::TimewaitExit | CmEventKind::DeviceRemoval);
        let mut end = None;
        match kind {
            CmEventKind::AddressResolved => self.address = Some(Ok(())),
            CmEventKind::AddressError(errno) => self.address = Some(Err(errno)),
            CmEventKind::RouteResolved => self.route = Some(Ok(())),
            CmEventKind::RouteError(errno) => self.route = Some(Err(errno)),
            CmEventKind::ConnectResponse(peer) => self.response = Some(peer),
            CmEventKind::Established => self.established = true,
            CmEventKind::ServiceFound { service, private_data } => {
                self.found = Some((service, private_data));
            }
            CmEventKind::Joined(group) => self.joined = Some(Ok(group)),
            CmEventKind::JoinError(errno) => self.joined = Some(Err(errno)),
            CmEventKind::Rejected { reason, private_data } => {
                end = Some(EndReason::Rejected { reason, private_data });
            }
            CmEventKind::Unreachable(errno) => end = Some(EndReason::Unreachable(errno)),
            CmEventKind::ConnectError(errno) => end = Some(EndReason::Error(errno)),
            CmEventKind::Disconnected => end = Some(EndReason::Disconnected),
            CmEventKind::TimewaitExit => end = Some(EndReason::TimewaitExit),
            CmEventKind::DeviceRemoval => end = Some(EndReason::DeviceRemoval),
            CmEventKind::AddressChange => end = Some(EndReason::AddressChange),
            CmEventKind::ConnectRequest { .. } | CmEventKind::Other(_) => return false,
        }
        self.peer_knows |= end.as_ref().is_some_and(|end| *end != EndReason::AddressChange);
        self.end = self.end.take().or(end);
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
            inbox.state(|state| assert_eq!(state.end, Some(end)));
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
        inbox.state(|state| {
            assert_eq!((state.address, state.route), (Some(Ok(())), Some(Err(113))));
            assert_eq!((&state.response, state.established), (&Some(peer), true));
            assert_eq!((&state.end, state.exited), (&None, false));
        });
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
    fn next_task_is_woken_if_the_waker_of_the_first_panics() {
        let inbox = Inbox::new(None);
        let woken: [Arc<Counts>; 2] = Default::default();
        let [second, third] = woken.clone().map(Waker::from);
        let wakers = [Waker::from(Arc::new(Panics)), second, third];
        let _waits = wakers.map(|waker| {
            let mut wait = inbox.wait();
            assert!(wait.poll(&mut Context::from_waker(&waker), |_| None::<()>).is_pending());
            wait
        });
        for expected in [[1, 0], [1, 1], [1, 1]] {
            inbox.wake_one();
            assert_eq!(woken.each_ref().map(|woken| woken.0.load(Ordering::Relaxed)), expected);
        }
    }

    struct Panics;

    impl std::task::Wake for Panics {
        fn wake(self: Arc<Self>) {
            std::panic::resume_unwind(Box::new(()));
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
