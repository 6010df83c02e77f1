//! Wakers and destructors that use the connection which calls them.
//!
//! Each test hangs if the connection holds a lock during the call.
//!
//! Shows F2.

#![allow(unsafe_code, reason = "implementing `Storage` and `BufMut` is unsafe")]

use std::pin::pin;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Wake, Waker};

use crate::connected::{config, pair_in, recv, run, two};
use crate::streams::streams;
use crate::torture::{self, Flavour, LONG, Mode, Seed, bounded, slow_network, soon};
use bytes::BufMut;
use bytes::buf::UninitSlice;
use futures::FutureExt;
use tokio::io::{AsyncWriteExt, ReadBuf};
use tokio_rdma::memory::Storage;
use tokio_rdma::{
    Access, CloseReason, CompletionMode, CompletionQueue, Connection, ExposedRegion, RdmaStream,
    RemoteRegion,
};

struct Setup {
    ours: Arc<Connection>,
    theirs: Connection,
    remote: RemoteRegion,
    _region: ExposedRegion,
}

impl Setup {
    /// Connects two ends. All completions of ours use one queue, so that its calls, also those
    /// that wait for messages, find the completions of other operations.
    fn new(seed: u64, mode: CompletionMode) -> Self {
        let [(device, one), (_, other)] = two(&slow_network(seed));
        let queue = CompletionQueue::builder(&device).capacity(1024).mode(mode).build().unwrap();
        let (ours, theirs) = pair_in(&one, &other, &config().completion_queue(&queue), &config());
        let region = theirs.expose(vec![0; 64], Access::REMOTE_ALL).unwrap();
        Self { ours: Arc::new(ours), theirs, remote: region.grant(), _region: region }
    }

    /// Polls until `called` reaches `times`. No other task runs, so this end polls the completions.
    fn poll_until(&self, called: &AtomicUsize, times: usize) {
        while called.load(Ordering::SeqCst) < times {
            assert!(self.ours.recv().now_or_never().is_none());
            std::thread::yield_now();
        }
    }
}

fn everywhere(what: &'static str, test: impl Fn(Setup) + Send + Copy + 'static) {
    for mode in Mode::ALL {
        bounded(what, LONG, move || {
            let seed = Seed::new(what);
            let runtime = Flavour::CurrentThread.runtime();
            let _inside = runtime.enter();
            test(Setup::new(seed.value, mode.make()));
        });
    }
}

/// A connection, and how often the application used it within a call.
#[derive(Clone)]
struct Caller {
    connection: Arc<Connection>,
    called: Arc<AtomicUsize>,
}

impl Caller {
    fn new(connection: &Arc<Connection>) -> Self {
        Self { connection: connection.clone(), called: Arc::default() }
    }

    fn use_connection(&self) {
        assert!(self.connection.counters().sent < u64::MAX);
        assert!(self.connection.recv().now_or_never().is_none());
        self.called.fetch_add(1, Ordering::SeqCst);
    }
}

struct Memory(Box<[u8]>, Caller);

// SAFETY: a boxed slice alone owns its heap memory, whose address moves do not change.
unsafe impl Storage for Memory {
    fn base(&mut self) -> NonNull<u8> {
        NonNull::from(&mut *self.0).cast()
    }

    fn len(&self) -> usize {
        self.0.len()
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        self.1.use_connection();
    }
}

struct Woken(Caller);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.use_connection();
    }
}

struct Dropped(Caller);

impl Wake for Dropped {
    fn wake(self: Arc<Self>) {}
}

impl Drop for Dropped {
    fn drop(&mut self) {
        self.0.use_connection();
    }
}

#[test]
fn memory_of_an_abandoned_operation_may_use_the_connection_in_its_destructor() {
    everywhere("memory", |setup| {
        for _ in 0..20 {
            let caller = Caller::new(&setup.ours);
            let memory = Memory(vec![7; 64].into(), caller.clone());
            let buffer = setup.ours.protection_domain().register(memory).unwrap();
            drop(setup.ours.write(buffer, setup.remote));
            setup.poll_until(&caller.called, 1);
        }
    });
}

#[test]
fn waker_of_an_operation_may_use_the_connection() {
    everywhere("waker", |setup| {
        for _ in 0..20 {
            let caller = Caller::new(&setup.ours);
            let waker = Waker::from(Arc::new(Woken(caller.clone())));
            let mut write = pin!(setup.ours.write(setup.ours.try_alloc(64).unwrap(), setup.remote));
            if write.as_mut().poll(&mut Context::from_waker(&waker)).is_pending() {
                setup.poll_until(&caller.called, 1);
            }
        }
    });
}

#[test]
fn dropped_waker_may_use_the_connection() {
    everywhere("queued receive", |setup| {
        let caller = Caller::new(&setup.ours);
        let new = || Waker::from(Arc::new(Dropped(caller.clone())));
        let mut waiting = Box::pin(setup.ours.recv());
        // Each poll replaces the waker in the wait queue, which holds its last reference.
        for _ in 0..3 {
            assert!(waiting.as_mut().poll(&mut Context::from_waker(&new())).is_pending());
        }
        assert_eq!(caller.called.load(Ordering::SeqCst), 2);
        drop(waiting);
        assert_eq!(caller.called.load(Ordering::SeqCst), 3);
    });
}

/// A buffer that peeks into the stream that fills it, and counts wake-ups.
struct Peeks<'a>(&'a RdmaStream, Arc<Counts>);

#[derive(Default)]
struct Counts(AtomicUsize);

impl Wake for Counts {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

// SAFETY: it returns no memory.
unsafe impl BufMut for Peeks<'_> {
    fn remaining_mut(&self) -> usize {
        1
    }

    unsafe fn advance_mut(&mut self, _: usize) {
        unreachable!("bytes are put");
    }

    fn chunk_mut(&mut self) -> &mut UninitSlice {
        unreachable!("bytes are put");
    }

    fn put_slice(&mut self, _: &[u8]) {
        let waker = Waker::from(self.1.clone());
        let mut context = Context::from_waker(&waker);
        let peeked = self.0.poll_peek(&mut context, &mut ReadBuf::new(&mut [0; 8]));
        assert!(peeked.is_pending(), "another task takes bytes");
    }
}

#[test]
fn peek_beside_a_task_that_takes_bytes_is_polled_again_and_does_not_spin() {
    run("peek", || async {
        let [mut client, server] = streams(&config()).await;
        client.write_all(b"ab").await.unwrap();
        soon("bytes", server.readable()).await.unwrap();
        let wakes = Arc::new(Counts::default());
        assert_eq!(server.try_read_buf(&mut Peeks(&server, wakes.clone())).unwrap(), 1);
        assert_eq!(wakes.0.load(Ordering::SeqCst), 1);
        let mut rest = [0; 8];
        assert_eq!((server.peek(&mut rest).await.unwrap(), rest[0]), (1, b'b'));
    });
}

struct Aborts(Caller);

impl Wake for Aborts {
    fn wake(self: Arc<Self>) {
        self.0.connection.abort();
        self.0.called.fetch_add(1, Ordering::SeqCst);
    }
}

#[test]
fn waker_of_an_operation_may_abort_the_connection() {
    everywhere("abort", |setup| {
        let caller = Caller::new(&setup.ours);
        let waker = Waker::from(Arc::new(Aborts(caller.clone())));
        while caller.called.load(Ordering::SeqCst) == 0 {
            let mut write = pin!(setup.ours.write(setup.ours.try_alloc(64).unwrap(), setup.remote));
            if write.as_mut().poll(&mut Context::from_waker(&waker)).is_pending() {
                // This end polls the completion, under its lock.
                while caller.called.load(Ordering::SeqCst) == 0 {
                    drop(setup.ours.recv().now_or_never());
                    std::thread::yield_now();
                }
            }
        }
        assert_eq!(setup.ours.close_reason(), Some(CloseReason::Aborted));
        assert!(setup.ours.recv().now_or_never().is_some_and(|refused| refused.is_err()));
    });
}

#[test]
fn connection_works_after_reentrant_calls() {
    bounded("works", LONG, || {
        let seed = Seed::new("connection_works_after_reentrant_calls");
        Flavour::CurrentThread.runtime().block_on(async {
            let setup = Setup::new(seed.value, CompletionMode::Event);
            let caller = Caller::new(&setup.ours);
            for number in 0..100_u64 {
                let memory = Memory(vec![7; 64].into(), caller.clone());
                drop(
                    setup.ours.write(
                        setup.ours.protection_domain().register(memory).unwrap(),
                        setup.remote,
                    ),
                );
                setup.ours.send(number.to_be_bytes().to_vec()).await.unwrap();
                assert_eq!(recv(&setup.theirs).await[..], number.to_be_bytes());
            }
            setup.ours.flush().await.unwrap();
            torture::eventually("drops", || caller.called.load(Ordering::SeqCst) == 100).await;
        });
    });
}
