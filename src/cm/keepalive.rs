//! Keepalive: finds out that a peer is gone while nothing is in flight.

use std::future::poll_fn;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::task::AbortHandle;

use super::clock::{self, Sleep};
use super::link::Disconnection;
use super::router::{Inbox, fail};
use crate::error::{NoRuntime, SetupError};
use crate::mem::RemoteRegion;
use crate::op::{QueuePair, WeakQueuePair};
use crate::types::{Rkey, WcStatus};

/// The task that probes the peer of a link. Dropping it ends the task.
#[derive(Debug)]
pub(super) struct Keepalive(AbortHandle);

impl Drop for Keepalive {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl Keepalive {
    /// Checks that `queue_pair` can be probed each `interval`.
    pub(super) fn check(interval: Option<Duration>, queue_pair: &QueuePair) -> Result<(), SetupError> {
        let Some(interval) = interval else { return Ok(()) };
        // Timers tick in milliseconds.
        let millis = u64::try_from(interval.as_millis()).unwrap_or(u64::MAX);
        SetupError::at_least("keepalive in milliseconds", millis, 1)?;
        SetupError::at_least("max_send_wr with keepalive", queue_pair.caps().max_send_wr.into(), 1)
    }

    /// Starts to probe the peer of a queue pair that is connected, in a task of the current runtime.
    pub(super) fn start(
        interval: Duration,
        queue_pair: &QueuePair,
        inbox: &Arc<Inbox>,
        peer: SocketAddr,
    ) -> Result<Self, NoRuntime> {
        let probing = probe(interval, queue_pair.downgrade(), inbox.clone(), peer);
        Ok(Self(NoRuntime::or_current()?.spawn(probing).abort_handle()))
    }
}

/// Work of a queue pair so far. If it has changed, the peer has acknowledged or sent something.
#[derive(Debug, PartialEq, Eq)]
struct Activity {
    sent: u64,
    received: u64,
}

impl Activity {
    fn of(queue_pair: &QueuePair) -> Self {
        let (send, receive) = (queue_pair.send_counters(), queue_pair.receive_counters());
        Self {
            sent: send.posted.wrapping_sub(send.in_flight.into()),
            received: receive.posted.wrapping_sub(receive.in_flight.into()),
        }
    }
}

async fn probe(interval: Duration, queue_pair: WeakQueuePair, inbox: Arc<Inbox>, peer: SocketAddr) {
    let mut before = None;
    loop {
        let mut sleep = Sleep::new(clock::deadline(interval));
        poll_fn(|context| sleep.poll(context)).await;
        let ended = inbox.happened().end.is_some();
        let Some(qp) = queue_pair.upgrade().filter(|_| !ended) else { return };
        let now = Some(Activity::of(&qp));
        // An operation in flight fails by its own retries.
        let idle = qp.send_counters().in_flight == 0 && before == now;
        before = now;
        if !idle {
            continue;
        }
        let written = qp.write_inline(&[], RemoteRegion::new(0, 0, Rkey(0)));
        // The task must not keep the queue pair alive.
        drop(qp);
        let Err(error) = written.await else {
            before = queue_pair.upgrade().map(|qp| Activity::of(&qp));
            continue;
        };
        let kind = error.kind();
        let end = match kind.status() {
            Some(WcStatus::RETRY_EXC_ERR) => Disconnection::Silent,
            Some(status) if status != WcStatus::WR_FLUSH_ERR => Disconnection::ProbeFailed,
            // The queue pair has ended for another reason, which its own work reports, or the program has moved it to a state
            // in which nothing can be posted.
            _ => return,
        };
        tracing::warn!(%peer, error = %kind, "a probe of the keepalive failed; ending the link");
        if let Some(qp) = queue_pair.upgrade() {
            fail(&qp);
        }
        inbox.probe_failed(end);
        return;
    }
}
