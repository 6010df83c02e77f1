//! The task of a connection: progress when no task of the service asks for any, time, and the end.
//!
//! Why there is one: credits, fetches and answers to the peer must go on while the service waits for something else, and so
//! must time. Why only one, and no work in it that a task of the service could not do: whoever sends or receives makes
//! progress itself, so that the task is a hop that nobody waits for as long as both ends keep talking.
//!
//! It ends with the connection: when that is closed or has failed, or when all that the service held of it is dropped.

use std::cell::Cell;
use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::ptr;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::runtime::{Handle, RuntimeFlavor};
use tokio::task::yield_now;

use super::admission::Admitted;
use super::config::ConnectionConfig;
use super::core::Core;
use super::error::CloseReason;
use super::waiters::Guest;
use crate::cm::Link;
use crate::cm::clock::{self, Sleep, timeout};
use crate::engine::Deferral;
use crate::op::QueuePair;

/// Longest wait for a goodbye to be taken by the peer's device when the service has dropped or aborted the connection, and for the
/// queue pair to be flushed: on a network that works both take less than a millisecond.
const LINGER: Duration = Duration::from_secs(1);

thread_local! {
    /// Bell of the driver that is polled on this thread, and whether it has rung since.
    static POLLED: Cell<(*const Bell, bool)> = const { Cell::new((ptr::null(), false)) };
}

/// What an operation wakes: the driver of its connection.
#[derive(Debug, Default)]
pub(super) struct Bell {
    driver: futures::task::AtomicWaker,
}

impl Bell {
    pub(super) fn register(&self, waker: &Waker) {
        self.driver.register(waker);
    }

    pub(super) fn ring(&self) {
        if ptr::eq(POLLED.get().0, self) {
            POLLED.set((self, true));
        } else {
            self.driver.wake();
        }
    }

    /// Lets go of the driver.
    pub(super) fn take(&self) -> Option<Waker> {
        self.driver.take()
    }
}

/// Its driver is being polled, and need not be woken for what it rings itself.
struct Polled {
    bell: *const Bell,
    before: (*const Bell, bool),
}

impl Polled {
    fn begin(bell: &Bell) -> Self {
        Self { bell, before: POLLED.replace((bell, false)) }
    }

    /// True if it has rung.
    fn end(self) -> bool {
        POLLED.get() == (self.bell, true)
    }
}

impl Drop for Polled {
    fn drop(&mut self) {
        POLLED.set(self.before);
    }
}

impl std::task::Wake for Bell {
    fn wake(self: Arc<Self>) {
        self.ring();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.ring();
    }
}

/// What the tasks of a connection share.
#[derive(Debug)]
pub(super) struct Shared {
    core: Mutex<Core>,
    bell: Arc<Bell>,
    /// The bell as what operations wake.
    waker: Waker,
    pub(super) qp: QueuePair,
    /// Where it has its task.
    runtime: Handle,
    /// Its place among the connections of a listener.
    _admitted: Option<Admitted>,
    this: Weak<Self>,
}

impl Shared {
    pub(super) fn new(core: Core, qp: QueuePair, runtime: Handle, admitted: Option<Admitted>) -> Arc<Self> {
        let bell = Arc::new(Bell::default());
        let waker = bell.clone().into();
        Arc::new_cyclic(|this| Self {
            core: Mutex::new(core),
            waker,
            bell,
            qp,
            runtime,
            _admitted: admitted,
            this: this.clone(),
        })
    }

    /// Does something under the lock, and after it what that has left to do, for this connection and, as operations are polled,
    /// for others: whatever that may run, such as wakers and drops of the service's, may come back here.
    pub(super) fn with<R>(&self, work: impl FnOnce(&mut Core, &Waker) -> R) -> R {
        let deferral = Deferral::begin();
        let mut core = self.core.lock();
        let result = work(&mut core, &self.waker);
        let after = core.take_after();
        drop(core);
        drop(deferral);
        if after.help {
            let helper = Helper { shared: self.this.clone(), at_it: true };
            drop(self.runtime.spawn_blocking(move || helper.run()));
        }
        if after.ring {
            self.bell.ring();
        }
        after.run();
        result
    }

    /// As [`with`](Self::with), for a task that may have to wait.
    pub(super) fn poll<R>(
        &self,
        context: &mut Context<'_>,
        mut work: impl FnMut(&mut Core, &Waker, &mut Guest<'_>) -> Poll<R>,
    ) -> Poll<R> {
        let mut guest = Guest::new(context.waker());
        let first = self.with(|core, bell| work(core, bell, &mut guest));
        if first.is_ready() || !guest.clone_if_needed() {
            return first;
        }
        // With the clone the task is registered: a third time is never needed.
        self.with(|core, bell| work(core, bell, &mut guest))
    }

    /// The service has dropped all it held.
    pub(super) fn abandon(&self) {
        self.with(|core, _| core.abandon());
        self.bell.ring();
    }

    /// Ends the connection at once, without having finished.
    pub(super) fn leave(&self, reason: CloseReason) {
        self.with(|core, waker| core.leave(reason, waker));
        self.bell.ring();
    }
}

/// A thread that does what may block, one thing after the other, until there is nothing more to do: at most one for a
/// connection, however much its peer offers.
struct Helper {
    shared: Weak<Shared>,
    at_it: bool,
}

impl Helper {
    fn run(mut self) {
        while let Some(shared) = self.shared.upgrade()
            && let Some(chore) = shared.with(|core, _| core.next_chore())
        {
            let done = chore.run();
            shared.with(|core, bell| core.on_done(done, bell));
        }
        self.at_it = false;
    }
}

impl Drop for Helper {
    fn drop(&mut self) {
        if let (true, Some(shared)) = (self.at_it, self.shared.upgrade()) {
            // Who waits for a message would wait for ever.
            let reason = if std::thread::panicking() { CloseReason::Memory } else { CloseReason::Runtime };
            shared.with(|core, _| core.end(reason));
            shared.bell.ring();
        }
    }
}

/// Runs a connection until it has ended.
pub(super) fn drive(shared: Arc<Shared>, config: Times, link: Option<Arc<Link>>) -> impl Future<Output = ()> + Send {
    // Made before the first poll: a runtime that shuts down may drop a task that was never polled.
    let mut end = End { shared: Some(shared.clone()) };
    async move {
        let mut timers = Timers::new(config);
        let alone = shared.runtime.runtime_flavor() == RuntimeFlavor::CurrentThread;
        let mut disconnected = pin!(disconnected(link));
        poll_fn(|context| {
            shared.bell.register(context.waker());
            let polled = Polled::begin(&shared.bell);
            let result = poll(&shared, &mut timers, disconnected.as_mut(), context);
            let again = polled.end() && result.is_pending();
            if again && alone {
                // Behind all others: as long as tasks wake themselves, as those do whose operations spin, a runtime of one thread
                // comes to its own future, that of `block_on` or a `LocalSet`, and to its sockets once in 61 times only. It is
                // pending, and woken then.
                let _ = pin!(yield_now()).poll(context);
            } else if again {
                // Others may take it over if what comes next on this thread takes long.
                context.waker().wake_by_ref();
            }
            result
        })
        .await;
        if let Some(mut goodbye) = shared.with(|core, _| core.goodbye.take()) {
            // In the error state it would not be sent.
            let said = timeout(LINGER, poll_fn(|context| goodbye.poll(context))).await;
            tracing::debug!(qpn = %shared.qp.qpn(), ?said, "goodbye");
        }
        // In order: what is in flight ends first, flushed. Not so if sending was stopped: then nothing can be posted behind it
        // to wait for, and what has no completion when the queue pair is destroyed ends as closed. A device that does not flush
        // is not waited for: what it may still touch is kept until the queue pair is destroyed.
        if timeout(LINGER, shared.qp.clone().close()).await.is_none() {
            tracing::warn!(qpn = %shared.qp.qpn(), "a queue pair is not flushed");
        }
        drop(end.shared.take());
        shared.with(|core, _| core.gone());
        drop(shared.bell.take());
    }
}

/// Ready when the peer has disconnected, if there is a manager that tells.
async fn disconnected(link: Option<Arc<Link>>) {
    match link {
        Some(link) => drop(link.disconnected().await),
        None => std::future::pending().await,
    }
}

fn poll(
    shared: &Shared,
    timers: &mut Timers,
    disconnected: Pin<&mut impl Future<Output = ()>>,
    context: &mut Context<'_>,
) -> Poll<()> {
    // Once it is ready the connection has ended, so it is not polled again.
    if disconnected.poll(context).is_ready() {
        shared.with(|core, waker| core.disconnected(waker));
    }
    let abandoned = shared.with(|core, waker| {
        core.progress(waker);
        let abandoned = core.take_abandoned();
        if abandoned {
            core.part(waker);
        }
        abandoned
    });
    if abandoned {
        timers.linger = Some(Instant::now() + LINGER);
    }
    loop {
        if shared.with(|core, _| core.ended().is_some()) {
            return Poll::Ready(());
        }
        if timers.linger.is_some() && shared.with(|core, waker| core.has_parted(waker)) {
            shared.with(|core, _| core.end(CloseReason::Local));
            return Poll::Ready(());
        }
        std::task::ready!(timers.poll(context));
        shared.with(|core, waker| {
            timers.due(core);
            core.progress(waker);
        });
    }
}

/// Ends a connection whose runtime drops the driver, and its queue pair.
struct End {
    shared: Option<Arc<Shared>>,
}

impl Drop for End {
    fn drop(&mut self) {
        if let Some(shared) = &self.shared {
            let ended = shared.qp.modify(&crate::types::QpAttr::to_state(crate::types::QpState::Err));
            tracing::debug!(qpn = %shared.qp.qpn(), ?ended, "the runtime of a connection has shut down");
            shared.with(|core, _| core.end(CloseReason::Runtime));
            // Nobody else would: if sending was stopped, a flush does not move those in line.
            shared.qp.end();
            shared.with(|core, _| core.gone());
        }
    }
}

/// Settings that are about time.
#[derive(Debug, Clone, Copy)]
pub(super) struct Times {
    keepalive: Option<(Duration, Duration)>,
    stall: Option<Duration>,
    first_message: Option<Duration>,
}

impl Times {
    pub(super) fn new(config: &ConnectionConfig) -> Self {
        let (keepalive, stall) = (config.keepalive, config.stall_timeout);
        Self { keepalive, stall, first_message: config.first_message_timeout }
    }
}

/// What happens by itself, and when. In real time: a paused clock of the runtime says nothing of what the peer does.
#[derive(Debug)]
struct Timers {
    times: Times,
    sleep: Sleep,
    /// When to look whether something was heard; and whether the peer was asked.
    silence: Option<Instant>,
    asked: bool,
    /// When to look whether something was sent, and what had been sent before if somebody was waiting.
    stall: Option<Instant>,
    stalled: Option<(u64, Instant)>,
    /// When the first message of the peer has to be there.
    first_message: Option<Instant>,
    /// When to give up saying goodbye.
    linger: Option<Instant>,
}

impl Timers {
    fn new(times: Times) -> Self {
        let now = Instant::now();
        let first = |time: Option<Duration>| time.and_then(|time| now.checked_add(time));
        Self {
            times,
            sleep: Sleep::new(clock::deadline(Duration::MAX)),
            silence: first(times.keepalive.map(|(interval, _)| interval)),
            asked: false,
            stall: first(times.stall.map(|stall| stall / 2)),
            stalled: None,
            first_message: first(times.first_message),
            linger: None,
        }
    }

    /// Ready when something is due.
    fn poll(&mut self, context: &mut Context<'_>) -> Poll<()> {
        let next = [self.silence, self.stall, self.first_message, self.linger].into_iter().flatten().min();
        let Some(next) = next else { return Poll::Pending };
        if self.sleep.deadline() != next {
            self.sleep.reset(next);
        }
        self.sleep.poll(context)
    }

    /// Does what is due.
    fn due(&mut self, core: &mut Core) {
        let now = Instant::now();
        let is_due = |time: Option<Instant>| time.is_some_and(|time| time <= now);
        if let (true, Some((interval, patience))) = (is_due(self.silence), self.times.keepalive) {
            let heard = core.take_heard();
            if !heard && self.asked {
                core.end(CloseReason::Silent);
            } else if !heard {
                core.ping();
            }
            self.asked = !heard;
            self.silence = now.checked_add(if heard { interval } else { patience });
        }
        if let (true, Some(stall)) = (is_due(self.stall), self.times.stall) {
            self.stalled = match (core.stalled_at(), self.stalled) {
                (Some(sent), Some((before, since))) if sent == before => Some((before, since)),
                (Some(sent), _) => Some((sent, now)),
                (None, _) => None,
            };
            if self.stalled.is_some_and(|(_, since)| now.duration_since(since) >= stall) {
                core.end(CloseReason::Stalled);
            }
            self.stall = now.checked_add(stall / 2);
        }
        if is_due(self.first_message) {
            self.first_message = None;
            if !core.begun {
                core.end(CloseReason::NoFirstMessage);
            }
        }
        if is_due(self.linger) {
            core.end(CloseReason::Local);
        }
    }
}
