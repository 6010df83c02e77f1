//! Leases: grants, revocation, invalidation, queueing and cancellation.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio_rdma::memory::HostMemory;
use tokio_rdma::op::Lease;
use tokio_rdma::types::{QpState, Transport, WcStatus};
use tokio_rdma::{Access, ExposedRegion, OpErrorKind, RemoteRegion};

use crate::common::pair::{Pair, Shape, Side};
use crate::common::{Setup, Wire, in_every_mode, run, rxe, skip, within};
use crate::wire;

/// Returns two connected ends if their device has memory windows.
fn pair(test: &str, mode: &str) -> Option<Pair> {
    shaped(test, &Shape::new(Transport::Rc, mode))
}

fn shaped(test: &str, shape: &Shape<'_>) -> Option<Pair> {
    let pair = Pair::shaped(Setup::new(), shape);
    if pair.setup.b.attr().max_mw == 0 {
        skip(test, "no memory windows");
        return None;
    }
    Some(pair)
}

/// Registers a region that peers access only through leases.
fn closed(side: &Side, len: usize) -> ExposedRegion {
    ExposedRegion::new(&side.pd, HostMemory::zeroed(len).unwrap(), Access::MW_BIND).unwrap()
}

fn bytes(region: &ExposedRegion) -> Vec<u8> {
    let mut bytes = vec![0; region.len()];
    region.read(0, &mut bytes).unwrap();
    bytes
}

/// Returns whether `status` means that access was denied. A lost negative acknowledgement is not
/// retransmitted, because the peer is then in the error state.
fn is_refusal(status: Option<WcStatus>) -> bool {
    status == Some(WcStatus::REM_ACCESS_ERR)
        || wire() == Wire::Faults && status == Some(WcStatus::RETRY_EXC_ERR)
}

async fn assert_denied(pair: &Pair, grant: RemoteRegion) {
    let refused = within(
        "a refused write",
        pair.a.qp.write(pair.a.buffer(b"too late"), grant.slice(..8).unwrap()),
    )
    .await;
    let error = refused.unwrap_err();
    assert!(is_refusal(error.status()), "{error}");
    let accessed = error.remote().map(|remote| (remote.operation, remote.len));
    assert_eq!(accessed, Some(("WRITE", 8)));
}

/// Waits until the caller has the only reference to the region.
async fn wait_unused(mut region: ExposedRegion) -> HostMemory {
    within("the release of the region", async {
        loop {
            match region.into_storage::<HostMemory>() {
                Ok(storage) => return storage,
                Err(still_held) => region = still_held,
            }
            tokio::task::yield_now().await;
        }
    })
    .await
}

async fn lease_grants_access_until_invalidated(mode: &str) {
    let Some(pair) = pair("lease_grants_access", mode) else { return };
    let Pair { a, b, .. } = &pair;
    let region = closed(b, 4096);
    let mut window = None;
    let mut last = None;
    for round in 0..5_u8 {
        let receive = a.qp.recv(a.blank(RemoteRegion::ENCODED_LEN));
        let lease = b.qp.lease(&region, 1024..2048, Access::REMOTE_ALL).await.unwrap();
        let grant = lease.grant();
        assert_eq!(
            (grant.len(), grant.rkey(), lease.access()),
            (1024, lease.rkey(), Access::REMOTE_ALL)
        );
        assert_eq!(*window.get_or_insert(grant.rkey().0 >> 8), grant.rkey().0 >> 8);
        b.qp.send(b.buffer(&grant.to_bytes())).await.unwrap();
        let received = RemoteRegion::from_bytes(&receive.await.unwrap().buffer).unwrap();
        assert_eq!(received, grant);

        a.qp.write(a.buffer(&[round + 1; 1024]), received).await.unwrap();
        let word = u64::from_ne_bytes([round + 1; 8]);
        assert_eq!(a.qp.fetch_add(received.slice(8..16).unwrap(), 1).await.unwrap(), word);
        let read = a.qp.read(a.blank(16), received.slice(..16).unwrap()).await.unwrap();
        assert_eq!(
            (read[..8].to_vec(), region.load(1032).unwrap()),
            (vec![round + 1; 8], word + 1)
        );
        lease.invalidate().await.unwrap();
        last = Some(received);
    }
    let before = bytes(&region);
    assert_denied(&pair, last.unwrap()).await;
    assert_eq!(bytes(&region), before);
    wait_unused(region).await;
}

async fn revoked_or_dropped_lease_ends_at_once(mode: &str) {
    for drops in [false, true] {
        let Some(pair) = pair("revoked_lease", mode) else { return };
        let Pair { a, b, .. } = &pair;
        let region = closed(b, 64);
        let lease = b.qp.lease(&region, 0..64, Access::REMOTE_WRITE).await.unwrap();
        let grant = lease.grant();
        a.qp.write(a.buffer(&[1; 64]), grant).await.unwrap();
        let region = region.into_storage::<HostMemory>().unwrap_err();
        if drops {
            drop(lease)
        } else {
            lease.revoke()
        }
        // The memory is unused at once and is freed before the peer's next access.
        drop(region.into_storage::<HostMemory>().unwrap());
        assert_denied(&pair, grant).await;
    }
}

async fn invalidation_by_the_peer_keeps_the_connection(mode: &str) {
    let Some(pair) = pair("invalidation_by_the_peer", mode) else { return };
    let Pair { a, b, .. } = &pair;
    let region = closed(b, 64);
    for round in 0..10_u8 {
        let receive = b.qp.recv(b.blank(64));
        let lease =
            b.qp.lease(&region, 0..64, Access::REMOTE_WRITE | Access::REMOTE_READ).await.unwrap();
        let grant = lease.grant();
        let written = a.qp.write(a.buffer(&[round; 64]), grant);
        let read = a.qp.read(a.blank(64), grant);
        let done = a.qp.fenced().invalidating(grant).send(a.buffer(b"done"));
        written.await.unwrap();
        assert_eq!(read.await.unwrap()[..], [round; 64]);
        done.await.unwrap();
        let received = receive.await.unwrap();
        assert_eq!(received.buffer[..], *b"done");
        if !rxe::known(b.pd.device(), &rxe::INVALIDATION_NOT_REPORTED) {
            assert_eq!(received.invalidated, Some(lease.rkey()));
        }
        // Neither may invalidate the window again.
        if round % 2 == 0 {
            drop(lease)
        } else {
            lease.revoke()
        }
        assert_eq!(bytes(&region), [round; 64]);
    }
    let receive = b.qp.recv(b.blank(8));
    a.qp.send(a.buffer(b"plain")).await.unwrap();
    assert_eq!(receive.await.unwrap().invalidated, None);
    assert_eq!((a.state(), b.state()), (QpState::Rts, QpState::Rts));
    wait_unused(region).await;
}

async fn invalid_lease_is_refused_and_keeps_the_connection(mode: &str) {
    let Some(pair) = pair("invalid_lease", mode) else { return };
    let Pair { a, b, .. } = &pair;
    let region = closed(b, 64);
    let refused = |lease: Result<Lease, tokio_rdma::OpError<()>>| lease.unwrap_err().kind();
    #[expect(clippy::reversed_empty_ranges, reason = "that is the case under test")]
    for range in [0..65, 64..65, 0..0, 64..64, 8..0, 0..usize::MAX] {
        let kind = refused(b.qp.lease(&region, range.clone(), Access::REMOTE_READ).await);
        assert!(matches!(kind, OpErrorKind::Limit(_)), "{range:?}: {kind:?}");
    }
    let open = b.region(64);
    let kind = refused(b.qp.lease(&open, 0..64, Access::REMOTE_READ).await);
    assert_eq!(kind, OpErrorKind::Rights { missing: Access::MW_BIND });
    let kind = refused(a.qp.lease(&region, 0..64, Access::REMOTE_READ).await);
    assert!(matches!(kind, OpErrorKind::Foreign { .. }), "{kind:?}");
    let lease = b.qp.lease(&region, 0..64, Access::REMOTE_WRITE).await.unwrap();
    a.qp.write(a.buffer(&[1; 64]), lease.grant()).await.unwrap();

    let Some(datagrams) = shaped("invalid_lease", &Shape::new(Transport::Ud, mode)) else {
        return;
    };
    let region = closed(&datagrams.b, 64);
    let kind = refused(datagrams.b.qp.lease(&region, 0..64, Access::REMOTE_READ).await);
    assert!(matches!(kind, OpErrorKind::Unsupported { .. }), "{kind:?}");
    let send = datagrams.b.qp.invalidating(lease.grant()).send(()).await;
    assert!(matches!(send.unwrap_err().kind(), OpErrorKind::Unsupported { .. }));
}

async fn queued_leases_are_granted_in_order_and_released_when_dropped(mode: &str) {
    let build = |builder: tokio_rdma::op::QueuePairBuilder| builder.max_send_wr(2);
    let Some(pair) =
        shaped("queued_leases", &Shape { build: &build, ..Shape::new(Transport::Rc, mode) })
    else {
        return;
    };
    let Pair { a, b, .. } = &pair;
    if rxe::known(b.pd.device(), &rxe::LOCAL_WORK_REPEATED) {
        return;
    }
    let region = closed(b, 640);
    // Finds no receive, so the work after it stays in flight or queued.
    let blocked = b.qp.send(b.buffer(b"blocked"));
    let mut leasing: Vec<_> = (0..10)
        .map(|at| Some(b.qp.lease(&region, at * 64..at * 64 + 64, Access::REMOTE_WRITE)))
        .collect();
    for at in [0, 3, 9] {
        leasing[at] = None;
    }
    let receive = a.qp.recv(a.blank(16));
    blocked.await.unwrap();
    receive.await.unwrap();
    let mut leases = Vec::new();
    for leasing in leasing.into_iter().flatten() {
        leases.push(within("a queued lease", leasing).await.unwrap());
    }
    assert_eq!(leases.len(), 7);
    for lease in &leases {
        a.qp.write(a.buffer(&[5; 64]), lease.grant()).await.unwrap();
    }
    let invalidations: Vec<_> = leases.into_iter().map(Lease::invalidate).collect();
    for (at, invalidation) in invalidations.into_iter().enumerate() {
        if at % 2 == 0 {
            within("an invalidation", invalidation).await.unwrap();
        }
    }
    wait_unused(region).await;
    assert_eq!((a.state(), b.state()), (QpState::Rts, QpState::Rts));
}

async fn lease_ends_with_its_queue_pair(mode: &str) {
    for closes in [false, true] {
        let Some(pair) = pair("lease_ends_with_its_queue_pair", mode) else { return };
        let Pair { a, b, setup } = pair;
        let region = closed(&b, 64);
        let lease = b.qp.lease(&region, 0..64, Access::REMOTE_WRITE).await.unwrap();
        let forgotten = b.qp.lease(&region, 0..64, Access::REMOTE_WRITE).await.unwrap();
        std::mem::forget(forgotten);
        let late = b.qp.clone();
        let waiting = b.qp.lease(&region, 0..64, Access::REMOTE_WRITE);
        if closes {
            b.qp.clone().close().await;
        } else {
            late.modify(&tokio_rdma::types::QpAttr::to_state(QpState::Err)).unwrap();
        }
        if closes {
            assert_eq!(
                late.lease(&region, 0..8, Access::REMOTE_READ).await.unwrap_err().kind(),
                OpErrorKind::Closed
            );
            assert_eq!(lease.invalidate().await.unwrap_err().kind(), OpErrorKind::Closed);
        } else {
            assert_eq!(
                lease.invalidate().await.unwrap_err().status(),
                Some(WcStatus::WR_FLUSH_ERR)
            );
        }
        drop((waiting, late, b.qp));
        drop(wait_unused(region).await);
        drop((a, setup));
    }
}

/// Checks that a peer's continuous WRITEs change no byte after the lease ends.
// Shows S2.
async fn memory_is_unchanged_after_a_lease_ends(mode: &str) {
    const LEN: usize = 16384;
    let rounds = if wire() == Wire::Faults { 3 } else { 10 };
    for round in 0..rounds {
        let Some(pair) = pair("memory_is_unchanged", mode) else { return };
        if rxe::known(pair.b.pd.device(), &rxe::MESSAGE_OUTLIVES_WINDOW) {
            return;
        }
        let region = Arc::new(closed(&pair.b, LEN));
        let lease = pair.b.qp.lease(&region, 0..LEN, Access::REMOTE_WRITE).await.unwrap();
        let grant = lease.grant();
        let started = Arc::new(AtomicBool::new(false));
        let Pair { a, b, setup } = pair;
        let writer = tokio::spawn({
            let started = started.clone();
            async move {
                loop {
                    let writes: Vec<_> =
                        (0..8).map(|_| a.qp.write(a.buffer(&[0xaa; LEN]), grant)).collect();
                    for write in writes {
                        match write.await {
                            Ok(_) => started.store(true, Ordering::Release),
                            Err(error) => {
                                assert!(is_refusal(error.status()), "{error}");
                                return a;
                            }
                        }
                    }
                    // The writes may not have to wait, and the owner may run on this thread.
                    tokio::task::yield_now().await;
                }
            }
        });
        within("the writer", async {
            while !started.load(Ordering::Acquire) {
                tokio::task::yield_now().await;
            }
        })
        .await;
        match round % 3 {
            0 => lease.revoke(),
            1 => drop(lease),
            _ => lease.invalidate().await.unwrap(),
        }
        region.write(0, &[0x55; LEN]).unwrap();
        let a = within("the writer's failure", writer).await.unwrap();
        assert_eq!(bytes(&region), [0x55; LEN], "round {round}");
        drop((a, b, setup));
    }
}

in_every_mode!(
    lease_grants_access_until_invalidated,
    revoked_or_dropped_lease_ends_at_once,
    invalidation_by_the_peer_keeps_the_connection,
    invalid_lease_is_refused_and_keeps_the_connection,
    queued_leases_are_granted_in_order_and_released_when_dropped,
    lease_ends_with_its_queue_pair,
    memory_is_unchanged_after_a_lease_ends,
);

#[test]
fn lease_is_invalidated_by_another_task() {
    run(2, "lease_is_invalidated_by_another_task", async {
        let Some(pair) = pair("lease_is_invalidated_by_another_task", "event") else { return };
        let region = closed(&pair.b, 64);
        let lease = pair.b.qp.lease(&region, 0..64, Access::REMOTE_WRITE).await.unwrap();
        tokio::spawn(async move { lease.invalidate().await.unwrap() }).await.unwrap();
        wait_unused(region).await;
    });
}
