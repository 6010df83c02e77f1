//! Deadlines in real time, or in the virtual time of a simulated network.
//!
//! One thread of the process wakes tasks at their deadlines. Another one revokes leases, which must
//! not wait for a waker that blocks. Tokio's timers do not fit: `tokio::time::pause` stops their
//! clock, but neither devices nor peers, and a timer belongs to one runtime, which a future may
//! leave. While [`drive`](crate::software::drive) runs on a thread, its network keeps the time of
//! that thread.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fmt;
use std::future::{Future, poll_fn};
use std::io;
use std::pin::pin;
use std::task::{Context, Poll, Waker};
use std::thread;
use std::time::{Duration, Instant};

use rdma_provider::later::{self, contained};
use rdma_provider::locks::{Condvar, Mutex, MutexGuard};
use rdma_soft::Network;

const MAX_DELAY: Duration = Duration::from_secs(10 * 365 * 24 * 3600);

pub(crate) async fn timeout<F: Future>(after: Duration, future: F) -> Option<F::Output> {
    let (mut future, mut sleep) = (pin!(future), Sleep::new(deadline(after)));
    poll_fn(|context| match future.as_mut().poll(context) {
        Poll::Ready(output) => Poll::Ready(Some(output)),
        Poll::Pending => sleep.poll(context).map(|()| None),
    })
    .await
}

pub(crate) fn deadline(after: Duration) -> Instant {
    now() + after.min(MAX_DELAY)
}

thread_local! {
    static SIMULATED: RefCell<Option<Network>> = const { RefCell::new(None) };
}

/// Returns to real time with `None`. Returns the earlier clock.
pub(crate) fn simulate(network: Option<Network>) -> Option<Network> {
    SIMULATED.replace(network)
}

pub(crate) fn now() -> Instant {
    simulated(Network::instant).unwrap_or_else(Instant::now)
}

pub(crate) fn since(instant: Instant) -> Duration {
    now().saturating_duration_since(instant)
}

fn simulated<T>(act: impl FnOnce(&Network) -> T) -> Option<T> {
    // While the thread ends, time is real.
    SIMULATED.try_with(|network| network.borrow().as_ref().map(act)).ok().flatten()
}

#[derive(Debug)]
pub(crate) struct Sleep {
    deadline: Instant,
    alarm: Option<(Alarm, Waker)>,
}

impl Sleep {
    pub(crate) fn new(deadline: Instant) -> Self {
        Self { deadline, alarm: None }
    }

    pub(crate) fn deadline(&self) -> Instant {
        self.deadline
    }

    pub(crate) fn reset(&mut self, deadline: Instant) {
        self.deadline = deadline;
        self.alarm = None;
    }

    pub(crate) fn poll(&mut self, context: &mut Context<'_>) -> Poll<()> {
        // An alarm fires after its instant, so a task that it has woken returns here.
        if now() >= self.deadline {
            return Poll::Ready(());
        }
        if self.alarm.as_ref().is_some_and(|(alarm, _)| !alarm.is_of_this_clock()) {
            self.alarm = None;
        }
        let waker = context.waker();
        match &mut self.alarm {
            Some((_, registered)) if registered.will_wake(waker) => {}
            Some((alarm, registered)) => {
                let is_set = alarm.redirect(waker);
                let other = std::mem::replace(registered, waker.clone());
                later::discard([other]);
                if !is_set {
                    return Poll::Ready(());
                }
            }
            None => match Alarm::waking(self.deadline, waker.clone()) {
                Ok(alarm) => self.alarm = Some((alarm, waker.clone())),
                // Without the thread, this task polls.
                Err(_) => contained(|| waker.wake_by_ref()),
            },
        }
        Poll::Pending
    }
}

/// A wake-up at an instant. Dropping it cancels the wake-up.
#[derive(Debug)]
pub(crate) enum Alarm {
    Thread(&'static AlarmThread, Key),
    Simulated(rdma_soft::Alarm),
}

/// The number makes the key unique.
type Key = (Instant, u64);

impl Alarm {
    /// Fails if the thread cannot be started.
    fn waking(deadline: Instant, waker: Waker) -> io::Result<Self> {
        Self::set(&TASKS, deadline, waker)
    }

    /// The revocation happens even if the alarm is leaked. `revoke` must not block.
    pub(crate) fn revoking(deadline: Instant, revoke: Waker) -> io::Result<Self> {
        Self::set(&REVOCATIONS, deadline, revoke)
    }

    fn set(thread: &'static AlarmThread, deadline: Instant, waker: Waker) -> io::Result<Self> {
        match simulated(Network::clone) {
            Some(network) => Ok(Self::Simulated(network.wake_at(deadline, waker))),
            None => thread.set(deadline, waker).map(|key| Self::Thread(thread, key)),
        }
    }

    /// Returns true if the clock that [`now`] reads fires it.
    fn is_of_this_clock(&self) -> bool {
        // Another clock may fire it too late, for example after hours of real time that pass at
        // once in virtual time.
        match self {
            Self::Thread(..) => simulated(|_| ()).is_none(),
            Self::Simulated(alarm) => simulated(|network| alarm.is_of(network)) == Some(true),
        }
    }

    /// Returns false if it has fired.
    fn redirect(&self, waker: &Waker) -> bool {
        let new = waker.clone();
        let (is_set, other) = match self {
            Self::Thread(thread, key) => {
                let mut alarms = thread.lock();
                match alarms.set.get_mut(key) {
                    Some(registered) => (true, std::mem::replace(registered, new)),
                    None => (false, new),
                }
            }
            Self::Simulated(alarm) => match alarm.redirect(new) {
                Ok(registered) => (true, registered),
                Err(new) => (false, new),
            },
        };
        later::discard([other]);
        is_set
    }
}

impl Drop for Alarm {
    fn drop(&mut self) {
        if let Self::Thread(thread, key) = self {
            // Drops the waker without the lock. The thread may wake once in vain.
            later::discard(thread.lock().set.remove(key));
        }
    }
}

struct Alarms {
    set: BTreeMap<Key, Waker>,
    next: u64,
    /// The thread's next wake-up, not after the first alarm. `None` if it does not run.
    next_wake: Option<Instant>,
    failed: bool,
}

pub(crate) struct AlarmThread {
    name: &'static str,
    alarms: Mutex<Alarms>,
    changed: Condvar,
}

impl fmt::Debug for AlarmThread {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AlarmThread").field("name", &self.name).finish_non_exhaustive()
    }
}

impl AlarmThread {
    const fn new(name: &'static str) -> Self {
        Self { name, alarms: Mutex::new(Alarms::new()), changed: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, Alarms> {
        self.alarms.lock()
    }

    fn set(&'static self, deadline: Instant, waker: Waker) -> io::Result<Key> {
        let mut alarms = self.lock();
        match alarms.next_wake {
            Some(wake) if wake <= deadline => {}
            Some(_) => {
                alarms.next_wake = Some(deadline);
                self.changed.notify_one();
            }
            None => {
                let thread = thread::Builder::new().name(self.name.to_owned());
                let started = thread.spawn(|| self.run());
                if let Err(error) = started {
                    if !std::mem::replace(&mut alarms.failed, true) {
                        let thread = self.name;
                        rdma_provider::error!(
                            %error,
                            thread,
                            "failed to start a thread for deadlines: tasks poll, leases get none"
                        );
                    }
                    return Err(error);
                }
                (alarms.next_wake, alarms.failed) = (Some(deadline), false);
            }
        }
        Ok(alarms.add(deadline, waker))
    }

    fn run(&self) {
        let mut alarms = self.lock();
        while let Some((&(instant, _), _)) = alarms.set.first_key_value() {
            let left = instant.saturating_duration_since(Instant::now());
            alarms.next_wake = Some(instant);
            if left.is_zero() {
                let due = alarms.set.pop_first();
                drop(alarms);
                later::wake(due.map(|(_, waker)| waker));
                alarms = self.lock();
            } else {
                self.changed.wait_for(&mut alarms, left);
            }
        }
        alarms.next_wake = None;
    }
}

static TASKS: AlarmThread = AlarmThread::new("tokio-rdma alarm");

static REVOCATIONS: AlarmThread = AlarmThread::new("tokio-rdma lease");

impl Alarms {
    const fn new() -> Self {
        Self { set: BTreeMap::new(), next: 0, next_wake: None, failed: false }
    }

    fn add(&mut self, deadline: Instant, waker: Waker) -> Key {
        let key = (deadline, self.next);
        self.next += 1;
        self.set.insert(key, waker);
        key
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::panic::resume_unwind;
    use std::sync::Arc;
    use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
    use std::task::{Wake, Waker};

    use rdma_soft::Faults;

    use super::*;
    use crate::contained::tests::HANG;

    const SHORT: Duration = Duration::from_millis(20);

    /// A waker that reports and then calls a function.
    struct Does(Mutex<Sender<()>>, fn());

    impl Wake for Does {
        fn wake(self: Arc<Self>) {
            let _ = self.0.lock().send(());
            (self.1)();
        }
    }

    impl Drop for Does {
        fn drop(&mut self) {
            let mut sleep = Sleep::new(deadline(SHORT));
            let _ = sleep.poll(&mut Context::from_waker(Waker::noop()));
        }
    }

    fn waker(act: fn()) -> (Waker, Receiver<()>) {
        let (sender, receiver) = channel();
        (Waker::from(Arc::new(Does(Mutex::new(sender), act))), receiver)
    }

    fn is_over(sleep: &mut Sleep) -> bool {
        sleep.poll(&mut Context::from_waker(Waker::noop())).is_ready()
    }

    #[test]
    fn earlier_alarm_set_second_fires_first() {
        let [(late, later), (soon, fired)] = [(); 2].map(|()| waker(|| ()));
        let (mut far, mut near) =
            (Sleep::new(deadline(Duration::MAX)), Sleep::new(deadline(SHORT)));
        assert!(far.poll(&mut Context::from_waker(&late)).is_pending());
        // On a busy machine, the deadline has passed already.
        if near.poll(&mut Context::from_waker(&soon)).is_pending() {
            fired.recv_timeout(HANG).unwrap();
        }
        assert!(is_over(&mut near) && !is_over(&mut far));
        far.reset(deadline(SHORT));
        assert!(later.try_recv().is_err());
        if far.poll(&mut Context::from_waker(&late)).is_pending() {
            later.recv_timeout(HANG).unwrap();
        }
        assert!(is_over(&mut far));
    }

    #[test]
    fn new_earliest_alarm_ends_the_sleep_of_its_thread() {
        static OWN: AlarmThread = AlarmThread::new("a test");
        let far = deadline(Duration::MAX);
        OWN.set(far, Waker::noop().clone()).unwrap();
        for _ in 0..3 {
            let (soon, fired) = waker(|| ());
            OWN.set(Instant::now(), soon).unwrap();
            fired.recv_timeout(HANG).unwrap();
            // The thread sleeps until the far alarm once it has noted that and released the lock.
            while OWN.lock().next_wake != Some(far) {
                thread::yield_now();
            }
        }
    }

    #[test]
    fn sleep_waits_for_its_new_deadline_after_an_earlier_one() {
        let mut sleep = Sleep::new(deadline(SHORT));
        for _ in 0..3 {
            let (waker, woken) = waker(|| ());
            if sleep.poll(&mut Context::from_waker(&waker)).is_pending() {
                woken.recv_timeout(HANG).unwrap();
            }
            assert!(is_over(&mut sleep));
            sleep.reset(deadline(HANG));
            assert!(!is_over(&mut sleep));
            sleep.reset(deadline(SHORT));
        }
    }

    #[test]
    fn alarm_fires_after_waker_panicked_with_panicking_payload() {
        struct Again;
        impl Drop for Again {
            fn drop(&mut self) {
                resume_unwind(Box::new("dropped"));
            }
        }
        for act in [|| resume_unwind(Box::new("woken")), || resume_unwind(Box::new(Again))] {
            let ((panicking, panicked), (sending, fired)) = (waker(act), waker(|| ()));
            let (mut first, mut second) =
                (Sleep::new(deadline(SHORT)), Sleep::new(deadline(2 * SHORT)));
            let early = [(&mut first, &panicking), (&mut second, &sending)]
                .map(|(sleep, waker)| sleep.poll(&mut Context::from_waker(waker)).is_pending());
            drop((panicking, sending));
            // Otherwise this thread was late, and the alarm is not set.
            for (receiver, early) in [panicked, fired].into_iter().zip(early) {
                assert_eq!(receiver.recv_timeout(HANG).is_ok(), early);
            }
        }
    }

    #[test]
    fn alarm_thread_may_drop_waker_that_sets_an_alarm() {
        let (last, done) = waker(|| ());
        // The alarm has the last reference.
        let alarm = Alarm::waking(deadline(SHORT), last).unwrap();
        done.recv_timeout(HANG).unwrap();
        // The waker was dropped, and its sender with it.
        assert_eq!(done.recv_timeout(HANG), Err(RecvTimeoutError::Disconnected));
        let (waker, fired) = waker(|| ());
        let next = Alarm::waking(deadline(SHORT), waker).unwrap();
        fired.recv_timeout(HANG).unwrap();
        drop((alarm, next));
    }

    #[test]
    fn sleep_wakes_the_task_that_polled_last() {
        let [(first, unused), (last, fired)] = [(); 2].map(|()| waker(|| ()));
        let mut sleep = Sleep::new(deadline(SHORT));
        let early = [&first, &last].map(|waker| sleep.poll(&mut Context::from_waker(waker)));
        drop(first);
        // Otherwise this thread was late.
        if early == [Poll::Pending; 2] {
            assert_eq!(unused.recv_timeout(HANG), Err(RecvTimeoutError::Disconnected));
            fired.recv_timeout(HANG).unwrap();
            assert!(is_over(&mut sleep));
        }
        drop((sleep, last));
        assert_eq!(fired.recv_timeout(HANG), Err(RecvTimeoutError::Disconnected));
    }

    #[test]
    fn sleep_is_woken_by_the_clock_of_its_last_poll() {
        let networks = [1, 2].map(|seed| Network::simulated(seed, Faults::none()));
        let real = deadline(HANG);
        let mut sleep = Sleep::new(real);
        assert!(!is_over(&mut sleep));
        for network in &networks {
            // Set by real time, then by the time of the other network.
            simulate(Some(network.clone()));
            let (waker, woken) = waker(|| ());
            assert!(sleep.poll(&mut Context::from_waker(&waker)).is_pending());
            simulate(None);
            assert!(network.step() && woken.try_recv().is_ok());
            assert_eq!(network.instant(), real);
        }
        let network = Network::simulated(3, Faults::none());
        simulate(Some(network));
        sleep.reset(deadline(SHORT));
        assert!(!is_over(&mut sleep));
        simulate(None);
        let (waker, woken) = waker(|| ());
        if sleep.poll(&mut Context::from_waker(&waker)).is_pending() {
            woken.recv_timeout(HANG).unwrap();
        }
        assert!(is_over(&mut sleep));
    }

    #[test]
    fn fired_alarm_is_not_redirected() {
        let (first, fired) = waker(|| ());
        let alarm = Alarm::waking(deadline(SHORT), first).unwrap();
        fired.recv_timeout(HANG).unwrap();
        assert!(!alarm.redirect(Waker::noop()));
        let set = Alarm::waking(deadline(HANG), Waker::noop().clone()).unwrap();
        assert!(set.redirect(Waker::noop()));
    }
}
