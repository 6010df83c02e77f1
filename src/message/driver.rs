//! The driver: the task that runs a connection while no task of the service does.
//!
//! Credits, fetches and answers to the peer must continue while the service waits for something else. A task that sends or
//! receives makes this progress itself, and does not wait for the driver. Three things happen in the driver only:
//!
//! - It reads the clock and executes deadlines, `Core::on_time`.
//! - It notices that the peer has disconnected, `Core::disconnected`.
//! - It closes the queue pair of a connection that has ended: `Connection::close` waits for that.
//!
//! The driver ends with the connection: when that is closed or has failed, or after the service has dropped its last handle.

use std::future::{Future, poll_fn};
use std::ops::ControlFlow;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use tokio::runtime::RuntimeFlavor;
use tokio::task::yield_now;

use super::error::CloseReason;
use super::lifecycle::Event;
use super::shared::{DriverPoll, Shared};
use super::timers::LINGER;
use crate::cm::Link;
use crate::cm::clock::{self, Sleep, timeout};

/// Runs a connection until it has ended.
pub(super) fn drive(
    shared: Arc<Shared>,
    link: Option<Arc<Link>>,
) -> impl Future<Output = ()> + Send {
    // Made before the first poll: a runtime that shuts down may drop a task that was never polled.
    let mut guard = ShutdownGuard { shared: Some(shared.clone()) };
    async move {
        let mut sleep = Sleep::new(clock::deadline(Duration::MAX));
        let alone = shared.runtime.runtime_flavor() == RuntimeFlavor::CurrentThread;
        let mut disconnected = pin!(disconnected(link));
        poll_fn(|context| {
            shared.bell.register(context.waker());
            let driver_poll = DriverPoll::begin(&shared.bell);
            let result = poll(&shared, &mut sleep, disconnected.as_mut(), context);
            let again = driver_poll.end() && result.is_pending();
            if again && alone {
                // A runtime of one thread polls its own future, that of `block_on` or a `LocalSet`, and its sockets only every
                // `event_interval` polls, 61 by default, as long as tasks wake themselves. A yield wakes the driver after them.
                let _ = pin!(yield_now()).poll(context);
            } else if again {
                // Another thread may steal the driver if the next task on this thread runs for long.
                context.waker().wake_by_ref();
            }
            result
        })
        .await;
        if let Some(mut abort) = shared.with(|core, _| core.sends.pop_back()) {
            // Closing enters the error state, where nothing is sent; wait for the Abort first.
            let taken = timeout(LINGER, poll_fn(|context| abort.poll(context))).await;
            tracing::debug!(qpn = %shared.qp.qpn(), ?taken, "abort");
        }
        // Operations in flight are flushed first. If sending was stopped, no marker can be posted behind them, and operations
        // without a completion end as closed when the queue pair is destroyed. A device that does not flush is not awaited:
        // memory that it may still access is kept until the queue pair is destroyed.
        if timeout(LINGER, shared.qp.clone().close()).await.is_none() {
            tracing::warn!(qpn = %shared.qp.qpn(), "a queue pair is not flushed");
        }
        drop(guard.shared.take());
        shared.with(|core, _| core.on(Event::QueuePairClosed));
        drop(shared.bell.take());
    }
}

/// Waits until the peer has disconnected; for ever without a connection manager.
async fn disconnected(link: Option<Arc<Link>>) {
    match link {
        Some(link) => drop(link.disconnected().await),
        None => std::future::pending().await,
    }
}

fn poll(
    shared: &Shared,
    sleep: &mut Sleep,
    disconnected: Pin<&mut impl Future<Output = ()>>,
    context: &mut Context<'_>,
) -> Poll<()> {
    // Once it is ready the connection has ended, so it is not polled again.
    if disconnected.poll(context).is_ready() {
        shared.with(|core, bell| core.disconnected(bell));
    }
    while let ControlFlow::Continue(deadline) = shared.with(|core, bell| core.drive(bell)) {
        let Some(deadline) = deadline else { return Poll::Pending };
        if sleep.deadline() != deadline {
            sleep.reset(deadline);
        }
        std::task::ready!(sleep.poll(context));
        shared.with(|core, _| core.on_time(Instant::now()));
    }
    Poll::Ready(())
}

/// Ends a connection whose runtime drops the driver, and its queue pair.
struct ShutdownGuard {
    shared: Option<Arc<Shared>>,
}

impl Drop for ShutdownGuard {
    fn drop(&mut self) {
        if let Some(shared) = &self.shared {
            let ended =
                shared.qp.modify(&crate::types::QpAttr::to_state(crate::types::QpState::Err));
            tracing::debug!(qpn = %shared.qp.qpn(), ?ended, "the runtime of a connection has shut down");
            shared.with(|core, _| core.on(Event::End(CloseReason::Runtime)));
            // If sending was stopped, a flush does not end queued operations.
            shared.qp.end();
            shared.with(|core, _| core.on(Event::QueuePairClosed));
        }
    }
}
