//! Operations and leases with deadlines: what is handed back changes no more.

use std::future::Future;
use std::pin::Pin;
use std::task::Poll;
use std::time::{Duration, Instant};

use tokio_rdma::dc::DcInitiator;
use tokio_rdma::error::Outcome;
use tokio_rdma::memory::HostMemory;
use tokio_rdma::op::{DeadlineError, QueuePairBuilder, RetryConfig, Revocable};
use tokio_rdma::types::{AckTimeout, QpAttr, QpState, Transport, WcStatus};
use tokio_rdma::{
    Access, Batch, ExposedRegion, OpError, OpErrorKind, QueuePair, SetupError, SharedReceiveQueue,
};

use super::dynamic::{self, Node};
use crate::common::pair::{Pair, Shape, Side, connect};
use crate::common::{Setup, in_every_mode, rxe, skip, until, within};

const SOON: Duration = Duration::from_millis(1);
const REVOKED: OpErrorKind = OpErrorKind::TimedOut { outcome: Outcome::MaybeExecuted };
const WITHDRAWN: OpErrorKind = OpErrorKind::TimedOut { outcome: Outcome::NotSent };

fn past() -> Instant {
    Instant::now()
}

async fn poll<F: Future + Unpin>(future: &mut F) -> Poll<F::Output> {
    std::future::poll_fn(|context| Poll::Ready(Pin::new(&mut *future).poll(context))).await
}

/// Returns two connected ends of which `b` answers nothing.
fn silent(mode: &str) -> Pair {
    // Timeout 0 is no timeout: retries must not end before a deadline, however late that fires.
    let options = RetryConfig { timeout: AckTimeout::from_code(0), ..Default::default() };
    let pair = Pair::shaped(Setup::new(), &Shape { options, ..Shape::new(Transport::Rc, mode) });
    pair.b.qp.modify(&QpAttr::to_state(QpState::Err)).unwrap();
    pair
}

/// Returns the buffer of an operation that its deadline has revoked.
fn revoked<O: Revocable<Failure = OpError<B>>, B>(error: DeadlineError<O>) -> B {
    assert_eq!(error.kind(), REVOKED);
    error.into_buffer().unwrap_or_else(|| panic!("the device flushes its work"))
}

fn is_revoked_or_flushed(kind: OpErrorKind) -> bool {
    kind == REVOKED || kind.status() == Some(WcStatus::WR_FLUSH_ERR)
}

// Shows T1.
async fn read_of_a_silent_peer_returns_its_buffer(mode: &str) {
    let Pair { a, b, .. } = &silent(mode);
    let region = b.region(4096);
    let first = a.qp.read(a.blank(4096), region.grant());
    let second = a.qp.read(a.blank(64), region.grant());
    let result = within("a READ with a deadline", first.within(SOON)).await;
    let buffer = revoked(result.unwrap_err());
    assert!(buffer.iter().all(|&byte| byte == 0xee));
    // Other work ends with a flush, by its own deadline too.
    assert_eq!(a.state(), QpState::Err);
    let flushed = within("a flushed READ", second.deadline(past())).await.unwrap_err();
    assert!(is_revoked_or_flushed(flushed.kind()), "{flushed}");
    assert_eq!(a.qp.send_counters().in_flight, 0);
}

// Shows T1.
async fn receive_without_a_message_returns_its_buffer(mode: &str) {
    let Pair { a, b, .. } = &Pair::new(Transport::Rc, mode);
    let result = within("a receive with a deadline", a.qp.recv(a.blank(64)).within(SOON)).await;
    let buffer = revoked(result.unwrap_err());
    assert_eq!(a.state(), QpState::Err);
    // The late message of the peer finds nothing, and its own deadline ends it.
    let send = b.qp.send(b.buffer(&[7; 64]));
    let sent = within("a late message", send.within(SOON)).await.unwrap_err();
    assert!(sent.kind() == REVOKED || sent.kind().status().is_some(), "{sent}");
    assert!(buffer.iter().all(|&byte| byte == 0xee));
}

// Shows T1.
async fn completed_operation_wins_over_its_deadline(mode: &str) {
    let Pair { a, b, .. } = &Pair::new(Transport::Rc, mode);
    let region = b.region(64);
    region.write(0, &[5; 64]).unwrap();
    let receive = b.qp.recv(b.blank(8));
    let read = a.qp.read(a.blank(64), region.grant());
    let add = a.qp.fetch_add(region.grant().slice(..8).unwrap(), 0);
    let mut batch = Batch::new();
    batch.read(a.blank(64), region.grant());
    let batch = a.qp.post_batch(batch);
    // Completes after all of them.
    a.qp.fenced().send(a.buffer(b"last")).await.unwrap();
    assert_eq!(read.deadline(past()).await.unwrap()[..], [5; 64]);
    assert_eq!(add.deadline(past()).await.unwrap(), u64::from_ne_bytes([5; 8]));
    assert_eq!(batch.deadline(past()).await.unwrap().into_buffers().unwrap()[0][..], [5; 64]);
    assert_eq!(receive.within(Duration::MAX).await.unwrap().buffer[..], *b"last");
    assert_eq!((a.state(), b.state()), (QpState::Rts, QpState::Rts));
}

async fn results_for_which_a_task_yields_win_over_their_deadlines(mode: &str) {
    let Pair { a, b, .. } = &Pair::new(Transport::Rc, mode);
    let region = b.region(64);
    let grant = region.grant().slice(..8).unwrap();
    // More than a task takes before it yields.
    let writes: Vec<_> = (0..300).map(|_| a.qp.write_inline(&[5; 8], grant)).collect();
    a.qp.write_inline(&[6; 8], grant).await.unwrap();
    let results = futures::future::join_all(writes.into_iter().map(|write| write.deadline(past())));
    assert!(within("all results", results).await.into_iter().all(|result| result.is_ok()));
    let too_long = || a.qp.write_inline(&[5; 9], grant).deadline(past());
    let results = futures::future::join_all((0..300).map(|_| too_long()));
    assert!(within("all refusals", results).await.into_iter().all(|result| result.is_err()));
    assert_eq!((a.state(), b.state()), (QpState::Rts, QpState::Rts));
}

// Shows T1.
async fn atomic_and_batch_report_their_deadline(mode: &str) {
    let Pair { a, b, .. } = &silent(mode);
    let region = b.region(64);
    let word = region.grant().slice(..8).unwrap();
    let mut batch = Batch::new();
    batch.read(a.blank(64), region.grant()).write(a.blank(64), region.grant());
    let (add, batch) = (a.qp.fetch_add(word, 1), a.qp.post_batch(batch));
    let result = within("a batch with a deadline", batch.within(SOON)).await.unwrap();
    assert_eq!(result.results(), [Err(REVOKED); 2]);
    assert!(result.buffers().iter().all(|buffer| buffer[..] == [0xee; 64]));
    let error = within("an atomic with a deadline", add.within(SOON)).await.unwrap_err();
    assert!(is_revoked_or_flushed(error.kind()), "{error}");
    assert_eq!(region.load(0).unwrap(), 0);
}

// Shows T1.
async fn queued_operation_is_withdrawn_and_harms_nothing(mode: &str) {
    let build = |builder: QueuePairBuilder| builder.max_send_wr(2);
    let shape = Shape { build: &build, ..Shape::new(Transport::Rc, mode) };
    let Pair { a, b, setup } = &Pair::shaped(Setup::new(), &shape);
    if setup.known(&rxe::SLOTS_FREED_EARLY) {
        return;
    }
    let region = b.region(64);
    // Sends without a receive stay in flight.
    let depth = a.qp.caps().max_send_wr;
    let blocked: Vec<_> = (0..depth).map(|_| a.qp.send(a.buffer(b"blocked"))).collect();
    let before = a.qp.write(a.buffer(&[1; 8]), region.grant());
    let queued = a.qp.write(a.buffer(&[2; 64]), region.grant());
    let after = a.qp.write(a.buffer(&[3; 8]), region.grant().slice(8..).unwrap());
    let error = within("a queued WRITE", queued.within(SOON)).await.unwrap_err();
    assert_eq!(error.kind(), WITHDRAWN);
    assert_eq!(error.into_buffer().unwrap()[..], [2; 64]);
    let receives: Vec<_> = blocked.iter().map(|_| b.qp.recv(b.blank(16))).collect();
    for (send, receive) in blocked.into_iter().zip(receives) {
        within("a blocked SEND", send).await.unwrap();
        within("its receive", receive).await.unwrap();
    }
    within("the WRITE before", before).await.unwrap();
    within("the WRITE after", after).await.unwrap();
    let mut bytes = [0; 64];
    region.read(0, &mut bytes).unwrap();
    assert_eq!(
        (&bytes[..8], &bytes[8..16], &bytes[16..]),
        (&[1; 8][..], &[3; 8][..], &[0; 48][..])
    );
    assert_eq!((a.state(), b.state()), (QpState::Rts, QpState::Rts));
}

// Shows T1.
async fn shared_receive_is_not_revoked_and_still_receives(mode: &str) {
    let setup = Setup::new();
    let pair = Pair::shaped(setup, &Shape::new(Transport::Rc, mode));
    let Pair { a, b, .. } = &pair;
    let srq = SharedReceiveQueue::new(&b.pd, &b.queue, 4, 1).unwrap();
    let end = QueuePair::builder(&b.pd, &b.queue).shared_receive_queue(&srq).build().unwrap();
    let start = QueuePair::new(&a.pd, &a.queue).unwrap();
    let shape = Shape::new(Transport::Rc, mode);
    connect(&start, &end, shape.mtu, &shape.options);
    let receive = srq.recv(b.blank(16)).deadline(past());
    let error = within("a shared receive", receive).await.unwrap_err();
    assert_eq!(error.kind(), REVOKED);
    let Err(receive) = error.into_result() else { panic!("revoked without a flush") };
    start.send(a.buffer(b"late")).await.unwrap();
    assert_eq!(within("the receive", receive).await.unwrap().buffer[..], *b"late");
}

// Shows T1.
async fn dropped_deadline_leaves_the_operation(mode: &str) {
    let Pair { a, b, .. } = &Pair::new(Transport::Rc, mode);
    let idle = a.pool.available();
    let mut receive = Box::pin(a.qp.recv(a.blank(16)).within(Duration::from_secs(3600)));
    assert!(poll(&mut receive).await.is_pending());
    drop(receive);
    b.qp.send(b.buffer(b"taken")).await.unwrap();
    within("the buffer", async {
        while a.pool.available() < idle {
            let _ = a.qp.write_inline(b"", b.region(1).grant().slice(..0).unwrap()).await;
        }
    })
    .await;
    assert_eq!((a.state(), b.state()), (QpState::Rts, QpState::Rts));
}

// Shows T1.
async fn deadline_of_a_dynamic_connection_is_repaired(mode: &str) {
    let Some(setup) = dynamic::setup("deadline_of_a_dynamic_connection") else { return };
    let (here, there) = (Node::new(&setup.a, mode), Node::new(&setup.b, mode));
    let initiator = DcInitiator::new(&here.pd, &here.queue).unwrap();
    let peer = initiator.peer(&there.target.address()).unwrap();
    dynamic::assert_works(&here, &initiator, &peer, &there, 1).await;
    // The target has no receive.
    let send = initiator.to(&peer).send(here.buffer(b"too early")).within(SOON);
    let error = within("a SEND with a deadline", send).await.unwrap_err();
    assert_eq!(revoked(error)[..], *b"too early");
    assert_eq!(dynamic::state(&initiator), QpState::Err);
    assert!(initiator.repair().unwrap());
    dynamic::assert_works(&here, &initiator, &peer, &there, 2).await;
}

fn closed(side: &Side, len: usize) -> ExposedRegion {
    ExposedRegion::new(&side.pd, HostMemory::zeroed(len).unwrap(), Access::MW_BIND).unwrap()
}

// Shows T1.
async fn expired_lease_protects_the_memory(mode: &str) {
    let pair = Pair::new(Transport::Rc, mode);
    let Pair { a, b, .. } = &pair;
    if b.pd.device().attr().max_mw == 0 {
        return skip("expired_lease", "no memory windows");
    }
    let region = closed(b, 64);
    let mut lease = b.qp.lease(&region, 0..64, Access::REMOTE_WRITE).await.unwrap();
    let grant = lease.grant();
    lease.expire_at(Instant::now() + Duration::from_secs(3600)).unwrap();
    a.qp.write(a.buffer(&[1; 64]), grant).await.unwrap();
    let region = region.into_storage::<HostMemory>().unwrap_err();
    assert!(!lease.has_expired() && poll(&mut Box::pin(lease.expired())).await.is_pending());
    lease.expire_at(Instant::now() + SOON).unwrap();
    within("the end of the lease", lease.expired()).await;
    assert!(lease.has_expired());
    assert_eq!(lease.expire_at(Instant::now() + SOON), Err(SetupError::Closed));
    // Free although the lease exists, and no invalidation harms the connection.
    let storage = region.into_storage::<HostMemory>().unwrap();
    assert_eq!(lease.invalidate().await.unwrap_err().kind(), WITHDRAWN);
    assert_eq!(b.state(), QpState::Rts);
    let denied = within("a late WRITE", a.qp.write(a.buffer(&[2; 64]), grant)).await;
    assert!(denied.is_err());
    drop(storage);
}

// Shows T1.
async fn deadline_of_a_leaked_lease_frees_the_memory(mode: &str) {
    let pair = Pair::new(Transport::Rc, mode);
    let b = &pair.b;
    if b.pd.device().attr().max_mw == 0 {
        return skip("leaked_lease", "no memory windows");
    }
    let region = closed(b, 64);
    let mut lease = b.qp.lease(&region, 0..64, Access::REMOTE_WRITE).await.unwrap();
    lease.expire_at(Instant::now() + SOON).unwrap();
    std::mem::forget(lease);
    let mut region = Some(region);
    until("the end of the leaked lease", || {
        match region.take().map(ExposedRegion::into_storage::<HostMemory>) {
            Some(Err(leased)) => region = Some(leased),
            _ => return true,
        }
        false
    })
    .await;
    // A lease that ended before its deadline leaves a window for the next one.
    let region = closed(b, 64);
    let mut windows = Vec::new();
    for _ in 0..3 {
        let mut lease = b.qp.lease(&region, 0..64, Access::REMOTE_WRITE).await.unwrap();
        lease.expire_at(Instant::now() + Duration::from_secs(3600)).unwrap();
        windows.push(lease.rkey().0 >> 8);
        lease.invalidate().await.unwrap();
    }
    assert_eq!(windows, [windows[0]; 3]);
}

in_every_mode!(
    read_of_a_silent_peer_returns_its_buffer,
    receive_without_a_message_returns_its_buffer,
    completed_operation_wins_over_its_deadline,
    results_for_which_a_task_yields_win_over_their_deadlines,
    atomic_and_batch_report_their_deadline,
    queued_operation_is_withdrawn_and_harms_nothing,
    shared_receive_is_not_revoked_and_still_receives,
    dropped_deadline_leaves_the_operation,
    deadline_of_a_dynamic_connection_is_repaired,
    expired_lease_protects_the_memory,
    deadline_of_a_leaked_lease_frees_the_memory,
);
