//! Code of a service that runs in the middle of a connection's work, and uses the connection: drops and wakers.
//!
//! Each of these hangs if a lock of the connection is held while such code runs.

#![allow(unsafe_code, reason = "memory of one's own is unsafe to implement")]

use std::pin::pin;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Wake, Waker};

use crate::connected::{config, pair_in, recv, two};
use crate::torture::{self, Flavour, LONG, Mode, Seed, bounded, slow_network};
use futures::FutureExt;
use tokio_rdma::memory::Storage;
use tokio_rdma::{Access, CloseReason, Connection, ConnectionConfig, ExposedRegion, RemoteRegion};

/// Two ends on a network that answers late, and memory of the second.
struct Setup {
    ours: Arc<Connection>,
    theirs: Connection,
    remote: RemoteRegion,
    _region: ExposedRegion,
}

impl Setup {
    fn new(seed: u64, config: &ConnectionConfig) -> Self {
        let [(_, one), (_, other)] = two(&slow_network(seed));
        let (ours, theirs) = pair_in(&one, &other, config, config);
        let region = theirs.expose(vec![0; 64], Access::REMOTE_ALL).unwrap();
        Self { ours: Arc::new(ours), theirs, remote: region.grant(), _region: region }
    }

    /// Receives nothing until `called`, without letting anybody else run: it is this end that finds what is done.
    fn look_until(&self, called: &AtomicUsize, times: usize) {
        while called.load(Ordering::SeqCst) < times {
            assert!(self.ours.recv().now_or_never().is_none());
            std::thread::yield_now();
        }
    }
}

/// In every mode in which the tasks of a connection find completions themselves.
fn everywhere(what: &'static str, test: impl Fn(Setup) + Send + Copy + 'static) {
    for mode in Mode::ALL {
        bounded(what, LONG, move || {
            let seed = Seed::new(what);
            let runtime = Flavour::CurrentThread.runtime();
            let _inside = runtime.enter();
            test(Setup::new(seed.value, &config().mode(mode.make())));
        });
    }
}

/// What uses a connection when it is dropped or woken, and counts that.
#[derive(Clone)]
struct Nosy {
    connection: Arc<Connection>,
    called: Arc<AtomicUsize>,
}

impl Nosy {
    fn new(connection: &Arc<Connection>) -> Self {
        Self { connection: connection.clone(), called: Arc::default() }
    }

    fn look(&self) {
        assert!(self.connection.counters().sent < u64::MAX);
        assert!(self.connection.recv().now_or_never().is_none());
        self.called.fetch_add(1, Ordering::SeqCst);
    }
}

/// Memory that looks when it is freed.
struct Memory(Box<[u8]>, Nosy);

// SAFETY: a boxed slice owns its heap memory alone, wherever it is moved.
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
        self.1.look();
    }
}

/// A waker that looks when it is woken.
struct Woken(Nosy);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.look();
    }
}

/// A waker that looks when it is dropped.
struct Dropped(Nosy);

impl Wake for Dropped {
    fn wake(self: Arc<Self>) {}
}

impl Drop for Dropped {
    fn drop(&mut self) {
        self.0.look();
    }
}

#[test]
fn memory_of_an_abandoned_operation_may_use_the_connection_when_it_is_dropped() {
    everywhere("memory", |setup| {
        for _ in 0..20 {
            let nosy = Nosy::new(&setup.ours);
            let memory = Memory(vec![7; 64].into(), nosy.clone());
            let buffer = setup.ours.protection_domain().register(memory).unwrap();
            drop(setup.ours.write(buffer, setup.remote));
            setup.look_until(&nosy.called, 1);
        }
    });
}

#[test]
fn waker_of_an_operation_may_use_the_connection() {
    everywhere("waker", |setup| {
        for _ in 0..20 {
            let nosy = Nosy::new(&setup.ours);
            let waker = Waker::from(Arc::new(Woken(nosy.clone())));
            let mut write = pin!(setup.ours.write(setup.ours.alloc(64).unwrap(), setup.remote));
            if write.as_mut().poll(&mut Context::from_waker(&waker)).is_pending() {
                setup.look_until(&nosy.called, 1);
            }
        }
    });
}

#[test]
fn waker_of_a_wait_may_use_the_connection_when_it_is_dropped() {
    everywhere("place in line", |setup| {
        let nosy = Nosy::new(&setup.ours);
        let new = || Waker::from(Arc::new(Dropped(nosy.clone())));
        let mut waiting = Box::pin(setup.ours.recv());
        // The line has the last share of each of the first two when the next takes its place.
        for _ in 0..3 {
            assert!(waiting.as_mut().poll(&mut Context::from_waker(&new())).is_pending());
        }
        assert_eq!(nosy.called.load(Ordering::SeqCst), 2);
        // And of the third when it leaves the line.
        drop(waiting);
        assert_eq!(nosy.called.load(Ordering::SeqCst), 3);
    });
}

/// A waker that ends the connection when it is woken.
struct Aborts(Nosy);

impl Wake for Aborts {
    fn wake(self: Arc<Self>) {
        self.0.connection.abort();
        self.0.called.fetch_add(1, Ordering::SeqCst);
    }
}

#[test]
fn waker_of_an_operation_may_abort_the_connection() {
    everywhere("abort", |setup| {
        let nosy = Nosy::new(&setup.ours);
        let waker = Waker::from(Arc::new(Aborts(nosy.clone())));
        while nosy.called.load(Ordering::SeqCst) == 0 {
            let mut write = pin!(setup.ours.write(setup.ours.alloc(64).unwrap(), setup.remote));
            if write.as_mut().poll(&mut Context::from_waker(&waker)).is_pending() {
                // It is this end that finds what is done, under its lock.
                while nosy.called.load(Ordering::SeqCst) == 0 {
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
fn connection_works_after_all_of_that() {
    bounded("works", LONG, || {
        let seed = Seed::new("connection_works_after_all_of_that");
        Flavour::CurrentThread.runtime().block_on(async {
            let setup = Setup::new(seed.value, &config());
            let nosy = Nosy::new(&setup.ours);
            for number in 0..100_u64 {
                let memory = Memory(vec![7; 64].into(), nosy.clone());
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
            torture::eventually("drops", || nosy.called.load(Ordering::SeqCst) == 100).await;
        });
    });
}
