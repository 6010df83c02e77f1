//! WRITEs with immediate data, which notify the peer's service within the flow control of messages,
//! and messages that are sent during the call.
//!
//! Uses the device that `TOKIO_RDMA_DEVICE` names, or the software device.

use std::pin::pin;

use futures::future::{join_all, poll_immediate};
use futures::{FutureExt, StreamExt};
use tokio_rdma::connection::{Notifications, TrySendError};
use tokio_rdma::software::Network;
use tokio_rdma::types::WcStatus;
use tokio_rdma::{
    Access, CloseReason, Connection, ExposedRegion, Imm, MessageError, OpErrorKind, RemoteRegion,
};

use crate::connected::{assert_ready, config, pair, pair_in, pattern, recv, run};
use crate::torture::{device, eventually, scaled, soon};

fn exposed(owner: &Connection) -> (ExposedRegion, RemoteRegion) {
    let region = owner.expose(vec![0; 4096], Access::REMOTE_WRITE).unwrap();
    let remote = region.grant();
    (region, remote)
}

async fn notify(from: &Connection, remote: RemoteRegion, bytes: &[u8], imm: u32) {
    let buffer = from.copy_from(bytes).unwrap();
    let remote = remote.slice(..bytes.len() as u64).unwrap();
    let written = soon("write", from.write_with_imm(buffer, remote, Imm(imm))).await.unwrap();
    assert_eq!(&written[..], bytes);
}

async fn next(notifications: &mut Notifications<'_>) -> (u32, usize) {
    let notification = soon("notification", notifications.next()).await.unwrap().unwrap();
    (notification.imm.0, notification.len)
}

#[test]
fn notification_follows_its_data_and_may_carry_any_immediate() {
    run("notification", || async {
        let (a, b) = pair(&config());
        let (region, remote) = exposed(&b);
        let mut notifications = b.notifications();
        // Each would be a header of another kind.
        for (round, imm) in [0, 1 << 29, 5 << 29, u32::MAX, 77].into_iter().enumerate() {
            let bytes = pattern(round * 500, round as u64);
            notify(&a, remote, &bytes, imm).await;
            assert_eq!(next(&mut notifications).await, (imm, bytes.len()));
            let mut found = vec![0; bytes.len()];
            region.read(0, &mut found).unwrap();
            assert!(found == bytes, "round {round}");
            a.send("a message").await.unwrap();
            assert_eq!(recv(&b).await, "a message");
        }
        assert_eq!(a.counters().notifications_sent, 5);
        assert_eq!(b.counters().notifications_received, 5);
        assert_ready([&a, &b]);
    });
}

#[test]
fn notifications_use_credits_and_wait_in_order_with_messages() {
    run("credits", || async {
        let (a, b) = pair(&config().receive_buffers(4).preallocate(true).keepalive(None));
        let (_region, remote) = exposed(&b);
        let empty = || (a.try_alloc(0).unwrap(), remote.slice(..0).unwrap());
        let write = |imm| {
            let (buffer, remote) = empty();
            a.write_with_imm(buffer, remote, Imm(imm))
        };
        let mut sent = 0;
        while a.counters().credits > 3 {
            soon("write", write(sent)).await.unwrap();
            sent += 1;
        }
        assert_eq!(sent, 4 + 1, "the window, and one of the reserve");
        let message = a.try_send("a message");
        assert!(matches!(message, Err(TrySendError::Full(ref kept)) if kept == "a message"));
        // Waiting in a FIFO; the first is withdrawn.
        let (mut dropped, mut sending, mut writing) =
            (Box::pin(write(100)), pin!(a.send("a message")), pin!(write(101)));
        assert!(poll_immediate(&mut dropped).await.is_none());
        assert!(poll_immediate(&mut sending).await.is_none());
        assert!(poll_immediate(&mut writing).await.is_none());
        drop(dropped);
        let receiving = async {
            let mut notifications = b.notifications();
            for imm in 0..sent {
                assert_eq!(next(&mut notifications).await, (imm, 0));
            }
            assert_eq!(recv(&b).await, "a message");
            assert_eq!(next(&mut notifications).await, (101, 0));
        };
        let both = async { tokio::join!(sending, writing, receiving) };
        let (sent, written, ()) = soon("all", both).await;
        sent.unwrap();
        written.unwrap();
        assert_ready([&a, &b]);
    });
}

#[test]
fn both_sides_notify_and_send_without_deadlock() {
    run("both", || async {
        let (a, b) = pair(&config().receive_buffers(2));
        let ((_ours, to_a), (_theirs, to_b)) = (exposed(&a), exposed(&b));
        let count = scaled(400) as u32;
        let side = async |own: &Connection, remote: RemoteRegion| {
            let notifying = async {
                for imm in 0..count {
                    notify(own, remote, b"x", imm).await;
                }
            };
            let sending = async {
                for number in 0..count {
                    own.send(number.to_be_bytes().to_vec()).await.unwrap();
                }
            };
            let notified = async {
                let mut notifications = own.notifications();
                for imm in 0..count {
                    assert_eq!(next(&mut notifications).await, (imm, 1));
                }
            };
            let receiving = async {
                for number in 0..count {
                    assert_eq!(recv(own).await, number.to_be_bytes()[..]);
                }
            };
            tokio::join!(notifying, sending, notified, receiving);
        };
        soon("both", async { tokio::join!(side(&a, to_b), side(&b, to_a)) }).await;
        assert_ready([&a, &b]);
        let closing = async { tokio::join!(a.close(), b.close()) };
        assert_eq!(soon("close", closing).await, (Ok(()), Ok(())));
    });
}

#[test]
fn notifications_end_with_the_peer() {
    run("end", || async {
        for reason in [CloseReason::Clean, CloseReason::Dropped] {
            let (a, b) = pair(&config());
            let (_region, remote) = exposed(&b);
            notify(&a, remote, b"last", 1).await;
            let mut notifications = b.notifications();
            let mut waiting = join_all([b.notifications(), b.notifications()].map(|stream| {
                // One of all streams gets the notification.
                stream.fold(0, async |count, next| count + u32::from(next.is_ok()))
            }));
            assert!(poll_immediate(&mut waiting).await.is_none());
            if reason == CloseReason::Clean {
                a.finish().unwrap();
                let refused = a.write_with_imm(a.try_alloc(0).unwrap(), remote, Imm(2)).await;
                assert_eq!(refused.unwrap_err().kind(), OpErrorKind::Closed);
            } else {
                a.abort();
            }
            assert_eq!(soon("end", waiting).await.into_iter().sum::<u32>(), 1);
            let end = soon("end", notifications.next()).await;
            match reason {
                CloseReason::Clean => assert_eq!(end, None),
                _ => assert_eq!(end, Some(Err(MessageError::Closed(reason)))),
            }
            assert_eq!(soon("end", notifications.next()).await, None);
        }

        // A side that closes discards notifications; their credits return.
        let (a, b) = pair(&config());
        let (_region, remote) = exposed(&b);
        for imm in 0..5 {
            notify(&a, remote, b"x", imm).await;
        }
        let closing = async { tokio::join!(a.close(), b.close()) };
        assert_eq!(soon("close", closing).await, (Ok(()), Ok(())));
        assert!(b.notifications().next().now_or_never().flatten().is_some_and(|end| end.is_err()));
        let refused = a.write_with_imm(a.try_alloc(1).unwrap(), remote, Imm(2)).await.unwrap_err();
        assert_eq!((refused.kind(), refused.into_buffer().len()), (OpErrorKind::Closed, 1));
    });
}

#[test]
fn refused_notification_costs_no_credit_and_a_failed_one_closes_the_connection() {
    run("refusals", || async {
        let (a, b) = pair(&config().receive_buffers(2));
        let (region, remote) = exposed(&b);
        for _ in 0..20 {
            let long =
                a.write_with_imm(a.try_alloc(9).unwrap(), remote.slice(..8).unwrap(), Imm(1));
            let error = soon("refusal", long).await.unwrap_err();
            assert!(matches!(error.kind(), OpErrorKind::Limit(_)), "{error:?}");
            assert_eq!(error.into_buffer().len(), 9);
        }
        notify(&a, remote, b"fine", 2).await;
        assert_eq!(next(&mut b.notifications()).await, (2, 4));

        drop(region);
        let late = a.write_with_imm(a.try_alloc(4).unwrap(), remote.slice(..4).unwrap(), Imm(3));
        let error = soon("failure", late).await.unwrap_err();
        assert_eq!(error.status(), Some(WcStatus::REM_ACCESS_ERR));
        let CloseReason::Operation(kind) = soon("closed", a.closed()).await else { panic!() };
        assert_eq!(kind.status(), Some(WcStatus::REM_ACCESS_ERR));
        assert!(soon("end", b.notifications().next()).await.is_some_and(|end| end.is_err()));
    });
}

// Shows C5.
#[test]
fn try_send_sends_when_called_or_returns_the_message() {
    run("try_send", || async {
        let (_, pd) = device(&Network::new());
        let config = config().keepalive(None);
        let (a, b) =
            pair_in(&pd, &pd, &config.clone().send_buffers(2), &config.clone().receive_buffers(3));
        let mut sent: u32 = 0;
        let full = loop {
            match a.try_send(sent.to_be_bytes().to_vec()) {
                Ok(()) => sent += 1,
                Err(error) => break error,
            }
        };
        assert_eq!(full, TrySendError::Full(sent.to_be_bytes().to_vec().into()));
        assert_eq!(sent, 3 + 1, "the window, and one of the reserve");
        // Never polled, but sent.
        for number in 0..sent {
            assert_eq!(recv(&b).await, number.to_be_bytes()[..]);
        }
        eventually("credits", || a.counters().credits > 4).await;
        // Credits may still be on their way: fills the window until a message waits.
        let mut waiting = Box::pin(a.send("waits"));
        while let Some(sent) = poll_immediate(&mut waiting).await {
            sent.unwrap();
            waiting = Box::pin(a.send("waits"));
        }
        recv(&b).await;
        // It does not overtake the message that waits.
        assert!(matches!(a.try_send("y"), Err(TrySendError::Full(_))));
        a.finish().unwrap();
        assert_eq!(a.try_send("z"), Err(TrySendError::Failed(MessageError::Finished)));
    });
}
