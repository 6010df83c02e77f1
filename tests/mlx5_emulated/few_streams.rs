//! A shared DC pool all of whose streams have failed and cannot be reset yet. The emulated device
//! holds the flushes back, so the program needs it to itself.

use tokio_rdma::dc::DcPolicy;
use tokio_rdma::error::TryError;
use tokio_rdma::types::WcStatus;

use crate::common::{eventually, run, until, within};
use crate::emulated::{adapter, has_few_streams};
use crate::pool::{Home, Node, poll, setup};
use emulated_connectx::Release;

const FLUSHED: Option<WcStatus> = Some(WcStatus::WR_FLUSH_ERR);

#[test]
fn operations_wait_for_the_first_stream_to_be_reset() {
    if !has_few_streams() {
        // Run by `emulated::pool_operations_wait_while_all_streams_have_failed`.
        return;
    }
    // In cooperative mode only this task takes completions.
    for (mode, awaits) in [("event", true), ("event", false), ("cooperative", true)] {
        run(1, mode, wait_for_a_reset(mode, awaits));
    }
    adapter().assert_clean();
}

/// Awaits the waiting operation, or leaves it to the reactor.
async fn wait_for_a_reset(mode: &str, awaits: bool) {
    let setup = setup("wait_for_a_reset").unwrap();
    let (home, there) = (Home::new(&setup.a, mode), Node::new(&setup.b, mode));
    let pool = home.pool(1, DcPolicy::Shared);
    let peers = [0, 1].map(|_| pool.peer(&there.target.address()).unwrap());
    let (free, initiator) = (home.buffers.available(), pool.counters().initiators[0].0);
    let write = |at: usize, to| peers[at].write(home.buffer(b"x"), there.remote(to, 1));

    let before = adapter().counters().requests;
    let bad = [0, 1].map(|at| peers[at].write(home.buffer(b"bad"), there.forbidden()));
    eventually("failures", || (adapter().counters().requests == before + 2).then_some(()));
    adapter().hold_completions(Some(initiator.0));
    let behind = [0, 1].map(|at| write(at, 0));
    eventually("flushes", || (adapter().held_completions() == 2).then_some(()));
    for write in bad {
        let error = within("bad write", write).await.unwrap_err();
        assert_eq!(error.status(), Some(WcStatus::REM_ACCESS_ERR));
    }

    let mut waiting = write(0, 1);
    let dropped = write(1, 2);
    assert!(poll(&mut waiting).is_pending());
    let refused = peers[1].try_write(home.buffer(b"x"), there.remote(3, 1)).unwrap_err();
    assert!(matches!(refused, TryError::Full(_)), "{refused}");
    drop(refused);
    let counters = pool.counters();
    assert_eq!((counters.waiting_peers, counters.waited, counters.stream_resets), (2, 2, 0));
    drop(dropped);
    assert_eq!((peers[0].waiting(), peers[1].waiting()), (1, 0));

    adapter().release_completions(Release::InOrder);
    if awaits {
        within("waiting write", waiting).await.unwrap();
    } else {
        let written = || {
            let mut bytes = [0; 2];
            there.region.read(0, &mut bytes).unwrap();
            bytes == [0, b'x']
        };
        until("written", written).await;
        within("written", waiting).await.unwrap();
    }
    for write in behind {
        assert_eq!(within("flushed write", write).await.unwrap_err().status(), FLUSHED);
    }
    for at in [0, 1] {
        within("next write", write(at, 4)).await.unwrap();
    }
    until("free buffers", || home.buffers.available() == free).await;
    let counters = pool.counters();
    assert_eq!((counters.stream_resets, counters.repairs, counters.waiting_peers), (2, 0, 0));
    let mut bytes = [0; 5];
    there.region.read(0, &mut bytes).unwrap();
    assert_eq!(bytes, [0, b'x', 0, 0, b'x']);
}
