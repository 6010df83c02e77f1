//! Messages: boundaries, order, sizes, slow receivers and cancelled waits.
//!
//! Uses the device that `TOKIO_RDMA_DEVICE` names, or the software device. `TOKIO_RDMA_SECONDS`
//! sets the duration of the test with many connections.

use std::collections::VecDeque;
use std::net::IpAddr;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::connected::{self, assert_ready, config, modes, pair, pair_in, pattern, recv, two};
use crate::torture::{
    self, Flavour, HANG, LONG, Mode, Seed, bounded, device, eventually, scaled, slow_network, soon,
    yields,
};
use bytes::Bytes;
use futures::{FutureExt, Sink, SinkExt, Stream, StreamExt};
use tokio::runtime::Builder;
use tokio::sync::watch;
use tokio::time::timeout;
use tokio_rdma::connection::{Handshake, HandshakeError};
use tokio_rdma::op::RetryConfig;
use tokio_rdma::software::{Faults, LinkCounters, Network};
use tokio_rdma::types::Gid;
use tokio_rdma::{
    Access, Buf, CompletionMode, CompletionQueue, Connection, ConnectionConfig, EstablishError,
    Listener, ListenerConfig, MessageError, Pool, RemoteRegion, SetupError, cm,
};

fn everywhere<F: Future<Output = ()>>(
    what: &'static str,
    test: impl Fn(Mode) -> F + Send + Copy + 'static,
) {
    for flavour in Flavour::ALL {
        for mode in Mode::ALL {
            bounded(what, LONG, move || flavour.runtime().block_on(test(mode)));
        }
    }
}

fn run<F: Future<Output = ()>>(what: &'static str, test: impl FnOnce() -> F + Send + 'static) {
    bounded(what, LONG, move || Flavour::MultiThread.runtime().block_on(test()));
}

#[test]
fn messages_of_all_lengths_arrive_whole_and_in_order() {
    everywhere("lengths", async |mode| {
        let (a, b) = pair(&config().mode(mode.make()));
        let lengths = [
            0,
            1,
            63,
            64,
            65,
            255,
            256,
            257,
            16_383,
            16_384,
            16_385,
            65_536,
            (1 << 20) - 1,
            1 << 20,
            (1 << 20) + 1,
        ];
        let lengths = lengths.into_iter().chain([0, (8 << 20) + 5, 3]);
        let sending = async {
            for (at, len) in lengths.clone().enumerate() {
                a.send(pattern(len, at as u64)).await.unwrap();
            }
        };
        let receiving = async {
            for (at, len) in lengths.clone().enumerate() {
                assert!(recv(&b).await == pattern(len, at as u64), "{len} bytes");
            }
        };
        tokio::join!(sending, receiving);
        a.flush().await.unwrap();
        assert_eq!((a.counters().offered, a.counters().sent, b.counters().received), (4, 18, 18));
        assert_ready([&a, &b]);
    });
}

#[test]
fn polling_modes_do_not_starve_the_main_future_of_a_runtime() {
    // While tasks wake themselves, the runtime polls the main future once per event interval, which
    // is hours here.
    for mode in [CompletionMode::Cooperative, CompletionMode::Hybrid] {
        bounded("main future", LONG, move || {
            let mut builder = tokio::runtime::Builder::new_current_thread();
            let runtime = builder.enable_all().event_interval(u32::MAX).build().unwrap();
            runtime.block_on(async {
                let (a, b) = pair(&config().mode(mode));
                let echo = tokio::spawn(async move {
                    while let Some(message) = b.recv().await.unwrap() {
                        b.send(message).await.unwrap();
                    }
                    b.close().await
                });
                for round in 0..100 {
                    a.send(pattern(64, round)).await.unwrap();
                    assert!(recv(&a).await == pattern(64, round));
                }
                a.close().await.unwrap();
                echo.await.unwrap().unwrap();
            });
        });
    }
}

#[test]
fn messages_of_several_frames_arrive_in_both_directions_with_few_buffers() {
    everywhere("several frames", async |mode| {
        for buffers in [2, 3, 5, 9] {
            let config = config()
                .mode(mode.make())
                .receive_buffer_size(1000)
                .receive_buffers(buffers)
                .spare_buffers(1)
                .send_buffers(buffers)
                .preallocate(true)
                .max_send_wr(4);
            let (a, b) = pair(&config);
            // The longest has as many frames as the peer's receives permit.
            let longest = 1000 * (buffers as usize - (buffers as usize).div_ceil(4) + 1);
            let lengths = [longest.min(1000 * buffers as usize), 10, 1001, 0, 1000, 2000];
            let count = scaled(100);
            let talk = async |own: &Connection, seed: u64| {
                let sending = async {
                    for number in 0..count {
                        let len = lengths[number as usize % lengths.len()];
                        own.send(pattern(len, seed + number)).await.unwrap();
                    }
                    own.flush().await.unwrap();
                };
                let receiving = async {
                    for number in 0..count {
                        let len = lengths[number as usize % lengths.len()];
                        let message = recv(own).await;
                        assert!(
                            message == pattern(len, 1_000_000 - seed + number),
                            "message {number}"
                        );
                    }
                };
                tokio::join!(sending, receiving);
            };
            soon("talk", async { tokio::join!(talk(&a, 0), talk(&b, 1_000_000)) }).await;
            assert_eq!((a.counters().offered, b.counters().offered), (0, 0));
            assert_ready([&a, &b]);
        }
    });
}

// Shows S1.
#[test]
fn registered_buffers_are_sent_from_their_memory_and_return_to_their_pool() {
    everywhere("registered buffers", async |mode| {
        let (a, b) = pair(&config().mode(mode.make()));
        let foreign = torture::device(&Network::new()).1;
        for (own, pd) in [(true, a.protection_domain()), (false, &foreign)] {
            let pool = Pool::new(pd, 100_000, 2).unwrap();
            for (number, len) in
                [0, 10, 64, 300, 16_384, 16_385, 40_000, 100_000].into_iter().enumerate()
            {
                let message = pattern(len, number as u64);
                let buffer = pool.copy_from(&message).unwrap().freeze();
                a.send_buffer(buffer.clone()).await.unwrap();
                // Part of a buffer that is in flight.
                a.send_buffer(buffer.slice(len / 2..).unwrap()).await.unwrap();
                assert!(buffer[..] == message[..]);
                assert!(recv(&b).await == message, "{len} bytes, own {own}");
                assert!(recv(&b).await == message[len / 2..], "half of {len} bytes, own {own}");
                a.flush().await.unwrap();
                drop(buffer);
                eventually("all buffers", || pool.available() == 2).await;
            }
        }
        assert_ready([&a, &b]);
    });
}

#[test]
fn lent_buffers_return_although_nothing_else_happens() {
    everywhere("lent buffers", async |mode| {
        let (a, b) = pair(&config().mode(mode.make()).keepalive(None));
        let pool = Pool::new(a.protection_domain(), 8192, 2).unwrap();
        // The window of the idle receiver takes all messages.
        for number in 0..20 {
            let mut buffer = soon("a buffer", pool.alloc(8192)).await.unwrap();
            buffer.copy_from_slice(&pattern(8192, number));
            a.send_buffer(buffer.freeze()).await.unwrap();
        }
        for number in 0..20 {
            assert!(recv(&b).await == pattern(8192, number), "message {number}");
        }
    });
}

#[test]
fn lent_buffer_returns_although_its_sender_has_waited_for_credits() {
    // In busy-poll mode a thread might find the completions before the sender does.
    for mode in [Mode::Event, Mode::Cooperative, Mode::Hybrid] {
        bounded("after a wait", LONG, move || {
            Flavour::CurrentThread.runtime().block_on(lend_after_a_wait(mode));
        });
    }
}

async fn lend_after_a_wait(mode: Mode) {
    const LEN: usize = 5_000;
    let network = Network::simulated(1, Faults::none());
    let deliver = || network.run_until_idle(Duration::from_millis(1));
    let [(_, one), (_, other)] = two(&network);
    let config = ConnectionConfig::default().mode(mode.make()).keepalive(None).preallocate(true);
    let config = config.receive_buffers(4);
    let (a, b) = pair_in(&one, &other, &config, &config);
    let pool = Pool::new(&one, LEN, 16).unwrap();
    let buffer = || pool.copy_from(&[7; LEN]).expect("most are free").freeze();
    let send_buffer = || a.send_buffer(buffer()).now_or_never().is_some_and(|sent| sent.is_ok());
    let try_send = || a.try_send(buffer()).is_ok();
    for round in 0..12 {
        let send = || if round % 2 == 0 { send_buffer() } else { try_send() };
        // No task runs, so that only these calls find completions.
        let until_refused = || (0..).take_while(|_| send()).count();
        let mut sent = until_refused();
        assert!(sent > 0);
        deliver();
        if round % 4 < 2 {
            // Later refused calls find the end of all sends: none is watched any more.
            sent += until_refused();
            deliver();
            assert_eq!((until_refused(), pool.available()), (0, 16), "round {round}");
        }
        for _ in 0..sent {
            let message = b.recv().now_or_never().expect("it has arrived");
            assert_eq!(message.unwrap().unwrap(), [7; LEN][..]);
        }
        deliver();
        // This call finds the credits and, in the other rounds, the end of all earlier sends.
        assert!(send(), "round {round}");
        assert_eq!(pool.available(), 15, "round {round}");
        eventually("all buffers", || {
            deliver();
            pool.available() == 16
        })
        .await;
        assert_eq!(recv(&b).await, [7; LEN][..]);
    }
}

#[test]
fn lent_buffer_returns_although_its_pool_has_others() {
    everywhere("others", async |mode| {
        let (a, b) = pair(&config().mode(mode.make()).keepalive(None));
        let pool = Pool::new(a.protection_domain(), 8192, 2).unwrap();
        for number in 0..3 {
            let mut buffer = soon("a buffer", pool.alloc(8192)).await.unwrap();
            buffer.copy_from_slice(&pattern(8192, number));
            a.send_buffer(buffer.freeze()).await.unwrap();
            let _other = pool.try_alloc(8192).expect("it was not sent");
            drop(soon("the sent buffer", pool.alloc(8192)).await.unwrap());
            assert!(recv(&b).await == pattern(8192, number), "message {number}");
        }
        // Its owner can write to it again, too.
        let view = a.protection_domain().register(vec![7; 8192]).unwrap().freeze();
        a.send_buffer(view.clone()).await.unwrap();
        let mut left = Some(view);
        eventually("the only view", || {
            left = left.take().and_then(|view| view.try_into_mut().err());
            left.is_none()
        })
        .await;
        assert_eq!(recv(&b).await, [7; 8192][..]);
    });
}

#[test]
fn lent_buffer_returns_although_the_runtime_of_its_sender_stands_still() {
    for mode in Mode::ALL {
        bounded("lent by another runtime", LONG, move || {
            let drivers = Flavour::MultiThread.runtime();
            let [(_, one), (_, other)] = two(&slow_network(1));
            let (a, b) = drivers.block_on(async {
                let config = config().mode(mode.make()).keepalive(None);
                let (a, b) = pair_in(&one, &other, &config, &config);
                a.send("first").await.unwrap();
                assert_eq!(recv(&b).await, "first");
                (a, b)
            });
            let pool = Pool::new(&one, 500, 1).unwrap();
            let buffer = pool.copy_from(&[7; 500]).unwrap().freeze();
            let sender = Flavour::CurrentThread.runtime();
            sender.block_on(soon("send", a.send_buffer(buffer))).unwrap();
            drivers.block_on(soon("the buffer", pool.alloc(500))).unwrap();
            drop(b);
        });
    }
}

#[test]
fn offered_message_is_fetched_although_the_runtime_of_its_receiver_stands_still() {
    for mode in Mode::ALL {
        bounded("fetched by another runtime", LONG, move || {
            let drivers = Flavour::CurrentThread.runtime();
            let network = Network::new();
            let [(_, one), (_, other)] = two(&network);
            let (a, b) = drivers.block_on(async {
                let config = config().mode(mode.make()).retries(RetryConfig::default());
                // The driver wakes neither to ask the peer nor to shrink buffers.
                let config = config.keepalive(None).preallocate(true);
                let (a, b) = pair_in(&one, &other, &config, &config);
                // Leaves a buffer, into which the receiver's runtime fetches the next message. This
                // READ completes at once, so the runtime of the drivers watches none.
                a.send(pattern(100_000, 1)).await.unwrap();
                assert!(recv(&b).await == pattern(100_000, 1));
                a.flush().await.unwrap();
                (a, b)
            });
            // The READ takes longer than the receiver's runtime runs.
            let delay = Duration::from_millis(5);
            network.set_faults(Faults::none().delay(delay..2 * delay));
            let receiver = Flavour::CurrentThread.runtime();
            let mut received = None;
            receiver.block_on(async {
                a.send(pattern(100_000, 2)).await.unwrap();
                eventually("an offer", || {
                    if b.counters().inbox == 0 {
                        received = b.recv().now_or_never();
                    }
                    received.is_some() || b.counters().inbox > 0
                })
                .await;
            });
            drivers.block_on(soon("flush", a.flush())).unwrap();
            let message = received.unwrap_or_else(|| drivers.block_on(b.recv()));
            assert!(message.unwrap().unwrap() == pattern(100_000, 2));
        });
    }
}

#[test]
fn both_ends_send_at_once_with_one_buffer_each() {
    everywhere("one buffer", async |mode| {
        let config = config()
            .mode(mode.make())
            .receive_buffers(1)
            .spare_buffers(0)
            .send_buffers(1)
            .max_send_wr(4);
        let (a, b) = pair(&config.receive_memory(1).send_memory(1));
        let count = scaled(200);
        let talk = async |own: &Connection, seed: u64| {
            let sending = async {
                for number in 0..count {
                    let len = [0, 10, 5000, 20_000][(number % 4) as usize];
                    own.send(pattern(len, seed + number)).await.unwrap();
                }
            };
            let receiving = async {
                for number in 0..count {
                    let len = [0, 10, 5000, 20_000][(number % 4) as usize];
                    assert!(
                        recv(own).await == pattern(len, 1_000_000 - seed + number),
                        "message {number}"
                    );
                }
            };
            tokio::join!(sending, receiving);
        };
        soon("talk", async { tokio::join!(talk(&a, 0), talk(&b, 1_000_000)) }).await;
        assert_ready([&a, &b]);
    });
}

#[test]
fn one_way_traffic_continues_without_messages_in_return() {
    run("one way", || async {
        let (a, b) = pair(&config());
        let count = scaled(20_000);
        let sender = tokio::spawn(async move {
            for number in 0..count {
                a.send(number.to_be_bytes().to_vec()).await.unwrap();
            }
            a.flush().await.unwrap();
            a
        });
        for number in 0..count {
            assert_eq!(recv(&b).await[..], number.to_be_bytes());
        }
        let a = soon("sender", sender).await.unwrap();
        assert_ready([&a, &b]);
        // One acknowledgement frame covers several messages.
        assert!(b.counters().acks <= count / 8, "{:?}", b.counters());
    });
}

// Shows S4.
#[test]
fn slow_receiver_limits_its_sender_and_bounds_memory() {
    modes("slow service", || async {
        let config = config().receive_buffers(8).receive_memory(1 << 20).send_memory(1 << 20);
        let config = config.preallocate(true);
        let (a, b) = pair(&config);
        // The peer has 8 receive buffers. Credits may allow one message more.
        let mut short = 0;
        while timeout(Duration::from_millis(50), a.send(pattern(1000, short))).await.is_ok() {
            short += 1;
        }
        assert!((8..=9).contains(&short), "{short} short messages");
        for number in 0..short {
            assert!(recv(&b).await == pattern(1000, number));
        }
        // The memory limits of both ends apply, but one message is always allowed.
        let mut long = 0;
        while timeout(Duration::from_millis(200), a.send(pattern(600_000, long))).await.is_ok() {
            long += 1;
        }
        assert!((1..=2).contains(&long), "{long} long messages");
        assert_eq!(b.counters().inbox as u64, long);
        for number in 0..long {
            assert!(recv(&b).await == pattern(600_000, number));
        }
        soon("free memory", a.send("free memory")).await.unwrap();
        assert_eq!(recv(&b).await, "free memory");
        assert_ready([&a, &b]);
    });
}

#[test]
fn messages_are_fetched_before_the_application_receives() {
    modes("fetched", || async {
        let (a, b) = pair(&config().receive_buffers(4));
        // The application at `b` receives nothing, and its sends have used up all credits.
        let mut filled = 0;
        while b.send(pattern(100, filled)).now_or_never().is_some() {
            filled += 1;
        }
        for number in 0..3 {
            a.send(pattern(100_000, number)).await.unwrap();
        }
        soon("flush", a.flush()).await.unwrap();
        assert_eq!(a.counters().inbox as u64, filled);
        for number in 0..3 {
            assert!(recv(&b).await == pattern(100_000, number));
        }
    });
}

#[test]
fn retained_messages_are_copied_and_delay_no_sender() {
    modes("retained messages", || async {
        let (a, b) = pair(&config().receive_buffers(4).spare_buffers(3).preallocate(true));
        let mut kept = Vec::new();
        for number in 0..50 {
            a.send(pattern(4000, number)).await.unwrap();
            kept.push(recv(&b).await);
        }
        assert_eq!(b.counters().copied_out, 47);
        assert!(
            kept.iter()
                .enumerate()
                .all(|(number, message)| *message == pattern(4000, number as u64))
        );
        // Dropping the last clone frees the receive buffer.
        let clone = kept[0].slice(10..20);
        kept.truncate(1);
        drop(kept);
        a.send(pattern(4000, 1)).await.unwrap();
        let zero_copy = recv(&b).await;
        assert_eq!(b.counters().copied_out, 47);
        assert_eq!(clone[..], pattern(4000, 0)[10..20]);
        drop((clone, zero_copy));
    });
}

#[test]
fn received_messages_outlive_their_connection() {
    modes("outlive", || async {
        let (a, b) = pair(&config());
        for len in [1000, 100_000, 3_000_000] {
            a.send(pattern(len, 5)).await.unwrap();
        }
        let messages = [recv(&b).await, recv(&b).await, recv(&b).await];
        drop((a, b));
        yields(100).await;
        assert!(messages.iter().all(|message| *message == pattern(message.len(), 5)));
    });
}

// Shows E2.
#[test]
fn dropped_sends_send_nothing_and_dropped_receives_lose_nothing() {
    let seed = Seed::new("--test connections dropped_sends");
    let value = seed.value;
    run("cancelled", move || async move {
        let (a, b) =
            pair(&config().receive_buffers(3).spare_buffers(2).send_buffers(2).send_memory(40_000));
        let count = scaled(1_000);
        let sending = async {
            let (mut random, mut dropped) = (fastrand::Rng::with_seed(value), 0);
            for number in 0..count {
                let len = [8, 300, 9_000, 30_000][random.usize(..4)];
                let message = [&number.to_be_bytes()[..], &pattern(len, number)[..]].concat();
                loop {
                    let sent = {
                        let mut send = std::pin::pin!(a.send(message.clone()));
                        let mut sent = None;
                        for _ in 0..random.u32(1..4) {
                            sent = send.as_mut().now_or_never();
                            if sent.is_some() {
                                break;
                            }
                            tokio::task::yield_now().await;
                        }
                        sent
                    };
                    match sent {
                        Some(result) => break result.unwrap(),
                        None => dropped += 1,
                    }
                    tokio::task::yield_now().await;
                }
            }
            a.finish().unwrap();
            dropped
        };
        let receiving = async {
            let mut random = fastrand::Rng::with_seed(!value);
            let (mut number, mut dropped) = (0_u64, 0);
            loop {
                let next = match random.bool() {
                    true => b.recv().now_or_never(),
                    false => timeout(Duration::from_micros(random.u64(..300)), b.recv()).await.ok(),
                };
                let Some(next) = next else {
                    dropped += 1;
                    tokio::task::yield_now().await;
                    continue;
                };
                let Some(message) = next.unwrap() else { break };
                assert_eq!(message[..8], number.to_be_bytes());
                assert!(message[8..] == pattern(message.len() - 8, number), "message {number}");
                number += 1;
            }
            assert_eq!(number, count);
            dropped
        };
        let dropped = soon("exchange", async { tokio::join!(sending, receiving) }).await;
        assert!(dropped.0 > 0 && dropped.1 > 0, "{dropped:?} were dropped");
        assert_ready([&a, &b]);
    });
    drop(seed);
}

#[test]
fn tasks_sharing_a_connection_keep_their_order() {
    run("shared", || async {
        let (a, b) = pair(&config().receive_buffers(2));
        let (a, b) = (Arc::new(a), Arc::new(b));
        let tasks = 8;
        let each = scaled(400);
        let senders: Vec<_> = (0..tasks)
            .map(|task| {
                let a = a.clone();
                tokio::spawn(async move {
                    for number in 0..each {
                        a.send((task << 32 | number).to_be_bytes().to_vec()).await.unwrap();
                    }
                })
            })
            .collect();
        let receivers: Vec<_> = (0..3)
            .map(|_| {
                let b = b.clone();
                tokio::spawn(async move {
                    let mut seen = Vec::new();
                    while let Some(message) = b.recv().await.unwrap() {
                        seen.push(u64::from_be_bytes(message[..].try_into().unwrap()));
                    }
                    seen
                })
            })
            .collect();
        for sender in senders {
            soon("sender", sender).await.unwrap();
        }
        a.finish().unwrap();
        let mut all = Vec::new();
        for receiver in receivers {
            let seen = soon("receiver", receiver).await.unwrap();
            for task in 0..tasks {
                let of_one: Vec<_> = seen.iter().filter(|&number| number >> 32 == task).collect();
                assert!(of_one.is_sorted(), "messages of one task are in order");
            }
            all.extend(seen);
        }
        all.sort_unstable();
        let expected: Vec<_> =
            (0..tasks).flat_map(|task| (0..each).map(move |number| task << 32 | number)).collect();
        assert!(all == expected, "each once");
    });
}

#[test]
fn handles_of_a_connection_are_sinks_and_streams() {
    fn is_both<
        T: Sink<Bytes, Error = MessageError> + Stream<Item = Result<Bytes, MessageError>> + Unpin,
    >(
        _: &T,
    ) {
    }
    modes("handles", || async {
        let (a, b) = pair(&config().receive_buffers(3));
        is_both(&a);
        let (mut a_send, a_recv, b_send, mut b_recv) = (a.clone(), a, b.clone(), b);
        let count = scaled(1_000);
        let echo = tokio::spawn(async move {
            while let Some(message) = b_recv.next().await {
                b_send.send(message.unwrap()).await.unwrap();
            }
            b_send.finish().unwrap();
            b_recv
        });
        let sending = tokio::spawn(async move {
            let mut messages =
                futures::stream::iter((0..count).map(|number| Ok(pattern(20, number))));
            a_send.send_all(&mut messages).await.unwrap();
            SinkExt::close(&mut a_send).await.unwrap();
            a_send
        });
        let echoed: Vec<_> = a_recv.collect().await;
        assert_eq!(echoed.len() as u64, count);
        for (number, message) in echoed.into_iter().enumerate() {
            assert_eq!(message.unwrap(), pattern(20, number as u64));
        }
        let a_send = soon("sending", sending).await.unwrap();
        let b = soon("echo", echo).await.unwrap();
        soon("end", b.close()).await.unwrap();
        assert_eq!(
            a_send.send("more").await,
            Err(MessageError::Closed(tokio_rdma::CloseReason::Clean))
        );
    });
}

#[test]
fn unpolled_sinks_and_streams_block_no_other_operation() {
    modes("unpolled waiters", || async {
        let (mut a, mut b) = pair(&config().receive_buffers(1));
        assert!(timeout(Duration::from_millis(1), b.next()).await.is_err());
        Connection::send(&a, "first").await.unwrap();
        assert_eq!(recv(&b).await, "first");

        // The stream joins the wait queue again, but is not polled afterwards.
        assert!(b.next().now_or_never().is_none());
        assert!(b.recv().now_or_never().is_none());
        Connection::send(&a, "second").await.unwrap();
        assert_eq!(soon("stream", b.next()).await.unwrap().unwrap(), "second");

        let mut sent = 0;
        while Connection::send(&a, "filler").now_or_never().is_some() {
            sent += 1;
        }
        // A credit may have returned meanwhile.
        while SinkExt::send(&mut a, "filler".into()).now_or_never().is_some() {
            sent += 1;
        }
        let sending = Connection::send(&a, "third");
        let receiving = async {
            let mut fillers = 0;
            loop {
                match &recv(&b).await[..] {
                    b"filler" => fillers += 1,
                    other => break assert_eq!(other, b"third"),
                }
            }
            fillers
        };
        let (third, fillers) =
            soon("send beside a sink", async { tokio::join!(sending, receiving) }).await;
        third.unwrap();
        soon("sink", async {
            let last = async {
                if fillers == sent {
                    assert_eq!(recv(&b).await, "filler");
                } else {
                    assert_eq!(fillers, sent + 1);
                }
            };
            tokio::join!(SinkExt::flush(&mut a), last).0.unwrap();
        })
        .await;
    });
}

#[test]
fn unpolled_sink_blocks_no_call_of_its_handle() {
    modes("unpolled sink", || async {
        let (mut a, b) = pair(&config().receive_buffers(1));
        let region = b.expose(vec![0; 8], Access::REMOTE_WRITE).unwrap();
        let remote = RemoteRegion::from_bytes(&region.grant().to_bytes()).unwrap();
        while a.try_send("filler").is_ok() {}
        soon("feed", SinkExt::feed(&mut a, "fed".into())).await.unwrap();
        let receiving = tokio::spawn({
            let b = b.clone();
            async move {
                let mut received = Vec::new();
                while let Ok(Some(message)) = b.recv().await {
                    received.push(message);
                }
                received
            }
        });
        let buffer = a.copy_from(b"x").unwrap();
        let write = a.write_with_imm(buffer, remote.slice(..1).unwrap(), tokio_rdma::Imm(1));
        soon("write_with_imm beside the sink", write).await.unwrap();
        soon("notification", b.notifications().next()).await.unwrap().unwrap();
        eventually("try_send beside the sink", || a.try_send("tried").is_ok()).await;
        soon("the sink", SinkExt::close(&mut a)).await.unwrap();
        let received = soon("all", receiving).await.unwrap();
        assert_eq!(received.iter().filter(|message| **message == "fed").count(), 1);
        assert_eq!(received.iter().filter(|message| **message == "tried").count(), 1);
    });
}

#[test]
fn unpolled_stream_of_one_handle_blocks_no_other_handle() {
    modes("unpolled stream", || async {
        let (a, b) = pair(&config().receive_buffers(1));
        let mut streams = [b.clone(), b.clone()];
        assert!(streams[0].next().now_or_never().is_none());
        a.send("first").await.unwrap();
        assert_eq!(recv(&b).await, "first");
        assert!(streams[0].next().now_or_never().is_none());
        // Behind the stream that is not polled.
        let waiting = soon("recv", async {
            let (received, sent) = tokio::join!(b.recv(), a.send("second"));
            sent.unwrap();
            received.unwrap().unwrap()
        });
        assert_eq!(waiting.await, "second");
        let waiting = soon("stream", async {
            let (received, sent) = tokio::join!(streams[1].next(), a.send("third"));
            sent.unwrap();
            received.unwrap().unwrap()
        });
        assert_eq!(waiting.await, "third");
        drop(a);
        for stream in &mut streams {
            assert!(soon("end", stream.next()).await.is_none_or(|end| end.is_err()));
        }
    });
}

#[test]
fn message_arrives_in_one_runtime_although_another_one_no_longer_runs() {
    for mode in [CompletionMode::Event, CompletionMode::Hybrid] {
        bounded("runtimes", LONG, || message_arrives_without_the_first_runtime(mode));
    }
}

fn message_arrives_without_the_first_runtime(mode: CompletionMode) {
    let current = || Flavour::CurrentThread.runtime();
    let (idle, peers) = (current(), Flavour::MultiThread.runtime());
    let config = ConnectionConfig::default().keepalive(None).mode(mode);
    let devices = two(&Network::new());
    let prepared = [&idle, &peers].into_iter().zip(&devices).map(|(runtime, (_, pd))| {
        let _context = runtime.enter();
        Connection::prepare(pd, &config).unwrap()
    });
    let [a, b]: [_; 2] = prepared.collect::<Vec<_>>().try_into().unwrap();
    let (endpoints, handshakes) =
        ([a.endpoint(), b.endpoint()], [&a, &b].map(|end| end.handshake(b"").unwrap()));
    let a = idle.block_on(async { a.establish(&endpoints[1], &handshakes[1]).unwrap() });
    let b = peers.block_on(async { b.establish(&endpoints[0], &handshakes[0]).unwrap() });
    let b = Arc::new(b);
    // Waits in a runtime, which then watches the queue but no longer runs.
    let wait = async { timeout(Duration::from_millis(20), a.recv()).await.is_err() };
    assert!(idle.block_on(wait));
    // It may still spin when it stops, after it has received a message.
    peers.block_on(b.send("first")).unwrap();
    assert_eq!(idle.block_on(recv(&a)), "first");
    // Counts how often a runtime has nothing left to do.
    let parks = watch::Sender::new(0);
    let others = [(), ()].map(|()| {
        let parks = parks.clone();
        Builder::new_current_thread()
            .enable_all()
            .on_thread_park(move || parks.send_modify(|parks| *parks += 1))
            .build()
            .unwrap()
    });
    for number in 0..6_u8 {
        let receiving = async {
            let mut receive = std::pin::pin!(a.recv());
            assert!(receive.as_mut().now_or_never().is_none());
            let (b, mut parks) = (b.clone(), parks.subscribe());
            let before = *parks.borrow();
            peers.spawn(async move {
                // The receiver waits.
                parks.wait_for(|parks| *parks > before).await.unwrap();
                b.send(vec![number; 10]).await.unwrap();
            });
            soon("message", receive).await.unwrap().unwrap()
        };
        let received = others[usize::from(number % 2)].block_on(receiving);
        assert_eq!(received, vec![number; 10]);
    }
    drop(idle);
}

#[test]
fn connections_in_hybrid_mode_exchange_messages_without_events() {
    const EXCHANGES: u64 = 2_000;
    bounded("spinning", LONG, || {
        Flavour::CurrentThread.runtime().block_on(async {
            let (device, pd) = torture::device(&Network::new());
            let queue = CompletionQueue::builder(&device).capacity(1024);
            let queue = queue.mode(CompletionMode::Hybrid).build().unwrap();
            let config = config().completion_queue(&queue);
            let (a, b) = pair_in(&pd, &pd, &config, &config);
            let answering = async {
                for _ in 0..EXCHANGES {
                    b.send(recv(&b).await).await.unwrap();
                }
            };
            let asking = async {
                for number in 0..EXCHANGES {
                    let message = Bytes::copy_from_slice(&number.to_be_bytes());
                    a.send(message.clone()).await.unwrap();
                    assert_eq!(recv(&a).await, message);
                }
            };
            tokio::join!(answering, asking);
            let counters = queue.counters();
            assert!(counters.events < EXCHANGES / 10, "{counters:?}");
        });
    });
}

#[test]
fn message_owner_may_use_the_connection_in_its_destructor() {
    struct Owner(Arc<Connection>, Vec<u8>);

    impl AsRef<[u8]> for Owner {
        fn as_ref(&self) -> &[u8] {
            &self.1
        }
    }

    impl Drop for Owner {
        fn drop(&mut self) {
            assert!(self.0.counters().sent > 0);
        }
    }

    modes("owner", || async {
        let (a, b) = pair(&config());
        let a = Arc::new(a);
        for len in [8, 800, 80_000] {
            soon("send", a.send(Bytes::from_owner(Owner(a.clone(), vec![1; len])))).await.unwrap();
            assert_eq!(recv(&b).await.len(), len);
            soon("flush", a.flush()).await.unwrap();
        }
        // The thread that polls the last completion may drop the message after it has woken the
        // flush.
        eventually("all of them are dropped", || Arc::strong_count(&a) == 1).await;
    });
}

#[test]
fn panicking_message_destructor_leaves_the_connection_usable() {
    struct Owner {
        _kept: Arc<()>,
        bytes: Vec<u8>,
    }

    impl AsRef<[u8]> for Owner {
        fn as_ref(&self) -> &[u8] {
            &self.bytes
        }
    }

    impl Drop for Owner {
        fn drop(&mut self) {
            panic!("a destructor that panics");
        }
    }

    modes("owner that panics", || async {
        let (a, b) = pair(&config());
        let kept = Arc::new(());
        // The peer fetches a message of this length. The task that polls the completion drops its
        // memory, or `send`, if the peer is faster.
        let owner = Owner { _kept: kept.clone(), bytes: vec![1; 80_000] };
        let sending = soon("send", a.send(Bytes::from_owner(owner)));
        if let Ok(sent) = AssertUnwindSafe(sending).catch_unwind().await {
            sent.unwrap();
        }
        assert_eq!(recv(&b).await.len(), 80_000);
        soon("flush", a.flush()).await.unwrap();
        eventually("the memory is dropped", || Arc::strong_count(&kept) == 1).await;
        soon("send", a.send("still here")).await.unwrap();
        assert_eq!(recv(&b).await, "still here");
        soon("answer", b.send("here too")).await.unwrap();
        assert_eq!(recv(&a).await, "here too");
        assert_eq!(a.close_reason(), None);
    });
}

#[test]
fn flush_waits_only_for_earlier_messages() {
    modes("flush", || async {
        // The receive memory suffices for one fetch at a time.
        let (mut a, b) = pair(&config().receive_memory(1).max_eager(0));
        for number in 0..2 {
            a.send(pattern(20_000, number)).await.unwrap();
        }
        let mut flush = Box::pin(a.flush());
        assert!(flush.as_mut().now_or_never().is_none());
        a.send(pattern(20_000, 2)).await.unwrap();
        assert_eq!(recv(&b).await, pattern(20_000, 0));
        soon("flush", flush).await.unwrap();
        assert_eq!(b.counters().received, 1, "the third is not fetched");

        let mut later = Box::pin(a.flush());
        assert!(later.as_mut().now_or_never().is_none());
        assert_eq!(recv(&b).await, pattern(20_000, 1));
        soon("later flush", later).await.unwrap();
        assert_eq!(recv(&b).await, pattern(20_000, 2));

        // A cancelled flush does not shorten a later one.
        for number in 0..2 {
            a.feed(pattern(20_000, number)).await.unwrap();
        }
        assert!(SinkExt::flush(&mut a).now_or_never().is_none());
        a.feed(pattern(20_000, 2)).await.unwrap();
        assert_eq!(recv(&b).await, pattern(20_000, 0));
        assert!(timeout(Duration::from_millis(20), SinkExt::flush(&mut a)).await.is_err());
        assert_eq!(recv(&b).await, pattern(20_000, 1));
        soon("flush of the sink", SinkExt::flush(&mut a)).await.unwrap();
    });
}

#[test]
fn messages_too_long_for_the_peer_are_refused() {
    run("too long", || async {
        let (_, pd) = device(&Network::new());
        let (a, b) = pair_in(&pd, &pd, &config(), &config().max_message(100_000));
        assert_eq!((a.max_message(), b.max_message()), (100_000, 64 << 20));
        match a.send(vec![0; 100_001]).await {
            Err(MessageError::TooLong(limit)) => {
                assert_eq!((limit.asked, limit.allowed), (100_001, 100_000))
            }
            other => panic!("{other:?}"),
        }
        a.send(pattern(100_000, 1)).await.unwrap();
        assert!(recv(&b).await == pattern(100_000, 1));
    });
}

#[test]
fn message_limit_below_the_buffer_size_is_exact() {
    run("short limit", || async {
        let (_, pd) = device(&Network::new());
        for limit in [0, 1, 1000, 16_383, 16_384, 16_385] {
            let (a, b) = pair_in(&pd, &pd, &config(), &config().max_message(limit));
            assert_eq!((a.max_message(), a.peer().max_message), (limit, limit));
            match a.send(vec![0; limit as usize + 1]).await {
                Err(MessageError::TooLong(error)) => {
                    assert_eq!((error.asked, error.allowed), (limit + 1, limit))
                }
                other => panic!("{limit}: {other:?}"),
            }
            for len in [limit as usize, 0] {
                a.send(pattern(len, 1)).await.unwrap();
                assert!(recv(&b).await == pattern(len, 1), "{len} bytes of at most {limit}");
            }
        }
    });
}

#[test]
fn flush_awaited_directly_in_block_on_returns() {
    // At first, a message of 16 KiB is not copied, so the flush waits until the peer has fetched
    // it. In release builds, `will_wake` is false for clones of the waker of `block_on`.
    for len in [16_384, 300, 1] {
        for mode in Mode::ALL {
            bounded("flush in block_on", LONG, move || {
                Flavour::CurrentThread.runtime().block_on(async {
                    let (a, mut b) = pair(&config().mode(mode.make()));
                    let receiver = tokio::spawn(async move { (recv(&b).await, b) });
                    a.send(pattern(len, 1)).await.unwrap();
                    a.flush().await.unwrap();
                    let received;
                    (received, b) = receiver.await.unwrap();
                    assert!(received == pattern(len, 1));
                    let (mut sink, stream) = (a.clone(), a);
                    let receiver = tokio::spawn(async move {
                        for _ in 0..2 {
                            assert!(recv(&b).await == pattern(len, 2));
                        }
                        assert!(b.recv().await.unwrap().is_none());
                        b.close().await.unwrap();
                    });
                    sink.send(pattern(len, 2)).await.unwrap();
                    Connection::send(&sink, pattern(len, 2)).await.unwrap();
                    Connection::flush(&sink).await.unwrap();
                    SinkExt::<Bytes>::flush(&mut sink).await.unwrap();
                    SinkExt::<Bytes>::close(&mut sink).await.unwrap();
                    receiver.await.unwrap();
                    drop(stream);
                });
            });
        }
    }
}

#[test]
fn invalid_settings_are_refused_by_name() {
    run("settings", || async {
        let (device, pd) = device(&Network::new());
        let attr = device.attr().clone();
        let small = |config: ConnectionConfig| match Connection::prepare(&pd, &config) {
            Err(SetupError::TooSmall { field, .. }) => field,
            other => panic!("{other:?}"),
        };
        assert_eq!(small(config().receive_buffers(0)), "receive_buffers");
        assert_eq!(small(config().send_buffers(0)), "send_buffers");
        assert_eq!(small(config().receive_buffer_size(19)), "receive_buffer_size");
        assert_eq!(small(config().max_inline(19)), "max_inline");
        assert_eq!(small(config().max_send_wr(1)), "max_send_wr");
        let (zero, some) = (Duration::ZERO, Duration::from_secs(1));
        assert!(small(config().keepalive(Some((zero, some)))).starts_with("keepalive interval"));
        assert!(small(config().keepalive(Some((some, zero)))).starts_with("keepalive timeout"));
        assert!(small(config().stall_timeout(Some(zero))).starts_with("stall_timeout"));
        let large = |config: ConnectionConfig| match Connection::prepare(&pd, &config) {
            Err(SetupError::Limit(limit)) => limit.field,
            other => panic!("{other:?}"),
        };
        assert_eq!(large(config().receive_buffers(8192)), "receive_buffers");
        assert_eq!(large(config().max_send_wr(attr.max_qp_wr + 1)), "max_send_wr");
        assert_eq!(large(config().max_inline(attr.max_inline + 1)), "max_inline");
        assert_eq!(large(config().max_message(u64::MAX)), "max_message");
        assert_eq!(
            large(config().retries(RetryConfig { retry_count: 8, ..Default::default() })),
            "retry_count"
        );
        assert_eq!(
            large(config().retries(RetryConfig { rnr_retry: 8, ..Default::default() })),
            "rnr_retry"
        );
        let queue = CompletionQueue::builder(&device)
            .capacity(100)
            .mode(CompletionMode::Event)
            .build()
            .unwrap();
        let none = ListenerConfig::new(config()).handshakes(0);
        let bound = Listener::bind_with(&device, connected::address(&device), none).await;
        let least = SetupError::TooSmall { field: "handshakes", asked: 0, least: 1 };
        assert_eq!(bound.unwrap_err(), EstablishError::Setup(least));
        let full = Connection::prepare(&pd, &config().completion_queue(&queue));
        assert!(matches!(full, Err(SetupError::CompletionQueueFull { .. })), "{full:?}");
    });
}

#[test]
fn oversized_user_data_and_invalid_settings_are_refused_before_connecting() {
    run("user data", || async {
        let (device, _) = device(&Network::new());
        let allowed = |result: Result<(), EstablishError>| match result {
            Err(EstablishError::Handshake(HandshakeError::UserData { allowed, .. })) => allowed,
            other => panic!("{other:?}"),
        };
        let with = |bytes: usize| config().user_data(vec![7; bytes]);
        let bind = async |bytes| {
            Listener::bind_with(&device, connected::address(&device), &with(bytes)).await
        };
        for bytes in [173, 256, 1 << 20] {
            assert_eq!(allowed(bind(bytes).await.map(drop)), 172);
        }
        let listener = bind(172).await.unwrap();
        let connect = async |bytes| {
            Connection::connect_with(&device, listener.local_addr().unwrap(), &with(bytes)).await
        };
        assert_eq!(allowed(connect(33).await.map(drop)), 32);
        let (a, b) = soon("connect", async { tokio::try_join!(connect(32), listener.accept()) })
            .await
            .unwrap();
        assert_eq!((&a.user_data()[..], &b.user_data()[..]), (&[7; 172][..], &[7; 32][..]));
        let settings = config().retries(RetryConfig { retry_count: 8, ..Default::default() });
        match Listener::bind_with(&device, connected::address(&device), &settings).await {
            Err(EstablishError::Setup(SetupError::Limit(limit))) => {
                assert_eq!(limit.field, "retry_count")
            }
            other => panic!("{other:?}"),
        }
        let (other, pd) = self::device(&Network::new());
        let queue = CompletionQueue::new(&other, CompletionMode::Event).unwrap();
        let settings = [
            ("protection domain", config().protection_domain(&pd)),
            ("completion queue", config().completion_queue(&queue)),
        ];
        for (what, settings) in settings {
            let bound = Listener::bind_with(&device, connected::address(&device), &settings).await;
            assert!(
                matches!(
                    bound,
                    Err(EstablishError::Setup(SetupError::Foreign { what: named })) if named == what
                ),
                "{what}: {bound:?}"
            );
        }
    });
}

#[test]
fn gid_follows_the_peer_or_source_setting_and_must_match_the_route() {
    run("path", || async {
        let (device, pd) = device(&Network::new());
        let (port, entry) = device.default_path().unwrap();
        let gid = |config: ConnectionConfig| {
            Connection::prepare(&pd, &config).map(|made| made.endpoint().gid)
        };
        assert_eq!(gid(config().source(port.port, entry.index)), Ok(entry.gid));
        assert_eq!(gid(config().peer(entry.gid)), Ok(device.path_to(entry.gid).unwrap().1.gid));
        assert_eq!(
            gid(config().source(port.port, 255)),
            Err(SetupError::NoGid { port: port.port.0 })
        );
        assert!(
            gid(config().source(port.port, 255).peer(entry.gid)).is_ok(),
            "the last setting applies"
        );

        let listener =
            Listener::bind_with(&device, connected::address(&device), &config()).await.unwrap();
        let address = listener.local_addr().unwrap();
        let route = cm::resolve(&device, address).await.unwrap();
        let (peer, number, index) = (route.destination(), route.port(), route.gid_index());
        drop(route);
        let stranger: Gid = IpAddr::from([10, 9, 9, 9]).into();
        for (asked, wrong) in
            [("peer GIDs", config().peer(stranger)), ("sources", config().source(number, !index))]
        {
            match soon("refuse", Connection::connect_with(&device, address, &wrong)).await {
                Err(EstablishError::Connect(cm::ConnectError::Setup { error, .. })) => {
                    assert!(
                        matches!(
                            *error,
                            SetupError::Mismatch { what, .. } if what.starts_with(asked)
                        ),
                        "{error:?}"
                    );
                }
                other => panic!("{asked}: {other:?}"),
            }
        }
        for right in [config().peer(peer), config().source(number, index)] {
            let connecting = Connection::connect_with(&device, address, &right);
            let (a, b) = soon("connect", async { tokio::try_join!(connecting, listener.accept()) })
                .await
                .unwrap();
            a.send("there").await.unwrap();
            assert_eq!(recv(&b).await, "there");
        }

        let picky =
            Listener::bind_with(&device, connected::address(&device), &config().peer(stranger))
                .await
                .unwrap();
        let address = picky.local_addr().unwrap();
        let asking = async {
            for _ in 0..2 {
                match soon("reject", Connection::connect_with(&device, address, &config())).await {
                    Err(EstablishError::Connect(cm::ConnectError::Rejected { .. })) => {}
                    other => panic!("{other:?}"),
                }
            }
        };
        tokio::select! {
            made = picky.accept() => panic!("{made:?}"),
            () = asking => {}
        }
    });
}

#[test]
fn peer_memory_is_read_and_written_alongside_messages() {
    modes("beside", || async {
        let (a, b) = pair(&config().max_send_wr(4));
        let region = b.expose(vec![0; 4096], Access::REMOTE_ALL).unwrap();
        b.send(region.grant()).await.unwrap();
        let remote = RemoteRegion::from_bytes(&recv(&a).await).unwrap();
        let count = scaled(200);
        let adding = async {
            let adds: Vec<_> =
                (0..count).map(|_| a.fetch_add(remote.slice(8..16).unwrap(), 1)).collect();
            for (before, add) in adds.into_iter().enumerate() {
                assert_eq!(soon("add", add).await.unwrap(), before as u64);
            }
        };
        let sending = async {
            for number in 0..count {
                a.send(pattern(500, number)).await.unwrap();
            }
        };
        let receiving = async {
            for number in 0..count {
                assert!(recv(&b).await == pattern(500, number));
            }
        };
        tokio::join!(adding, sending, receiving);
        a.write(a.copy_from(b"hello").unwrap(), remote.slice(..5).unwrap()).await.unwrap();
        a.send("written").await.unwrap();
        assert_eq!(recv(&b).await, "written");
        let mut bytes = [0; 5];
        region.read(0, &mut bytes).unwrap();
        assert_eq!(&bytes, b"hello");
        let buffer = a.read(a.try_alloc(16).unwrap(), remote.slice(..16).unwrap()).await.unwrap();
        assert_eq!((&buffer[..5], &buffer[8..]), (&b"hello"[..], &count.to_ne_bytes()[..]));
        assert_eq!(a.compare_swap(remote.slice(8..16).unwrap(), count, 7).await.unwrap(), count);
        assert!(a.try_alloc(1 << 20).is_ok());
        a.send(buffer).await.unwrap();
        let shared: Buf = a.copy_from(b"shared").unwrap().freeze();
        a.send(shared.clone()).await.unwrap();
        assert_eq!((recv(&b).await.len(), &recv(&b).await[..]), (16, &shared[..]));
    });
}

#[test]
fn messages_arrive_once_and_in_order_despite_loss_and_duplicates() {
    let seed = Seed::new("--test connections messages_arrive_once");
    let faults = Faults::none().loss(0.02).duplicate(0.02).reorder(0.02).corrupt(0.01);
    let value = seed.value;
    run("faults", move || async move {
        let counters = talk_over(faults, value).await;
        // There are thousands of packets, so each fault occurs.
        let each = [counters.lost, counters.duplicated, counters.reordered, counters.corrupted];
        assert!(each.iter().all(|&count| count > 0), "{counters:?}");
    });
    drop(seed);
}

/// Covers late duplicates of READs, whose memory is no longer registered.
#[test]
fn messages_arrive_once_and_in_order_despite_late_duplicates() {
    let seed = Seed::new("--test connections messages_arrive_once");
    let faults =
        Faults::none().duplicate(0.2).reorder(0.2).delay(Duration::ZERO..Duration::from_millis(3));
    let value = seed.value;
    run("late duplicates", move || async move {
        let counters = talk_over(faults, value).await;
        assert!(counters.duplicated > 0 && counters.reordered > 0, "{counters:?}");
    });
    drop(seed);
}

async fn talk_over(faults: Faults, seed: u64) -> LinkCounters {
    let mut all = LinkCounters::default();
    for round in 0..scaled(8) {
        let network = Network::with_faults(seed.wrapping_add(round), faults.clone());
        let (_, pd) = torture::software(&network);
        let config = config().receive_buffers(6);
        let (a, b) = pair_in(&pd, &pd, &config, &config);
        let talk = async |own: &Connection| {
            let sending = async {
                for number in 0..60 {
                    own.send(pattern([20, 3_000, 30_000][number as usize % 3], number))
                        .await
                        .unwrap();
                }
                own.finish().unwrap();
            };
            let receiving = async {
                for number in 0..60 {
                    let message = recv(own).await;
                    assert!(
                        message == pattern([20, 3_000, 30_000][number as usize % 3], number),
                        "message {number}"
                    );
                }
                assert_eq!(soon("end", own.recv()).await, Ok(None));
            };
            tokio::join!(sending, receiving);
        };
        tokio::join!(talk(&a), talk(&b));
        let closed = soon("close", async { tokio::join!(a.close(), b.close()) }).await;
        assert_eq!(closed, (Ok(()), Ok(())));
        let counters = network.counters();
        all.lost += counters.lost;
        all.duplicated += counters.duplicated;
        all.reordered += counters.reordered;
        all.corrupted += counters.corrupted;
    }
    all
}

/// Sends and verifies messages until `stop` is set, and returns the number sent and received.
async fn talk(
    own: Connection,
    peer_seed: u64,
    seed: u64,
    largest: usize,
    slow: bool,
    stop: Arc<AtomicBool>,
) -> u64 {
    // The number in front of a message determines the bytes that follow.
    let message = |random: &mut fastrand::Rng, number: u64| {
        let len = match random.u8(..10) {
            0 => 0,
            1..=5 => random.usize(..2_000),
            6..=8 => random.usize(..64_000.min(largest)),
            _ => random.usize(..=largest),
        };
        let body = pattern(len, seed ^ number);
        [&number.to_be_bytes()[..], &body[..]].concat()
    };
    let sending = async {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut in_flight = VecDeque::new();
        let mut number = 0;
        while !stop.load(Ordering::Relaxed) || number < scaled(40) {
            if in_flight.len() == 32 {
                let next: std::pin::Pin<Box<dyn Future<Output = Result<(), MessageError>> + Send>> =
                    in_flight.pop_front().unwrap();
                next.await.unwrap();
            }
            let mut send = Box::pin(own.send(message(&mut random, number)));
            number += 1;
            // The first poll queues the send, which fixes its order.
            match (&mut send).now_or_never() {
                Some(sent) => sent.unwrap(),
                None => in_flight.push_back(send),
            }
            tokio::task::yield_now().await;
        }
        for send in in_flight {
            send.await.unwrap();
        }
        own.flush().await.unwrap();
        if let Some((counters, _)) = own.software_counters() {
            assert_eq!(counters.rnr_naks, 0);
        } else {
            assert!(torture::hardware().is_some(), "it is open");
        }
        own.finish().unwrap();
        number
    };
    let receiving = async {
        let mut number = 0_u64;
        while let Some(message) = own.recv().await.unwrap() {
            assert_eq!(message[..8], number.to_be_bytes(), "in order, each once");
            assert!(
                message[8..] == pattern(message.len() - 8, peer_seed ^ number),
                "message {number} is damaged"
            );
            number += 1;
            if slow {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        }
        number
    };
    let (sent, received) = tokio::join!(sending, receiving);
    own.close().await.unwrap();
    sent + received
}

#[test]
fn many_connections_exchange_messages_with_some_slow_readers() {
    let seed = Seed::new("--test connections many_connections_exchange");
    let value = seed.value;
    let seconds = std::env::var("TOKIO_RDMA_SECONDS")
        .map_or(torture::CROWD_SECONDS, |seconds| seconds.parse().expect("a number"));
    bounded("crowd", 4 * LONG + Duration::from_secs(2 * seconds), move || {
        Flavour::MultiThread.runtime().block_on(async {
            let (device, pd) = device(&Network::new());
            let queue = CompletionQueue::builder(&device).capacity(64 * 2 * 200).build().unwrap();
            let config =
                config().completion_queue(&queue).receive_buffers(32).receive_buffer_size(4096);
            let config = config.spare_buffers(8).receive_memory(8 << 20).send_memory(8 << 20);
            // A debug build generates bytes slowly, and SoftRoCE may run in an emulated machine.
            let brief =
                std::env::var_os("TOKIO_RDMA_SECONDS").is_none() && torture::hardware().is_some();
            let largest = if cfg!(debug_assertions) || brief { 1 << 20 } else { 8 << 20 };
            let stop = Arc::new(AtomicBool::new(false));
            let mut talks = Vec::new();
            for number in 0..64_u64 {
                let (a, b) = pair_in(&pd, &pd, &config, &config);
                let seeds = (value.wrapping_add(2 * number), value.wrapping_add(2 * number + 1));
                let slow = number % 8 == 0;
                talks.push(tokio::spawn(talk(a, seeds.1, seeds.0, largest, false, stop.clone())));
                talks.push(tokio::spawn(talk(b, seeds.0, seeds.1, largest, slow, stop.clone())));
            }
            let begun = Instant::now();
            tokio::time::sleep(Duration::from_secs(seconds)).await;
            stop.store(true, Ordering::Relaxed);
            let mut messages = 0;
            for talk in talks {
                messages += talk.await.unwrap();
            }
            eprintln!("{messages} messages sent and received in {:?}", begun.elapsed());
            assert!(messages >= 64 * 2 * 2 * scaled(40));
            eventually("queue pairs end", || queue.counters().reserved == 0).await;
        });
    });
    drop(seed);
}

/// Requests a connection, and returns a future that completes the handshake only if it is polled.
async fn silent(
    device: &tokio_rdma::Device,
    address: std::net::SocketAddr,
) -> impl Future<Output = Result<cm::CmConnection, cm::ConnectError>> {
    let route = cm::resolve(device, address).await.unwrap();
    let queue = CompletionQueue::new(device, CompletionMode::Event).unwrap();
    let pd = device.protection_domain().unwrap();
    let qp = route.prepare(tokio_rdma::QueuePair::builder(&pd, &queue)).build().unwrap();
    let hello = Handshake { buffer_size: 4096, receives: 68, max_message: 1 << 20, grows: false }
        .encode(b"silent")
        .unwrap();
    let mut connecting = Box::pin(async move {
        let options = cm::ConnectConfig::default().timeout(HANG).private_data(hello);
        route.connect(&qp, &options).await
    });
    // One poll sends the request. Nothing confirms the reply.
    assert!(connecting.as_mut().now_or_never().is_none());
    connecting
}

#[test]
fn silent_peer_delays_no_other_handshake() {
    modes("silent", || async {
        let (device, _) = device(&Network::new());
        let config =
            config().connect_timeout(HANG).receive_buffers(4).send_buffers(4).spare_buffers(0);
        let listener =
            Listener::bind_with(&device, connected::address(&device), &config).await.unwrap();
        let address = listener.local_addr().unwrap();
        let silent = silent(&device, address).await;
        let count = scaled(100);
        let connecting = async {
            for number in 0..count {
                let config = config.clone().user_data(number.to_be_bytes().to_vec());
                let connection = Connection::connect_with(&device, address, &config).await.unwrap();
                connection.send("hello").await.unwrap();
                assert_eq!(connection.recv().await.unwrap(), None);
                connection.close().await.unwrap();
            }
        };
        let accepting = async {
            for number in 0..count {
                let connection = listener.accept().await.unwrap();
                assert_eq!(
                    connection.user_data()[..],
                    number.to_be_bytes(),
                    "a connection of the silent peer was accepted"
                );
                assert_eq!(&recv(&connection).await[..], b"hello");
                connection.close().await.unwrap();
            }
        };
        soon("other connections", async { tokio::join!(connecting, accepting) }).await;
        // Its handshake is still pending: otherwise it could not be completed now.
        let both = async { tokio::join!(silent, listener.accept()) };
        let (ours, theirs) = soon("the silent peer", both).await;
        let _ours = ours.expect("its handshake had not ended");
        assert!(theirs.unwrap().user_data().starts_with(b"silent"));
        let stats = listener.stats();
        assert_eq!((stats.accepted, stats.failed, stats.evicted), (count + 1, 0, 0));
    });
}

#[test]
fn silent_peers_at_the_handshake_limit_delay_others_until_their_deadline() {
    run("bounded", || async {
        let (device, _) = device(&Network::new());
        let config = config().connect_timeout(Duration::from_millis(300));
        let one = ListenerConfig::new(config.clone()).handshakes(1);
        let listener =
            Listener::bind_with(&device, connected::address(&device), one).await.unwrap();
        let address = listener.local_addr().unwrap();
        let _silent = silent(&device, address).await;
        // This request is handled after the silent peer has timed out.
        let patient = config.clone().connect_timeout(HANG);
        let connecting = Connection::connect_with(&device, address, &patient);
        let (ours, theirs) =
            soon("the next", async { tokio::join!(connecting, listener.accept()) }).await;
        ours.unwrap().send("hello").await.unwrap();
        assert_eq!(&recv(&theirs.unwrap()).await[..], b"hello");
    });
}

#[test]
fn dropped_accept_loses_no_connection() {
    modes("dropped accept", || async {
        let (device, _) = device(&Network::new());
        let config = config().receive_buffers(4).send_buffers(4).spare_buffers(0);
        let listener =
            Listener::bind_with(&device, connected::address(&device), &config).await.unwrap();
        let (address, count) = (listener.local_addr().unwrap(), scaled(40));
        let peers: Vec<_> = (0..count)
            .map(|number| {
                let (device, config) =
                    (device.clone(), config.clone().user_data(number.to_be_bytes().to_vec()));
                tokio::spawn(async move {
                    Connection::connect_with(&device, address, &config).await.unwrap()
                })
            })
            .collect();
        let mut accepted = Vec::new();
        soon("connections", async {
            while accepted.len() < count as usize {
                if let Some(connection) = listener.accept().now_or_never() {
                    accepted.push(connection.unwrap());
                }
                tokio::task::yield_now().await;
            }
        })
        .await;
        let mut numbers: Vec<_> = accepted.iter().map(|one| one.user_data().to_vec()).collect();
        numbers.sort();
        assert!(numbers.into_iter().eq((0..count).map(|number| number.to_be_bytes().to_vec())));
        for peer in peers {
            assert_eq!(soon("peer", peer).await.unwrap().close_reason(), None);
        }
    });
}
