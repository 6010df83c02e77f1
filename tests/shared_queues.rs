//! Shared receive queues under the operations of the crate.

mod torture;

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};

use tokio_rdma::software::Network;

use tokio_rdma::{CompletionMode, CompletionQueue, Pool, ProtectionDomain, QueuePair, SharedReceiveQueue};
use torture::{Flavour, LONG, bounded, connect, device, soon};

/// Polls once, from nowhere.
fn poll<F: Future + Unpin>(future: &mut F) -> Poll<F::Output> {
    Pin::new(future).poll(&mut Context::from_waker(Waker::noop()))
}

fn queue(pd: &ProtectionDomain) -> CompletionQueue {
    CompletionQueue::new(pd.device(), CompletionMode::Event).unwrap()
}

#[test]
fn receives_of_a_shared_queue_arrive_on_its_completion_queue_however_the_queue_pair_is_described() {
    bounded("receive", LONG, || {
        Flavour::CurrentThread.runtime().block_on(async {
            let (_device, pd) = device(&Network::new());
            let (own, other) = (queue(&pd), queue(&pd));
            let srq = SharedReceiveQueue::new(&pd, &own, 8, 1).unwrap();
            let pool = Pool::new(&pd, 64, 8).unwrap();
            let sender = QueuePair::new(&pd, &other).unwrap();
            let receiver =
                QueuePair::builder(&pd, &other).shared_receive_queue(&srq).receive_completions(&other).build().unwrap();
            connect(&sender, &receiver);
            // In `other`, the number of the shared queue is that of this queue, and its slot that of this receive.
            let mut bystander = sender.recv(pool.try_alloc(8).unwrap());
            let shared = srq.recv(pool.try_alloc(8).unwrap());
            soon("send", sender.send(pool.copy_from(b"hello").unwrap())).await.unwrap();
            assert!(poll(&mut bystander).is_pending(), "nothing was sent to it");
            assert_eq!(&soon("receive", shared).await.unwrap().buffer[..], b"hello");
        });
    });
}
