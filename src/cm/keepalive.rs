use std::future::poll_fn;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::task::AbortHandle;

use super::disconnection::Disconnection;
use super::inbox::{Inbox, fail};
use crate::clock::{self, Sleep};
use crate::error::{NoRuntime, OpErrorKind, SetupError};
use crate::memory::RemoteRegion;
use crate::op::{QueuePair, WeakQueuePair};
use crate::types::{AckTimeout, QpState, Rkey, WcStatus};

#[derive(Debug)]
pub(super) struct Keepalive(AbortHandle);

impl Drop for Keepalive {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl Keepalive {
    pub(super) fn check(
        interval: Option<Duration>,
        timeout: AckTimeout,
        queue_pair: &QueuePair,
    ) -> Result<(), SetupError> {
        let Some(interval) = interval else { return Ok(()) };
        if queue_pair.protection_domain().device().attr().is_iwarp() {
            return Err(SetupError::Unsupported {
                what: "an iWARP device completes a probe before the peer has acknowledged it; \
                       leave ConnectConfig::keepalive at None, and exchange messages instead",
            });
        }
        // Timers have a resolution of milliseconds.
        let millis = u64::try_from(interval.as_millis()).unwrap_or(u64::MAX);
        SetupError::at_least("keepalive in milliseconds", millis, 1)?;
        SetupError::at_least(
            "timeout with keepalive, code of ibv_modify_qp(3)",
            timeout.code().into(),
            1,
        )?;
        SetupError::at_least("max_send_wr with keepalive", queue_pair.caps().max_send_wr.into(), 1)
    }

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

/// A change of the number of completed sends or receives proves that the peer has acknowledged or
/// sent something.
fn completed(queue_pair: &QueuePair) -> (u64, u64) {
    let (send, receive) = (queue_pair.send_counters(), queue_pair.receive_counters());
    let sent = send.posted.wrapping_sub(send.in_flight.into());
    let received = receive.posted.wrapping_sub(receive.in_flight.into());
    (sent, received)
}

async fn probe(interval: Duration, queue_pair: WeakQueuePair, inbox: Arc<Inbox>, peer: SocketAddr) {
    let mut before = None;
    loop {
        let mut sleep = Sleep::new(clock::deadline(interval));
        poll_fn(|context| sleep.poll(context)).await;
        let ended = inbox.state(|state| state.end.is_some());
        let Some(qp) = queue_pair.upgrade().filter(|_| !ended) else { return };
        let now = Some(completed(&qp));
        // An operation in flight detects a lost peer by its retries.
        let idle = qp.send_counters().in_flight == 0 && before == now;
        before = now;
        if !idle {
            continue;
        }
        let written = qp.write_inline(&[], RemoteRegion::new(0, 0, Rkey(0)));
        // The task must not keep the queue pair alive.
        drop(qp);
        let Err(error) = written.await else {
            before = queue_pair.upgrade().map(|qp| completed(&qp));
            continue;
        };
        let kind = error.kind();
        let end = match kind {
            OpErrorKind::Completion(error) if error.status == WcStatus::RETRY_EXC_ERR => {
                Disconnection::Silent
            }
            OpErrorKind::Completion(error) if error.status != WcStatus::WR_FLUSH_ERR => {
                Disconnection::ProbeFailed
            }
            OpErrorKind::CompletionQueue(_) => Disconnection::ProbeFailed,
            OpErrorKind::Closed => return,
            // The connection has ended, which fails the queue pair; its event follows.
            _ if inbox.is_ending() => return,
            // Other work failed first, or the peer attempted a forbidden operation.
            _ if queue_pair
                .upgrade()
                .is_some_and(|qp| matches!(qp.query(), Ok((QpState::Err, _)))) =>
            {
                Disconnection::ProbeFailed
            }
            // The program has moved the queue pair to a state in which it cannot post.
            _ => continue,
        };
        rdma_provider::warn!(%peer, error = %kind, "keepalive probe failed; disconnecting");
        if let Some(qp) = queue_pair.upgrade() {
            fail(&qp);
        }
        inbox.probe_failed(end);
        return;
    }
}
