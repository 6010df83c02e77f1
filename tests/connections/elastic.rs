//! Buffers that follow use: their number, length and memory.

use std::collections::VecDeque;
use std::time::Duration;

use crate::connected::{self, assert_ready, config, modes, pair, pair_in, pattern, recv};
use crate::torture::{self, Flavour, LONG, Mode, Seed, bounded, scaled, soon};
use bytes::Bytes;
use tokio_rdma::connection::{BufferBudget, RefusalReason};
use tokio_rdma::software::Network;
use tokio_rdma::{BufMut, Connection, EstablishError, Listener, SetupError};

/// The registered bytes of a connection that is not in use.
const FIRST: u64 = 10 * 384;

/// Waits until a side has the buffers of a connection that is not in use.
async fn shrunk(connection: &Connection) {
    soon("fewer buffers", async {
        while connection.counters().buffer_memory > FIRST {
            tokio::task::yield_now().await;
        }
    })
    .await;
}

#[test]
fn used_connection_registers_buffers_and_an_idle_one_returns_them() {
    modes("use", || async {
        let (a, b) = pair(&config().shrink_after(Duration::from_millis(20)));
        for round in 0..3 {
            for side in [&a, &b] {
                shrunk(side).await;
                assert_eq!(side.counters().receives, 8, "round {round}");
            }
            let sending = async {
                for number in 0..500 {
                    soon("a send", a.send(pattern(4000, number))).await.unwrap();
                }
            };
            let receiving = async {
                let mut most = 0;
                for number in 0..500 {
                    assert!(recv(&b).await == pattern(4000, number), "message {number}");
                    most = most.max(b.counters().receives);
                }
                most
            };
            let ((), most) = tokio::join!(sending, receiving);
            assert!(most > 8, "round {round}");
            if torture::hardware().is_none() {
                assert_eq!(most, 68, "round {round}");
            }
        }
        assert_eq!(a.counters().growth_failures + b.counters().growth_failures, 0);
        assert_ready([&a, &b]);
    });
}

#[test]
fn peer_sends_as_many_messages_as_there_are_receive_buffers() {
    modes("receive buffers", || async {
        for _ in 0..scaled(100) {
            let (a, b) = pair(&config().receive_buffers(20));
            for number in 0..20 {
                soon("a send that nobody receives", a.send(pattern(8, number))).await.unwrap();
            }
            for number in 0..20 {
                assert!(recv(&b).await == pattern(8, number), "message {number}");
            }
        }
    });
}

#[test]
fn requests_and_short_answers_register_nothing() {
    modes("requests", || async {
        let (a, b) = pair(&config());
        for number in 0..200 {
            a.send(pattern(60, number)).await.unwrap();
            assert!(recv(&b).await == pattern(60, number));
            b.send(pattern(10, number)).await.unwrap();
            assert!(recv(&a).await == pattern(10, number));
        }
        for side in [&a, &b] {
            let counters = side.counters();
            assert_eq!((counters.receives, counters.buffer_memory), (8, FIRST));
        }
    });
}

/// Messages that a service keeps, some in the buffers of their connection.
#[derive(Default)]
struct Kept(VecDeque<(u64, Bytes)>);

impl Kept {
    fn keep(&mut self, number: u64, message: Bytes, most: usize) {
        self.0.push_back((number, message));
        while self.0.len() > most
            && let Some((number, message)) = self.0.pop_front()
        {
            assert!(message == pattern(message.len(), number), "kept message {number}");
        }
    }
}

/// Messages in bursts, between which sides may become idle.
async fn burst(
    from: &Connection,
    to: &Connection,
    random: &mut fastrand::Rng,
    first: u64,
    kept: &mut Kept,
) -> u64 {
    let keep = [0, 0, 5, 100][random.usize(..4)];
    let most = [40, 600, 3000, 20_000, 70_000][random.usize(..5)];
    let lens: Vec<usize> = (0..random.usize(1..40)).map(|_| random.usize(..most)).collect();
    let sending = async {
        for (number, &len) in (first..).zip(&lens) {
            soon("a send", from.send(pattern(len, number))).await.unwrap();
        }
    };
    let receiving = async {
        for (number, &len) in (first..).zip(&lens) {
            let message = recv(to).await;
            assert!(message == pattern(len, number), "message {number} of {len} bytes");
            kept.keep(number, message, keep);
        }
    };
    tokio::join!(sending, receiving);
    first + lens.len() as u64
}

async fn grow_and_shrink(mode: Mode, seed: u64) {
    let mut random = fastrand::Rng::with_seed(seed);
    let mut choose = |from: [u32; 4]| from[random.usize(..4)];
    let keepalive = (Duration::from_millis(choose([1, 3, 50, 5000]).into()), LONG);
    let config = config()
        .mode(mode.make())
        .receive_buffers(choose([1, 4, 5, 64]))
        .spare_buffers(choose([0, 1, 4, 32]))
        .send_buffers(choose([1, 2, 16, 64]))
        .receive_buffer_size(choose([400, 1000, 8192, 32 << 10]))
        .keepalive(Some(keepalive))
        .shrink_after(Duration::from_millis(1));
    // All peers live here, but a thread may not run for longer than `config` permits.
    let config = match torture::hardware() {
        Some(_) => config,
        None => config.retries(torture::impatient()),
    };
    let (a, b) = pair(&config);
    let talk = async |from: &Connection, to: &Connection, seed: u64| {
        let mut random = fastrand::Rng::with_seed(seed);
        let (mut number, mut kept) = (0, Kept::default());
        for _ in 0..scaled(if cfg!(debug_assertions) { 8 } else { 30 }) {
            number = burst(from, to, &mut random, number, &mut kept).await;
            if random.u8(..3) == 0 {
                shrunk(to).await;
            }
        }
    };
    tokio::join!(talk(&a, &b, seed), talk(&b, &a, seed.wrapping_add(1)));
    assert_ready([&a, &b]);
}

#[test]
fn messages_arrive_whole_while_windows_grow_and_shrink() {
    let seed = Seed::new("--test connections windows_grow_and_shrink");
    let value = seed.value;
    let modes = |flavour| Mode::ALL.into_iter().map(move |mode| (flavour, mode));
    for (number, (flavour, mode)) in (0..).zip(Flavour::ALL.into_iter().flat_map(modes)) {
        let chosen = value.wrapping_add(number);
        bounded("windows", LONG, move || {
            flavour.runtime().block_on(grow_and_shrink(mode, chosen));
        });
    }
    drop(seed);
}

#[test]
fn without_memory_for_more_buffers_messages_still_arrive() {
    if torture::hardware().is_some() {
        // It would register as much as the device permits.
        return;
    }
    // To register all the memory takes seconds without optimisation, in every mode the same.
    let only = if cfg!(debug_assertions) { 1 } else { Mode::ALL.len() };
    for mode in Mode::ALL.into_iter().take(only) {
        bounded("no memory", LONG, move || {
            connected::use_mode(mode);
            Flavour::MultiThread.runtime().block_on(without_memory());
        });
    }
}

async fn without_memory() {
    let (a, b) = pair(&config().receive_buffers(16).shrink_after(Duration::from_millis(20)));
    let mut registered: Vec<BufMut> = Vec::new();
    let refused = loop {
        match b.protection_domain().register(vec![0; 1]) {
            Ok(buffer) => registered.push(buffer),
            Err(error) => break error,
        }
    };
    assert!(matches!(refused, SetupError::Verb(_)), "{refused}");
    // As long as a work request holds: the sender needs no memory either.
    let message = |number: u64| Bytes::copy_from_slice(&number.to_be_bytes());
    let exchange = async |numbers: std::ops::Range<u64>| {
        let sending = async {
            for number in numbers.clone() {
                soon("a send", a.send(message(number))).await.unwrap();
            }
        };
        let receiving = async {
            for number in numbers.clone() {
                assert_eq!(recv(&b).await, message(number));
            }
        };
        tokio::join!(sending, receiving);
    };
    exchange(0..100).await;
    assert!(b.counters().growth_failures > 0);
    assert_eq!(b.counters().receives, 8);
    registered.clear();
    let tries_again = async {
        while b.counters().receives < 20 {
            exchange(0..100).await;
        }
    };
    soon("growth", tries_again).await;
    assert_ready([&a, &b]);
}

/// Sends messages of up to 40,000 bytes both ways, several at once.
async fn exchange(a: &Connection, b: &Connection) {
    let talk = async |from: &Connection, to: &Connection| {
        let sending = async {
            for number in 0..100 {
                soon("a send", from.send(pattern(400 * number as usize, number))).await.unwrap();
            }
        };
        let receiving = async {
            for number in 0..100 {
                assert!(recv(to).await == pattern(400 * number as usize, number), "{number}");
            }
        };
        tokio::join!(sending, receiving);
    };
    tokio::join!(talk(a, b), talk(b, a));
}

#[test]
fn connections_at_the_limit_of_their_budget_slow_down_and_live_on() {
    modes("budget", || async {
        for bytes in [4 * FIRST, 64 << 10, 700 << 10] {
            let budget = BufferBudget::new(bytes);
            let config = config().budget(&budget).shrink_after(Duration::from_millis(20));
            let (a, b) = pair(&config);
            let (c, d) = pair(&config);
            tokio::join!(exchange(&a, &b), exchange(&c, &d));
            assert!(budget.counters().used <= bytes, "{budget:?}");
            assert!(budget.counters().refused > 0, "{budget:?}");
            for side in [&a, &b, &c, &d] {
                shrunk(side).await;
                assert_ready([&a, &b]);
            }
            drop((a, b, c, d));
            soon("all bytes", async {
                while budget.counters().used > 0 {
                    tokio::task::yield_now().await;
                }
            })
            .await;
        }
    });
}

#[test]
fn first_growth_that_does_not_fit_registers_shorter_receives() {
    modes("little budget", || async {
        // Sixteen buffers of 16 KiB do not fit, nor of 4 KiB beside as much for others.
        let budget = BufferBudget::new(64 << 10);
        let (_, pd) = torture::device(&Network::new());
        // They do not become fewer during the test.
        let served = config().budget(&budget).shrink_after(LONG);
        let (a, b) = pair_in(&pd, &pd, &config(), &served);
        let sending = async {
            for number in 0..100 {
                soon("a send", a.send(pattern(10 * number as usize, number))).await.unwrap();
            }
        };
        let receiving = async {
            for number in 0..100 {
                let message = recv(&b).await;
                assert!(message == pattern(10 * number as usize, number), "message {number}");
            }
        };
        tokio::join!(sending, receiving);
        assert!(b.counters().buffer_memory > FIRST, "{:?}", b.counters());
        assert!(budget.counters().used <= budget.counters().bytes / 2, "{budget:?}");
        let each = b.counters().buffer_memory / u64::from(b.counters().receives);
        assert!((1 << 10..4 << 10).contains(&each), "{:?}", b.counters());
        assert_ready([&a, &b]);
    });
}

#[test]
fn listener_whose_budget_is_used_up_refuses_until_a_connection_closes() {
    modes("out of buffers", || async {
        let (device, _) = torture::device(&Network::new());
        let budget = BufferBudget::process().part(2 * FIRST);
        let served = config().budget(&budget);
        let listener =
            Listener::bind_with(&device, connected::address(&device), &served).await.unwrap();
        let connect = async || {
            let config = config();
            let connecting =
                Connection::connect_with(&device, listener.local_addr().unwrap(), &config);
            soon("connect", async { tokio::try_join!(connecting, listener.accept()) }).await
        };
        let (first, second) = (connect().await.unwrap(), connect().await.unwrap());
        let refused = async {
            let config = config();
            let connecting =
                Connection::connect_with(&device, listener.local_addr().unwrap(), &config);
            tokio::select! {
                refused = connecting => refused,
                accepted = listener.accept() => panic!("{accepted:?}"),
            }
        };
        match soon("refusal", refused).await {
            Err(EstablishError::Refused { reason, .. }) => {
                assert_eq!(reason, RefusalReason::OutOfBuffers);
            }
            other => panic!("{other:?}"),
        }
        assert_eq!(listener.stats().refused_buffers, 1);
        let too_small = config().budget(&BufferBudget::new(FIRST - 1));
        let error = Connection::connect_with(&device, listener.local_addr().unwrap(), &too_small)
            .await
            .err();
        assert!(
            matches!(error, Some(EstablishError::Setup(SetupError::Limit(limit)))
                if limit.field.starts_with("bytes of the BufferBudget")),
            "{error:?}"
        );
        drop(first);
        soon("free buffers", async {
            while budget.counters().used > FIRST {
                tokio::task::yield_now().await;
            }
        })
        .await;
        let (client, server) = connect().await.unwrap();
        exchange(&client, &server).await;
        drop(second);
    });
}
