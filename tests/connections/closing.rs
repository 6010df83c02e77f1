//! The end of connections: clean, half, dropped, late, silent, with lost devices and runtimes. On the device that
//! `TOKIO_RDMA_DEVICE` names, or the software device.

use std::time::Duration;

use crate::connected::{self, config, pair, pair_in, pattern, recv, run, two};
use crate::torture::{
    Flavour, LONG, Mode, Seed, bounded, device, eventually, hardware, scaled, slow_network, soon,
    yields,
};
use futures::{FutureExt, StreamExt};
use tokio::time::timeout;
use tokio_rdma::op::ConnectOptions;
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

/// Sends until that ends the connection, or finds out that it has ended.
async fn until_closed(connection: &Connection) -> CloseReason {
    loop {
        match connection.send("x").await {
            Ok(()) => tokio::task::yield_now().await,
            refused => return closed(refused),
        }
    }
}

/// Two connected ends, by address.
async fn by_address(device: &Device, config: &ConnectionConfig) -> (Connection, Connection) {
    let listener = Listener::bind_with(device, connected::address(device), config).await.unwrap();
    let connecting = Connection::connect_with(device, listener.local_addr(), config);
    soon("connect", async { tokio::try_join!(connecting, listener.accept()) }).await.unwrap()
}

#[test]
fn both_close_at_once_and_it_is_clean() {
    run("both close", || async {
        let (a, b) = pair(&config());
        a.send(pattern(100, 1)).await.unwrap();
        let (first, second) = soon("close", async { tokio::join!(a.close(), b.close()) }).await;
        assert_eq!((first, second), (Ok(()), Ok(())));
        assert_eq!(b.counters().discarded, 1);
        assert_eq!(a.close_reason(), Some(CloseReason::Clean));
        // Again, it is just as clean.
        assert_eq!(soon("again", a.close()).await, Ok(()));
        assert_eq!(closed(a.send("x").await), CloseReason::Clean);
        assert_eq!(
            a.write(a.copy_from(b"x").unwrap(), grant_of(&b)).await.unwrap_err().kind(),
            OpErrorKind::Closed
        );
    });
}

/// Some memory of a peer.
fn grant_of(connection: &Connection) -> tokio_rdma::RemoteRegion {
    connection.expose(vec![0; 64], Access::REMOTE_ALL).unwrap().grant()
}

#[test]
fn close_flushes_what_was_sent_and_the_peer_sees_the_end_after_it() {
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
fn one_end_finishes_and_the_other_goes_on() {
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
        // It is over when the other finishes, too, without a close.
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
fn dropping_after_the_end_was_seen_is_clean_and_before_is_not() {
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
        let (_, mut receiving) = a.into_split();
        assert!(receiving.next().await.unwrap().is_err() && receiving.next().await.is_none());
    });
}

#[test]
fn sends_and_receives_that_wait_are_told_of_the_end() {
    run("waiting", || async {
        let (a, b) = pair(&config().receive_buffers(1));
        while a.send("fill").now_or_never().is_some() {}
        let (a, other) = (std::sync::Arc::new(a), std::sync::Arc::new(b));
        let waiting = {
            let a = a.clone();
            tokio::spawn(async move { tokio::join!(a.send("waits"), a.recv(), a.flush()) })
        };
        tokio::task::yield_now().await;
        drop(other);
        let (sent, received, _) = soon("told", waiting).await.unwrap();
        assert_eq!((closed(sent), closed(received)), (CloseReason::Dropped, CloseReason::Dropped));

        // The same if this end is closed while others wait.
        let (a, b) = pair(&config());
        let a = std::sync::Arc::new(a);
        let waiting = tokio::spawn({
            let a = a.clone();
            async move { a.recv().await }
        });
        tokio::task::yield_now().await;
        let (closing, other) = soon("close", async { tokio::join!(a.close(), b.close()) }).await;
        assert_eq!((closing, other), (Ok(()), Ok(())));
        assert!(matches!(soon("told", waiting).await.unwrap(), Ok(None) | Err(_)));
    });
}

#[test]
fn peer_that_does_not_finish_is_waited_for_until_the_deadline() {
    run("late", || async {
        let (a, b) = pair(&config().close_timeout(Duration::from_millis(50)));
        assert_eq!(closed(soon("close", a.close()).await), CloseReason::CloseTimeout);
        assert_eq!(soon("end", b.recv()).await, Ok(None));
        let reason = soon("told", until_closed(&b)).await;
        assert_ne!(reason, CloseReason::Clean);
    });
}

#[test]
fn peer_whose_device_is_gone_is_noticed_by_what_is_sent_and_by_asking() {
    for asks in [true, false] {
        bounded("gone", LONG, move || {
            Flavour::CurrentThread.runtime().block_on(async {
                let network = Network::new();
                let [(_, a_pd), (_two, b_pd)] = two(&network);
                let keepalive = asks.then_some((Duration::from_millis(20), Duration::from_millis(200)));
                let config = config().keepalive(keepalive);
                let (a, b) = pair_in(&a_pd, &b_pd, &config, &config);
                a.send("there").await.unwrap();
                assert_eq!(recv(&b).await, "there");
                network.control("two").unwrap().set_port(false);
                if !asks {
                    a.send("gone").await.unwrap();
                }
                let reason = closed(soon("notices", a.recv()).await);
                let lost =
                    matches!(reason, CloseReason::Operation(kind) if kind.status() == Some(WcStatus::RETRY_EXC_ERR));
                assert!(lost || asks && reason == CloseReason::Silent, "{reason:?}");
            });
        });
    }
}

#[test]
fn what_did_not_arrive_is_not_called_clean_though_the_peer_has_finished() {
    run("lost at the end", || async {
        let network = Network::new();
        let [(_, a_pd), (_two, b_pd)] = two(&network);
        let (a, b) = pair_in(&a_pd, &b_pd, &config(), &config());
        b.finish().unwrap();
        assert_eq!(soon("end", a.recv()).await, Ok(None));
        network.control("two").unwrap().set_port(false);
        a.send("never arrives").await.unwrap();
        let reason = closed(soon("close", a.close()).await);
        assert!(
            matches!(reason, CloseReason::Operation(kind) if kind.status() == Some(WcStatus::RETRY_EXC_ERR)),
            "{reason:?}"
        );
        drop(b);
    });
}

#[test]
fn quiet_connection_is_kept_alive_by_answers_alone() {
    run("quiet", || async {
        // The timeout is long enough for a machine with more to do than processors. An end asks for a second time when it is over.
        let (a, b) =
            pair(&config().keepalive(Some((Duration::from_millis(5), Duration::from_secs(2)))));
        // Neither service does anything, and each end asks until this many answers have come.
        let answers = || a.counters().acks.min(b.counters().acks);
        eventually("answers", || answers() >= 2 || a.close_reason().or(b.close_reason()).is_some())
            .await;
        assert_eq!((a.close_reason(), b.close_reason()), (None, None));
        a.send("x").await.unwrap();
        assert_eq!(recv(&b).await, "x");
    });
}

#[test]
fn sender_whose_peer_takes_nothing_stalls_if_that_is_asked_for() {
    run("stalled", || async {
        let (a, _b) =
            pair(&config().receive_buffers(2).stall_timeout(Some(Duration::from_millis(60))));
        let reason = soon("stalls", until_closed(&a)).await;
        assert_eq!(reason, CloseReason::Stalled);
    });
}

#[test]
fn operation_that_fails_ends_the_connection_with_its_reason() {
    run("operation", || async {
        let (a, b) = pair(&config());
        let region = b.expose(vec![0; 64], Access::REMOTE_READ).unwrap();
        let refused = a.write(a.copy_from(b"no").unwrap(), region.grant()).await.unwrap_err();
        assert_eq!(refused.status(), Some(WcStatus::REM_ACCESS_ERR));
        // That, and not the flush of the receives.
        let reason = closed(soon("ends", a.recv()).await);
        assert_eq!(reason, CloseReason::Operation(refused.kind()));
        assert_eq!(a.close_reason(), Some(reason));
        assert!(matches!(closed(soon("ends", b.recv()).await), CloseReason::Operation(_)));
    });
}

#[test]
fn operation_that_nobody_waits_for_is_the_reason_if_it_fails() {
    run("abandoned", || async {
        let (a, b) = pair(&config());
        let region = b.expose(vec![0; 64], Access::REMOTE_READ).unwrap();
        let mut batch = Batch::new();
        for _ in 0..4 {
            batch.write(a.copy_from(b"no").unwrap(), region.grant());
        }
        drop(a.post_batch(batch));
        // It may find that out.
        drop(a.send("behind").await);
        let reason = closed(soon("ends", a.recv()).await);
        assert_eq!(status(reason), Some(WcStatus::REM_ACCESS_ERR), "{reason:?}");
    });
}

#[test]
fn operation_that_a_dead_peer_does_not_answer_is_the_reason() {
    run("dead", || async {
        let network = Network::new();
        let [(_, a_pd), (_two, b_pd)] = two(&network);
        let config = config().keepalive(None);
        let (a, b) = pair_in(&a_pd, &b_pd, &config, &config);
        let remote = grant_of(&b);
        network.control("two").unwrap().set_port(false);
        let waiting = a.read(a.alloc(8).unwrap(), remote);
        drop(a.write(a.copy_from(b"lost").unwrap(), remote));
        let reason = closed(soon("notices", a.recv()).await);
        assert_eq!(status(reason), Some(WcStatus::RETRY_EXC_ERR), "{reason:?}");
        assert_eq!(
            soon("read", waiting).await.unwrap_err().status(),
            Some(WcStatus::RETRY_EXC_ERR)
        );
    });
}

/// Status of the operation that has ended a connection.
fn status(reason: CloseReason) -> Option<WcStatus> {
    match reason {
        CloseReason::Operation(kind) => kind.status(),
        _ => None,
    }
}

/// True if that may have become of an operation that was in flight, or in line, when its connection was aborted.
fn may_be_aborted<T, B>(result: &Result<T, OpError<B>>) -> bool {
    match result {
        Ok(_) => true,
        Err(error) => {
            error.kind() == OpErrorKind::Closed || error.status() == Some(WcStatus::WR_FLUSH_ERR)
        }
    }
}

/// Receives until that fails.
async fn last(connection: &Connection) -> CloseReason {
    loop {
        match connection.recv().await {
            Ok(Some(_)) => {}
            refused => return closed(refused),
        }
    }
}

#[test]
fn abort_ends_both_ends_with_messages_and_operations_in_flight() {
    let seed = Seed::new("--test connections abort_ends_both_ends");
    let value = seed.value;
    run("abort", move || async move {
        let (_, pd) = device(&slow_network(value));
        let config = config().max_send_wr(8);
        let config = match hardware() {
            Some(_) => config,
            // The network is late, and this machine may be: no peer that lives is to be taken for dead.
            None => config.options(ConnectOptions {
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
            tokio::spawn(async move { last(&end).await })
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
        // Again, it is no harm.
        a.abort();

        // The peer is told, or finds out.
        let reason = soon("peer", until_closed(&b)).await;
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
fn abort_tells_the_peer_behind_what_was_sent() {
    run("word", || async {
        let (a, b) = pair(&config());
        a.send("before").await.unwrap();
        b.send("not received").await.unwrap();
        eventually("arrival", || a.counters().inbox == 1).await;
        a.abort();
        // It is thrown away at once, and not kept until the connection is dropped.
        assert_eq!((a.counters().inbox, a.counters().discarded), (0, 1));
        assert_eq!(recv(&b).await, "before");
        assert_eq!(closed(soon("told", b.recv()).await), CloseReason::Dropped);
        assert_eq!(closed(a.recv().await), CloseReason::Aborted);
        assert_eq!(closed(soon("close", a.close()).await), CloseReason::Aborted);
        let (_, mut receiving) = a.into_split();
        assert!(receiving.next().await.unwrap().is_err() && receiving.next().await.is_none());

        // By address, the connection manager says so besides.
        let (device, _) = device(&Network::new());
        let (a, b) = by_address(&device, &config()).await;
        a.abort();
        let reason = closed(soon("told", b.recv()).await);
        assert!(matches!(reason, CloseReason::Dropped | CloseReason::Disconnected), "{reason:?}");
        assert_eq!(a.close_reason(), Some(CloseReason::Aborted));

        // Either half ends both.
        for by_sender in [true, false] {
            let (a, b) = pair(&config());
            let (sender, receiver) = a.into_split();
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
            let (received, receiver) = soon("told", receiving).await.unwrap();
            assert!(received.is_none_or(|received| closed(received) == CloseReason::Aborted));
            let refused = sender.send("late").await.unwrap_err();
            assert!(matches!(refused, MessageError::Closed(CloseReason::Aborted)), "{refused:?}");
            assert_eq!(closed(soon("told", b.recv()).await), CloseReason::Dropped);
            drop((sender, receiver));
        }
    });
}

#[test]
fn abort_ends_what_the_peer_would_never_answer() {
    run("silence", || async {
        let network = Network::new();
        let [(_, a_pd), (_two, b_pd)] = two(&network);
        // No timeout: nothing but an abort ends it.
        let options = ConnectOptions { timeout: AckTimeout::from_code(0), ..Default::default() };
        let config = config().keepalive(None).options(options);
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

#[test]
fn abort_whose_runtime_goes_away_ends_what_was_in_line() {
    for mode in Mode::ALL {
        bounded("no runtime", LONG, move || {
            connected::use_mode(mode);
            let network = Network::new();
            let [(_, a_pd), (_two, b_pd)] = two(&network);
            // No timeout: nothing but the end of the queue pair makes room.
            let options =
                ConnectOptions { timeout: AckTimeout::from_code(0), ..Default::default() };
            let config = config().keepalive(None).options(options).max_send_wr(4);
            let (first, second) =
                (Flavour::CurrentThread.runtime(), Flavour::CurrentThread.runtime());
            let pool = Pool::new(&a_pd, 64, 16).unwrap();
            // Without an await: the driver does not get to close the queue pair.
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
                // In line: the end of a batch, writes, and a whole batch.
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
fn abort_changes_nothing_once_it_is_over() {
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
fn device_that_is_lost_ends_both_with_an_error() {
    run("lost", || async {
        let network = Network::new();
        let [(_, a_pd), (_two, b_pd)] = two(&network);
        let (a, b) = pair_in(&a_pd, &b_pd, &config(), &config());
        network.control("two").unwrap().kill();
        assert!(matches!(closed(soon("b", b.recv()).await), CloseReason::Operation(_)));
        a.send("x").await.unwrap();
        assert!(matches!(closed(soon("a", a.recv()).await), CloseReason::Operation(_)));
    });
}

#[test]
fn runtime_that_shuts_down_ends_its_connections() {
    // A runtime of one thread has polled nothing that was spawned when it shuts down.
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
            // Dropped where there is no runtime at all.
            drop((a, b));
        });
    }
}

#[test]
fn connection_by_address_carries_user_data_and_ends_with_its_link() {
    run("by address", || async {
        let (device, _) = device(&Network::new());
        let listener = Listener::bind_with(
            &device,
            connected::address(&device),
            &config().user_data("server\0\0"),
        )
        .await
        .unwrap();
        let address = listener.local_addr();
        let client = config().user_data("client\0");
        let connecting = Connection::connect_with(&device, address, &client);
        let (a, b) = soon("connect", async { tokio::try_join!(connecting, listener.accept()) })
            .await
            .unwrap();
        assert_eq!(
            (&a.user_data()[..], &b.user_data()[..]),
            (&b"server\0\0"[..], &b"client\0"[..])
        );
        assert_eq!((a.peer_addr(), b.local_addr()), (Some(address), Some(address)));
        let exchange = async {
            a.send(pattern(100_000, 1)).await.unwrap();
            assert!(recv(&b).await == pattern(100_000, 1));
        };
        soon("exchange", exchange).await;
        // What is exposed to one peer is out of reach for another.
        let (c, _d) = by_address(&device, &config()).await;
        let region = b.expose(vec![0; 8], Access::REMOTE_ALL).unwrap();
        assert!(a.fetch_add(region.grant(), 1).await.is_ok());
        assert_eq!(
            c.fetch_add(region.grant(), 1).await.unwrap_err().status(),
            Some(WcStatus::REM_ACCESS_ERR)
        );
        drop(b);
        let reason = closed(soon("told", a.recv()).await);
        assert!(matches!(reason, CloseReason::Dropped | CloseReason::Disconnected), "{reason:?}");

        // The 33rd byte does not fit a request.
        let too_much =
            Connection::connect_with(&device, address, &config().user_data(vec![1; 33])).await;
        assert!(too_much.is_err());
        // A request can be looked at, and rejected.
        let asking = Connection::connect(&device, address);
        let rejecting =
            async { listener.request().await.unwrap().reject(b"no room\0").await.unwrap() };
        let (refused, ()) = soon("reject", async { tokio::join!(asking, rejecting) }).await;
        match refused {
            Err(tokio_rdma::EstablishError::Rejected { user_data, .. }) => {
                assert_eq!(&user_data[..], b"no room\0", "with its length")
            }
            other => panic!("{other:?}"),
        }
    });
}

#[test]
fn ends_by_address_close_cleanly_in_every_order() {
    let seed = Seed::new("--test connections ends_by_address");
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
fn timeout_on_receive_leaves_the_connection_as_it_was() {
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
fn receiver_is_not_told_of_the_end_of_messages_that_close_has_thrown_away() {
    run("thrown away", || async {
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

        // Whoever has received them all is told.
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
