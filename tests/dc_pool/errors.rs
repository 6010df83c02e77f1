//! Errors of DC pools and their effect on other operations.

use tokio_rdma::dc::DcPolicy;
use tokio_rdma::types::{AsyncEvent, WcStatus};
use tokio_rdma::{CompletionQueue, OpErrorKind, SetupError};

use super::{Home, Node, block, exclusive, poll, setup, unblock, until};
use crate::common::{Setup, in_every_mode, within};

in_every_mode!(
    errors_of_one_peer_affect_no_other,
    unawaited_failure_is_repaired,
    peer_has_failed_after_its_own_failure_until_it_is_made_anew,
    lease_ends_with_its_first_failure,
    shared_initiators_continue_after_a_failure,
    lost_device_fails_every_operation,
    retained_lease_blocks_no_operation_after_device_loss,
    pool_on_a_failed_completion_queue_reports_its_error,
);

async fn errors_of_one_peer_affect_no_other(mode: &str) {
    const ROUNDS: u64 = 12;
    let Some(setup) = setup("errors_of_one_peer") else { return };
    let (home, there) = (Home::new(&setup.a, mode), Node::new(&setup.b, mode));
    let pool = home.pool(3, exclusive(5));
    let address = there.target.address();
    let mut stranger = address;
    stranger.key.0 ^= 1;
    let gone = Node::new(&setup.b, mode);
    let (greedy, stranger, gone_peer) = (
        pool.peer(&address).unwrap(),
        pool.peer(&stranger).unwrap(),
        pool.peer(&gone.target.address()).unwrap(),
    );
    drop(gone);
    let good: Vec<_> = (0..4).map(|_| pool.peer(&address).unwrap()).collect();
    let bad = [
        (greedy, there.forbidden(), ROUNDS),
        (stranger, there.remote(0, 4), ROUNDS),
        // Each round takes as long as its retries.
        (gone_peer, there.remote(0, 4), 2),
    ];
    let failing = bad.into_iter().map(|(peer, remote, rounds)| {
        tokio::spawn(async move {
            for _ in 0..rounds {
                let (first, second) =
                    (peer.write_inline(b"fail", remote), peer.write_inline(b"next", remote));
                let error = within("bad write", first).await.unwrap_err();
                assert!(
                    error.status().is_some_and(|status| status != WcStatus::WR_FLUSH_ERR),
                    "{error}"
                );
                within("bad write", second).await.unwrap_err();
            }
        })
    });
    let succeeding = good.into_iter().enumerate().map(|(at, peer)| {
        let word = there.word(8 + at);
        tokio::spawn(async move {
            for round in 0..10 * ROUNDS {
                let adds = [0, 1, 2].map(|_| peer.fetch_add(word, 1));
                for (part, add) in adds.into_iter().enumerate() {
                    assert_eq!(within("good add", add).await.unwrap(), 3 * round + part as u64);
                }
            }
        })
    });
    let tasks: Vec<_> = failing.chain(succeeding).collect();
    for task in tasks {
        within("task", task).await.unwrap();
    }
    until("repaired", || pool.counters().repairs >= 2 * ROUNDS + 2).await;
    let counters = pool.counters();
    assert_eq!((counters.failed_repairs, counters.waiting_peers), (0, 0), "{counters:?}");
    let mut bytes = [1; 8];
    there.region.read(0, &mut bytes).unwrap();
    assert_eq!(bytes, [0; 8]);
}

// Shows C2.
async fn unawaited_failure_is_repaired(mode: &str) {
    let Some(setup) = setup("unawaited_failure") else { return };
    let (home, there) = (Home::new(&setup.a, mode), Node::new(&setup.b, mode));
    let pool = home.pool(2, exclusive(5));
    let peer = |_| pool.peer(&there.target.address()).unwrap();
    let [one, other] = [0, 1].map(peer);
    let free = home.buffers.available();
    drop(one.write(home.buffer(b"fails"), there.forbidden()));
    drop(one.write(home.buffer(b"is flushed"), there.remote(0, 10)));
    until("repaired", || pool.counters().repairs == 1 && home.buffers.available() == free).await;
    for peer in [&one, &other] {
        within("write", peer.write(home.buffer(b"goes on"), there.remote(16, 7))).await.unwrap();
    }
    assert_eq!((pool.counters().repairs, pool.counters().failed_repairs), (1, 0));
}

async fn peer_has_failed_after_its_own_failure_until_it_is_made_anew(mode: &str) {
    let Some(setup) = setup("peer_has_failed") else { return };
    for policy in [exclusive(5), DcPolicy::Shared] {
        let (home, there) = (Home::new(&setup.a, mode), Node::new(&setup.b, mode));
        let pool = home.pool(2, policy);
        let peer = || pool.peer(&there.target.address()).unwrap();
        let (mut bad, good) = (peer(), peer());
        for awaited in [true, false] {
            for peer in [&bad, &good] {
                within("write", peer.write_inline(b"good", there.remote(0, 4))).await.unwrap();
            }
            assert!(!bad.has_failed());
            let fails = bad.write_inline(b"bad", there.forbidden());
            if awaited {
                within("bad", fails).await.unwrap_err();
            } else {
                drop(fails);
                until("failed", || bad.has_failed()).await;
            }
            assert!(bad.has_failed(), "{policy:?}");
            // The peers may share an initiator.
            assert!(!good.has_failed() || policy == DcPolicy::Shared, "{policy:?}");
            until("repaired", || pool.counters().repairs == if awaited { 1 } else { 2 }).await;
            within("write", bad.write_inline(b"good", there.remote(0, 4))).await.unwrap();
            assert!(bad.has_failed(), "a repaired initiator does not change that");
            bad = peer();
        }
        assert!(!bad.has_failed());
        pool.close();
        assert!(bad.has_failed() && good.has_failed());
        assert_eq!(pool.peer(&there.target.address()).unwrap_err(), SetupError::Closed);
    }
}

async fn lease_ends_with_its_first_failure(mode: &str) {
    let Some(setup) = setup("lease_ends_with_its_first_failure") else { return };
    for policy in [exclusive(5), DcPolicy::Shared] {
        let (home, there) = (Home::new(&setup.a, mode), Node::new(&setup.b, mode));
        let pool = home.pool(1, policy);
        let peer = pool.peer(&there.target.address()).unwrap();
        let lease = within("lease", peer.borrow()).await.unwrap();
        within("write", lease.write_inline(b"good", there.remote(0, 4))).await.unwrap();
        let (bad, behind) = (
            lease.write_inline(b"bad", there.forbidden()),
            lease.write_inline(b"behind", there.remote(0, 6)),
        );
        within("bad", bad).await.unwrap_err();
        assert_eq!(
            within("behind", behind).await.unwrap_err().status(),
            Some(WcStatus::WR_FLUSH_ERR)
        );
        within("write", peer.write_inline(b"others", there.remote(8, 6))).await.unwrap();
        let late =
            within("late", lease.write_inline(b"late", there.remote(0, 4))).await.unwrap_err();
        assert_eq!(late.status(), Some(WcStatus::WR_FLUSH_ERR));
        let again = within("lease", peer.borrow()).await.unwrap();
        drop(lease);
        within("write", again.write_inline(b"more", there.remote(8, 4))).await.unwrap();
        let mut bytes = [0; 14];
        there.region.read(0, &mut bytes).unwrap();
        assert_eq!(&bytes, b"good\0\0\0\0morers");
    }
}

async fn shared_initiators_continue_after_a_failure(mode: &str) {
    let Some(setup) = setup("shared_initiators") else { return };
    let (home, there) = (Home::new(&setup.a, mode), Node::new(&setup.b, mode));
    let pool = home.pool(2, DcPolicy::Shared);
    let peers: Vec<_> = (0..5).map(|_| pool.peer(&there.target.address()).unwrap()).collect();
    // Peers that share an initiator do not wait for each other.
    let blocked = block(&there, &peers[0]).await;
    for peer in &peers[1..] {
        assert!(
            poll(&mut peer.fetch_add(there.word(0), 1)).is_ready() || pool.counters().waited == 0
        );
    }
    unblock(&there).await;
    within("send", blocked).await.unwrap();
    for round in 0..20 {
        within("bad", peers[round % 5].write_inline(b"bad", there.forbidden())).await.unwrap_err();
        for peer in &peers {
            within("good", peer.write_inline(b"good", there.remote(64, 4))).await.unwrap();
        }
    }
    // The last repair may still be in progress.
    until("repaired", || pool.counters().repairs >= 20).await;
    assert_eq!((pool.counters().repairs, pool.counters().failed_repairs), (20, 0));
}

// Shows C1.
async fn lost_device_fails_every_operation(mode: &str) {
    let Some((setup, control, _)) = Setup::controlled("lost_device") else { return };
    let (home, there) = (Home::new(&setup.a, mode), Node::new(&setup.b, mode));
    let pool = home.pool(2, exclusive(3));
    let address = there.target.address();
    let free = home.buffers.available();
    let stuck: Vec<_> = (0..2).map(|_| pool.peer(&address).unwrap()).collect();
    let mut sends = Vec::new();
    for peer in &stuck {
        sends.push(block(&there, peer).await);
    }
    let tasks: Vec<_> = (0..6)
        .map(|_| {
            let (peer, remote) = (pool.peer(&address).unwrap(), there.remote(0, 4));
            let buffers = home.buffers.clone();
            tokio::spawn(async move {
                loop {
                    let write = peer.write(buffers.copy_from(b"load").unwrap(), remote);
                    if let Err(error) = within("write", write).await {
                        return error.kind();
                    }
                }
            })
        })
        .collect();
    until("waiting peers", || pool.counters().waiting_peers == 6).await;
    let lent = pool.peer(&address).unwrap().borrow();
    control.kill();
    let typed = |kind: OpErrorKind| {
        assert!(
            matches!(
                kind,
                OpErrorKind::Closed
                    | OpErrorKind::CompletionQueue(_)
                    | OpErrorKind::Completion(_)
                    | OpErrorKind::Post(_)
            ),
            "{kind}"
        );
    };
    for send in sends {
        typed(within("send", send).await.unwrap_err().kind());
    }
    for task in tasks {
        typed(within("task", task).await.unwrap());
    }
    typed(within("lease", lent).await.unwrap_err().kind());
    let late = stuck[0].write(home.buffer(b"late"), there.remote(0, 4));
    typed(within("late", late).await.unwrap_err().kind());
    assert_eq!((home.buffers.available(), pool.counters().waiting_peers), (free, 0));
}

/// Removes the device while nothing is in flight, so the lease sees no failure.
// Shows C1.
async fn retained_lease_blocks_no_operation_after_device_loss(mode: &str) {
    let Some((setup, control, _)) = Setup::controlled("retained_lease") else { return };
    let (home, there) = (Home::new(&setup.a, mode), Node::new(&setup.b, mode));
    let pool = home.pool(1, exclusive(3));
    let [one, other] = [0, 1].map(|_| pool.peer(&there.target.address()).unwrap());
    let lease = within("lease", one.borrow()).await.unwrap();
    let mut write = other.write(home.buffer(b"waits"), there.remote(0, 5));
    assert!(poll(&mut write).is_pending());
    control.kill();
    within("write", write).await.unwrap_err();
    within("late", other.write(home.buffer(b"late"), there.remote(0, 4))).await.unwrap_err();
    within("lent", lease.write(home.buffer(b"lent"), there.remote(0, 4))).await.unwrap_err();
    assert_eq!(pool.counters().waiting_peers, 0);
}

/// Fails only the completion queue. Verbs still succeed, so the queue alone knows the cause.
async fn pool_on_a_failed_completion_queue_reports_its_error(mode: &str) {
    let Some((setup, control, _)) = Setup::controlled("pool_on_a_failed_completion_queue") else {
        return;
    };
    let (home, there) = (Home::new(&setup.a, mode), Node::new(&setup.b, mode));
    let pool = home.pool(2, exclusive(3));
    let peer = pool.peer(&there.target.address()).unwrap();
    let stuck = block(&there, &peer).await;
    let lease =
        within("lease", pool.peer(&there.target.address()).unwrap().borrow()).await.unwrap();
    let event = AsyncEvent::CqError { cq: home.queue.id() };
    control.announce(event);
    assert_eq!(setup.a.next_event().unwrap(), Some(event));
    within("send", stuck).await.unwrap_err();
    assert!(home.queue.failure().is_some_and(|error| error.errno == 5), "{mode}");
    // Until the pool notices, a write succeeds, or fails on an initiator that is being destroyed.
    until_final_error(mode, async || {
        let late = within("late", peer.write(home.buffer(b"late"), there.remote(0, 4))).await;
        match late.map_err(|error| error.kind()) {
            Err(OpErrorKind::CompletionQueue(error)) => {
                assert_eq!(error.errno, 5, "{mode}");
                Some(())
            }
            Ok(_) | Err(OpErrorKind::Closed) => None,
            Err(other) => panic!("{mode}: {other:?}"),
        }
    })
    .await;
    // A leased initiator is closed, not repaired.
    until_final_error(mode, async || {
        let lent = within("lent", lease.write(home.buffer(b"lent"), there.remote(0, 4))).await;
        match lent.unwrap_err().kind() {
            OpErrorKind::Closed => Some(()),
            other => {
                assert!(
                    matches!(
                        other,
                        OpErrorKind::Completion(error) if error.status == WcStatus::WR_FLUSH_ERR
                    ),
                    "{mode}: {other:?}"
                );
                None
            }
        }
    })
    .await;
}

async fn until_final_error(mode: &str, mut operation: impl AsyncFnMut() -> Option<()>) {
    let start = std::time::Instant::now();
    while operation().await.is_none() {
        assert!(start.elapsed() < crate::torture::HANG, "{mode}: the expected error did not occur");
        tokio::task::yield_now().await;
    }
}

#[test]
fn pool_settings_are_validated_at_build() {
    let Some(setup) = setup("pool_settings") else { return };
    let home = Home::new(&setup.a, "event");
    let builder = || tokio_rdma::dc::DcPool::builder(&home.pd, &home.queue);
    let error = builder().initiators(0).build().unwrap_err();
    assert_eq!(error, SetupError::TooSmall { field: "initiators", asked: 0, least: 1 });
    // A queue of chosen capacity does not grow. Devices may round the capacity up.
    let queue = CompletionQueue::builder(&setup.a).capacity(1024).build().unwrap();
    let fit = queue.counters().capacity / 128;
    let error = tokio_rdma::dc::DcPool::builder(&home.pd, &queue)
        .initiators(fit as usize + 1)
        .initiator(|each| each.max_send_wr(128))
        .build()
        .unwrap_err();
    assert!(
        matches!(error, SetupError::CompletionQueueFull { asked: 128, free: 0..128 }),
        "{error}"
    );
    let error = builder().policy(exclusive(0)).build().unwrap_err();
    assert_eq!(error, SetupError::TooSmall { field: "quota", asked: 0, least: 1 });
    let pool = builder().policy(exclusive(1)).build().unwrap();
    assert_eq!((pool.policy(), pool.counters().initiators.len()), (exclusive(1), 4));
}
