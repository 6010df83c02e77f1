//! The tests that Miri runs: each kind of operation, abandoned operations, threads that share a
//! queue, and operations that outlive all handles to their queues. They are short because Miri is
//! slow; all but one need no runtime.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread;
use std::time::Instant;

use super::wake_list::Teardown;
use super::{Limits, QueuePairCore};
use crate::contained::tests::HANG;
use crate::error::{LimitError, SetupError, VerbError};
use crate::memory::{HostMemory, PdKey, SgeList};
use crate::software::Network;
use crate::types::{AsyncEvent, Imm, QpCaps, Sge, Transport};
use crate::verbs::{Qp, QpConfig};
use crate::{
    Access, Batch, BufMut, CompletionMode, CompletionQueue, Device, ExposedRegion, OpErrorKind,
    Pool, QueuePair, RemoteRegion, SharedReceiveQueue,
};

fn poll<F: Future + Unpin>(future: &mut F) -> Poll<F::Output> {
    Pin::new(future).poll(&mut Context::from_waker(Waker::noop()))
}

fn ready<F: Future + Unpin>(mut future: F) -> F::Output {
    let Poll::Ready(output) = poll(&mut future) else { panic!("it is pending") };
    output
}

/// A connected pair with a pool and a region, on one completion queue.
struct Setup {
    queue: CompletionQueue,
    pool: Pool,
    a: QueuePair,
    b: QueuePair,
    region: ExposedRegion,
}

impl Setup {
    fn new(mode: CompletionMode) -> Self {
        Self::with_depth(mode, 16)
    }

    fn with_depth(mode: CompletionMode, depth: u32) -> Self {
        let device = Device::software_in(&Network::new(), "outlived0").unwrap();
        let pd = device.protection_domain().unwrap();
        let queue = CompletionQueue::new(&device, mode).unwrap();
        let new = || QueuePair::builder(&pd, &queue).max_send_wr(depth).build().unwrap();
        let (a, b) = (new(), new());
        a.connect(&b.endpoint()).unwrap();
        b.connect(&a.endpoint()).unwrap();
        // Aligned for atomics: bytes of a `Vec` are not, under Miri.
        let region =
            ExposedRegion::new(&pd, HostMemory::zeroed(64).unwrap(), Access::REMOTE_ALL).unwrap();
        Self { pool: Pool::new(&pd, 64, 8).unwrap(), queue, a, b, region }
    }

    fn grant(&self) -> RemoteRegion {
        self.region.grant()
    }

    fn word(&self, offset: u64) -> RemoteRegion {
        self.grant().slice(offset..offset + 8).unwrap()
    }

    fn buffer(&self, bytes: &[u8]) -> BufMut {
        self.pool.copy_from(bytes).unwrap()
    }

    fn contents(&self) -> Vec<u8> {
        let mut bytes = vec![0; 64];
        self.region.read(0, &mut bytes).unwrap();
        bytes
    }
}

/// Returns the modes without a thread of their own. Miri takes seconds for each, and lifetimes are
/// the same in all.
fn modes() -> impl Iterator<Item = CompletionMode> {
    let modes = [CompletionMode::Event, CompletionMode::Cooperative, CompletionMode::Hybrid];
    modes.into_iter().take(if cfg!(miri) { 1 } else { 3 })
}

// Shows M1.
#[test]
fn operation_polled_after_all_handles_are_dropped_frees_its_work_queue() {
    for mode in modes() {
        let setup = Setup::new(mode);
        let mut write = setup.a.write(setup.pool.try_alloc(64).unwrap(), setup.grant());
        let mut receive = setup.a.recv(setup.pool.try_alloc(64).unwrap());
        let Setup { queue: _, pool, a, b, region } = setup;
        drop((a, b));
        assert!(matches!(poll(&mut write), Poll::Ready(Ok(_))));
        let Poll::Ready(Err(error)) = poll(&mut receive) else {
            panic!("its queue pair is destroyed")
        };
        assert!(
            matches!(error.kind(), OpErrorKind::Completion(_) | OpErrorKind::Closed),
            "{error}"
        );
        drop(error);
        assert_eq!(pool.available(), 8);
        drop(region);
    }
}

// Shows M1.
#[test]
fn batch_polled_after_all_handles_are_dropped_frees_its_work_queue() {
    for mode in modes() {
        let setup = Setup::new(mode);
        let mut batch = Batch::new();
        for _ in 0..3 {
            batch.write(setup.pool.try_alloc(64).unwrap(), setup.grant());
        }
        let mut posted = setup.a.post_batch(batch);
        let Setup { queue: _, pool, a, b, region } = setup;
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
        let Setup { queue: _, pool, a, b, region } = setup;
        drop((a, b));
        drop((write, receive));
        assert_eq!(pool.available(), 8);
        drop(region);
    }
}

// Attaching is refused after the failure. A queue pair attached before it must be refused at its
// registration, because the failure did not destroy it.
#[test]
fn failed_completion_queue_refuses_queue_pairs_that_are_not_registered_yet() {
    let network = Network::new();
    let device = Device::software_in(&network, "failed0").unwrap();
    let pd = device.protection_domain().unwrap();
    let queue = CompletionQueue::new(&device, CompletionMode::Event).unwrap();
    let cq = queue.shared();
    let caps =
        QpCaps { max_send_wr: 4, max_recv_wr: 4, max_send_sge: 1, max_recv_sge: 1, max_inline: 0 };
    let options = QpConfig::new(Transport::Rc, caps);
    let limits = Limits {
        depth: 4,
        max_sge: 1,
        max_read_sge: 1,
        max_inline: 0,
        max_message: 64,
        pd: PdKey(pd.id()),
        solicited: false,
        notifies: false,
    };
    let create = || {
        let qp = Qp::new(&pd, queue.cq(), queue.cq(), None, &options).unwrap();
        QueuePairCore::new(qp, (cq, limits), (cq, Some(limits)), None)
    };
    let core = create().unwrap();
    network.control("failed0").unwrap().announce(AsyncEvent::CqError { cq: queue.id() });
    device.next_event().unwrap();
    cq.drain();
    assert!(queue.failure().is_some());
    let teardown: Arc<dyn Teardown> = core.clone();
    let owned = cq.set_queue_pair(core.send(), Arc::downgrade(&teardown));
    for refused in
        [owned, cq.add_consumer(core.send(), &teardown), create().map(drop).map_err(verb)]
    {
        assert_eq!(refused.unwrap_err().errno, VerbError::EIO);
    }
}

fn verb(error: SetupError) -> VerbError {
    let SetupError::Verb(error) = error else { panic!("{error}") };
    error
}

// The first operation finds no free slot, so it takes another path than later ones.
#[test]
fn operation_behind_others_is_checked_as_the_first_is() {
    let setup = Setup::new(CompletionMode::Event);
    let Setup { pool, a, region, .. } = &setup;
    let other = a.protection_domain().device().protection_domain().unwrap();
    let foreign = || other.register(vec![0; 8]).unwrap();
    assert!(matches!(
        poll(&mut a.write(pool.try_alloc(64).unwrap(), region.grant())),
        Poll::Ready(Ok(_))
    ));
    let received = a.recv(pool.try_alloc(64).unwrap());
    let beyond = region.grant().slice(..8).unwrap();
    for (buffer, remote, kind) in [
        (foreign(), region.grant(), OpErrorKind::Foreign { what: "buffer" }),
        (
            pool.try_alloc(64).unwrap(),
            beyond,
            OpErrorKind::Limit(LimitError {
                field: "bytes for the remote region",
                asked: 64,
                allowed: 8,
            }),
        ),
    ] {
        let Poll::Ready(Err(error)) = poll(&mut a.write(buffer, remote)) else {
            panic!("it is refused: {kind}")
        };
        assert_eq!(error.kind(), kind);
    }
    let Poll::Ready(Err(error)) = poll(&mut a.recv(foreign())) else { panic!("it is refused") };
    assert_eq!(error.kind(), OpErrorKind::Foreign { what: "buffer" });
    assert_eq!((a.send_counters().posted, a.receive_counters().posted), (1, 1));
    drop(received);
}

// To some devices an element of no bytes means one of 2^31.
#[test]
fn element_of_no_bytes_is_no_element() {
    let setup = Setup::new(CompletionMode::Event);
    let queue = setup.a.send_queue();
    let (empty, full) = (setup.pool.try_alloc(0).unwrap(), setup.pool.try_alloc(64).unwrap());
    let mut list = SgeList::new();
    queue.gather(&empty, &mut list).unwrap();
    assert!(list.is_empty());
    queue.gather(&full, &mut list).unwrap();
    assert_eq!(list[..], [full.sge()]);

    let (sge, pd) = (full.sge(), PdKey(setup.a.protection_domain().id()));
    assert!(!queue.is_plain(empty.sge(), pd, 64));
    assert!(
        queue.is_plain(sge, pd, 64)
            && queue.is_plain(sge, pd, u64::MAX)
            && !queue.is_plain(sge, pd, 63)
    );
    let longest = queue.limits.max_message as u32;
    let of = |length| Sge { length, ..sge };
    assert!(
        queue.is_plain(of(longest), pd, u64::MAX) && !queue.is_plain(of(longest + 1), pd, u64::MAX)
    );
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

// Shows M1.
#[test]
fn every_operation_moves_its_bytes_and_returns_its_buffer() {
    for mode in modes() {
        let setup = Setup::new(mode);
        let Setup { a, b, .. } = &setup;
        let receives = [(); 4].map(|()| b.recv(setup.buffer(&[0xee; 20])));
        assert_eq!(ready(a.send(setup.buffer(b"plain"))).unwrap()[..], *b"plain");
        assert_eq!(
            ready(a.with_imm(Imm(7)).send(setup.buffer(b"beside").freeze())).unwrap()[..],
            *b"beside"
        );
        let mut bytes = *b"inline";
        let inline = a.send_inline(&bytes);
        bytes.fill(0);
        ready(inline).unwrap();
        ready(
            a.with_imm(Imm(8)).write(setup.buffer(b"written"), setup.grant().slice(3..).unwrap()),
        )
        .unwrap();
        let messages = [
            (&b"plain"[..], None),
            (b"beside", Some(Imm(7))),
            (b"inline", None),
            (b"", Some(Imm(8))),
        ];
        for (receive, (bytes, imm)) in receives.into_iter().zip(messages) {
            let received = ready(receive).unwrap();
            assert_eq!(
                (&received.buffer[..], received.imm, received.written),
                (bytes, imm, bytes.is_empty())
            );
        }
        assert_eq!(setup.contents()[..12], *b"\0\0\0written\0\0");
        ready(a.write(
            vec![setup.buffer(b"from "), setup.buffer(b"parts")],
            setup.grant().slice(16..).unwrap(),
        ))
        .unwrap();
        let read =
            ready(a.read(setup.buffer(&[0; 10]), setup.grant().slice(16..).unwrap())).unwrap();
        assert_eq!(read[..], *b"from parts");
        assert_eq!(ready(a.fetch_add(setup.word(32), 5)).unwrap(), 0);
        assert_eq!(ready(a.compare_swap(setup.word(32), 5, 9)).unwrap(), 5);
        assert_eq!(setup.region.load(32), Ok(9));
        let mut batch = Batch::new();
        batch.write(setup.buffer(b"batch"), setup.grant().slice(40..).unwrap());
        batch.read(setup.buffer(&[0; 5]), setup.grant().slice(40..).unwrap());
        let buffers = ready(a.post_batch(batch)).into_buffers().unwrap();
        assert_eq!([&buffers[0][..], &buffers[1][..]], [b"batch", b"batch"]);
        drop((read, buffers));
        assert_eq!(setup.pool.available(), 8);
    }
}

// Operations are dropped at once, or after a poll that registered a waker. A forgotten operation
// keeps its buffer.
// Shows M1.
#[test]
fn abandoned_operations_are_done_once_and_their_buffers_are_free_afterwards() {
    for mode in modes() {
        let setup = Setup::new(mode);
        let Setup { a, b, pool, region, .. } = &setup;
        drop(b.recv(setup.buffer(&[0; 8])));
        let mut polled = b.recv(setup.buffer(&[0; 8]));
        assert!(poll(&mut polled).is_pending());
        drop(polled);
        assert_eq!(pool.available(), 6, "the device may still write to both");
        let mut kept = b.recv(setup.buffer(&[0; 8]));
        for byte in 1..=3 {
            ready(a.send(setup.buffer(&[byte; 8]))).unwrap();
        }
        let Poll::Ready(Ok(received)) = poll(&mut kept) else { panic!("its message has arrived") };
        assert_eq!((&received.buffer[..], pool.available()), (&[3; 8][..], 7));
        drop(received);

        drop(a.write(setup.buffer(&[4; 8]), setup.grant()));
        drop(a.read(setup.buffer(&[0; 8]), setup.grant()));
        drop(a.fetch_add(setup.word(8), 1));
        let mut batch = Batch::new();
        batch.write(setup.buffer(&[5; 8]), setup.grant().slice(16..).unwrap());
        batch.read(setup.buffer(&[0; 8]), setup.grant());
        drop(a.post_batch(batch));
        std::mem::forget(a.write(setup.buffer(&[6; 8]), setup.grant().slice(24..).unwrap()));
        assert_eq!(ready(a.fetch_add(setup.word(8), 1)).unwrap(), 1, "the other one is done once");
        assert_eq!((setup.contents()[..8].to_vec(), region.load(8)), (vec![4; 8], Ok(2)));
        assert_eq!(setup.contents()[16..32], [[5; 8], [6; 8]].concat());
        assert_eq!(pool.available(), 7, "all but the one that was forgotten");
    }
}

// Shows M1.
#[test]
fn queued_work_is_done_whether_it_is_awaited_or_abandoned() {
    for mode in modes() {
        let setup = Setup::with_depth(mode, 2);
        let post = || setup.a.fetch_add(setup.word(0), 1);
        let mut posted: Vec<_> = (0..6).map(|_| post()).collect();
        // The first was never polled. The second has a waker, unless its poll finds it done.
        drop(posted.remove(2));
        let mut polled = posted.remove(3);
        drop(poll(&mut polled));
        drop(polled);
        let results: Vec<_> = posted.into_iter().map(|add| wait(add).unwrap()).collect();
        assert_eq!(results, [0, 1, 3, 5]);
        assert_eq!(setup.region.load(0), Ok(6));
    }
}

#[test]
fn receives_of_a_shared_queue_end_when_it_is_dropped_with_its_queue_pair() {
    for mode in modes() {
        let Setup { queue: _, pool, a, b, region } = Setup::new(mode.clone());
        let pd = a.protection_domain();
        let queue = CompletionQueue::new(pd.device(), mode).unwrap();
        let shared = SharedReceiveQueue::new(pd, &queue, 4, 1).unwrap();
        let sharing = QueuePair::builder(pd, &queue).shared_receive_queue(&shared).build().unwrap();
        let [mut first, second, third] = [(); 3].map(|()| shared.recv(pool.try_alloc(64).unwrap()));
        assert!(poll(&mut first).is_pending());
        drop((shared, third, queue));
        assert!(poll(&mut first).is_pending(), "messages may still arrive for its queue pair");
        drop((sharing, region, a, b));
        for receive in [first, second] {
            let error = ready(receive).unwrap_err();
            assert_eq!(error.kind(), OpErrorKind::Closed);
        }
        assert_eq!(pool.available(), 8);
    }
}

/// A waker with a reference count that Miri checks.
struct NoopWake;

impl Wake for NoopWake {
    fn wake(self: Arc<Self>) {}
}

/// Polls until `future` is ready, without using its wake-ups.
fn wait<F: Future + Unpin>(mut future: F) -> F::Output {
    let (start, waker) = (Instant::now(), Waker::from(Arc::new(NoopWake)));
    loop {
        if let Poll::Ready(output) = Pin::new(&mut future).poll(&mut Context::from_waker(&waker)) {
            return output;
        }
        assert!(start.elapsed() < HANG, "it hangs");
        thread::yield_now();
    }
}

// The reactor wakes it: no task polls the completion queue meanwhile.
// Shows M1.
#[test]
fn receive_that_waits_in_a_runtime_is_woken_by_the_event_of_its_completion() {
    let setup = Setup::new(CompletionMode::Event);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    for round in 0..2 {
        let mut receive = setup.b.recv(setup.buffer(&[0; 8]));
        thread::scope(|scope| {
            let received = runtime.block_on(async {
                let waits = std::future::poll_fn(|context| {
                    Poll::Ready(Pin::new(&mut receive).poll(context).is_pending())
                });
                assert!(waits.await, "nothing was sent yet");
                scope.spawn(|| drop(setup.a.send(setup.buffer(&[round; 8]))));
                tokio::time::timeout(HANG, receive).await
            });
            assert_eq!(received.expect("it hangs").unwrap().buffer[..], [round; 8]);
        });
    }
    drop(runtime);
    wait(setup.a.fetch_add(setup.word(0), 1)).unwrap();
    assert_eq!(setup.pool.available(), 8);
}

// Shows M1.
#[test]
fn threads_that_share_a_queue_pair_lose_no_operation() {
    let setup = &Setup::with_depth(CompletionMode::Event, 2);
    thread::scope(|scope| {
        for thread in 0..2 {
            scope.spawn(move || {
                let own = setup.grant().slice(16 + 8 * thread..24 + 8 * thread).unwrap();
                for round in 0..3 {
                    let add = setup.a.fetch_add(setup.word(0), 1);
                    drop(setup.a.fetch_add(setup.word(8), 1));
                    let write = setup.a.write(setup.buffer(&[round; 8]), own);
                    wait(add).unwrap();
                    assert_eq!(wait(write).unwrap()[..], [round; 8]);
                    let read = wait(setup.a.read(setup.buffer(&[0xff; 8]), own));
                    assert_eq!(read.unwrap()[..], [round; 8]);
                }
            });
        }
    });
    wait(setup.a.fetch_add(setup.word(8), 0)).unwrap();
    assert_eq!((setup.region.load(0), setup.region.load(8)), (Ok(6), Ok(6)));
    assert_eq!(setup.pool.available(), 8);
}

/// A waker whose functions all take the lock of the completion queue, by reading its counters.
#[allow(unsafe_code, reason = "a waker without `Wake` is made of raw parts")]
mod locking_waker {
    use std::sync::Arc;
    use std::task::{RawWaker, RawWakerVTable, Waker};

    use crate::engine::{CompletionQueue, Drainer};

    const TABLE: RawWakerVTable = RawWakerVTable::new(clone, wake, wake_by_ref, drop_waker);

    pub(super) fn new(queue: &CompletionQueue) -> Waker {
        // SAFETY: C2: the data are a reference to the queue, as each function of the table takes
        // it.
        unsafe { Waker::new(Arc::into_raw(queue.shared().clone()).cast(), &TABLE) }
    }

    unsafe fn clone(data: *const ()) -> RawWaker {
        // SAFETY: C2: a reference that the caller keeps.
        unsafe {
            wake_by_ref(data);
            Arc::increment_strong_count(data.cast::<Drainer>());
        }
        RawWaker::new(data, &TABLE)
    }

    unsafe fn wake(data: *const ()) {
        // SAFETY: C2: this function consumes the reference.
        unsafe { drop_waker(data) };
    }

    unsafe fn wake_by_ref(data: *const ()) {
        // SAFETY: C2: a reference that the caller keeps.
        unsafe { (*data.cast::<Drainer>()).counters() };
    }

    unsafe fn drop_waker(data: *const ()) {
        // SAFETY: C2: this function consumes the reference.
        unsafe { Arc::from_raw(data.cast::<Drainer>()) }.counters();
    }
}

#[test]
fn waker_that_takes_the_lock_of_the_completion_queue_is_cloned_woken_and_dropped_without_it() {
    let modes = [CompletionMode::Event, CompletionMode::Cooperative, CompletionMode::Hybrid];
    let (done, ended) = std::sync::mpsc::channel();
    let test = thread::spawn(move || {
        for mode in modes {
            let it = Setup::new(mode);
            let waker = locking_waker::new(&it.queue);
            let mut context = Context::from_waker(&waker);
            let mut receive = it.b.recv(it.buffer(&[0; 8]));
            for _ in 0..3 {
                assert!(Pin::new(&mut receive).poll(&mut context).is_pending());
            }
            ready(it.a.send(it.buffer(b"12345678"))).unwrap();
            let Poll::Ready(received) = Pin::new(&mut receive).poll(&mut context) else {
                panic!("it has arrived")
            };
            assert_eq!(received.unwrap().buffer[..], *b"12345678");
            let mut abandoned = it.b.recv(it.buffer(&[0; 8]));
            assert!(Pin::new(&mut abandoned).poll(&mut context).is_pending());
            drop(abandoned);
            ready(it.a.send(it.buffer(b"12345678"))).unwrap();
        }
        done.send(()).unwrap();
    });
    ended.recv_timeout(HANG).expect("a lock was held");
    test.join().unwrap();
}
