//! Connections whose driver's runtime does not run.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::channel;
use std::task::{Context, Poll, Waker};
use std::thread;
use std::time::Duration;

use futures::FutureExt as _;
use tokio::runtime::{Builder, Runtime};
use tokio::task::yield_now;

use crate::connection::{Connection, ConnectionConfig};
use crate::contained::tests::{Counts, HANG};
use crate::software::{Faults, Network};
use crate::verbs::Device;

fn runtime() -> Runtime {
    Builder::new_current_thread().enable_all().build().unwrap()
}

/// Connects two sides in `runtime`, and runs their drivers once.
fn connect(runtime: &Runtime, network: &Network) -> [Connection; 2] {
    let device = Device::software_in(network, "stopped").unwrap();
    let pd = device.protection_domain().unwrap();
    runtime.block_on(async {
        let prepare = || Connection::prepare(&pd, &ConnectionConfig::default()).unwrap();
        let (ours, theirs) = (prepare(), prepare());
        let ends = [&ours, &theirs].map(|side| (side.endpoint(), side.handshake(b"").unwrap()));
        let connections = [
            ours.establish(&ends[1].0, &ends[1].1).unwrap(),
            theirs.establish(&ends[0].0, &ends[0].1).unwrap(),
        ];
        yield_now().await;
        connections
    })
}

#[test]
fn completion_found_while_another_thread_has_the_lock_wakes_the_receiver() {
    let (stopped, running) = (runtime(), runtime());
    let [ours, theirs] = connect(&stopped, &Network::new());
    let (counts, shared) = (Arc::new(Counts::default()), theirs.handle().shared.clone());
    let waker = Waker::from(counts.clone());
    let mut receiving = Box::pin(theirs.recv());
    running.block_on(async {
        assert!(receiving.poll_unpin(&mut Context::from_waker(&waker)).is_pending());
    });
    let ((locked, is_locked), (served, is_served)) = (channel(), channel::<()>());
    thread::scope(|scope| {
        scope.spawn(move || {
            shared.with(|_, _| {
                locked.send(()).unwrap();
                // Ends early if the other thread does not wait for the lock.
                let _ = is_served.recv_timeout(Duration::from_millis(200));
            });
        });
        is_locked.recv().unwrap();
        running.block_on(async {
            ours.send("message").await.unwrap();
            // The task that serves the channel finds the completion.
            for _ in 0..100 {
                yield_now().await;
            }
        });
        drop(served);
    });
    assert_eq!(counts.0.load(Ordering::Relaxed), 1);
    let mut context = Context::from_waker(&waker);
    assert!(matches!(
        receiving.poll_unpin(&mut context),
        Poll::Ready(Ok(Some(message))) if message == "message"
    ));
}

#[test]
fn long_message_is_received_by_a_task_of_another_runtime() {
    let delay = Duration::from_millis(1);
    let network = Network::with_faults(1, Faults::none().delay(delay..2 * delay));
    let (stopped, running) = (runtime(), runtime());
    let [ours, theirs] = connect(&stopped, &network);
    running.block_on(async {
        // A task of its own: the end of the time limit does not poll it.
        let exchange = tokio::spawn(async move {
            ours.send(vec![7; 100_000]).await.unwrap();
            assert!(theirs.recv().await.unwrap().unwrap() == vec![7; 100_000]);
        });
        tokio::time::timeout(HANG, exchange).await.expect("it hangs").unwrap();
    });
}
