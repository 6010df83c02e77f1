//! Deadlines in real time.
//!
//! One thread of the process, the alarm thread, wakes tasks at their deadlines. Tokio's timers do
//! not fit: `tokio::time::pause` stops their clock, but neither devices nor peers. Also, a timer
//! belongs to one runtime, which a future may outlive or leave.
//!
//! Setting a deadline takes a lock. The thread is notified only of a new earliest deadline. Among
//! operations, only those with a deadline set one; messages set none.

use std::collections::BTreeMap;
use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::thread;
use std::time::{Duration, Instant};

use futures::task::AtomicWaker;

use crate::contained::contained;

/// Limit of a delay, in effect infinite.
const MAX_DELAY: Duration = Duration::from_secs(10 * 365 * 24 * 3600);

/// Returns the result of `future`, or `None` if `after` passes first.
pub(crate) async fn timeout<F: Future>(after: Duration, future: F) -> Option<F::Output> {
    let (mut future, mut sleep) = (pin!(future), Sleep::new(deadline(after)));
    poll_fn(|context| match future.as_mut().poll(context) {
        Poll::Ready(output) => Poll::Ready(Some(output)),
        Poll::Pending => sleep.poll(context).map(|()| None),
    })
    .await
}

pub(crate) fn deadline(after: Duration) -> Instant {
    Instant::now() + after.min(MAX_DELAY)
}

/// A wait for an instant, in any runtime or none.
#[derive(Debug)]
pub(crate) struct Sleep {
    deadline: Instant,
    alarm: Option<Alarm>,
    /// The signal of an earlier alarm, so that another deadline needs no allocation.
    spare: Option<Arc<Signal>>,
}

impl Sleep {
    pub(crate) fn new(deadline: Instant) -> Self {
        Self { deadline, alarm: None, spare: None }
    }

    pub(crate) fn deadline(&self) -> Instant {
        self.deadline
    }

    pub(crate) fn reset(&mut self, deadline: Instant) {
        self.deadline = deadline;
        if let Some(alarm) = self.alarm.take() {
            let mut signal = alarm.signal.clone();
            drop(alarm);
            // If the alarm thread has it, it is about to fire it, and the next alarm needs another.
            if let Some(own) = Arc::get_mut(&mut signal) {
                *own.fired.get_mut() = false;
                self.spare = Some(signal);
            }
        }
    }

    pub(crate) fn poll(&mut self, context: &mut Context<'_>) -> Poll<()> {
        if self.alarm.is_none() {
            if Instant::now() >= self.deadline {
                return Poll::Ready(());
            }
            self.alarm = Alarm::set(self.deadline, self.spare.take().unwrap_or_default());
        }
        let Some(alarm) = &self.alarm else {
            // Without the alarm thread, this task polls.
            contained(|| context.waker().wake_by_ref());
            return Poll::Pending;
        };
        alarm.signal.poll(context)
    }
}

#[derive(Debug, Default)]
struct Signal {
    fired: AtomicBool,
    waker: AtomicWaker,
}

impl Signal {
    fn poll(&self, context: &mut Context<'_>) -> Poll<()> {
        if !self.fired.load(Ordering::Acquire) {
            // May wake a task and drop another task's waker.
            contained(|| self.waker.register(context.waker()));
        }
        // Checked after registering: the signal may have fired before.
        if self.fired.load(Ordering::Acquire) { Poll::Ready(()) } else { Poll::Pending }
    }

    fn fire(&self) {
        self.fired.store(true, Ordering::Release);
        let Some(waker) = self.waker.take() else { return };
        contained(|| waker.wake_by_ref());
        // Separate: two panics at once would abort the process.
        contained(|| drop(waker));
    }
}

/// A wake-up at an instant. Dropping it cancels the wake-up, unless that is in progress.
#[derive(Debug)]
pub(crate) struct Alarm {
    key: Key,
    signal: Arc<Signal>,
}

/// The instant, and a number to tell equal instants apart.
type Key = (Instant, u64);

impl Alarm {
    /// Sets an alarm that wakes `waker` on the alarm thread, even if it is leaked.
    ///
    /// Returns `None` if the thread cannot be started.
    pub(crate) fn waking(deadline: Instant, waker: Waker) -> Option<Self> {
        let signal = Signal::default();
        signal.waker.register(&waker);
        Self::set(deadline, Arc::new(signal))
    }

    /// Returns `None` if the thread cannot be started.
    fn set(deadline: Instant, signal: Arc<Signal>) -> Option<Self> {
        let mut alarms = Alarms::lock();
        let key = (deadline, alarms.next);
        match alarms.next_wake {
            Some(wake) if wake <= deadline => {}
            Some(_) => {
                alarms.next_wake = Some(deadline);
                CHANGED.notify_one();
            }
            None => {
                let started =
                    thread::Builder::new().name("tokio-rdma alarm".to_owned()).spawn(Alarms::run);
                if let Err(error) = started {
                    let known = std::mem::replace(&mut alarms.failed, true);
                    // The program's `tracing` subscriber must not run under the lock.
                    drop(alarms);
                    if !known {
                        tracing::error!(
                            %error,
                            "failed to start the alarm thread; tasks poll for their deadlines"
                        );
                    }
                    return None;
                }
                (alarms.next_wake, alarms.failed) = (Some(deadline), false);
            }
        }
        alarms.next += 1;
        alarms.set.insert(key, signal.clone());
        Some(Self { key, signal })
    }
}

impl Drop for Alarm {
    fn drop(&mut self) {
        // Drops the signal's waker without the lock. The thread may wake once in vain.
        let gone = Alarms::lock().set.remove(&self.key);
        drop(gone);
    }
}

struct Alarms {
    set: BTreeMap<Key, Arc<Signal>>,
    next: u64,
    /// The thread's next wake-up, not after the first alarm. `None` if it does not run: it exits
    /// when no alarm is left.
    next_wake: Option<Instant>,
    failed: bool,
}

static ALARMS: Mutex<Alarms> =
    Mutex::new(Alarms { set: BTreeMap::new(), next: 0, next_wake: None, failed: false });
static CHANGED: Condvar = Condvar::new();

impl Alarms {
    fn lock() -> MutexGuard<'static, Self> {
        ALARMS.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run() {
        let mut alarms = Self::lock();
        while let Some((&key, _)) = alarms.set.first_key_value() {
            let left = key.0.saturating_duration_since(Instant::now());
            alarms.next_wake = Some(key.0);
            if left.is_zero() {
                let due = alarms.set.remove(&key);
                drop(alarms);
                if let Some(signal) = &due {
                    signal.fire();
                }
                // May be the last reference, with the waker of a task that polled meanwhile.
                contained(|| drop(due));
                alarms = Self::lock();
            } else {
                alarms =
                    CHANGED.wait_timeout(alarms, left).unwrap_or_else(PoisonError::into_inner).0;
            }
        }
        alarms.next_wake = None;
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

    /// A waker that reports and then calls a function.
    struct Does(Mutex<Sender<()>>, fn());

    impl Wake for Does {
        fn wake(self: Arc<Self>) {
            let _ = self.0.lock().unwrap().send(());
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
        assert!(near.poll(&mut Context::from_waker(&soon)).is_pending());
        fired.recv_timeout(LONG).unwrap();
        assert!(is_over(&mut near) && !is_over(&mut far));
        far.reset(deadline(SHORT));
        assert!(later.try_recv().is_err());
        assert!(far.poll(&mut Context::from_waker(&late)).is_pending());
        later.recv_timeout(LONG).unwrap();
        assert!(is_over(&mut far));
    }

    #[test]
    fn sleep_waits_for_its_new_deadline_after_an_earlier_one() {
        let mut sleep = Sleep::new(deadline(SHORT));
        for _ in 0..3 {
            let (waker, woken) = waker(|| ());
            if sleep.poll(&mut Context::from_waker(&waker)).is_pending() {
                woken.recv_timeout(LONG).unwrap();
            }
            assert!(is_over(&mut sleep));
            sleep.reset(deadline(LONG));
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
            assert!(first.poll(&mut Context::from_waker(&panicking)).is_pending());
            drop(panicking);
            assert!(second.poll(&mut Context::from_waker(&sending)).is_pending());
            panicked.recv_timeout(LONG).unwrap();
            fired.recv_timeout(LONG).unwrap();
        }
    }

    /// A waker that repolls its sleep with a waker that sets an alarm when dropped, then drops the
    /// sleep.
    struct Takes(Mutex<Option<(Sleep, Waker)>>);

    impl Wake for Takes {
        fn wake(self: Arc<Self>) {
            let Some((mut sleep, waker)) = self.0.lock().unwrap().take() else { return };
            let _ = sleep.poll(&mut Context::from_waker(&waker));
            // The alarm has the last reference.
            drop(waker);
            drop(sleep);
        }
    }

    #[test]
    fn alarm_thread_may_drop_waker_that_sets_an_alarm() {
        let (last, done) = waker(|| ());
        let takes = Arc::new(Takes(Mutex::new(None)));
        let mut sleep = Sleep::new(deadline(SHORT));
        let first = Waker::from(takes.clone());
        // Held until filled, in case the alarm fires early.
        let mut slot = takes.0.lock().unwrap();
        assert!(sleep.poll(&mut Context::from_waker(&first)).is_pending());
        *slot = Some((sleep, last));
        drop(slot);
        // The waker was dropped, and its sender with it.
        assert!(
            done.recv_timeout(LONG)
                .is_err_and(|error| error == std::sync::mpsc::RecvTimeoutError::Disconnected)
        );
        let (waker, fired) = waker(|| ());
        let mut next = Sleep::new(deadline(SHORT));
        assert!(next.poll(&mut Context::from_waker(&waker)).is_pending());
        fired.recv_timeout(LONG).unwrap();
    }
}
