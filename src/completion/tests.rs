//! Lifetimes that Miri checks: operations that outlive all handles to their queues.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use super::teardown::Drawing;
use super::{Limits, QueuePairCore};
use crate::error::{SetupError, VerbError};
use crate::software::Network;
use crate::types::{AsyncEvent, QpCaps, Transport};
use crate::verbs::{PdKey, Qp, QpOptions};
use crate::{
    Access, Batch, CompletionMode, CompletionQueue, Device, ExposedRegion, OpErrorKind, Pool, QueuePair, RemoteRegion,
};

fn poll<F: Future + Unpin>(future: &mut F) -> Poll<F::Output> {
    Pin::new(future).poll(&mut Context::from_waker(Waker::noop()))
}

/// A connected pair with a pool and a region, on one completion queue.
struct Setup {
    pool: Pool,
    a: QueuePair,
    b: QueuePair,
    region: ExposedRegion,
}

impl Setup {
    fn new(mode: CompletionMode) -> Self {
        let device = Device::software_in(&Network::new(), "outlived0").unwrap();
        let pd = device.protection_domain().unwrap();
        let queue = CompletionQueue::new(&device, mode).unwrap();
        let new = || QueuePair::new(&pd, &queue).unwrap();
        let (a, b) = (new(), new());
        a.connect(&b.endpoint()).unwrap();
        b.connect(&a.endpoint()).unwrap();
        let region = ExposedRegion::new(&pd, vec![0; 64], Access::REMOTE_ALL).unwrap();
        Self { pool: Pool::new(&pd, 64, 8).unwrap(), a, b, region }
    }

    fn grant(&self) -> RemoteRegion {
        self.region.grant()
    }
}

/// Of those without a thread of their own; Miri takes a minute for each, and lifetimes are the same in all.
fn modes() -> impl Iterator<Item = CompletionMode> {
    let modes = [CompletionMode::Event, CompletionMode::Cooperative, CompletionMode::Hybrid];
    modes.into_iter().take(if cfg!(miri) { 1 } else { 3 })
}

#[test]
fn operation_polled_after_all_handles_are_dropped_frees_its_work_queue() {
    for mode in modes() {
        let setup = Setup::new(mode);
        let mut write = setup.a.write(setup.pool.try_alloc(64).unwrap(), setup.grant());
        let mut receive = setup.a.recv(setup.pool.try_alloc(64).unwrap());
        let Setup { pool, a, b, region } = setup;
        drop((a, b));
        assert!(matches!(poll(&mut write), Poll::Ready(Ok(_))));
        let Poll::Ready(Err(error)) = poll(&mut receive) else { panic!("its queue pair is destroyed") };
        assert!(matches!(error.kind(), OpErrorKind::Completion(_) | OpErrorKind::Closed), "{error}");
        drop(error);
        assert_eq!(pool.available(), 8);
        drop(region);
    }
}

#[test]
fn batch_polled_after_all_handles_are_dropped_frees_its_work_queue() {
    for mode in modes() {
        let setup = Setup::new(mode);
        let mut batch = Batch::new();
        for _ in 0..3 {
            batch.write(setup.pool.try_alloc(64).unwrap(), setup.grant());
        }
        let mut posted = setup.a.post_batch(batch);
        let Setup { pool, a, b, region } = setup;
        drop((a, b));
        assert!(poll(&mut posted).is_ready());
        drop(posted);
        assert_eq!(pool.available(), 8);
        drop(region);
    }
}

#[test]
fn operation_dropped_after_all_handles_are_dropped_frees_its_work_queue() {
    for mode in modes() {
        let setup = Setup::new(mode);
        let write = setup.a.write(setup.pool.try_alloc(64).unwrap(), setup.grant());
        let receive = setup.a.recv(setup.pool.try_alloc(64).unwrap());
        let Setup { pool, a, b, region } = setup;
        drop((a, b));
        drop((write, receive));
        assert_eq!(pool.available(), 8);
        drop(region);
    }
}

/// It is refused when it is attached; one that was attached before the failure must be refused afterwards, too, for the failure
/// did not destroy it.
#[test]
fn completion_queue_that_has_failed_takes_no_queue_pair_between_its_creation_and_its_registration() {
    let network = Network::new();
    let device = Device::software_in(&network, "failed0").unwrap();
    let pd = device.protection_domain().unwrap();
    let queue = CompletionQueue::new(&device, CompletionMode::Event).unwrap();
    let cq = queue.shared();
    let caps = QpCaps { max_send_wr: 4, max_recv_wr: 4, max_send_sge: 1, max_recv_sge: 1, max_inline: 0 };
    let options = QpOptions { transport: Transport::Rc, caps };
    let limits = Limits { depth: 4, max_sge: 1, max_inline: 0, max_message: 64, pd: PdKey(pd.id()) };
    let create = || {
        let qp = Qp::new(&pd, queue.cq(), queue.cq(), None, &options).unwrap();
        QueuePairCore::new(qp, (cq, limits), (cq, Some(limits)), None)
    };
    let core = create().unwrap();
    cq.own(core.send(), &core).unwrap();
    network.control("failed0").unwrap().announce(AsyncEvent::CqError { cq: queue.id() });
    device.next_event().unwrap();
    cq.drain();
    assert!(queue.failure().is_some());
    let drawing: Arc<dyn Drawing> = core.clone();
    for refused in [cq.own(core.send(), &core), cq.draw(core.send(), &drawing), create().map(drop).map_err(verb)] {
        assert_eq!(refused.unwrap_err().errno, VerbError::EIO);
    }
}

fn verb(error: SetupError) -> VerbError {
    let SetupError::Verb(error) = error else { panic!("{error}") };
    error
}

#[test]
fn operation_refused_before_posting_frees_its_own_slot() {
    let setup = Setup::new(CompletionMode::Event);
    let too_long = setup.pool.try_alloc(64).unwrap();
    let mut write = setup.a.write(too_long, setup.grant().slice(..8).unwrap());
    assert!(matches!(poll(&mut write), Poll::Ready(Err(_))));
    drop(setup.a.write(setup.pool.try_alloc(64).unwrap(), setup.grant().slice(..8).unwrap()));
    assert_eq!(setup.pool.available(), 8);
}
