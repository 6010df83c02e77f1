//! Shared receive queues and resets of queue pairs, in the operation layer.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};
use std::thread;

use crate::torture::{Flavour, LONG, bounded, connect, device, scaled, soon};
use tokio_rdma::error::LimitError;
use tokio_rdma::software::Network;
use tokio_rdma::types::{Qkey, QpAttr, QpState, Transport};
use tokio_rdma::{
    Access, CompletionMode, CompletionQueue, OpErrorKind, Pool, ProtectionDomain, QueuePair,
    SetupError, SharedReceiveQueue,
};

fn poll<F: Future + Unpin>(future: &mut F) -> Poll<F::Output> {
    Pin::new(future).poll(&mut Context::from_waker(Waker::noop()))
}

fn queue(pd: &ProtectionDomain) -> CompletionQueue {
    CompletionQueue::new(pd.device(), CompletionMode::Event).unwrap()
}

#[test]
fn shared_receives_complete_on_the_completion_queue_of_their_queue() {
    bounded("receive", LONG, || {
        Flavour::CurrentThread.runtime().block_on(async {
            let (_device, pd) = device(&Network::new());
            let (own, other) = (queue(&pd), queue(&pd));
            let srq = SharedReceiveQueue::new(&pd, &own, 8, 1).unwrap();
            let pool = Pool::new(&pd, 64, 8).unwrap();
            let sender = QueuePair::new(&pd, &other).unwrap();
            let sharing = || QueuePair::builder(&pd, &other).shared_receive_queue(&srq);
            let elsewhere = sharing().receive_completions(&other).build().unwrap_err();
            assert_eq!(
                elsewhere,
                SetupError::OtherCompletionQueue { asked: other.id(), queue: own.id() }
            );
            let with_own = sharing().max_recv_wr(1).build().unwrap_err();
            let field = "max_recv_wr beside a shared receive queue";
            assert_eq!(with_own, SetupError::Limit(LimitError { field, asked: 1, allowed: 0 }));
            let receiver = sharing().receive_completions(&own).max_recv_wr(0).build().unwrap();
            assert_eq!(receiver.caps().max_recv_wr, 0);
            connect(&sender, &receiver);
            // A receive with the same queue number and slot in `other` as the shared receive has in
            // `own`: completions of one must not reach the other.
            let mut bystander = sender.recv(pool.try_alloc(8).unwrap());
            let shared = srq.recv(pool.try_alloc(8).unwrap());
            soon("send", sender.send(pool.copy_from(b"hello").unwrap())).await.unwrap();
            assert!(poll(&mut bystander).is_pending(), "the message was for the shared queue");
            assert_eq!(&soon("receive", shared).await.unwrap().buffer[..], b"hello");
        });
    });
}

#[test]
fn invalid_queue_pair_and_pool_settings_are_refused_by_name() {
    let (_device, pd) = device(&Network::new());
    let own = queue(&pd);
    let builder = || QueuePair::builder(&pd, &own);
    let keyed = builder().qkey(Qkey(7)).build().unwrap_err();
    assert!(matches!(keyed, SetupError::Unsupported { what } if what.contains("qkey")), "{keyed}");
    let reached =
        builder().transport(Transport::Ud).access(Access::REMOTE_READ).build().unwrap_err();
    assert!(
        matches!(reached, SetupError::Unsupported { what } if what.contains("access")),
        "{reached}"
    );
    // Sizes may be rounded up.
    let granted =
        builder().max_send_wr(3).max_recv_wr(3).max_sge(1).max_inline(1).build().unwrap().caps();
    assert!(
        granted.max_send_wr >= 3 && granted.max_recv_wr >= 3 && granted.max_inline >= 1,
        "{granted:?}"
    );
    let shared = SharedReceiveQueue::new(&pd, &own, 3, 1).unwrap().caps();
    assert!(shared.max_wr >= 3 && shared.max_sge >= 1, "{shared:?}");
    let none = Pool::new(&pd, 64, 0).unwrap_err();
    assert_eq!(none, SetupError::TooSmall { field: "buffers", asked: 0, least: 1 });
    let none = Pool::new(&pd, 0, 1).unwrap_err();
    assert_eq!(none, SetupError::TooSmall { field: "buffer_size", asked: 0, least: 1 });
}

#[test]
fn completed_shared_receive_outlives_its_queue_pair() {
    bounded("receive", LONG, || {
        Flavour::CurrentThread.runtime().block_on(async {
            for reset in [false, true] {
                let (_device, pd) = device(&Network::new());
                let (own, other) = (queue(&pd), queue(&pd));
                let srq = SharedReceiveQueue::new(&pd, &own, 8, 1).unwrap();
                let pool = Pool::new(&pd, 64, 8).unwrap();
                let sender = QueuePair::new(&pd, &other).unwrap();
                let receiver =
                    QueuePair::builder(&pd, &other).shared_receive_queue(&srq).build().unwrap();
                connect(&sender, &receiver);
                let receive = srq.recv(pool.try_alloc(8).unwrap());
                soon("send", sender.send(pool.copy_from(b"hello").unwrap())).await.unwrap();
                if reset {
                    receiver.modify(&QpAttr::to_state(QpState::Reset)).unwrap();
                }
                drop(receiver);
                assert_eq!(&soon("receive", receive).await.unwrap().buffer[..], b"hello");
            }
        });
    });
}

#[test]
fn reset_keeps_receives_posted_after_it() {
    bounded("reset", LONG, || {
        let (_device, pd) = device(&Network::new());
        let completions = queue(&pd);
        let pool = Pool::new(&pd, 64, 256).unwrap();
        let init = QpAttr {
            pkey_index: Some(0),
            port: Some(tokio_rdma::types::PortNum(1)),
            access: Some(Access::empty()),
            ..QpAttr::to_state(QpState::Init)
        };
        for round in 0..scaled(if cfg!(debug_assertions) { 60 } else { 300 }) {
            let qp = QueuePair::new(&pd, &completions).unwrap();
            // Many receives, so that the reset takes a while.
            let before: Vec<_> = (0..100).map(|_| qp.recv(pool.try_alloc(8).unwrap())).collect();
            qp.modify(&QpAttr::to_state(QpState::Err)).unwrap();
            let other = qp.clone();
            let resets =
                thread::spawn(move || other.modify(&QpAttr::to_state(QpState::Reset)).unwrap());
            while qp.query().unwrap().0 != QpState::Reset {
                std::hint::spin_loop();
            }
            qp.modify(&init).unwrap();
            let mut after = qp.recv(pool.try_alloc(8).unwrap());
            resets.join().unwrap();
            if let Poll::Ready(ended) = poll(&mut after) {
                assert!(
                    !matches!(ended.unwrap_err().kind(), OpErrorKind::Closed),
                    "round {round}: returned as closed although posted"
                );
            }
            drop((before, after, qp));
        }
    });
}
