//! Drivers that fail to destroy objects, and devices that do not flush: memory that the device may
//! still access is leaked.

#![allow(unsafe_code, reason = "memory that records its release")]

use std::future::Future;
use std::pin::Pin;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use crate::torture::{LONG, block_on, bounded, narrow, pair, software};
use tokio_rdma::dc::DcTarget;
use tokio_rdma::error::Outcome;
use tokio_rdma::memory::Storage;
use tokio_rdma::software::{DeviceControl, Network};
use tokio_rdma::types::{AsyncEvent, QpCaps, Transport, WcStatus};
use tokio_rdma::verbs::{Qp, QpConfig};
use tokio_rdma::{
    Access, Batch, CompletionMode, CompletionQueue, Device, ExposedRegion, OpErrorKind, Pool,
    ProtectionDomain, QueuePair, SharedReceiveQueue,
};

fn poll<F: Future + Unpin>(future: &mut F) -> Poll<F::Output> {
    Pin::new(future).poll(&mut Context::from_waker(Waker::noop()))
}

#[derive(Debug)]
struct Tracked(Box<[u8]>, Arc<AtomicBool>);

impl Tracked {
    fn new() -> (Self, Arc<AtomicBool>) {
        let freed = Arc::new(AtomicBool::new(false));
        (Self(vec![0; 4096].into(), freed.clone()), freed)
    }
}

// SAFETY: a boxed slice is the only owner of its heap memory, wherever it is moved.
unsafe impl Storage for Tracked {
    fn base(&mut self) -> NonNull<u8> {
        NonNull::from(&mut *self.0).cast()
    }

    fn len(&self) -> usize {
        self.0.len()
    }
}

impl Drop for Tracked {
    fn drop(&mut self) {
        self.1.store(true, Ordering::SeqCst);
    }
}

fn is_freed(freed: &AtomicBool) -> bool {
    freed.load(Ordering::SeqCst)
}

/// A device whose driver can be made to fail each destruction.
struct FailingDevice {
    network: Network,
    control: DeviceControl,
    pd: ProtectionDomain,
    queue: CompletionQueue,
}

impl FailingDevice {
    fn new() -> Self {
        let network = Network::new();
        let device = Device::software_in(&network, "it").unwrap();
        let control = network.control("it").unwrap();
        let queue = CompletionQueue::new(&device, CompletionMode::Event).unwrap();
        Self { pd: device.protection_domain().unwrap(), network, control, queue }
    }

    /// Drops everything else. Returns true if the device remains open because objects were leaked.
    fn leaks(self) -> bool {
        let Self { network, control, pd, queue } = self;
        control.refuse_destroy(false);
        drop((control, pd, queue));
        network.control("it").is_some()
    }
}

// Shows S1.
#[test]
fn memory_with_failed_deregistration_is_leaked() {
    for refuses in [false, true] {
        let it = FailingDevice::new();
        let ((local, exposed), (local_freed, exposed_freed)) = {
            let ((a, freed_a), (b, freed_b)) = (Tracked::new(), Tracked::new());
            ((a, b), (freed_a, freed_b))
        };
        let buffer = it.pd.register(local).unwrap();
        let region = ExposedRegion::new(&it.pd, exposed, Access::REMOTE_ALL).unwrap();
        it.control.refuse_destroy(true);
        let buffer = buffer.into_storage::<Tracked>().expect_err("its deregistration fails");
        let region = region.into_storage::<Tracked>().expect_err("its deregistration fails");
        assert!(!is_freed(&local_freed) && !is_freed(&exposed_freed));
        region.write(0, b"still ours").unwrap();
        it.control.refuse_destroy(refuses);
        drop((buffer, region));
        assert_eq!((is_freed(&local_freed), is_freed(&exposed_freed)), (!refuses, !refuses));
        assert_eq!(it.leaks(), refuses);
    }
}

#[test]
fn device_closes_after_its_memory_was_recovered() {
    let it = FailingDevice::new();
    let ((local, _), (exposed, _)) = (Tracked::new(), Tracked::new());
    it.pd.register(local).unwrap().into_storage::<Tracked>().map_err(drop).unwrap();
    ExposedRegion::new(&it.pd, exposed, Access::REMOTE_ALL)
        .unwrap()
        .into_storage::<Tracked>()
        .map_err(drop)
        .unwrap();
    assert!(!it.leaks(), "recovered memory keeps the device open");
}

// Shows S1.
#[test]
fn memory_with_failed_window_unbind_is_leaked() {
    for refuses in [false, true] {
        let it = FailingDevice::new();
        let (a, b) = pair(&it.pd, &it.queue);
        let (memory, freed) = Tracked::new();
        let region =
            ExposedRegion::new(&it.pd, memory, Access::REMOTE_ALL | Access::MW_BIND).unwrap();
        let lease = block_on(a.lease(&region, 0..64, Access::REMOTE_WRITE)).unwrap();
        let grant = lease.grant();
        it.control.refuse_destroy(refuses);
        lease.revoke();
        it.control.refuse_destroy(false);
        drop(region);
        assert_eq!(is_freed(&freed), !refuses);
        // The window that remains open is harmless: its memory is still allocated.
        let written = block_on(b.write_inline(b"late", grant));
        assert_eq!(written.is_ok(), refuses, "{written:?}");
        drop((a, b));
        assert_eq!(it.leaks(), refuses);
    }
}

// Shows S1.
#[test]
fn undestroyed_queue_pair_returns_buffers_only_by_completions() {
    for refuses in [false, true] {
        let it = FailingDevice::new();
        let (a, b) = pair(&it.pd, &it.queue);
        let (memory, freed) = Tracked::new();
        let (owned, other) = (it.pd.register(memory).unwrap(), Tracked::new());
        let srq = SharedReceiveQueue::new(&it.pd, &it.queue, 4, 1).unwrap();
        let drawing =
            QueuePair::builder(&it.pd, &it.queue).shared_receive_queue(&srq).build().unwrap();
        let (receive, shared) = (a.recv(owned), srq.recv(it.pd.register(other.0).unwrap()));
        drop(srq);
        it.control.refuse_destroy(refuses);
        drop((a, b, drawing));
        it.control.refuse_destroy(false);
        let error = block_on(receive).unwrap_err();
        assert_eq!(error.status(), Some(WcStatus::WR_FLUSH_ERR), "{error:?}");
        drop(error.into_buffer());
        assert!(is_freed(&freed), "returned by its completion");
        // The shared receive is unused, and the queue pair may still take it.
        let mut shared = shared;
        match poll(&mut shared) {
            Poll::Ready(Err(error)) => {
                assert!(!refuses && matches!(error.kind(), OpErrorKind::Closed), "{error:?}")
            }
            Poll::Ready(Ok(received)) => panic!("unexpected message: {received:?}"),
            Poll::Pending => assert!(refuses),
        }
        drop(shared);
        assert_eq!(is_freed(&other.1), !refuses);
        assert_eq!(it.leaks(), refuses);
    }
}

/// Uses a device that does not flush: only destroying the queue pair frees buffers.
#[test]
fn unflushed_buffers_are_held_until_the_queue_pair_is_destroyed() {
    for refuses in [true, false] {
        let it = FailingDevice::new();
        let (a, b) = pair(&it.pd, &it.queue);
        let [(memory, freed), (abandoned, abandoned_freed)] = [(); 2].map(|()| Tracked::new());
        let (mut receive, dropped) =
            (b.recv(it.pd.register(memory).unwrap()), b.recv(it.pd.register(abandoned).unwrap()));
        drop(dropped);
        assert!(poll(&mut receive).is_pending());
        it.control.ignore_errors(true);
        it.control.refuse_destroy(refuses);
        drop(b);
        it.control.refuse_destroy(false);
        if refuses {
            // The device still owns the buffer and writes to it.
            assert!(
                poll(&mut receive).is_pending() && !is_freed(&freed) && !is_freed(&abandoned_freed)
            );
            block_on(a.send_inline(b"late")).unwrap();
            let received = block_on(receive).unwrap();
            assert_eq!(received.buffer[..], *b"late");
            drop(received);
            assert!(is_freed(&freed) && !is_freed(&abandoned_freed));
            block_on(a.send_inline(b"later")).unwrap();
            assert!(is_freed(&abandoned_freed));
        } else {
            let Poll::Ready(Err(error)) = poll(&mut receive) else { panic!("the operation hangs") };
            assert!(matches!(error.kind(), OpErrorKind::Closed), "{error:?}");
            drop(error);
            assert!(is_freed(&freed) && is_freed(&abandoned_freed));
        }
        it.control.ignore_errors(false);
        drop(a);
        assert_eq!(it.leaks(), refuses);
    }
}

/// Uses a device that does not flush: a deadline destroys the queue pair, or returns no memory.
// Shows T1.
#[test]
fn deadline_returns_only_memory_that_the_device_has_left() {
    for refuses in [true, false] {
        let it = FailingDevice::new();
        let (a, b) = pair(&it.pd, &it.queue);
        let (memory, freed) = Tracked::new();
        let receive = b.recv(it.pd.register(memory).unwrap()).within(Duration::ZERO);
        it.control.ignore_errors(true);
        it.control.refuse_destroy(refuses);
        let error = block_on(receive).unwrap_err();
        it.control.refuse_destroy(false);
        let revoked = OpErrorKind::TimedOut { outcome: Outcome::MaybeExecuted };
        assert_eq!(error.kind(), revoked);
        match error.into_result() {
            Ok(error) => {
                assert!(!refuses && !is_freed(&freed));
                drop(error.into_buffer());
            }
            Err(receive) => {
                // The device still owns the buffer and writes to it.
                assert!(refuses && !is_freed(&freed));
                block_on(a.send_inline(b"late")).unwrap();
                assert_eq!(block_on(receive).unwrap().buffer[..], *b"late");
            }
        }
        assert!(is_freed(&freed));
        it.control.ignore_errors(false);
        drop((a, b));
        assert_eq!(it.leaks(), refuses);
    }
}

// Shows T1.
#[test]
fn lease_whose_window_cannot_be_freed_returns_no_memory() {
    let it = FailingDevice::new();
    let (a, b) = pair(&it.pd, &it.queue);
    let (memory, freed) = Tracked::new();
    let region = ExposedRegion::new(&it.pd, memory, Access::MW_BIND).unwrap();
    let mut lease = block_on(a.lease(&region, 0..64, Access::REMOTE_WRITE)).unwrap();
    let grant = lease.grant();
    it.control.refuse_destroy(true);
    lease.expire_at(Instant::now()).unwrap();
    it.control.refuse_destroy(false);
    assert!(lease.has_expired());
    let region = region.into_storage::<Tracked>().expect_err("the peer may still write it");
    block_on(b.write_inline(b"late", grant)).unwrap();
    drop((region, lease, a, b));
    assert!(!is_freed(&freed) && it.leaks());
}

#[test]
fn queued_work_of_an_undestroyed_queue_pair_ends_at_once() {
    for refuses in [false, true] {
        let (network, [a, _b], pool, region) = narrow(8);
        let control = network.control("torture0").unwrap();
        let buffer = || pool.try_alloc(64).unwrap();
        let mut posted: Vec<_> = (0..2).map(|_| a.write(buffer(), region.grant())).collect();
        let mut write = a.write(buffer(), region.grant());
        let mut batch = Batch::new();
        batch.write(buffer(), region.grant()).write(buffer(), region.grant());
        let mut batch = a.post_batch(batch);
        let (mut received, mut receive) = (a.recv(buffer()), a.recv(buffer()));
        drop(a.write(buffer(), region.grant()));
        assert!(
            poll(&mut write).is_pending()
                && poll(&mut batch).is_pending()
                && poll(&mut receive).is_pending()
        );
        assert_eq!(pool.available(), 0);

        control.refuse_destroy(refuses);
        drop(a);
        control.refuse_destroy(false);
        let Poll::Ready(Err(error)) = poll(&mut write) else { panic!("the operation hangs") };
        assert!(matches!(error.kind(), OpErrorKind::Closed), "{error:?}");
        let Poll::Ready(result) = poll(&mut batch) else { panic!("the operation hangs") };
        assert!(
            result.results().iter().all(|part| matches!(part, Err(OpErrorKind::Closed))),
            "{result:?}"
        );
        let Poll::Ready(Err(refused)) = poll(&mut receive) else { panic!("the operation hangs") };
        assert!(matches!(refused.kind(), OpErrorKind::Closed), "{refused:?}");
        drop((error, result, refused));
        assert_eq!(
            pool.available(),
            5,
            "all but the posted buffers, whose futures were not polled"
        );
        for write in &mut posted {
            let error = block_on(write).unwrap_err();
            assert_eq!(error.status(), Some(WcStatus::WR_FLUSH_ERR), "{error:?}");
        }
        let error = block_on(&mut received).unwrap_err();
        assert_eq!(error.status(), Some(WcStatus::WR_FLUSH_ERR), "{error:?}");
    }
}

// Shows S1.
#[test]
fn receives_of_an_undestroyed_shared_queue_are_leaked() {
    for refuses in [false, true] {
        let it = FailingDevice::new();
        let (memory, freed) = Tracked::new();
        let srq = SharedReceiveQueue::new(&it.pd, &it.queue, 1, 1).unwrap();
        let mut receive = srq.recv(it.pd.register(memory).unwrap());
        let mut queued = srq.recv(it.pd.register(vec![0; 64]).unwrap());
        it.control.refuse_destroy(refuses);
        drop(srq);
        it.control.refuse_destroy(false);
        let Poll::Ready(Err(error)) = poll(&mut queued) else {
            panic!("the operation hangs or receives")
        };
        assert!(matches!(error.kind(), OpErrorKind::Closed), "{error:?}");
        drop(error);
        match poll(&mut receive) {
            Poll::Ready(Err(error)) => {
                assert!(!refuses && matches!(error.kind(), OpErrorKind::Closed), "{error:?}")
            }
            Poll::Ready(Ok(received)) => panic!("unexpected message: {received:?}"),
            Poll::Pending => assert!(refuses),
        }
        drop(receive);
        assert_eq!(is_freed(&freed), !refuses);
        assert_eq!(it.leaks(), refuses);
    }
}

#[test]
fn failed_destruction_of_a_verbs_queue_pair_returns_an_error() {
    let it = FailingDevice::new();
    let caps =
        QpCaps { max_send_wr: 1, max_recv_wr: 1, max_send_sge: 1, max_recv_sge: 1, max_inline: 0 };
    let options = QpConfig::new(Transport::Rc, caps);
    let cq = it.queue.verbs();
    let create = || Qp::new(&it.pd, cq, cq, None, &options).unwrap();
    create().destroy().unwrap();
    let refused = create();
    it.control.refuse_destroy(true);
    let error = refused.destroy().unwrap_err();
    assert_eq!((error.verb, error.errno), ("ibv_destroy_qp", 16));
    assert!(it.leaks());
}

/// Polls the queue's verbs object, which detects that the queue has failed.
fn poll_verbs(queue: &CompletionQueue) {
    queue.verbs().poll(&mut [tokio_rdma::types::WorkCompletion::EMPTY]).ok();
}

/// Checks the documentation of [`DcTarget`]: the receives it may take are never released.
// Shows S1.
#[test]
fn receives_of_an_undestroyed_dc_target_are_leaked() {
    bounded("target", LONG, || {
        let network = Network::new();
        let (_device, pd) = software(&network);
        let own = CompletionQueue::new(pd.device(), CompletionMode::Event).unwrap();
        let srq = SharedReceiveQueue::new(&pd, &own, 8, 1).unwrap();
        let pool = Pool::new(&pd, 64, 8).unwrap();
        let (stuck, other) = (DcTarget::new(&pd, &srq).unwrap(), DcTarget::new(&pd, &srq).unwrap());
        let mut receive = srq.recv(pool.try_alloc(8).unwrap());
        let control = network.control("torture0").unwrap();
        control.refuse_destroy(true);
        drop(stuck);
        control.refuse_destroy(false);
        drop(other);
        control.announce(AsyncEvent::CqError { cq: own.id() });
        for _ in 0..100_000 {
            poll_verbs(&own);
            assert!(poll(&mut receive).is_pending());
        }
        drop((srq, receive));
        assert_eq!(pool.available() + 1, pool.total(), "the buffer stays with the device");
    });
}
