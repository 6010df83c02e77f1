//! Deadlines in real time.
//!
//! Devices and peers take real time, which `tokio::time::pause` does not stop. With a paused clock, a runtime that has nothing to
//! do advances the clock to the next deadline at once: a timer of Tokio fires before a device can answer. A [`Sleep`] that fires
//! early therefore waits for the rest in a thread, the [alarm](Alarms), and sets no timer of Tokio any more: that would fire
//! early again, and keep the runtime busy.

use std::collections::BTreeMap;
use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker, ready};
use std::thread;
use std::time::{Duration, Instant};

use futures::task::AtomicWaker;
use tokio::runtime::Handle;
use tokio::task::unconstrained;
use tokio::time::{self, sleep_until};

use crate::contained::{ContainedWaker, contained};
use crate::error::NoRuntime;

/// Longest time that a deadline is away: further ones are never reached.
const FAR: Duration = Duration::from_secs(10 * 365 * 24 * 3600);

/// The runtime that polls the current task, if it has timers.
pub(crate) fn runtime() -> Result<Handle, NoRuntime> {
    let handle = Handle::try_current().map_err(|_| NoRuntime::Outside)?;
    match timer(Instant::now()) {
        Some(_) => Ok(handle),
        None => Err(NoRuntime::Time),
    }
}

/// A timer of the current runtime, if it has timers.
fn timer(deadline: Instant) -> Option<time::Sleep> {
    Handle::try_current().ok()?;
    let left = deadline.saturating_duration_since(Instant::now());
    NoRuntime::Time.unless_registered(|| sleep_until(time::Instant::now() + left)).ok()
}

/// The result of `future`, or `None` if `after` has passed before.
pub(crate) async fn timeout<F: Future>(after: Duration, future: F) -> Option<F::Output> {
    let (mut future, mut sleep, mut wakers) = (pin!(future), Sleep::new(deadline(after)), ContainedWaker::default());
    poll_fn(|context| {
        if let Poll::Ready(output) = future.as_mut().poll(context) {
            return Poll::Ready(Some(output));
        }
        // Not charged to the budget of the task: a future that spends it would never be timed out.
        let expired = pin!(unconstrained(poll_fn(|context| sleep.poll(context))));
        // A timer's waker that panics would keep other timers of the runtime from being noticed.
        wakers.poll(context, |context| expired.poll(context)).map(|()| None)
    })
    .await
}

/// The moment that is `after` from now.
pub(crate) fn deadline(after: Duration) -> Instant {
    Instant::now() + after.min(FAR)
}

/// A wait for a moment of real time.
#[derive(Debug)]
pub(crate) struct Sleep {
    deadline: Instant,
    waits: Waits,
}

#[derive(Debug)]
enum Waits {
    /// By a timer of the runtime.
    Timer(Pin<Box<time::Sleep>>),
    /// By the alarm thread: there is no timer, or it has fired early.
    Alarm(Option<Alarm>),
}

impl Sleep {
    /// Waits until `deadline`, by a timer of the current runtime if that has timers.
    pub(crate) fn new(deadline: Instant) -> Self {
        let waits = timer(deadline).map_or(Waits::Alarm(None), |timer| Waits::Timer(Box::pin(timer)));
        Self { deadline, waits }
    }

    pub(crate) fn deadline(&self) -> Instant {
        self.deadline
    }

    /// Waits until another moment.
    pub(crate) fn reset(&mut self, deadline: Instant) {
        self.deadline = deadline;
        match &mut self.waits {
            Waits::Timer(timer) => {
                let left = deadline.saturating_duration_since(Instant::now());
                timer.as_mut().reset(time::Instant::now() + left);
            }
            Waits::Alarm(alarm) => *alarm = None,
        }
    }

    /// Ready once the moment has come.
    pub(crate) fn poll(&mut self, context: &mut Context<'_>) -> Poll<()> {
        if let Waits::Timer(timer) = &mut self.waits {
            ready!(timer.as_mut().poll(context));
            if Instant::now() >= self.deadline {
                return Poll::Ready(());
            }
            tracing::debug!("the clock of the runtime is not real time; waiting in a thread");
            self.waits = Waits::Alarm(None);
        }
        if let Waits::Alarm(alarm) = &mut self.waits {
            let alarm = alarm.get_or_insert_with(|| Alarm::set(self.deadline));
            alarm.waker.register(context.waker());
        }
        // After registering: the thread may have woken before.
        if Instant::now() >= self.deadline { Poll::Ready(()) } else { Poll::Pending }
    }
}

/// A task that the alarm thread wakes at a moment.
#[derive(Debug)]
struct Alarm {
    key: Key,
    waker: Arc<AtomicWaker>,
}

/// The moment, and a number that tells alarms of the same moment apart.
type Key = (Instant, u64);

impl Alarm {
    fn set(deadline: Instant) -> Self {
        let waker = Arc::new(AtomicWaker::new());
        let mut alarms = Alarms::lock();
        let key = (deadline, alarms.next);
        alarms.next += 1;
        alarms.set.insert(key, waker.clone());
        if !std::mem::replace(&mut alarms.runs, true) {
            let started = thread::Builder::new().name("tokio-rdma alarm".to_owned()).spawn(Alarms::run);
            if let Err(error) = started {
                alarms.runs = false;
                tracing::error!(%error, "failed to start the alarm thread; a deadline will not be noticed in time");
            }
        }
        drop(alarms);
        CHANGED.notify_one();
        Self { key, waker }
    }
}

impl Drop for Alarm {
    fn drop(&mut self) {
        // The waker is dropped by the caller's frame, not under the lock.
        let gone = Alarms::lock().set.remove(&self.key);
        drop(gone);
    }
}

/// Alarms of the process. The thread runs as long as there are any.
struct Alarms {
    set: BTreeMap<Key, Arc<AtomicWaker>>,
    next: u64,
    runs: bool,
}

static ALARMS: Mutex<Alarms> = Mutex::new(Alarms { set: BTreeMap::new(), next: 0, runs: false });
static CHANGED: Condvar = Condvar::new();

impl Alarms {
    fn lock() -> MutexGuard<'static, Self> {
        ALARMS.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run() {
        let mut alarms = Self::lock();
        while let Some((&(deadline, number), _)) = alarms.set.first_key_value() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let due = alarms.set.remove(&(deadline, number));
                drop(alarms);
                let waker = due.as_deref().and_then(AtomicWaker::take);
                contained(|| waker.into_iter().for_each(Waker::wake));
                alarms = Self::lock();
            } else {
                alarms = CHANGED.wait_timeout(alarms, left).unwrap_or_else(PoisonError::into_inner).0;
            }
        }
        alarms.runs = false;
    }
}
