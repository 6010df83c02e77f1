//! Messages: boundaries, order, sizes, both ways, slow services, cancelled waits.
//!
//! `cargo test --test messages`; on the device that `TOKIO_RDMA_DEVICE` names, or the software device.
//! `TOKIO_RDMA_SECONDS` sets how long the crowd talks.

#![allow(clippy::unwrap_used)]

mod common;

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use common::{Setup, Wire, run, within};
use futures::{SinkExt, StreamExt};
use tokio_rdma::{
    CloseReason, CompletionMode, CompletionQueue, Connection, ConnectionConfig, Device, LimitError, MessageError,
    ProtectionDomain,
};

const WIRE: Wire = Wire::Memory;

/// Two connected ends.
fn pair_of(setup: &Setup, a: &ConnectionConfig, b: &ConnectionConfig) -> (Connection, Connection) {
    let (a_pd, b_pd) = (setup.a.protection_domain().unwrap(), setup.b.protection_domain().unwrap());
    pair_in(&a_pd, &b_pd, a, b)
}

fn pair_in(
    a_pd: &ProtectionDomain,
    b_pd: &ProtectionDomain,
    a: &ConnectionConfig,
    b: &ConnectionConfig,
) -> (Connection, Connection) {
    let (a, b) = (Connection::prepare(a_pd, a).unwrap(), Connection::prepare(b_pd, b).unwrap());
    let (a_end, b_end) = (a.endpoint(), b.endpoint());
    let (a_hello, b_hello) = (a.hello(b"from a").unwrap(), b.hello(b"from b").unwrap());
    (a.establish(&b_end, &b_hello).unwrap(), b.establish(&a_end, &a_hello).unwrap())
}

fn pair() -> (Connection, Connection) {
    pair_of(&Setup::new(), &ConnectionConfig::default(), &ConnectionConfig::default())
}

fn bytes(len: usize, seed: u8) -> Bytes {
    common::pattern(len, seed).into()
}

async fn recv(connection: &Connection) -> Bytes {
    within("a message", connection.recv()).await.unwrap().expect("no message")
}

#[test]
fn messages_of_every_kind_of_length_arrive_whole_and_in_order() {
    run(1, "lengths", async {
        let (a, b) = pair();
        let lengths = [
            0,
            1,
            63,
            64,
            65,
            255,
            256,
            257,
            8191,
            8192,
            8193,
            65_536,
            (1 << 20) - 1,
            1 << 20,
            (1 << 20) + 1,
            (8 << 20) + 5,
        ];
        let sending = async {
            for (at, &len) in lengths.iter().enumerate() {
                a.send(bytes(len, at as u8)).await.unwrap();
            }
        };
        let receiving = async {
            for (at, &len) in lengths.iter().enumerate() {
                assert_eq!(recv(&b).await, bytes(len, at as u8), "{len} bytes");
            }
        };
        tokio::join!(sending, receiving);
        a.flush().await.unwrap();
        assert_eq!(a.counters().offered, 6);
        assert_eq!((&a.user_data()[..], &b.user_data()[..]), (&b"from b"[..], &b"from a"[..]));
    });
}
