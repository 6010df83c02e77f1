//! Messages received in registered memory, and messages gathered from parts.

use std::time::Duration;

use bytes::Bytes;
use futures::{FutureExt, SinkExt};
use tokio::time::timeout;
use tokio_rdma::software::Network;
use tokio_rdma::{Buf, CloseReason, Connection, ConnectionConfig, MessageError, Pool, SetupError};

use crate::connected::{assert_ready, config, pair, pair_in, pattern, recv, run, two};
use crate::torture::{self, Flavour, LONG, Seed, bounded, eventually, scaled, soon};

const FRAME: usize = 16 << 10;
const EAGER: usize = 64 << 10;
const MIB: usize = 1 << 20;

const LENGTHS: [usize; 14] = [
    0,
    1,
    256,
    257,
    FRAME - 1,
    FRAME,
    FRAME + 1,
    EAGER - 1,
    EAGER,
    EAGER + 1,
    MIB,
    MIB + 1,
    3 * MIB,
    2,
];

async fn recv_buffer(connection: &Connection) -> Buf {
    soon("a message", connection.recv_buffer()).await.expect("no error").expect("not the end")
}

fn small() -> ConnectionConfig {
    config().receive_buffers(4).spare_buffers(2).send_buffers(4)
}

#[test]
fn received_buffers_hold_messages_of_all_lengths_and_can_be_sent_on() {
    run("sent on", || async {
        let (_, pd) = torture::device(&Network::new());
        let config = config().preallocate(true);
        let (a, b) = pair_in(&pd, &pd, &config, &config);
        let (c, d) = pair_in(&pd, &pd, &config, &config);
        for (number, len) in LENGTHS.into_iter().enumerate() {
            let message = pattern(len, number as u64);
            a.send(message.clone()).await.unwrap();
            let buffer = recv_buffer(&b).await;
            assert!(buffer[..] == message[..], "{len} bytes");
            c.send_buffer(buffer.clone()).await.unwrap();
            assert!(recv(&d).await == message, "{len} bytes by another connection");
            b.send_buffer(buffer).await.unwrap();
            assert!(recv_buffer(&a).await[..] == message[..], "{len} bytes back");
        }
        for connection in [&a, &b, &c, &d] {
            connection.finish().unwrap();
        }
        for connection in [&a, &b, &c, &d] {
            assert!(soon("the end", connection.recv_buffer()).await.unwrap().is_none());
        }
        let counters = b.counters();
        assert_eq!((counters.received, counters.copied_out), (LENGTHS.len() as u64, 0));
        assert_ready([&a, &b]);
    });
}

#[test]
fn bytes_of_a_buffer_are_sent_from_its_memory() {
    run("without a copy", || async {
        let network = Network::new();
        let [(_, one), (_, other)] = two(&network);
        let config = config().preallocate(true).retries(torture::impatient());
        let (a, b) = pair_in(&one, &other, &config, &config);
        let pool = Pool::new(&one, 8192, 8).unwrap();
        let message =
            |number| Bytes::from(pool.copy_from(&pattern(8192, number)).expect("a free buffer"));
        network.partition("one", "two").unwrap();
        a.send(message(0)).await.unwrap();
        a.try_send(message(1)).unwrap();
        a.send_vectored(&[message(2)]).await.unwrap();
        let (mut sending, receiving) = (a.clone(), a);
        sending.feed(message(3).slice(1..4097)).await.unwrap();
        assert_eq!(pool.available(), 4, "the buffers are in use until the peer has them");
        sending.send(message(4).slice(..4095)).await.unwrap();
        let parts = [message(5).slice(..4096), message(6).slice(..4096)];
        sending.send_vectored(&parts).await.unwrap();
        drop(parts);
        assert_eq!(pool.available(), 4, "others are copied");
        network.heal("one", "two").unwrap();
        for number in 0..3 {
            assert!(recv(&b).await == pattern(8192, number), "message {number}");
        }
        assert!(recv(&b).await == pattern(8192, 3).slice(1..4097));
        assert!(recv(&b).await == pattern(8192, 4).slice(..4095));
        let [first, second] = [5, 6].map(|number| pattern(8192, number).slice(..4096));
        assert!(recv(&b).await == [first, second].concat());
        eventually("all buffers", || pool.available() == 8).await;
        drop((sending, receiving));
    });
}

#[test]
fn received_bytes_go_on_from_the_memory_in_which_they_have_arrived() {
    run("forwarded", || async {
        let (_, pd) = torture::device(&Network::new());
        let config = config().preallocate(true);
        let [(a, b), (c, d)] = [(); 2].map(|()| pair_in(&pd, &pd, &config, &config));
        let mut message = pattern(FRAME, 1);
        for round in 0..scaled(50) {
            // Around the ring of two connections, whole and in part.
            a.send(message.clone()).await.unwrap();
            c.send(recv(&b).await).await.unwrap();
            d.send(recv(&d).await).await.unwrap();
            b.send(recv(&c).await.slice(..FRAME / 2)).await.unwrap();
            assert!(recv(&a).await == message.slice(..FRAME / 2), "round {round}");
            message = pattern(FRAME, round);
        }
        assert_ready([&a, &b]);
        assert_ready([&c, &d]);
    });
}

#[test]
fn received_buffers_are_not_reused_while_they_are_held() {
    run("held", || async {
        let (a, b) = pair(&small());
        let lengths = [0, 10, 300, FRAME, FRAME + 1, 3 * FRAME, EAGER, MIB, MIB + 1];
        let sending = async {
            for (number, &len) in lengths.iter().cycle().take(5 * lengths.len()).enumerate() {
                a.send(pattern(len, number as u64)).await.unwrap();
            }
            a.finish().unwrap();
        };
        let receiving = async {
            let mut held = Vec::new();
            while let Some(buffer) = soon("message", b.recv_buffer()).await.unwrap() {
                held.push(buffer);
            }
            held
        };
        let ((), held) = tokio::join!(sending, receiving);
        assert_eq!(held.len(), 5 * lengths.len());
        for (number, buffer) in held.iter().enumerate() {
            let len = lengths[number % lengths.len()];
            assert!(buffer[..] == pattern(len, number as u64)[..], "message {number}");
        }
        assert!(b.counters().copied_out > 0, "there are few spare buffers");
        assert_ready([&a, &b]);
    });
}

#[test]
fn credits_return_with_buffers_and_dropped_receives_lose_nothing() {
    let seed = Seed::new("--test connections credits_return");
    let value = seed.value;
    run("credits", move || async move {
        let (a, b) = pair(&small().send_memory(200_000));
        let count = scaled(500);
        let lengths = [0, 8, 300, 9_000, 20_000, 100_000];
        let sending = async {
            for number in 0..count {
                let len = lengths[number as usize % lengths.len()];
                a.send(pattern(len, number)).await.unwrap();
            }
            a.finish().unwrap();
        };
        let receiving = async {
            let mut random = fastrand::Rng::with_seed(value);
            let (mut number, mut dropped) = (0_u64, 0);
            let mut held = std::collections::VecDeque::new();
            loop {
                let next = match random.u8(..4) {
                    0 => b.recv().now_or_never().map(|got| got.map(|got| got.map(Received::Bytes))),
                    1 => (b.recv_buffer().now_or_never())
                        .map(|got| got.map(|got| got.map(Received::Buffer))),
                    _ => timeout(Duration::from_micros(random.u64(..300)), b.recv_buffer())
                        .await
                        .ok()
                        .map(|got| got.map(|got| got.map(Received::Buffer))),
                };
                let Some(next) = next else {
                    dropped += 1;
                    tokio::task::yield_now().await;
                    continue;
                };
                let Some(message) = next.unwrap() else { break };
                let expected = pattern(lengths[number as usize % lengths.len()], number);
                assert!(message.bytes() == &expected[..], "message {number}");
                number += 1;
                held.push_back((message, expected));
                if held.len() > random.usize(..4) {
                    let (message, expected) = held.pop_front().unwrap();
                    assert!(message.bytes() == &expected[..], "a held message");
                }
            }
            (number, dropped)
        };
        let ((), (number, dropped)) =
            soon("exchange", async { tokio::join!(sending, receiving) }).await;
        assert_eq!(number, count);
        assert!(dropped > 0);
        assert_ready([&a, &b]);
    });
    drop(seed);
}

enum Received {
    Bytes(Bytes),
    Buffer(Buf),
}

impl Received {
    fn bytes(&self) -> &[u8] {
        match self {
            Self::Bytes(bytes) => bytes,
            Self::Buffer(buffer) => buffer,
        }
    }
}

#[test]
fn receivers_of_both_kinds_share_the_messages() {
    run("both kinds", || async {
        let (a, b) = pair(&small());
        let b = std::sync::Arc::new(b);
        let count = scaled(300);
        let receivers: Vec<_> = (0..4)
            .map(|kind| {
                let b = b.clone();
                tokio::spawn(async move {
                    let mut seen = Vec::new();
                    loop {
                        let message = match kind % 2 {
                            0 => b.recv().await.unwrap().map(Received::Bytes),
                            _ => b.recv_buffer().await.unwrap().map(Received::Buffer),
                        };
                        let Some(message) = message else { return seen };
                        let (number, rest) = message.bytes().split_first_chunk().unwrap();
                        let number = u64::from_be_bytes(*number);
                        assert!(*rest == pattern(rest.len(), number), "message {number}");
                        seen.push(number);
                    }
                })
            })
            .collect();
        for number in 0..count {
            let len = [10, 400, 9_000, 100_000][number as usize % 4];
            let parts = [Bytes::copy_from_slice(&number.to_be_bytes()), pattern(len, number)];
            soon("a send", a.send_vectored(&parts)).await.unwrap();
        }
        a.finish().unwrap();
        let mut all = Vec::new();
        for receiver in receivers {
            let seen = soon("a receiver", receiver).await.unwrap();
            assert!(seen.is_sorted());
            all.extend(seen);
        }
        all.sort_unstable();
        assert!(all.into_iter().eq(0..count), "each once");
    });
}

#[test]
fn failed_registration_leaves_the_message_to_be_received() {
    if torture::hardware().is_some() {
        return;
    }
    // Once: it registers as much as the device allows.
    bounded("no registration", LONG, || {
        Flavour::CurrentThread.runtime().block_on(async {
            let (a, b) = pair(&config().preallocate(true));
            let message = pattern(3 * FRAME, 1);
            a.send(message.clone()).await.unwrap();
            a.flush().await.unwrap();
            let mut registered = Vec::new();
            let limit = loop {
                match b.protection_domain().register(vec![0; 1]) {
                    Ok(buffer) => registered.push(buffer),
                    Err(error) => break error,
                }
            };
            for _ in 0..2 {
                let failed = soon("failure", b.recv_buffer()).await.unwrap_err();
                assert!(matches!(failed, MessageError::Register(SetupError::Verb(_))), "{failed}");
                assert_eq!(failed, MessageError::Register(limit.clone()));
            }
            drop(registered);
            assert!(recv_buffer(&b).await[..] == message[..]);
            a.send("next").await.unwrap();
            assert_eq!(recv_buffer(&b).await[..], b"next"[..]);
        })
    });
}

#[test]
fn aborted_connection_has_no_buffers_and_a_lost_one_those_that_arrived() {
    run("ended", || async {
        for aborts in [true, false] {
            let (a, b) = pair(&config());
            let messages = [pattern(10, 0), pattern(FRAME, 1), pattern(3 * FRAME, 2)];
            for message in &messages {
                a.send(message.clone()).await.unwrap();
            }
            a.flush().await.unwrap();
            if aborts {
                b.abort();
                let end = soon("the end", b.recv_buffer()).await.unwrap_err();
                assert_eq!(end, MessageError::Closed(CloseReason::Aborted));
                continue;
            }
            a.abort();
            soon("the end", b.closed()).await;
            for message in &messages {
                assert!(recv_buffer(&b).await[..] == message[..]);
            }
            let end = soon("the end", b.recv_buffer()).await.unwrap_err();
            assert!(matches!(end, MessageError::Closed(_)), "{end}");
        }
    });
}

#[test]
fn parts_arrive_as_their_concatenation() {
    let seed = Seed::new("--test connections parts_arrive");
    let value = seed.value;
    run("parts", move || async move {
        let (a, b) = pair(&config().preallocate(true));
        let mut random = fastrand::Rng::with_seed(value);
        let inline = [63, 64, 65];
        for (number, len) in LENGTHS.into_iter().chain(inline).chain([0; 2]).enumerate() {
            for boundaries in [0, 1, 2, 30] {
                let message = pattern(len, number as u64);
                let mut at: Vec<_> = (0..boundaries).map(|_| random.usize(..=len)).collect();
                at.extend([0, len]);
                at.sort_unstable();
                let parts: Vec<_> =
                    at.windows(2).map(|ends| message.slice(ends[0]..ends[1])).collect();
                soon("a send", a.send_vectored(&parts)).await.unwrap();
                assert!(recv(&b).await == message, "{len} bytes in {} parts", parts.len());
            }
        }
        a.send_vectored(&[]).await.unwrap();
        assert!(recv(&b).await.is_empty());
        let (sent, offered) = (a.counters().sent, a.counters().offered);
        assert_eq!((sent, offered), (4 * (LENGTHS.len() as u64 + 5) + 1, 4 * 4));
        assert_ready([&a, &b]);
    });
    drop(seed);
}

#[test]
fn parts_above_the_limit_are_refused_like_one_message() {
    run("too long", || async {
        let (_, pd) = torture::device(&Network::new());
        let (a, b) = pair_in(&pd, &pd, &config(), &config().max_message(100_000));
        let part = pattern(100_000, 7);
        let parts = [part.clone(), Bytes::from_static(b"1")];
        let expected = a.send(parts.concat()).await.unwrap_err();
        assert!(matches!(expected, MessageError::TooLong(_)), "{expected}");
        assert_eq!(a.send_vectored(&parts).await, Err(expected));
        a.send_vectored(&[part.slice(..5), part.slice(5..)]).await.unwrap();
        assert!(recv(&b).await == part);
    });
}
