//! Deadlines in real time.
//!
//! One thread of the process, the alarm thread, wakes the tasks whose deadline has come. Timers of Tokio would be wrong here:
//! `tokio::time::pause` stops their clock, but neither devices nor peers; and a timer belongs to the runtime in which it was made,
//! while a future may be moved to another one, or out of all, when that runtime is gone, not run any more, or has no timers.
//!
//! Deadlines are rare and long: a wait of seconds, or a period that the driver of a connection looks at when it is over. Setting one
//! takes a lock, and a notification of the thread only if it is the earliest so far; no operation or message sets any.

use std::collections::BTreeMap;
use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::thread;
use std::time::{Duration, Instant};

use futures::task::AtomicWaker;

use crate::contained::contained;

/// Longest time that a deadline is away: further ones are never reached.
const FAR: Duration = Duration::from_secs(10 * 365 * 24 * 3600);

/// The result of `future`, or `None` if `after` has passed before.
pub(crate) async fn timeout<F: Future>(after: Duration, future: F) -> Option<F::Output> {
    let (mut future, mut sleep) = (pin!(future), Sleep::new(deadline(after)));
    poll_fn(|context| match future.as_mut().poll(context) {
        Poll::Ready(output) => Poll::Ready(Some(output)),
        Poll::Pending => sleep.poll(context).map(|()| None),
    })
    .await
}

/// The moment that is `after` from now.
pub(crate) fn deadline(after: Duration) -> Instant {
    Instant::now() + after.min(FAR)
}

/// A wait for a moment of real time, in any runtime or in none. The alarm is set when the task first waits.
#[derive(Debug)]
pub(crate) struct Sleep {
    deadline: Instant,
    alarm: Option<Alarm>,
}

impl Sleep {
    pub(crate) fn new(deadline: Instant) -> Self {
        Self { deadline, alarm: None }
    }

    pub(crate) fn deadline(&self) -> Instant {
        self.deadline
    }

    /// Waits until another moment.
    pub(crate) fn reset(&mut self, deadline: Instant) {
        *self = Self::new(deadline);
    }

    /// Ready once the moment has come.
    pub(crate) fn poll(&mut self, context: &mut Context<'_>) -> Poll<()> {
        if self.alarm.is_none() {
            if Instant::now() >= self.deadline {
                return Poll::Ready(());
            }
            self.alarm = Alarm::set(self.deadline);
        }
        let Some(alarm) = &self.alarm else {
            // There is no thread: this task has to look by itself.
            contained(|| context.waker().wake_by_ref());
            return Poll::Pending;
        };
        alarm.bell.poll(context)
    }
}

/// What the alarm thread wakes a task by.
#[derive(Debug, Default)]
struct Bell {
    rang: AtomicBool,
    waker: AtomicWaker,
}

impl Bell {
    fn poll(&self, context: &mut Context<'_>) -> Poll<()> {
        if !self.rang.load(Ordering::Acquire) {
            // It may wake, and drop the waker of another task.
            contained(|| self.waker.register(context.waker()));
        }
        // After registering: the thread may have woken before.
        if self.rang.load(Ordering::Acquire) { Poll::Ready(()) } else { Poll::Pending }
    }

    fn ring(&self) {
        self.rang.store(true, Ordering::Release);
        let Some(waker) = self.waker.take() else { return };
        contained(|| waker.wake_by_ref());
        // Apart: two panics at once would end the process.
        contained(|| drop(waker));
    }
}

/// A bell that the alarm thread rings at a moment.
#[derive(Debug)]
struct Alarm {
    key: Key,
    bell: Arc<Bell>,
}

/// The moment, and a number that tells alarms of the same moment apart.
type Key = (Instant, u64);

impl Alarm {
    /// `None` if the thread cannot be started.
    fn set(deadline: Instant) -> Option<Self> {
        let bell = Arc::<Bell>::default();
        let mut alarms = Alarms::lock();
        let key = (deadline, alarms.next);
        match alarms.wakes {
            Some(wakes) if wakes <= deadline => {}
            Some(_) => {
                alarms.wakes = Some(deadline);
                CHANGED.notify_one();
            }
            None => {
                let started =
                    thread::Builder::new().name("tokio-rdma alarm".to_owned()).spawn(Alarms::run);
                if let Err(error) = started {
                    let known = std::mem::replace(&mut alarms.failed, true);
                    // A subscriber of the program must not run under the lock.
                    drop(alarms);
                    if !known {
                        tracing::error!(%error, "failed to start the alarm thread; tasks poll for their deadlines");
                    }
                    return None;
                }
                (alarms.wakes, alarms.failed) = (Some(deadline), false);
            }
        }
        alarms.next += 1;
        alarms.set.insert(key, bell.clone());
        Some(Self { key, bell })
    }
}

impl Drop for Alarm {
    fn drop(&mut self) {
        // The bell has a waker, which is dropped by the caller's frame, not under the lock. The thread may wake in vain, once.
        let gone = Alarms::lock().set.remove(&self.key);
        drop(gone);
    }
}

/// Alarms of the process.
struct Alarms {
    set: BTreeMap<Key, Arc<Bell>>,
    next: u64,
    /// When the thread looks next, which is not after the first alarm; `None` if it does not run. It ends when it finds no alarm.
    wakes: Option<Instant>,
    /// The thread could not be started.
    failed: bool,
}

static ALARMS: Mutex<Alarms> =
    Mutex::new(Alarms { set: BTreeMap::new(), next: 0, wakes: None, failed: false });
static CHANGED: Condvar = Condvar::new();

impl Alarms {
    fn lock() -> MutexGuard<'static, Self> {
        ALARMS.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run() {
        let mut alarms = Self::lock();
        while let Some((&key, _)) = alarms.set.first_key_value() {
            let left = key.0.saturating_duration_since(Instant::now());
            alarms.wakes = Some(key.0);
            if left.is_zero() {
                let due = alarms.set.remove(&key);
                drop(alarms);
                if let Some(bell) = &due {
                    bell.ring();
                }
                // Perhaps the last reference, with the waker of a task that has polled meanwhile.
                contained(|| drop(due));
                alarms = Self::lock();
            } else {
                alarms =
                    CHANGED.wait_timeout(alarms, left).unwrap_or_else(PoisonError::into_inner).0;
            }
        }
        alarms.wakes = None;
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::panic::resume_unwind;
    use std::sync::mpsc::{Receiver, Sender, channel};
    use std::task::{Wake, Waker};

    use super::*;

    const LONG: Duration = Duration::from_secs(60);
    const SHORT: Duration = Duration::from_millis(20);

    /// A waker that reports, and then does something.
    struct Does(Mutex<Sender<()>>, fn());

    impl Wake for Does {
        fn wake(self: Arc<Self>) {
            let _ = self.0.lock().unwrap().send(());
            (self.1)();
        }
    }

    impl Drop for Does {
        /// Needs the lock for alarms.
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
    fn alarm_set_after_a_later_one_rings_first() {
        let [(late, later), (soon, rang)] = [(); 2].map(|()| waker(|| ()));
        let (mut far, mut near) =
            (Sleep::new(deadline(Duration::MAX)), Sleep::new(deadline(SHORT)));
        assert!(far.poll(&mut Context::from_waker(&late)).is_pending());
        assert!(near.poll(&mut Context::from_waker(&soon)).is_pending());
        rang.recv_timeout(LONG).unwrap();
        assert!(is_over(&mut near) && !is_over(&mut far));
        far.reset(deadline(SHORT));
        assert!(later.try_recv().is_err());
        assert!(far.poll(&mut Context::from_waker(&late)).is_pending());
        later.recv_timeout(LONG).unwrap();
        assert!(is_over(&mut far));
    }

    #[test]
    fn alarm_rings_after_a_waker_that_panics_with_a_payload_that_panics() {
        struct Again;
        impl Drop for Again {
            fn drop(&mut self) {
                resume_unwind(Box::new("dropped"));
            }
        }
        for act in [|| resume_unwind(Box::new("woken")), || resume_unwind(Box::new(Again))] {
            let ((rude, rudely), (honest, rang)) = (waker(act), waker(|| ()));
            let (mut first, mut second) =
                (Sleep::new(deadline(SHORT)), Sleep::new(deadline(2 * SHORT)));
            assert!(first.poll(&mut Context::from_waker(&rude)).is_pending());
            drop(rude);
            assert!(second.poll(&mut Context::from_waker(&honest)).is_pending());
            rudely.recv_timeout(LONG).unwrap();
            rang.recv_timeout(LONG).unwrap();
        }
    }

    /// Polls a sleep again with a last waker, which sets an alarm when it is dropped, and drops the sleep.
    struct Takes(Mutex<Option<(Sleep, Waker)>>);

    impl Wake for Takes {
        fn wake(self: Arc<Self>) {
            let Some((mut sleep, waker)) = self.0.lock().unwrap().take() else { return };
            let _ = sleep.poll(&mut Context::from_waker(&waker));
            // The alarm's is the last.
            drop(waker);
            drop(sleep);
        }
    }

    #[test]
    fn waker_that_sets_an_alarm_when_it_is_dropped_may_be_the_alarm_threads() {
        let (last, done) = waker(|| ());
        let takes = Arc::new(Takes(Mutex::new(None)));
        let mut sleep = Sleep::new(deadline(SHORT));
        let first = Waker::from(takes.clone());
        // Held while it is set, so that it is there when the alarm rings.
        let mut slot = takes.0.lock().unwrap();
        assert!(sleep.poll(&mut Context::from_waker(&first)).is_pending());
        *slot = Some((sleep, last));
        drop(slot);
        // Its sender is dropped with it.
        assert!(
            done.recv_timeout(LONG)
                .is_err_and(|error| error == std::sync::mpsc::RecvTimeoutError::Disconnected)
        );
        // And the thread goes on.
        let (waker, rang) = waker(|| ());
        let mut next = Sleep::new(deadline(SHORT));
        assert!(next.poll(&mut Context::from_waker(&waker)).is_pending());
        rang.recv_timeout(LONG).unwrap();
    }
}
