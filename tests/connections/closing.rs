//! Closing of connections: clean, half, dropped, aborted, timed out, or with lost devices and
//! runtimes.
//!
//! Uses the device that `TOKIO_RDMA_DEVICE` names, or the software device.

use std::time::Duration;

use crate::connected::{self, config, config_of_lost_peer, pair, pair_in, pattern, recv, run, two};
use crate::torture::{
    Flavour, LONG, Mode, Seed, bounded, device, eventually, hardware, scaled, slow_network, soon,
    yields,
};
use futures::future::poll_immediate;
use futures::{FutureExt, StreamExt};
use tokio::time::timeout;
use tokio_rdma::op::RetryConfig;
use tokio_rdma::software::Network;
use tokio_rdma::types::{AckTimeout, WcStatus};
use tokio_rdma::{
    Access, Batch, CloseReason, Connection, ConnectionConfig, Device, Listener, MessageError,
    OpError, OpErrorKind, Pool,
};

fn closed<T>(result: Result<T, MessageError>) -> CloseReason {
    match result {
        Err(MessageError::Closed(reason)) => reason,
        Err(other) => panic!("{other:?}"),
        Ok(_) => panic!("not closed"),
    }
}

async fn send_until_closed(connection: &Connection) -> CloseReason {
    loop {
        match connection.send("x").await {
            Ok(()) => tokio::task::yield_now().await,
            refused => return closed(refused),
        }
    }
}

async fn by_address(device: &Device, config: &ConnectionConfig) -> (Connection, Connection) {
    let listener = Listener::bind_with(device, connected::address(device), config).await.unwrap();
    let connecting = Connection::connect_with(device, listener.local_addr().unwrap(), config);
    soon("connect", async { tokio::try_join!(connecting, listener.accept()) }).await.unwrap()
}

#[test]
fn simultaneous_close_is_clean() {
    run("both close", || async {
        let (a, b) = pair(&config());
        a.send(pattern(100, 1)).await.unwrap();
        let (first, second) = soon("close", async { tokio::join!(a.close(), b.close()) }).await;
        assert_eq!((first, second), (Ok(()), Ok(())));
        assert_eq!(b.counters().discarded, 1);
        assert_eq!(a.close_reason(), Some(CloseReason::Clean));
        assert_eq!(soon("again", a.close()).await, Ok(()));
        assert_eq!(closed(a.send("x").await), CloseReason::Clean);
        assert_eq!(
            a.write(a.copy_from(b"x").unwrap(), grant_of(&b)).await.unwrap_err().kind(),
            OpErrorKind::Closed
        );
    });
}

fn grant_of(connection: &Connection) -> tokio_rdma::RemoteRegion {
    connection.expose(vec![0; 64], Access::REMOTE_ALL).unwrap().grant()
}

#[test]
fn close_delivers_sent_messages_before_the_end() {
    run("flush", || async {
        let (a, b) = pair(&config());
        let sent: Vec<_> = [10, 9_000, 3_000_000, 0, 500_000]
            .into_iter()
            .map(|len| pattern(len, len as u64))
            .collect();
        let closing = async {
            for message in &sent {
                a.send(message.clone()).await.unwrap();
            }
            soon("close", a.close()).await
        };
        let receiving = async {
            for message in &sent {
                assert!(recv(&b).await == *message);
            }
            assert_eq!(soon("end", b.recv()).await, Ok(None));
            assert_eq!(soon("end", b.recv()).await, Ok(None));
            soon("close", b.close()).await
        };
        assert_eq!(tokio::join!(closing, receiving), (Ok(()), Ok(())));
    });
}

#[test]
fn finished_end_still_receives() {
    run("half-close", || async {
        let (a, b) = pair(&config().receive_buffers(4));
        a.send("last").await.unwrap();
        a.finish().unwrap();
        assert_eq!(a.send("more").await, Err(MessageError::Finished));
        assert_eq!(recv(&b).await, "last");
        assert_eq!(soon("end", b.recv()).await, Ok(None));
        for number in 0..scaled(200) {
            let message = pattern([10, 20_000][number as usize % 2], number);
            let (sent, received) =
                soon("message", async { tokio::join!(b.send(message.clone()), a.recv()) }).await;
            sent.unwrap();
            assert!(received.unwrap().unwrap() == message);
        }
        b.finish().unwrap();
        assert_eq!(soon("end", a.recv()).await, Ok(None));
        while a.close_reason().is_none() || b.close_reason().is_none() {
            tokio::task::yield_now().await;
        }
        assert_eq!(
            (a.close_reason(), b.close_reason()),
            (Some(CloseReason::Clean), Some(CloseReason::Clean))
        );
    });
}

#[test]
fn drop_is_clean_only_after_the_end_was_received() {
    run("drop", || async {
        let (a, b) = pair(&config());
        let serving = async {
            while b.recv().await.unwrap().is_some() {}
            drop(b);
        };
        a.send("x").await.unwrap();
        let (closed_a, ()) = soon("close", async { tokio::join!(a.close(), serving) }).await;
        assert_eq!(closed_a, Ok(()));

        let (a, b) = pair(&config());
        b.send("before").await.unwrap();
        drop(b);
        assert_eq!(recv(&a).await, "before");
        assert_eq!(closed(soon("reason", a.recv()).await), CloseReason::Dropped);
        assert_eq!(closed(a.send("x").await), CloseReason::Dropped);
        assert_eq!(closed(soon("close", a.close()).await), CloseReason::Dropped);
        let mut receiving = a;
        assert!(receiving.next().await.unwrap().is_err() && receiving.next().await.is_none());
    });
}

#[test]
fn waiting_sends_and_receives_end_with_the_connection() {
    run("waiting", || async {
        let (a, b) = pair(&config().receive_buffers(1).preallocate(true));
        while a.send("fill").now_or_never().is_some() {}
        let (a, other) = (std::sync::Arc::new(a), std::sync::Arc::new(b));
        let waiting = {
            let a = a.clone();
            tokio::spawn(async move { tokio::join!(a.send("waits"), a.recv(), a.flush()) })
        };
        tokio::task::yield_now().await;
        drop(other);
        let (sent, received, _) = soon("waiters", waiting).await.unwrap();
        assert_eq!((closed(sent), closed(received)), (CloseReason::Dropped, CloseReason::Dropped));

        let (a, b) = pair(&config());
        let a = std::sync::Arc::new(a);
        let waiting = tokio::spawn({
            let a = a.clone();
            async move { a.recv().await }
        });
        tokio::task::yield_now().await;
        let (closing, other) = soon("close", async { tokio::join!(a.close(), b.close()) }).await;
        assert_eq!((closing, other), (Ok(()), Ok(())));
        assert!(matches!(soon("receive", waiting).await.unwrap(), Ok(None) | Err(_)));
    });
}

// Shows E2.
#[test]
fn close_waits_for_the_peer_until_the_deadline() {
    run("late", || async {
        let (a, b) = pair(&config().close_timeout(Duration::from_millis(50)));
        assert_eq!(closed(soon("close", a.close()).await), CloseReason::CloseTimeout);
        assert_eq!(soon("end", b.recv()).await, Ok(None));
        let reason = soon("reason", send_until_closed(&b)).await;
        assert_ne!(reason, CloseReason::Clean);
    });
}

#[test]
fn lost_peer_device_is_detected_by_sends_and_by_keepalive() {
    for asks in [true, false] {
        bounded("gone", LONG, move || {
            Flavour::CurrentThread.runtime().block_on(async {
                let network = Network::new();
                let [(_, a_pd), (_two, b_pd)] = two(&network);
                let keepalive =
                    asks.then_some((Duration::from_millis(20), Duration::from_millis(200)));
                let config = config_of_lost_peer().keepalive(keepalive);
                let (a, b) = pair_in(&a_pd, &b_pd, &config, &config);
                a.send("there").await.unwrap();
                assert_eq!(recv(&b).await, "there");
                network.control("two").unwrap().set_port(false);
                if !asks {
                    a.send("gone").await.unwrap();
                }
                let reason = closed(soon("notices", a.recv()).await);
                let lost = matches!(
                    reason,
                    CloseReason::Operation(kind)
                        if kind.status() == Some(WcStatus::RETRY_EXC_ERR)
                );
                assert!(lost || asks && reason == CloseReason::Silent, "{reason:?}");
            });
        });
    }
}

#[test]
fn close_with_undelivered_messages_is_not_clean() {
    run("lost at the end", || async {
        let network = Network::new();
        let [(_, a_pd), (_two, b_pd)] = two(&network);
        let config = config_of_lost_peer();
        let (a, b) = pair_in(&a_pd, &b_pd, &config, &config);
        b.finish().unwrap();
        assert_eq!(soon("end", a.recv()).await, Ok(None));
        network.control("two").unwrap().set_port(false);
        a.send("never arrives").await.unwrap();
        let reason = closed(soon("close", a.close()).await);
        assert!(
            matches!(
                reason,
                CloseReason::Operation(kind) if kind.status() == Some(WcStatus::RETRY_EXC_ERR)
            ),
            "{reason:?}"
        );
        drop(b);
    });
}

#[test]
fn idle_connection_is_kept_alive_by_acks() {
    run("quiet", || async {
        // Long enough for an overloaded machine. An end pings again when it expires.
        let (a, b) =
            pair(&config().keepalive(Some((Duration::from_millis(5), Duration::from_secs(2)))));
        // The applications are idle, so all acknowledgements answer pings.
        let acks = || a.counters().acks.min(b.counters().acks);
        eventually("acks", || acks() >= 2 || a.close_reason().or(b.close_reason()).is_some()).await;
        assert_eq!((a.close_reason(), b.close_reason()), (None, None));
        a.send("x").await.unwrap();
        assert_eq!(recv(&b).await, "x");
    });
}

#[test]
fn stall_timeout_closes_a_connection_whose_peer_receives_nothing() {
    run("stalled", || async {
        let (a, _b) =
            pair(&config().receive_buffers(2).stall_timeout(Some(Duration::from_millis(60))));
        let reason = soon("stall", send_until_closed(&a)).await;
        assert_eq!(reason, CloseReason::Stalled);
    });
}

#[test]
fn failed_operation_is_the_close_reason() {
    run("operation", || async {
        let (a, b) = pair(&config());
        let region = b.expose(vec![0; 64], Access::REMOTE_READ).unwrap();
        let refused = a.write(a.copy_from(b"no").unwrap(), region.grant()).await.unwrap_err();
        assert_eq!(refused.status(), Some(WcStatus::REM_ACCESS_ERR));
        // The reason is the failed operation, not the flush of the receives.
        let reason = closed(soon("ends", a.recv()).await);
        assert_eq!(reason, CloseReason::Operation(refused.kind()));
        assert_eq!(a.close_reason(), Some(reason));
        assert!(matches!(closed(soon("ends", b.recv()).await), CloseReason::Operation(_)));
    });
}

#[test]
fn failed_abandoned_operation_is_the_close_reason() {
    run("abandoned", || async {
        let (a, b) = pair(&config());
        let region = b.expose(vec![0; 64], Access::REMOTE_READ).unwrap();
        let mut batch = Batch::new();
        for _ in 0..4 {
            batch.write(a.copy_from(b"no").unwrap(), region.grant());
        }
        drop(a.post_batch(batch));
        // This send may fail because of the operation.
        drop(a.send("behind").await);
        let reason = closed(soon("ends", a.recv()).await);
        assert_eq!(status(reason), Some(WcStatus::REM_ACCESS_ERR), "{reason:?}");
    });
}

#[test]
fn unanswered_operation_is_the_close_reason() {
    run("dead", || async {
        let network = Network::new();
        let [(_, a_pd), (_two, b_pd)] = two(&network);
        let config = config_of_lost_peer().keepalive(None);
        let (a, b) = pair_in(&a_pd, &b_pd, &config, &config);
        let remote = grant_of(&b);
        network.control("two").unwrap().set_port(false);
        let waiting = a.read(a.try_alloc(8).unwrap(), remote);
        drop(a.write(a.copy_from(b"lost").unwrap(), remote));
        let reason = closed(soon("notices", a.recv()).await);
        assert_eq!(status(reason), Some(WcStatus::RETRY_EXC_ERR), "{reason:?}");
        assert_eq!(
            soon("read", waiting).await.unwrap_err().status(),
            Some(WcStatus::RETRY_EXC_ERR)
        );
    });
}

fn status(reason: CloseReason) -> Option<WcStatus> {
    match reason {
        CloseReason::Operation(kind) => kind.status(),
        _ => None,
    }
}

/// Returns whether an operation may have this result after an abort.
fn may_be_aborted<T, B>(result: &Result<T, OpError<B>>) -> bool {
    match result {
        Ok(_) => true,
        Err(error) => {
            error.kind() == OpErrorKind::Closed || error.status() == Some(WcStatus::WR_FLUSH_ERR)
        }
    }
}

async fn recv_until_closed(connection: &Connection) -> CloseReason {
    loop {
        match connection.recv().await {
            Ok(Some(_)) => {}
            refused => return closed(refused),
        }
    }
}

// Shows S1.
#[test]
fn abort_closes_both_ends_with_work_in_flight() {
    let seed = Seed::new("--test connections abort_closes_both_ends");
    let value = seed.value;
    run("abort", move || async move {
        let (_, pd) = device(&slow_network(value));
        let config = config().max_send_wr(8);
        let config = match hardware() {
            Some(_) => config,
            // A live peer must not exceed its retries on the slow network.
            None => config.retries(RetryConfig {
                timeout: AckTimeout::from_code(18),
                retry_count: 1,
                ..Default::default()
            }),
        };
        let (a, b) = pair_in(&pd, &pd, &config, &config);
        let [ours, theirs] =
            [&a, &b].map(|end| end.expose(vec![0; 4096], Access::REMOTE_ALL).unwrap());
        let pools = [&a, &b].map(|end| Pool::new(end.protection_domain(), 512, 48).unwrap());
        let (a, b) = (std::sync::Arc::new(a), std::sync::Arc::new(b));
        let waiting = [&a, &b].map(|end| {
            let end = end.clone();
            tokio::spawn(async move { recv_until_closed(&end).await })
        });
        for len in [10, 1000, 3 << 20] {
            a.send(pattern(len, 1)).await.unwrap();
            b.send(pattern(len, 2)).await.unwrap();
        }
        // More than the queues hold.
        let buffer = |end: usize| pools[end].try_alloc(512).unwrap();
        let writes: Vec<_> = (0..32).map(|_| a.write(buffer(0), theirs.grant())).collect();
        let adds: Vec<_> =
            (0..8).map(|_| a.fetch_add(theirs.grant().slice(..8).unwrap(), 1)).collect();
        let mut batch = Batch::new();
        for _ in 0..8 {
            batch.read(buffer(0), theirs.grant());
        }
        let batch = a.post_batch(batch);
        let reads: Vec<_> = (0..32).map(|_| b.read(buffer(1), ours.grant())).collect();
        drop(a.write(buffer(0), theirs.grant()));

        a.abort();
        assert_eq!(a.close_reason(), Some(CloseReason::Aborted));
        assert_eq!(closed(a.send("x").await), CloseReason::Aborted);
        assert_eq!(closed(a.recv().await), CloseReason::Aborted);
        assert_eq!(closed(a.flush().await), CloseReason::Aborted);
        let late = a.write(buffer(0), theirs.grant()).await.unwrap_err();
        assert_eq!(late.kind(), OpErrorKind::Closed);
        drop(late);
        a.abort();

        // The peer receives the abort frame, or its operations fail.
        let reason = soon("peer", send_until_closed(&b)).await;
        let flushed = [WcStatus::RETRY_EXC_ERR, WcStatus::WR_FLUSH_ERR].map(Some);
        assert!(reason == CloseReason::Dropped || flushed.contains(&status(reason)), "{reason:?}");
        let [our_wait, their_wait] = waiting;
        assert_eq!(soon("waits", our_wait).await.unwrap(), CloseReason::Aborted);
        assert_eq!(soon("waits", their_wait).await.unwrap(), reason);

        for write in writes {
            let result = soon("write", write).await;
            assert!(may_be_aborted(&result), "{result:?}");
        }
        for add in adds {
            let result = soon("add", add).await;
            assert!(may_be_aborted(&result), "{result:?}");
        }
        for result in soon("batch", batch).await.results() {
            let flushed = |kind: OpErrorKind| kind.status() == Some(WcStatus::WR_FLUSH_ERR);
            assert!(
                result.is_ok()
                    || result.is_err_and(|kind| kind == OpErrorKind::Closed || flushed(kind))
            );
        }
        for read in reads {
            drop(soon("read", read).await);
        }
        assert_eq!(closed(soon("close", a.close()).await), CloseReason::Aborted);
        assert!(soon("close", b.close()).await.is_err());
        eventually("all buffers", || pools.iter().all(|pool| pool.available() == 48)).await;
    });
    drop(seed);
}

#[test]
fn abort_notifies_the_peer_after_sent_messages() {
    run("abort notification", || async {
        let (a, b) = pair(&config());
        a.send("before").await.unwrap();
        b.send("not received").await.unwrap();
        eventually("arrival", || a.counters().inbox == 1).await;
        a.abort();
        // Received messages are discarded at the abort, not at the drop.
        assert_eq!((a.counters().inbox, a.counters().discarded), (0, 1));
        assert_eq!(recv(&b).await, "before");
        assert_eq!(closed(soon("abort", b.recv()).await), CloseReason::Dropped);
        assert_eq!(closed(a.recv().await), CloseReason::Aborted);
        assert_eq!(closed(soon("close", a.close()).await), CloseReason::Aborted);
        let mut receiving = a;
        assert!(receiving.next().await.unwrap().is_err() && receiving.next().await.is_none());

        // With an address, the connection manager disconnects as well.
        let (device, _) = device(&Network::new());
        let (a, b) = by_address(&device, &config()).await;
        a.abort();
        let reason = closed(soon("abort", b.recv()).await);
        assert!(matches!(reason, CloseReason::Dropped | CloseReason::Disconnected), "{reason:?}");
        assert_eq!(a.close_reason(), Some(CloseReason::Aborted));

        for by_sender in [true, false] {
            let (a, b) = pair(&config());
            let (sender, receiver) = (a.clone(), a);
            let receiving = tokio::spawn(async move {
                if by_sender {
                    return (Some(receiver.recv().await), receiver);
                }
                receiver.abort();
                (None, receiver)
            });
            tokio::task::yield_now().await;
            if by_sender {
                sender.abort();
            }
            let (received, receiver) = soon("receiver", receiving).await.unwrap();
            assert!(received.is_none_or(|received| closed(received) == CloseReason::Aborted));
            let refused = sender.send("late").await.unwrap_err();
            assert!(matches!(refused, MessageError::Closed(CloseReason::Aborted)), "{refused:?}");
            assert_eq!(closed(soon("abort", b.recv()).await), CloseReason::Dropped);
            drop((sender, receiver));
        }
    });
}

// Shows E2.
#[test]
fn abort_ends_unanswered_operations() {
    run("silence", || async {
        let network = Network::new();
        let [(_, a_pd), (_two, b_pd)] = two(&network);
        // Without an ACK timeout, only an abort ends the operations.
        let options = RetryConfig { timeout: AckTimeout::from_code(0), ..Default::default() };
        let config = config().keepalive(None).retries(options);
        let (a, b) = pair_in(&a_pd, &b_pd, &config, &config);
        let remote = grant_of(&b);
        network.control("two").unwrap().set_port(false);
        let pool = Pool::new(a.protection_domain(), 64, 4).unwrap();
        a.send("never arrives").await.unwrap();
        let write = a.write(pool.try_alloc(64).unwrap(), remote);
        let read = a.read(pool.try_alloc(64).unwrap(), remote);
        let mut batch = Batch::new();
        for _ in 0..2 {
            batch.read(pool.try_alloc(64).unwrap(), remote);
        }
        let batch = a.post_batch(batch);
        let a = std::sync::Arc::new(a);
        let closing = tokio::spawn({
            let a = a.clone();
            async move { a.close().await }
        });
        tokio::task::yield_now().await;
        assert_eq!((a.close_reason(), pool.available()), (None, 0));
        a.abort();
        assert!(soon("write", write).await.is_err() && soon("read", read).await.is_err());
        assert!(soon("batch", batch).await.results().iter().all(Result::is_err));
        assert_eq!(closed(soon("close", closing).await.unwrap()), CloseReason::Aborted);
        eventually("all buffers", || pool.available() == 4).await;
    });
}

// Shows E2.
#[test]
fn abort_ends_queued_work_after_its_runtime_is_dropped() {
    for mode in Mode::ALL {
        bounded("no runtime", LONG, move || {
            connected::use_mode(mode);
            let network = Network::new();
            let [(_, a_pd), (_two, b_pd)] = two(&network);
            // Without an ACK timeout, only closing the queue pair frees slots.
            let options = RetryConfig { timeout: AckTimeout::from_code(0), ..Default::default() };
            let config = config().keepalive(None).retries(options).max_send_wr(4);
            let (first, second) =
                (Flavour::CurrentThread.runtime(), Flavour::CurrentThread.runtime());
            let pool = Pool::new(&a_pd, 64, 16).unwrap();
            // Without an await, the driver task does not run and close the queue pair.
            let (a, _b, writes, batches) = first.block_on(async {
                let (a, b) = pair_in(&a_pd, &b_pd, &config, &config);
                let remote = grant_of(&b);
                network.control("two").unwrap().set_port(false);
                let buffer = || pool.try_alloc(64).unwrap();
                let batch = |reads| {
                    let mut batch = Batch::new();
                    for _ in 0..reads {
                        batch.read(buffer(), remote);
                    }
                    a.post_batch(batch)
                };
                let mut writes = vec![a.write(buffer(), remote)];
                // The wait queue holds a part of a batch, WRITEs, and a whole batch.
                let mut batches = vec![batch(5)];
                writes.extend((0..4).map(|_| a.write(buffer(), remote)));
                batches.push(batch(3));
                drop(a.write(buffer(), remote));
                a.abort();
                (a, b, writes, batches)
            });
            drop(first);
            assert_eq!(a.close_reason(), Some(CloseReason::Aborted));
            second.block_on(async {
                for write in writes {
                    assert!(soon("write", write).await.is_err());
                }
                for batch in batches {
                    assert!(soon("batch", batch).await.results().iter().all(Result::is_err));
                }
                assert_eq!(closed(soon("close", a.close()).await), CloseReason::Aborted);
                eventually("all buffers", || pool.available() == 16).await;
            });
        });
    }
}

#[test]
fn abort_after_close_changes_nothing() {
    run("over", || async {
        let (a, b) = pair(&config());
        let (first, second) = soon("close", async { tokio::join!(a.close(), b.close()) }).await;
        assert_eq!((first, second), (Ok(()), Ok(())));
        a.abort();
        assert_eq!(a.close_reason(), Some(CloseReason::Clean));
        assert_eq!(soon("again", a.close()).await, Ok(()));
    });
}

#[test]
fn lost_device_closes_both_ends_with_an_error() {
    run("lost", || async {
        let network = Network::new();
        let [(_, a_pd), (_two, b_pd)] = two(&network);
        let config = config_of_lost_peer();
        let (a, b) = pair_in(&a_pd, &b_pd, &config, &config);
        network.control("two").unwrap().kill();
        assert!(matches!(closed(soon("b", b.recv()).await), CloseReason::Operation(_)));
        a.send("x").await.unwrap();
        assert!(matches!(closed(soon("a", a.recv()).await), CloseReason::Operation(_)));
    });
}

#[test]
fn runtime_shutdown_closes_its_connections() {
    // A current-thread runtime may shut down before polling a spawned task.
    for flavour in [Flavour::MultiThread, Flavour::CurrentThread] {
        bounded("runtime", LONG, move || {
            let (first, second) = (flavour.runtime(), Flavour::CurrentThread.runtime());
            let (a, b) = first.block_on(async { pair(&config()) });
            drop(first);
            second.block_on(async {
                for end in [&a, &b] {
                    assert_eq!(closed(soon("end", end.recv()).await), CloseReason::Runtime);
                    assert_eq!(closed(soon("close", end.close()).await), CloseReason::Runtime);
                }
            });
            // Drops the ends outside of any runtime.
            drop((a, b));
        });
    }
}

#[test]
fn connection_by_address_carries_user_data_and_detects_a_dropped_peer() {
    run("by address", || async {
        let (device, _) = device(&Network::new());
        let listener = Listener::bind_with(
            &device,
            connected::address(&device),
            &config().user_data("server\0\0"),
        )
        .await
        .unwrap();
        let address = listener.local_addr().unwrap();
        let client = config().user_data("client\0");
        let connecting = Connection::connect_with(&device, address, &client);
        let (a, b) = soon("connect", async { tokio::try_join!(connecting, listener.accept()) })
            .await
            .unwrap();
        assert_eq!(
            (&a.user_data()[..], &b.user_data()[..]),
            (&b"server\0\0"[..], &b"client\0"[..])
        );
        assert_eq!((a.peer_addr().unwrap(), b.local_addr().unwrap()), (address, address));
        let exchange = async {
            a.send(pattern(100_000, 1)).await.unwrap();
            assert!(recv(&b).await == pattern(100_000, 1));
        };
        soon("exchange", exchange).await;
        // Memory exposed to one peer is inaccessible to another.
        let (c, _d) = by_address(&device, &config()).await;
        let region = b.expose(vec![0; 8], Access::REMOTE_ALL).unwrap();
        assert!(a.fetch_add(region.grant(), 1).await.is_ok());
        assert_eq!(
            c.fetch_add(region.grant(), 1).await.unwrap_err().status(),
            Some(WcStatus::REM_ACCESS_ERR)
        );
        drop(b);
        let reason = closed(soon("drop", a.recv()).await);
        assert!(matches!(reason, CloseReason::Dropped | CloseReason::Disconnected), "{reason:?}");

        // A request holds at most 32 bytes of user data.
        let too_much =
            Connection::connect_with(&device, address, &config().user_data(vec![1; 33])).await;
        assert!(too_much.is_err());
        // Called first: the listener establishes no connection itself afterwards.
        let mut request = Box::pin(listener.request());
        assert!(poll_immediate(&mut request).await.is_none());
        let asking = Connection::connect(&device, address);
        let rejecting = async { request.await.unwrap().reject(b"too busy\0").await.unwrap() };
        let (refused, ()) = soon("reject", async { tokio::join!(asking, rejecting) }).await;
        match refused {
            Err(tokio_rdma::EstablishError::Rejected { user_data, .. }) => {
                assert_eq!(&user_data[..], b"too busy\0", "the trailing zero is kept")
            }
            other => panic!("{other:?}"),
        }
    });
}

#[test]
fn both_ends_by_address_close_cleanly_in_any_order() {
    let seed = Seed::new("--test connections both_ends_by_address");
    let value = seed.value;
    bounded("orders", 2 * LONG, move || {
        Flavour::MultiThread.runtime().block_on(async {
            let (device, _) = device(&Network::new());
            let mut random = fastrand::Rng::with_seed(value);
            for _ in 0..scaled(60) {
                let (a, b) = by_address(&device, &config()).await;
                let end = async |own: Connection, messages: u64, late: u32, reads: bool| {
                    for number in 0..messages {
                        own.send(pattern([5, 10_000][number as usize % 2], number)).await.unwrap();
                    }
                    yields(late).await;
                    if reads {
                        own.finish().unwrap();
                        while own.recv().await.unwrap().is_some() {}
                    }
                    own.close().await
                };
                let mut end = |own| end(own, random.u64(..5), random.u32(..100), random.bool());
                let both = (end(a), end(b));
                let ended = soon("both end", async { tokio::join!(both.0, both.1) }).await;
                assert_eq!(ended, (Ok(()), Ok(())));
            }
        });
    });
    drop(seed);
}

#[test]
fn timed_out_receive_leaves_the_connection_unchanged() {
    run("timeout", || async {
        let (a, b) = pair(&config());
        for _ in 0..20 {
            assert!(timeout(Duration::from_millis(1), b.recv()).await.is_err());
        }
        a.send("x").await.unwrap();
        assert_eq!(recv(&b).await, "x");
    });
}

#[test]
fn receive_after_close_discarded_messages_reports_local_close() {
    run("discarded", || async {
        let (a, b) = pair(&config());
        for number in 0..3 {
            a.send(pattern(100, number)).await.unwrap();
        }
        a.finish().unwrap();
        assert_eq!(recv(&b).await, pattern(100, 0));
        assert_eq!(
            soon("close", async { tokio::join!(a.close(), b.close()) }).await,
            (Ok(()), Ok(()))
        );
        assert_eq!(b.counters().discarded, 2);
        assert_eq!(closed(b.recv().await), CloseReason::Local);

        // An application that has received all messages gets the end of messages.
        let (a, b) = pair(&config());
        a.send("last").await.unwrap();
        a.finish().unwrap();
        assert_eq!(recv(&b).await, "last");
        assert_eq!(
            soon("close", async { tokio::join!(a.close(), b.close()) }).await,
            (Ok(()), Ok(()))
        );
        assert_eq!(b.recv().await, Ok(None));
    });
}
