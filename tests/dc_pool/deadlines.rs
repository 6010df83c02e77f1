//! Deadlines of pooled operations, and their effect on other peers.

use std::time::Duration;

use tokio_rdma::dc::{DcPolicy, DcPoolPeer};
use tokio_rdma::error::Outcome;
use tokio_rdma::op::{DeadlineError, Revocable};
use tokio_rdma::types::WcStatus;
use tokio_rdma::{OpError, OpErrorKind};

use super::{Home, Node, block, exclusive, setup, unblock, until};
use crate::common::{in_every_mode, within};

in_every_mode!(
    operation_that_waits_for_an_initiator_is_withdrawn_and_harms_nothing,
    deadline_in_an_exclusive_pool_affects_only_its_peer,
    deadline_in_a_shared_pool_flushes_other_peers_and_is_repaired,
    completed_pooled_operation_wins_over_its_deadline,
);

const SOON: Duration = Duration::from_millis(1);
const REVOKED: OpErrorKind = OpErrorKind::TimedOut { outcome: Outcome::MaybeExecuted };
const WITHDRAWN: OpErrorKind = OpErrorKind::TimedOut { outcome: Outcome::NotSent };

fn ended<O: Revocable<Failure = OpError<B>>, B>(error: DeadlineError<O>) -> (OpErrorKind, B) {
    let kind = error.kind();
    (kind, error.into_buffer().unwrap_or_else(|| panic!("the device flushes its work")))
}

/// Writes and reads the bytes `byte` at `offset`.
async fn assert_works(home: &Home, peer: &DcPoolPeer, node: &Node, offset: usize, byte: u8) {
    let remote = node.remote(offset, 8);
    within("write", peer.write(home.buffer(&[byte; 8]), remote)).await.unwrap();
    let read = within("read", peer.read(home.buffer(&[0; 8]), remote)).await.unwrap();
    assert_eq!(read[..], [byte; 8]);
}

// Shows T1.
async fn operation_that_waits_for_an_initiator_is_withdrawn_and_harms_nothing(mode: &str) {
    let Some(setup) = setup("waiting_operation_is_withdrawn") else { return };
    let (home, there) = (Home::new(&setup.a, mode), Node::new(&setup.b, mode));
    let pool = home.pool(1, exclusive(64));
    let [one, other] = [0, 1].map(|_| pool.peer(&there.target.address()).unwrap());
    let blocked = block(&there, &one).await;
    let before = other.write(home.buffer(&[1; 8]), there.remote(0, 8));
    let write = other.write(home.buffer(b"withdraw"), there.remote(8, 8)).within(SOON);
    let add = other.fetch_add(there.word(2), 1).within(SOON);
    let after = other.write(home.buffer(&[3; 8]), there.remote(24, 8));
    let (kind, buffer) = ended(within("write", write).await.unwrap_err());
    assert_eq!((kind, &buffer[..]), (WITHDRAWN, &b"withdraw"[..]));
    assert_eq!(ended(within("add", add).await.unwrap_err()), (WITHDRAWN, ()));
    assert_eq!(other.waiting(), 2);
    unblock(&there).await;
    within("send", blocked).await.unwrap();
    within("write before it", before).await.unwrap();
    within("write after it", after).await.unwrap();
    let mut bytes = [0; 32];
    there.region.read(0, &mut bytes).unwrap();
    assert_eq!(bytes, [[1; 8], [0; 8], [0; 8], [3; 8]].concat()[..]);
    assert_eq!((pool.counters().repairs, pool.counters().waiting_peers), (0, 0));
    assert!(!one.has_failed() && !other.has_failed());
}

// Shows T1.
async fn deadline_in_an_exclusive_pool_affects_only_its_peer(mode: &str) {
    let Some(setup) = setup("deadline_in_an_exclusive_pool") else { return };
    let (home, there) = (Home::new(&setup.a, mode), Node::new(&setup.b, mode));
    let pool = home.pool(2, exclusive(64));
    let [late, other] = [0, 1].map(|_| pool.peer(&there.target.address()).unwrap());
    for round in 1..=3 {
        // The target has no receive.
        let send = late.send(home.buffer(b"too late")).within(SOON);
        let behind = late.write(home.buffer(b"flush me"), there.remote(0, 8));
        assert_works(&home, &other, &there, 64, round).await;
        let (kind, buffer) = ended(within("send", send).await.unwrap_err());
        assert_eq!((kind, &buffer[..]), (REVOKED, &b"too late"[..]));
        let flushed = within("write behind it", behind).await.unwrap_err();
        assert_eq!(flushed.status(), Some(WcStatus::WR_FLUSH_ERR));
        assert_works(&home, &other, &there, 64, round + 10).await;
        assert_works(&home, &late, &there, 128, round).await;
        until("repaired", || pool.counters().repairs == u64::from(round)).await;
    }
    assert_eq!(pool.counters().failed_repairs, 0);
    assert!(late.has_failed() && !other.has_failed());
}

// Shows T1.
async fn deadline_in_a_shared_pool_flushes_other_peers_and_is_repaired(mode: &str) {
    let Some(setup) = setup("deadline_in_a_shared_pool") else { return };
    let (home, there) = (Home::new(&setup.a, mode), Node::new(&setup.b, mode));
    let pool = home.pool(1, DcPolicy::Shared);
    let [late, other] = [0, 1].map(|_| pool.peer(&there.target.address()).unwrap());
    let send = late.send(home.buffer(b"too late")).within(SOON);
    let behind = other.write(home.buffer(b"a victim"), there.remote(0, 8));
    let (kind, buffer) = ended(within("send", send).await.unwrap_err());
    assert_eq!((kind, &buffer[..]), (REVOKED, &b"too late"[..]));
    let flushed = within("write behind it", behind).await.unwrap_err();
    assert_eq!(flushed.status(), Some(WcStatus::WR_FLUSH_ERR));
    until("repaired", || pool.counters().repairs == 1).await;
    assert_works(&home, &late, &there, 8, 1).await;
    assert_works(&home, &other, &there, 16, 2).await;
}

async fn completed_pooled_operation_wins_over_its_deadline(mode: &str) {
    let Some(setup) = setup("completed_pooled_operation") else { return };
    let (home, there) = (Home::new(&setup.a, mode), Node::new(&setup.b, mode));
    let pool = home.pool(1, exclusive(64));
    let peer = pool.peer(&there.target.address()).unwrap();
    let hour = Duration::from_secs(3600);
    for round in 0..50 {
        let write = peer.write(home.buffer(&[round; 8]), there.remote(0, 8)).within(hour);
        let written = within("write", write).await;
        assert!(written.is_ok(), "{written:?}");
        let add = peer.fetch_add(there.word(1), 1).within(hour);
        assert_eq!(within("add", add).await.map_err(|error| error.kind()), Ok(u64::from(round)));
    }
    assert_eq!(pool.counters().repairs, 0);
}
