//! Connections as those of iWARP devices, on the software device: frames end with their header, and
//! the connecting side sends the first one.

use bytes::Bytes;
use futures::FutureExt;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::connection::{BufferBudget, Connection, ConnectionConfig, Listener};
use crate::error::SetupError;
use crate::memory::Pool;
use crate::software::Network;
use crate::stream::{RdmaListener, RdmaStream};
use crate::verbs::Device;

fn run<T>(test: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(test)
}

fn like_iwarp(mut config: ConnectionConfig) -> ConnectionConfig {
    config.like_iwarp = true;
    config
}

fn pattern(len: usize) -> Bytes {
    (0..len).map(|at| (at * 7 + at / 251) as u8).collect()
}

fn devices() -> [Device; 2] {
    let network = Network::new();
    ["client", "server"].map(|name| Device::software_in(&network, name).unwrap())
}

async fn connected(config: &ConnectionConfig) -> [Connection; 2] {
    let [client, server] = devices();
    let listener = Listener::bind_with(&server, "127.0.0.1:0", config).await.unwrap();
    let connecting = Connection::connect_with(&client, listener.local_addr().unwrap(), config);
    let (theirs, ours) = tokio::join!(listener.accept(), connecting);
    [ours.unwrap(), theirs.unwrap()]
}

#[test]
fn messages_of_each_length_arrive_in_buffers_that_grow_and_in_fixed_ones() {
    let fixed = ConnectionConfig::default().preallocate(true);
    for config in [ConnectionConfig::default(), fixed] {
        run(async {
            let [ours, theirs] = connected(&like_iwarp(config)).await;
            // Around the ends of inline data, of first receives, of frames and of messages in
            // frames.
            let around = |len: usize| len - 9..len + 9;
            let lens = (0..70).chain(around(384)).chain(around(16_384)).chain(around(131_072));
            for round in 0..2 {
                for len in lens.clone() {
                    let message = pattern(len + round);
                    let (sent, received) = tokio::join!(ours.send(message.clone()), theirs.recv());
                    sent.unwrap();
                    assert_eq!(received.unwrap(), Some(message), "{len}");
                }
            }
            theirs.send("answer").await.unwrap();
            assert_eq!(ours.recv().await.unwrap().unwrap(), "answer");
            let ends = async {
                assert_eq!(theirs.recv().await.unwrap(), None);
                theirs.close().await
            };
            tokio::try_join!(ends, ours.close()).unwrap();
        });
    }
}

#[test]
fn registered_buffers_are_copied() {
    run(async {
        let [ours, theirs] = connected(&like_iwarp(ConnectionConfig::default())).await;
        let pool = Pool::new(ours.protection_domain(), 16_384, 2).unwrap();
        for len in [1, 300, 16_384] {
            let buffer = pool.copy_from(&pattern(len)).unwrap().freeze();
            let (sent, received) = tokio::join!(ours.send(buffer), theirs.recv());
            sent.unwrap();
            assert_eq!(received.unwrap(), Some(pattern(len)));
        }
    });
}

#[test]
fn bytes_of_a_stream_arrive_in_order_both_ways() {
    run(async {
        let [client, server] = devices();
        let config = like_iwarp(ConnectionConfig::for_streams());
        let listener = RdmaListener::bind_with(&server, "127.0.0.1:0", &config).await.unwrap();
        let address = listener.local_addr().unwrap();
        let connecting = RdmaStream::connect_with(&client, address, &config);
        let ((server, _), client) = tokio::try_join!(listener.accept(), connecting).unwrap();
        let all = pattern(3_000_000);
        let exchange = async |stream: RdmaStream| {
            let (mut read, mut write) = tokio::io::split(stream);
            let writing = async {
                let (mut rest, mut len) = (&all[..], 1);
                while !rest.is_empty() {
                    let (piece, left) = rest.split_at(len.min(rest.len()));
                    write.write_all(piece).await.unwrap();
                    (rest, len) = (left, len % 40_000 * 3 + 1);
                }
                write.shutdown().await.unwrap();
            };
            let mut received = Vec::new();
            let (_, end) = tokio::join!(writing, read.read_to_end(&mut received));
            end.unwrap();
            assert!(received == all);
        };
        tokio::join!(exchange(client), exchange(server));
    });
}

#[test]
fn stream_without_budget_sends_short_frames() {
    run(async {
        let [client, server] = devices();
        // For the first receives only.
        let config =
            || like_iwarp(ConnectionConfig::for_streams()).budget(&BufferBudget::new(3840));
        let listener = RdmaListener::bind_with(&server, "127.0.0.1:0", &config()).await.unwrap();
        let (address, config) = (listener.local_addr().unwrap(), config());
        let connecting = RdmaStream::connect_with(&client, address, &config);
        let ((mut server, _), mut client) =
            tokio::try_join!(listener.accept(), connecting).unwrap();
        // Written before anything is read, so that the first buffers are used up.
        let all = pattern(20_000);
        let mut written = 0;
        while let Some(len) = client.write(&all[written..]).now_or_never() {
            written += len.unwrap();
        }
        assert!(written > 0, "the first buffers need no budget");
        let writing = async {
            client.write_all(&all[written..]).await.unwrap();
            client.shutdown().await.unwrap();
        };
        let mut received = Vec::new();
        let (_, end) = tokio::join!(writing, server.read_to_end(&mut received));
        end.unwrap();
        assert!(received == all);
    });
}

#[test]
fn receives_too_short_for_an_offer_and_its_header_are_refused() {
    let [client, _] = devices();
    let config = like_iwarp(ConnectionConfig::default().receive_buffer_size(23));
    let refused = config.check(&client);
    assert_eq!(refused, SetupError::at_least("receive_buffer_size", 23, 24));
}

#[test]
fn accepting_side_may_have_the_first_message() {
    run(async {
        let [ours, theirs] = connected(&like_iwarp(ConnectionConfig::default())).await;
        theirs.send("first").await.unwrap();
        assert_eq!(ours.recv().await.unwrap().unwrap(), "first");
    });
}

#[test]
fn requests_that_fit_a_work_request_register_nothing() {
    run(async {
        let [ours, theirs] = connected(&like_iwarp(ConnectionConfig::default())).await;
        let before = [&ours, &theirs].map(|side| side.counters().buffer_memory);
        // Of 64 bytes, four are the header.
        for _ in 0..200 {
            ours.send(pattern(60)).await.unwrap();
            assert_eq!(theirs.recv().await.unwrap().unwrap(), pattern(60));
            theirs.send("answer").await.unwrap();
            assert_eq!(ours.recv().await.unwrap().unwrap(), "answer");
        }
        assert_eq!([&ours, &theirs].map(|side| side.counters().buffer_memory), before);
    });
}
