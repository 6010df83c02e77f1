//! Assignment of initiators to peers, fairness, and the order of operations.

use tokio_rdma::dc::{DcPolicy, DcPoolPeer, DcTarget};
use tokio_rdma::error::TryError;
use tokio_rdma::memory::HostMemory;
use tokio_rdma::types::Access;
use tokio_rdma::{
    Batch, BufMut, CompletionQueue, ExposedRegion, Imm, OpErrorKind, SharedReceiveQueue,
};

use super::{Home, Node, block, exclusive, poll, setup, unblock, until};
use crate::common::{in_every_mode, mode, pattern, within};

in_every_mode!(
    each_operation_completes,
    operations_of_a_peer_stay_in_order,
    busy_peer_starves_no_other,
    waiting_operations_are_posted_without_being_polled,
    dropped_waiting_operation_is_not_sent,
    initiator_of_dropped_work_is_reassigned_when_the_work_ends,
    leases_keep_their_initiator,
    peers_without_waiting_work_leave_the_queue,
    lease_holder_is_not_recalled,
    stuck_peer_starves_no_other,
    waiting_operations_fail_when_the_pool_closes,
);

async fn each_operation_completes(mode: &str) {
    let Some(setup) = setup("each_operation_completes") else { return };
    for policy in [DcPolicy::default(), DcPolicy::Shared] {
        let (home, there) = (Home::new(&setup.a, mode), Node::new(&setup.b, mode));
        let pool = home.pool(2, policy);
        let peer = pool.peer(&there.target.address()).unwrap();
        let bytes = pattern(200, 1);
        let mut buffer =
            within("write", peer.write(home.buffer(&bytes), there.remote(8, 200))).await.unwrap();
        buffer.fill(0xee);
        let buffer = within("read", peer.read(buffer, there.remote(8, 200))).await.unwrap();
        assert_eq!(&buffer[..], bytes);
        within("inline", peer.write_inline(b"inline", there.remote(32, 6))).await.unwrap();
        within("try", peer.try_write(home.buffer(b"tried"), there.remote(64, 5)).unwrap())
            .await
            .unwrap();
        let read = peer
            .fenced()
            .try_read(home.buffers.try_alloc(5).unwrap(), there.remote(64, 5))
            .unwrap();
        assert_eq!(&within("read", read).await.unwrap()[..], b"tried");
        assert_eq!(within("add", peer.fetch_add(there.word(0), 2)).await.unwrap(), 0);
        assert_eq!(within("swap", peer.compare_swap(there.word(0), 2, 7)).await.unwrap(), 2);
        assert_eq!(there.region.load(0).unwrap(), 7);
        let error = within("add", peer.fetch_add(there.remote(4, 8), 2)).await.unwrap_err();
        assert!(matches!(error.kind(), OpErrorKind::Misaligned { .. }), "{error}");

        let receives: Vec<_> =
            (0..7).map(|_| there.srq.recv(there.buffers.try_alloc(64).unwrap())).collect();
        within("send", peer.send(home.buffer(b"0"))).await.unwrap();
        within("send", peer.with_imm(Imm(1)).send(home.buffer(b"1"))).await.unwrap();
        within("send", peer.solicited().send_inline(b"2")).await.unwrap();
        within("send", peer.with_imm(Imm(3)).send_inline(b"3")).await.unwrap();
        within("send", peer.try_send(home.buffer(b"4")).unwrap()).await.unwrap();
        within("write", peer.with_imm(Imm(5)).write(home.buffer(b"5"), there.remote(0, 1)))
            .await
            .unwrap();
        within("write", peer.with_imm(Imm(6)).write_inline(b"6", there.remote(0, 1)))
            .await
            .unwrap();
        for (round, receive) in receives.into_iter().enumerate() {
            let received = within("receive", receive).await.unwrap();
            assert_eq!(received.imm, [1, 3, 5, 6].contains(&round).then_some(Imm(round as u32)));
        }

        let mut batch = Batch::new();
        for at in 0..8 {
            batch.write(home.buffer(&[at as u8; 4]), there.remote(100 + 4 * at, 4));
        }
        assert!(within("batch", peer.post_batch(batch)).await.is_ok());
        let mut batch = Batch::new();
        batch.read(home.buffers.try_alloc(4).unwrap(), there.remote(100 + 4 * 7, 4));
        let result = within("batch", peer.try_post_batch(batch).unwrap()).await;
        assert_eq!(&result.buffers()[0][..], [7; 4]);

        let lease = within("lease", peer.borrow()).await.unwrap();
        let (first, second) =
            (lease.write_inline(b"1", there.remote(0, 1)), lease.fetch_add(there.word(3), 1));
        within("write", first).await.unwrap();
        within("add", second).await.unwrap();
        let counters = pool.counters();
        assert_eq!(
            (counters.switches, counters.waited, counters.repairs),
            (1, 0, 0),
            "{counters:?}"
        );
        assert!(format!("{pool:?} {peer:?} {lease:?}").contains("DcPool"));
    }
}

/// Posts everything before the first await. A small quota makes the peers alternate.
async fn operations_of_a_peer_stay_in_order(mode: &str) {
    const PEERS: usize = 5;
    const MESSAGES: u32 = 60;
    let Some(setup) = setup("operations_of_a_peer_stay_in_order") else { return };
    for policy in [exclusive(3), DcPolicy::Shared] {
        let home = Home::new(&setup.a, mode);
        let nodes: Vec<_> = (0..PEERS).map(|_| Node::new(&setup.b, mode)).collect();
        let pool = home.pool(2, policy);
        let peers: Vec<_> =
            nodes.iter().map(|node| pool.peer(&node.target.address()).unwrap()).collect();
        let receives: Vec<Vec<_>> = nodes
            .iter()
            .map(|node| {
                (0..MESSAGES).map(|_| node.srq.recv(node.buffers.try_alloc(4).unwrap())).collect()
            })
            .collect();
        let mut sends = Vec::new();
        for round in 0..MESSAGES {
            for peer in &peers {
                sends.push(peer.clone().with_imm(Imm(round)).send_inline(b"text"));
            }
        }
        // Awaits in reverse order: earlier operations progress without being polled.
        for send in sends.into_iter().rev() {
            within("send", send).await.unwrap();
        }
        for receives in receives {
            let mut seen = Vec::new();
            for receive in receives {
                seen.push(within("receive", receive).await.unwrap().imm);
            }
            assert_eq!(
                seen,
                (0..MESSAGES).map(|round| Some(Imm(round))).collect::<Vec<_>>(),
                "{policy:?}"
            );
        }
        assert_eq!(pool.counters().waiting_peers, 0);
    }
}

/// Adds to one word, so that the results show the order of operations.
async fn busy_peer_starves_no_other(mode: &str) {
    const QUOTA: u32 = 40;
    let Some(setup) = setup("busy_peer_starves_no_other") else { return };
    let (home, there) = (Home::new(&setup.a, mode), Node::new(&setup.b, mode));
    let pool = home.pool(1, exclusive(QUOTA));
    let peer = || pool.peer(&there.target.address()).unwrap();
    let (busy, quiet) = (peer(), peer());
    let blocked = block(&there, &busy).await;
    let mut adds: Vec<_> = (0..20).map(|_| busy.fetch_add(there.word(0), 1)).collect();
    let asked = quiet.fetch_add(there.word(0), 1);
    // The busy peer's quota covers the blocking send, the 20 additions, and some of these.
    adds.extend((0..100).map(|_| busy.fetch_add(there.word(0), 1)));
    assert_eq!((busy.waiting(), quiet.waiting()), (20 + 100 + 1 - QUOTA as usize, 1));
    unblock(&there).await;
    assert_eq!(within("add", asked).await.unwrap(), u64::from(QUOTA) - 1);
    let mut expected = (0..121).filter(|&at| at != u64::from(QUOTA) - 1);
    for add in adds {
        assert_eq!(within("add", add).await.ok(), expected.next());
    }
    within("send", blocked).await.unwrap();
}

// Shows C2.
async fn waiting_operations_are_posted_without_being_polled(mode: &str) {
    let Some(setup) = setup("waiting_operations_are_posted_without_being_polled") else { return };
    let (home, there) = (Home::new(&setup.a, mode), Node::new(&setup.b, mode));
    let pool = home.pool(1, exclusive(4));
    let peers: Vec<_> = (0..4).map(|_| pool.peer(&there.target.address()).unwrap()).collect();
    let blocked = block(&there, &peers[0]).await;
    let adds: Vec<_> = peers[1..].iter().map(|peer| peer.fetch_add(there.word(1), 1)).collect();
    let full = peers[1].try_write(home.buffer(b"now"), there.remote(0, 3)).unwrap_err();
    assert!(matches!(full, TryError::Full(_)), "{full}");
    assert_eq!((there.region.load(8).unwrap(), pool.counters().waiting_peers), (0, 3));
    unblock(&there).await;
    until("posted", || there.region.load(8).unwrap() == 3).await;
    for (round, add) in adds.into_iter().enumerate() {
        assert_eq!(within("add", add).await.unwrap(), round as u64);
    }
    within("send", blocked).await.unwrap();
}

async fn dropped_waiting_operation_is_not_sent(mode: &str) {
    let Some(setup) = setup("dropped_waiting_operation_is_not_sent") else { return };
    let (home, there) = (Home::new(&setup.a, mode), Node::new(&setup.b, mode));
    let pool = home.pool(1, exclusive(4));
    let peers: Vec<_> = (0..4).map(|_| pool.peer(&there.target.address()).unwrap()).collect();
    let blocked = block(&there, &peers[0]).await;
    let free = home.buffers.available();
    let writes: Vec<_> = (1..4)
        .map(|at| {
            [0, 1].map(|part| {
                peers[at].write(home.buffer(&[at as u8]), there.remote(10 * part + at, 1))
            })
        })
        .collect();
    let mut writes = writes.into_iter();
    let (first, second, third) =
        (writes.next().unwrap(), writes.next().unwrap(), writes.next().unwrap());
    // Drops both operations of one peer, unpolled, and one of another, polled.
    drop(first);
    let [mut a, b] = second;
    assert!(poll(&mut a).is_pending());
    drop(a);
    assert_eq!(home.buffers.available(), free - 3);
    assert_eq!((peers[1].waiting(), peers[2].waiting(), peers[3].waiting()), (0, 1, 2));
    unblock(&there).await;
    within("write", b).await.unwrap();
    for write in third {
        within("write", write).await.unwrap();
    }
    let mut bytes = [9; 14];
    there.region.read(0, &mut bytes).unwrap();
    assert_eq!(bytes, [0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0, 0, 2, 3]);
    within("send", blocked).await.unwrap();
}

// Shows C3.
async fn initiator_of_dropped_work_is_reassigned_when_the_work_ends(mode: &str) {
    let Some(setup) = setup("initiator_of_dropped_work") else { return };
    let (home, there) = (Home::new(&setup.a, mode), Node::new(&setup.b, mode));
    let pool = home.pool(1, exclusive(4));
    let peer = |_| pool.peer(&there.target.address()).unwrap();
    let [one, other] = [0, 1].map(peer);
    drop(block(&there, &one).await);
    let free = home.buffers.available();
    let dropped = one.write(home.buffer(b"dropped"), there.remote(0, 7));
    drop(dropped);
    drop(one);
    let mut write = other.write(home.buffer(b"later"), there.remote(0, 5));
    for _ in 0..50 {
        assert!(poll(&mut write).is_pending());
        tokio::task::yield_now().await;
    }
    assert_eq!(home.buffers.available(), free - 2);
    unblock(&there).await;
    within("write", write).await.unwrap();
    let mut bytes = [0; 7];
    there.region.read(0, &mut bytes).unwrap();
    assert_eq!(&bytes, b"latered");
    until("the dropped one's buffer", || home.buffers.available() == free).await;
}

async fn leases_keep_their_initiator(mode: &str) {
    let Some(setup) = setup("leases_keep_their_initiator") else { return };
    let (home, there) = (Home::new(&setup.a, mode), Node::new(&setup.b, mode));
    let pool = home.pool(1, exclusive(1));
    let peer = |_| pool.peer(&there.target.address()).unwrap();
    let [one, other, third] = [0, 1, 2].map(peer);
    let lease = within("lease", one.borrow()).await.unwrap();
    let mut waits = other.fetch_add(there.word(0), 1);
    let dropped = other.borrow();
    // A lease keeps its initiator beyond the quota and while idle.
    for round in 0..10 {
        assert_eq!(within("add", lease.fetch_add(there.word(0), 1)).await.unwrap(), round);
        assert!(poll(&mut waits).is_pending());
    }
    let next = third.borrow();
    drop(dropped);
    drop(lease);
    assert_eq!(within("add", waits).await.unwrap(), 10);
    let lease = within("lease", next).await.unwrap();
    // A granted lease that was never polled returns its initiator when dropped.
    let mut waits = one.fetch_add(there.word(0), 1);
    let second = third.borrow();
    assert!(poll(&mut waits).is_pending());
    drop(lease);
    assert_eq!(within("add", waits).await.unwrap(), 11);
    until("lent", || third.waiting() == 0).await;
    let mut waits = one.fetch_add(there.word(0), 1);
    assert!(poll(&mut waits).is_pending());
    drop(second);
    assert_eq!(within("add", waits).await.unwrap(), 12);
}

async fn peers_without_waiting_work_leave_the_queue(mode: &str) {
    let Some(setup) = setup("peers_without_waiting_work") else { return };
    let (home, there) = (Home::new(&setup.a, mode), Node::new(&setup.b, mode));
    let pool = home.pool(1, exclusive(1));
    let peer = || pool.peer(&there.target.address()).unwrap();
    let (busy, first, again, last) = (peer(), peer(), peer(), peer());
    let blocked = block(&there, &busy).await;
    let waits = first.fetch_add(there.word(0), 1);
    for _ in 0..200 {
        let mut add = peer().fetch_add(there.word(1), 1);
        assert!(poll(&mut add).is_pending());
        drop((add, again.fetch_add(there.word(1), 1)));
        assert!(pool.counters().waiting_peers <= 3, "{:?}", pool.counters());
    }
    let adds = [again.fetch_add(there.word(0), 1), last.fetch_add(there.word(0), 1)];
    unblock(&there).await;
    assert_eq!(within("add", waits).await.unwrap(), 0);
    let mut seen = Vec::new();
    for add in adds {
        seen.push(within("add", add).await.unwrap());
    }
    seen.sort_unstable();
    assert_eq!(seen, [1, 2]);
    assert_eq!((there.region.load(8).unwrap(), pool.counters().waiting_peers), (0, 0));
    within("send", blocked).await.unwrap();
}

/// Exceeds the quota of a peer with a lease. A recall would wait for that lease.
async fn lease_holder_is_not_recalled(mode: &str) {
    let Some(setup) = setup("lease_holder") else { return };
    let (home, there) = (Home::new(&setup.a, mode), Node::new(&setup.b, mode));
    let pool = home.pool(1, exclusive(1));
    let [one, other, third] = [0, 1, 2].map(|_| pool.peer(&there.target.address()).unwrap());
    let lease = within("lease", one.borrow()).await.unwrap();
    let mut waits = other.fetch_add(there.word(0), 1);
    for round in 0..3 {
        assert_eq!(within("add", one.fetch_add(there.word(0), 1)).await.unwrap(), 2 * round);
        assert_eq!(within("add", lease.fetch_add(there.word(0), 1)).await.unwrap(), 2 * round + 1);
    }
    assert!(poll(&mut waits).is_pending());
    // Operations queued earlier precede the lease. This addition follows it.
    let (borrow, add) = (third.borrow(), third.fetch_add(there.word(0), 1));
    let last = one.fetch_add(there.word(1), 1);
    drop(lease);
    let lease = within("lease", borrow).await.unwrap();
    assert_eq!(within("add", add).await.unwrap(), 7);
    drop(lease);
    assert_eq!((within("add", waits).await.unwrap(), within("add", last).await.unwrap()), (6, 0));
}

/// Recalls an initiator that is never returned. The other initiator serves the waiting peer after
/// the quotas of the busy one.
// Shows C2.
async fn stuck_peer_starves_no_other(mode: &str) {
    let Some(setup) = setup("stuck_peer") else { return };
    let home = Home::new(&setup.a, mode);
    let [gone, there] = [0, 1].map(|_| Node::new(&setup.b, mode));
    let pool = home.pool(2, exclusive(2));
    let stuck = pool.peer(&gone.target.address()).unwrap();
    let [busy, quiet] = [0, 1].map(|_| pool.peer(&there.target.address()).unwrap());
    let (blocked, first) = (block(&gone, &stuck).await, block(&there, &busy).await);
    let asked = quiet.fetch_add(there.word(0), 1);
    let recalled = [0, 1].map(|_| stuck.send_inline(b"waits"));
    assert_eq!((stuck.waiting(), quiet.waiting()), (1, 1));
    let adds: Vec<_> = (0..10).map(|_| busy.fetch_add(there.word(0), 1)).collect();
    assert_eq!(busy.waiting(), 7);
    unblock(&there).await;
    assert_eq!(within("add", asked).await.unwrap(), 3);
    let mut expected = (0..11).filter(|&at| at != 3);
    for add in adds {
        assert_eq!(within("add", add).await.ok(), expected.next());
    }
    within("send", first).await.unwrap();
    drop((recalled, blocked));
}

// Shows C1.
async fn waiting_operations_fail_when_the_pool_closes(mode: &str) {
    let Some(setup) = setup("waiting_operations_fail_when_the_pool_closes") else { return };
    let (home, there) = (Home::new(&setup.a, mode), Node::new(&setup.b, mode));
    let pool = home.pool(1, exclusive(1));
    let peer = |_| pool.peer(&there.target.address()).unwrap();
    let [one, other] = [0, 1].map(peer);
    let (blocked, free) = (block(&there, &one).await, home.buffers.available());
    let flying = one.write(home.buffer(b"flying"), there.remote(0, 6));
    let waiting = [
        other.write(home.buffer(b"first"), there.remote(0, 5)),
        one.write(home.buffer(b"second"), there.remote(0, 6)),
    ];
    let lent = other.borrow();
    pool.close();
    for write in waiting {
        let error = within("write", write).await.unwrap_err();
        assert_eq!(error.kind(), OpErrorKind::Closed);
    }
    assert_eq!(within("lease", lent).await.unwrap_err().kind(), OpErrorKind::Closed);
    for error in [
        within("send", blocked).await.unwrap_err().kind(),
        within("write", flying).await.unwrap_err().kind(),
    ] {
        assert!(matches!(error, OpErrorKind::Closed | OpErrorKind::Completion(_)), "{error}");
    }
    assert_eq!(
        within("add", one.fetch_add(there.word(0), 1)).await.unwrap_err().kind(),
        OpErrorKind::Closed
    );
    let refused = other.try_write(home.buffer(b"late"), there.remote(0, 4)).unwrap_err();
    assert!(matches!(refused, TryError::Refused(_)), "{refused}");
    drop(refused);
    let mut batch = Batch::new();
    batch.write(home.buffer(b"late"), there.remote(0, 4));
    let result = within("batch", other.post_batch(batch)).await;
    assert_eq!(result.results(), [Err(OpErrorKind::Closed)]);
    drop(result);
    let empty = within("empty batch", other.post_batch(Batch::<BufMut>::new())).await;
    let tried =
        within("empty batch, tried", other.try_post_batch(Batch::<BufMut>::new()).unwrap()).await;
    assert!(!empty.is_ok() && !tried.is_ok(), "a closed pool takes no batch, however short");
    assert_eq!(home.buffers.available(), free);
}

#[test]
fn many_addresses_share_eight_initiators() {
    crate::common::run(3, "many addresses", async {
        const ADDRESSES: usize = if cfg!(debug_assertions) { 1_600 } else { 10_000 };
        let Some(setup) = setup("many_addresses") else { return };
        let home = Home::new(&setup.a, "event");
        let pool = home.pool(8, exclusive(4));
        let pd = setup.b.protection_domain().unwrap();
        let queue = CompletionQueue::new(&setup.b, mode("event")).unwrap();
        let srq = SharedReceiveQueue::new(&pd, &queue, 4, 1).unwrap();
        let targets: Vec<_> = (0..ADDRESSES).map(|_| DcTarget::new(&pd, &srq).unwrap()).collect();
        let region =
            ExposedRegion::new(&pd, HostMemory::zeroed(8 * ADDRESSES).unwrap(), Access::REMOTE_ALL)
                .unwrap();
        let peers: Vec<DcPoolPeer> =
            targets.iter().map(|target| pool.peer(&target.address()).unwrap()).collect();
        let tasks: Vec<_> = peers
            .chunks(ADDRESSES / 16)
            .enumerate()
            .map(|(task, peers)| {
                let (peers, grant) = (peers.to_vec(), region.grant());
                tokio::spawn(async move {
                    for (at, peer) in peers.iter().enumerate() {
                        let start = 8 * (task * (ADDRESSES / 16) + at) as u64;
                        let word = grant.slice(start..start + 8).unwrap();
                        let (one, two) = (peer.fetch_add(word, 1), peer.fetch_add(word, 1 << 32));
                        assert_eq!(within("add", one).await.unwrap(), 0);
                        assert_eq!(within("add", two).await.unwrap(), 1);
                    }
                })
            })
            .collect();
        for task in tasks {
            within("task", task).await.unwrap();
        }
        for at in 0..ADDRESSES {
            assert_eq!(region.load(8 * at).unwrap(), 1 << 32 | 1, "peer {at}");
        }
        let counters = pool.counters();
        assert_eq!(
            (counters.initiators.len(), counters.repairs, counters.waiting_peers),
            (8, 0, 0)
        );
        assert!(counters.switches >= ADDRESSES as u64, "{counters:?}");
        assert!(counters.initiators.iter().all(|(_, queue)| queue.posted > 0), "{counters:?}");
    });
}

/// Polls from a thread in the context of a runtime that is dropped. Nothing else polls the queue.
// Shows C2.
#[test]
fn waiting_operation_outlives_the_runtime_it_was_polled_in() {
    let Some(setup) = setup("waiting_operation_outlives") else { return };
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let handle = runtime.handle().clone();
    let (home, there) = (Home::new(&setup.a, "event"), Node::new(&setup.b, "cooperative"));
    let pool = home.pool(1, exclusive(1));
    let [one, other] = [0, 1].map(|_| pool.peer(&there.target.address()).unwrap());
    let (polled, end) = std::sync::mpsc::channel::<()>();
    let (blocked, mut write) = {
        let _context = handle.enter();
        (one.send_inline(b"blocks"), other.write_inline(b"waits", there.remote(0, 5)))
    };
    drop(blocked);
    let thread = std::thread::spawn(move || {
        let _context = handle.enter();
        let waker: std::task::Waker = std::sync::Arc::new(Unpark(std::thread::current())).into();
        let mut context = std::task::Context::from_waker(&waker);
        let mut polled = Some(polled);
        loop {
            if let std::task::Poll::Ready(result) =
                std::pin::Pin::new(&mut write).poll(&mut context)
            {
                return result.unwrap();
            }
            drop(polled.take());
            // Longer than any test, so only a wake-up ends the wait.
            std::thread::park_timeout(std::time::Duration::from_secs(3600));
        }
    });
    end.recv().unwrap_err();
    drop(runtime);
    crate::common::run(2, "runtime that ended", async {
        unblock(&there).await;
        until("written", || thread.is_finished()).await;
    });
    thread.join().unwrap();
}

struct Unpark(std::thread::Thread);

impl std::task::Wake for Unpark {
    fn wake(self: std::sync::Arc<Self>) {
        self.0.unpark();
    }
}
