//! The driver: a task that runs a connection while the application is idle. Other tasks and the
//! waker of operations ([`ConnectionWaker`]) make progress too. Only the driver:
//!
//! - executes deadlines (`ConnectionState::on_deadline`)
//! - notices that the peer has disconnected (`ConnectionState::on_disconnect`)
//! - closes the queue pair after termination, for which `Connection::close` waits, and exits
//!
//! [`ConnectionWaker`]: super::shared::ConnectionWaker

use std::future::{Future, poll_fn};
use std::ops::ControlFlow;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use rdma_message_proto::lifecycle::Event;
use rdma_message_proto::timers::LINGER;
use tokio::runtime::RuntimeFlavor;
use tokio::task::yield_now;

use super::error::CloseReason;
use super::shared::{ConnectionInner, DriverPoll};
use crate::clock::{self, Sleep, timeout};
use crate::cm::CmConnection;

pub(super) fn drive(
    shared: Arc<ConnectionInner>,
    link: Option<Arc<CmConnection>>,
) -> impl Future<Output = ()> + Send {
    // A runtime may drop an unpolled task.
    let mut guard = ShutdownGuard { shared: Some(shared.clone()) };
    async move {
        let mut sleep = Sleep::new(clock::deadline(Duration::MAX));
        let single_threaded = shared.runtime.runtime_flavor() == RuntimeFlavor::CurrentThread;
        let mut disconnected = pin!(disconnected(link));
        poll_fn(|context| {
            shared.connection_waker.register(context.waker());
            let driver_poll = DriverPoll::begin(&shared.connection_waker);
            let result = poll(&shared, &mut sleep, disconnected.as_mut(), context);
            let repoll = driver_poll.end() && result.is_pending();
            if repoll && single_threaded {
                // While tasks wake themselves, a single-threaded runtime polls sockets and its own
                // future (`block_on`, `LocalSet`) only every `event_interval` polls, 61 by default.
                // A yield lets them run first.
                let _ = pin!(yield_now()).poll(context);
            } else if repoll {
                // Another thread may steal the driver if the next task on this thread runs for
                // long.
                context.waker().wake_by_ref();
            }
            result
        })
        .await;
        if let Some(mut abort) = shared.with(|state, _| state.outbox.sends.pop_back()) {
            // The error state stops sending: await the `Abort` first.
            let acknowledged = timeout(LINGER, poll_fn(|context| abort.poll(context))).await;
            rdma_provider::debug!(
                qpn = %shared.qp.qpn(),
                ?acknowledged,
                "waited for the Abort frame"
            );
        }
        // After `stop_sending` no marker can be posted, and operations without a completion end as
        // closed when the queue pair is destroyed. If the device does not flush, memory that it may
        // access stays allocated until then.
        if timeout(LINGER, shared.qp.clone().close()).await.is_none() {
            rdma_provider::warn!(
                qpn = %shared.qp.qpn(),
                "failed to flush queue pair within {LINGER:?}; its buffers stay allocated"
            );
        }
        drop(guard.shared.take());
        shared.with(|state, _| state.on(Event::QueuePairClosed));
        drop(shared.connection_waker.take());
    }
}

/// Stays pending without a connection manager.
async fn disconnected(link: Option<Arc<CmConnection>>) {
    match link {
        Some(link) => drop(link.disconnected().await),
        None => std::future::pending().await,
    }
}

fn poll(
    shared: &ConnectionInner,
    sleep: &mut Sleep,
    disconnected: Pin<&mut impl Future<Output = ()>>,
    context: &mut Context<'_>,
) -> Poll<()> {
    // The connection has terminated, and this is not polled again.
    if disconnected.poll(context).is_ready() {
        shared.with(|state, driver| state.on_disconnect(driver));
    }
    while let ControlFlow::Continue(deadline) = shared.with(|state, driver| state.drive(driver)) {
        let Some(deadline) = deadline else { return Poll::Pending };
        if sleep.deadline() != deadline {
            sleep.reset(deadline);
        }
        std::task::ready!(sleep.poll(context));
        shared.with(|state, _| state.on_deadline(clock::now()));
    }
    Poll::Ready(())
}

/// Terminates the connection and shuts down its queue pair if the runtime drops the driver.
struct ShutdownGuard {
    shared: Option<Arc<ConnectionInner>>,
}

impl Drop for ShutdownGuard {
    fn drop(&mut self) {
        if let Some(shared) = &self.shared {
            // Under one lock, or a task of another runtime could take the flush for the reason.
            let state_change = shared.with(|state, _| {
                let error = crate::types::QpAttr::to_state(crate::types::QpState::Err);
                let state_change = shared.qp.modify(&error);
                state.on(Event::Terminate(CloseReason::Runtime));
                state_change
            });
            rdma_provider::debug!(
                qpn = %shared.qp.qpn(),
                ?state_change,
                "Tokio runtime of the connection shut down; closing its queue pair"
            );
            // If sending was stopped, a flush does not complete queued operations.
            shared.qp.shut_down();
            shared.with(|state, _| state.on(Event::QueuePairClosed));
        }
    }
}
