//! Frames, coalescing and endings of streams on the software device.

use std::future::{Future, poll_fn};
use std::io::ErrorKind;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures::{FutureExt, StreamExt};
use rdma_message_proto::window::{Resize, Sizes};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf};

use crate::connection::stream_state::Held;
use crate::connection::{CloseReason, ConnectionConfig};
use crate::contained::tests::{HANG, calls_when_cloned};
use crate::memory::{BufMut, Pool};
use crate::software::Network;
use crate::stream::{RdmaListener, RdmaStream};
use crate::verbs::Device;

fn run<T>(test: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(test)
}

async fn pair() -> [RdmaStream; 2] {
    pair_in(&Network::new()).await
}

async fn pair_in(network: &Network) -> [RdmaStream; 2] {
    pair_with(network, &ConnectionConfig::for_streams()).await
}

/// Returns the client's and the server's stream of two devices.
async fn pair_with(network: &Network, config: &ConnectionConfig) -> [RdmaStream; 2] {
    let [client, server] =
        ["client", "server"].map(|name| Device::software_in(network, name).unwrap());
    let listener = RdmaListener::bind_with(&server, "127.0.0.1:0", config).await.unwrap();
    let address = listener.local_addr().unwrap();
    let connecting = RdmaStream::connect_with(&client, address, config);
    let ((server, _), client) = tokio::try_join!(listener.accept(), connecting).unwrap();
    [client, server]
}

#[test]
fn futures_that_connect_and_bind_are_short() {
    let device = Device::software_in(&Network::new(), "short").unwrap();
    let connecting = RdmaStream::connect(&device, "127.0.0.1:1");
    assert!(size_of_val(&connecting) < 1000, "{} bytes", size_of_val(&connecting));
    let binding = RdmaListener::bind(&device, "127.0.0.1:1");
    assert!(size_of_val(&binding) < 1000, "{} bytes", size_of_val(&binding));
}

#[test]
fn bytes_arrive_in_order_then_the_end() {
    run(async {
        let [mut client, mut server] = pair().await;
        let sent: Vec<u8> = (0..1 << 20).map(|at: u32| (at % 251) as u8).collect();
        let writing = async {
            client.write_all(&sent[..3]).await.unwrap();
            client.write_all(&sent[3..100_000]).await.unwrap();
            client.write_bytes(Bytes::copy_from_slice(&sent[100_000..])).await.unwrap();
            client.shutdown().await.unwrap();
        };
        let reading = async {
            let mut received = Vec::new();
            server.read_to_end(&mut received).await.unwrap();
            received
        };
        let ((), received) = tokio::join!(writing, reading);
        assert!(received == sent);
        assert_eq!(server.read(&mut [0; 8]).await.unwrap(), 0, "the end is final");
        server.write_all(b"still open").await.unwrap();
        drop(server);
        let mut answer = Vec::new();
        client.read_to_end(&mut answer).await.unwrap();
        assert_eq!(answer, b"still open");
        assert_eq!(client.closed().await, CloseReason::Clean);
    });
}

#[test]
fn listener_is_polled_for_streams_until_its_device_is_removed() {
    run(async {
        let network = Network::new();
        let [client, server] =
            ["client", "server"].map(|name| Device::software_in(&network, name).unwrap());
        let mut listener = RdmaListener::bind(&server, "127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        for as_stream in [false, true] {
            let accepting = async {
                if as_stream {
                    return listener.next().await.unwrap().unwrap();
                }
                let (stream, peer) = poll_fn(|task| listener.poll_accept(task)).await.unwrap();
                assert_eq!(peer, stream.peer_addr().unwrap());
                stream
            };
            let connecting = RdmaStream::connect(&client, address);
            let (connected, mut accepted) = tokio::join!(connecting, accepting);
            connected.unwrap().write_all(b"hello").await.unwrap();
            let mut received = Vec::new();
            accepted.read_to_end(&mut received).await.unwrap();
            assert_eq!(received, b"hello");
        }
        assert_eq!(listener.stats().accepted, 2);
        network.control("server").unwrap().kill();
        assert!(matches!(listener.next().await, Some(Err(_))));
        assert!(listener.next().await.is_none());
    });
}

#[test]
fn shutdown_of_a_listener_loses_no_arrived_bytes_and_aborts_the_rest_at_its_limit() {
    run(async {
        let network = Network::new();
        let [client, server] =
            ["client", "server"].map(|name| Device::software_in(&network, name).unwrap());
        for notices in [true, false] {
            let listener = RdmaListener::bind(&server, "127.0.0.1:0").await.unwrap();
            let connecting = RdmaStream::connect(&client, listener.local_addr().unwrap());
            let (mut ours, accepted) = tokio::join!(connecting, listener.accept());
            let (ours, mut theirs) = (ours.as_mut().unwrap(), accepted.unwrap().0);
            ours.write_all(&[7; 1000]).await.unwrap();
            theirs.read_exact(&mut [0; 1]).await.unwrap();
            let serving = async {
                let mut rest = Vec::new();
                if notices {
                    theirs.read_to_end(&mut rest).await.unwrap();
                    theirs.shutdown().await.unwrap();
                    assert_eq!(ours.read(&mut [0; 1]).await.unwrap(), 0);
                    ours.shutdown().await.unwrap();
                    assert_eq!(rest, [7; 999]);
                }
            };
            let limit = if notices { HANG } else { Duration::ZERO };
            let (report, ()) = tokio::join!(listener.shutdown(limit), serving);
            let found = (report.clean, report.unclean, report.aborted);
            assert_eq!(found, if notices { (1, 0, 0) } else { (0, 0, 1) });
            let reason = if notices { CloseReason::Clean } else { CloseReason::Shutdown };
            assert_eq!(theirs.closed().await, reason);
        }
    });
}

#[test]
fn stream_is_longer_than_the_longest_message() {
    for max_message in [0, 100, 100_000] {
        run(async {
            let config = ConnectionConfig::for_streams().max_message(max_message);
            let [mut client, mut server] = pair_with(&Network::new(), &config).await;
            let writing = async {
                client.write_all(&[7; 50_000]).await.unwrap();
                client.write_bytes(vec![7; 1 << 20]).await.unwrap();
                let pool = Pool::new(client.protection_domain(), 50_000, 1).unwrap();
                client.write_buf(pool.copy_from(&[7; 50_000]).unwrap()).await.unwrap();
                client.shutdown().await.unwrap();
            };
            let mut received = Vec::new();
            let ((), read) = tokio::join!(writing, server.read_to_end(&mut received));
            assert_eq!(read.unwrap(), 100_000 + (1 << 20));
        });
    }
}

#[test]
fn frames_are_read_in_place_and_partly() {
    run(async {
        let [mut client, mut server] = pair().await;
        client.write_all(b"one\ntwo\n").await.unwrap();
        let mut line = String::new();
        server.read_line(&mut line).await.unwrap();
        assert_eq!(line, "one\n");
        let mut rest = [0; 2];
        server.read_exact(&mut rest).await.unwrap();
        assert_eq!(&rest, b"tw");
        assert_eq!(server.read_bytes().await.unwrap().as_deref(), Some(&b"o\n"[..]));
    });
}

#[test]
fn aborted_stream_resets_the_peer() {
    run(async {
        let [client, mut server] = pair().await;
        client.abort();
        assert_eq!(server.read(&mut [0; 8]).await.unwrap_err().kind(), ErrorKind::ConnectionReset);
        let refused = server.write_all(b"late").await.unwrap_err().kind();
        assert_eq!(refused, ErrorKind::ConnectionReset);
        assert_eq!(server.counters().received, 0);
    });
}

/// Returns the frames in flight, and the bytes held.
fn outstanding(stream: &RdmaStream) -> (usize, usize) {
    let shared = &stream.handle().shared;
    shared
        .with(|state, _| (state.outbox.sends.len(), state.outbox.held.iter().map(Held::len).sum()))
}

/// Runs `test` with a stream whose peer acknowledges nothing, then lets the peer read to the end.
/// Returns the frames in which it has received `expected`.
fn unacknowledged(expected: usize, test: impl AsyncFnOnce(&mut RdmaStream)) -> u64 {
    run(async {
        let network = Network::new();
        let config = ConnectionConfig::for_streams().preallocate(true);
        let [mut client, mut server] = pair_with(&network, &config).await;
        let port = network.control("server").unwrap();
        port.set_port(false);
        test(&mut client).await;
        port.set_port(true);
        client.shutdown().await.unwrap();
        let mut received = Vec::new();
        server.read_to_end(&mut received).await.unwrap();
        assert!(received == vec![7; expected]);
        server.counters().received
    })
}

#[test]
fn unacknowledged_frames_in_short_buffers_do_not_limit_what_is_held() {
    run(async {
        let network = Network::new();
        let [mut client, mut server] = pair_with(&network, &ConnectionConfig::for_streams()).await;
        let port = network.control("server").unwrap();
        port.set_port(false);
        client.writable().await.unwrap();
        assert_eq!(client.try_write(&[7; 4000]).unwrap(), 4000, "more than the peer's receives");
        let mut written = 4000;
        while let Ok(more) = client.try_write(&[7; 1000]) {
            written += more;
        }
        assert!(written >= 256 << 10, "{written} bytes, half of the send buffers");
        port.set_port(true);
        client.shutdown().await.unwrap();
        let mut received = Vec::new();
        server.read_to_end(&mut received).await.unwrap();
        assert!(received == vec![7; written]);
    });
}

struct Count(AtomicU32);

impl Wake for Count {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

/// Writes until a write has to wait. Returns the number of bytes written.
async fn fill(stream: &mut RdmaStream) -> usize {
    let mut written = 0;
    while let Some(result) = stream.write(&[7; 1000]).now_or_never() {
        written += result.unwrap();
        tokio::task::yield_now().await;
    }
    written
}

#[test]
fn flush_does_not_withdraw_a_write_that_waits() {
    run(async {
        let [mut client, mut server] = pair().await;
        client.set_nodelay(true).unwrap();
        let mut written = fill(&mut client).await;
        let count = Arc::new(Count(AtomicU32::new(0)));
        let waker = Waker::from(count.clone());
        let context = &mut Context::from_waker(&waker);
        while let Poll::Ready(more) = Pin::new(&mut client).poll_write(context, &[7; 1000]) {
            written += more.unwrap();
            tokio::task::yield_now().await;
        }
        let before = count.0.load(Ordering::Relaxed);
        assert!(Pin::new(&mut client).poll_flush(context).is_ready());
        assert_eq!(count.0.load(Ordering::Relaxed), before, "not woken without a change");
        server.read_exact(&mut vec![0; written]).await.unwrap();
        let woken = async {
            while count.0.load(Ordering::Relaxed) == before {
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(HANG, woken).await.unwrap();
    });
}

#[test]
fn only_a_write_that_waits_for_the_peer_stalls() {
    let stall = Duration::from_secs(3600);
    for reads in [false, true] {
        run(async {
            let config = ConnectionConfig::for_streams().stall_timeout(Some(stall)).keepalive(None);
            let [mut client, mut server] = pair_with(&Network::new(), &config).await;
            // Its last future was dropped.
            let written = fill(&mut client).await;
            if reads {
                server.read_exact(&mut vec![0; written]).await.unwrap();
                while client.counters().credits < 10 {
                    tokio::task::yield_now().await;
                }
            }
            let now = Instant::now();
            for check in 1..=4 {
                let shared = &client.handle().shared;
                shared.with(|state, _| state.on_deadline(now + stall * check));
            }
            assert_eq!(client.close_reason(), (!reads).then_some(CloseReason::Stalled));
        });
    }
}

#[test]
fn flush_and_shutdown_without_a_credit_do_not_wait() {
    run(async {
        let [mut client, mut server] = pair_in(&Network::new()).await;
        let written = fill(&mut client).await;
        assert!(client.counters().credits < 4 && outstanding(&client).1 > 0);
        assert!(client.flush().now_or_never().unwrap().is_ok());
        assert!(client.shutdown().now_or_never().unwrap().is_ok());
        assert!(client.flush().now_or_never().unwrap().is_ok());
        let mut received = Vec::new();
        server.read_to_end(&mut received).await.unwrap();
        assert!(received == vec![7; written]);
    });
}

/// Returns a copy of `bytes` in memory that the stream can send from.
fn registered(stream: &RdmaStream, bytes: &[u8]) -> BufMut {
    Pool::new(stream.protection_domain(), 64, 1).unwrap().copy_from(bytes).unwrap()
}

#[test]
fn bytes_of_a_buffer_are_written_from_its_memory() {
    let frames = unacknowledged(4096 + 4095, async |stream| {
        let in_place =
            |stream: &RdmaStream| stream.handle().shared.with(|state, _| state.outbox.in_place);
        let memory = stream.protection_domain().register(vec![7; 4096]).unwrap();
        let bytes = bytes::Bytes::from(memory);
        stream.write_bytes(bytes.clone()).await.unwrap();
        assert_eq!((in_place(stream), outstanding(stream)), (1, (1, 0)));
        stream.write_bytes(bytes.slice(1..)).await.unwrap();
        assert_eq!((in_place(stream), outstanding(stream)), (1, (1, 4095)), "a copy costs less");
    });
    assert_eq!(frames, 2);
}

#[test]
fn short_writes_are_combined_while_a_frame_is_in_flight() {
    let frames = unacknowledged(1 + 99 * 10, async |stream| {
        stream.write_all(&[7]).await.unwrap();
        assert_eq!(outstanding(stream), (1, 0), "the first is sent at once");
        for written in 1..=99 {
            stream.write_all(&[7; 10]).await.unwrap();
            assert_eq!(outstanding(stream), (1, written * 10));
        }
    });
    assert_eq!(frames, 2);
}

#[test]
fn held_bytes_are_sent_whichever_call_finds_the_last_acknowledgement() {
    run(async {
        let [mut client, mut server] = pair().await;
        client.write_all(&[7]).await.unwrap();
        client.handle().shared.with(|state, waker| {
            let buffer =
                state.take_send_buffer(state.protocol.framing().frame(), 1).unwrap().unwrap();
            state.outbox.held.push_back(Held::new(buffer, 10));
            let limit = Instant::now() + HANG;
            // Nothing has polled the frame, as if it completed after `send_held`.
            while !state.outbox.sends[0].is_finished() {
                assert!(Instant::now() < limit, "not acknowledged");
                state.io.qp.drain_completions();
            }
            state.watch_sends(&mut Context::from_waker(waker)).unwrap();
        });
        assert_eq!(outstanding(&client).1, 0);
        server.read_exact(&mut [0; 11]).await.unwrap();
    });
}

#[test]
fn held_bytes_longer_than_a_receive_are_split_without_loss() {
    run(async {
        let [mut client, mut server] = pair().await;
        let sent: Vec<u8> = (0..1000_u32).map(|at| (at % 251) as u8).collect();
        let pool = Pool::new(client.protection_domain(), sent.len(), 1).unwrap();
        let buffer = pool.copy_from(&sent).unwrap();
        client.handle().shared.with(|state, _| {
            state.outbox.held.push_back(Held::new(buffer, sent.len()));
            // The next receives of the peer take 300 bytes, as far as this side knows.
            let next = state.protocol.flow.next_receive();
            let resize = Resize { receives: 64, skip: 0, from: next + 20, size: 32 << 10 };
            let sizes = state.protocol.framing_mut().sizes();
            *sizes = Sizes::new(300);
            sizes.change(resize, next).unwrap();
        });
        client.flush().await.unwrap();
        client.shutdown().await.unwrap();
        let mut received = Vec::new();
        server.read_to_end(&mut received).await.unwrap();
        assert!(received == sent, "{} of {} bytes", received.len(), sent.len());
        assert_eq!(server.counters().received, 4);
    });
}

#[test]
fn write_that_waits_is_woken_when_another_withdraws_its_ticket() {
    run(async {
        let network = Network::new();
        let [mut client, _server] = pair_in(&network).await;
        network.control("server").unwrap().set_port(false);
        const PIECE: usize = 1 << 20;
        client.handle().shared.with(|state, _| state.protocol.sending.limit_offers(PIECE as u64));
        client.write_bytes(vec![7; PIECE]).await.unwrap();
        let count = Arc::new(Count(AtomicU32::new(0)));
        let waker = Waker::from(count.clone());
        {
            // It waits until the peer has fetched the first piece.
            let more = pin!(client.write_bytes(vec![7; PIECE]));
            assert!(more.poll(&mut Context::from_waker(&waker)).is_pending());
        }
        assert_eq!(count.0.load(Ordering::Relaxed), 0);
        // Few bytes need no memory, so this write takes the position of the one that waits.
        client.write_all(&[7]).await.unwrap();
        assert_eq!(count.0.load(Ordering::Relaxed), 1);
    });
}

#[test]
fn held_bytes_are_sent_when_they_fill_a_frame() {
    let frame = 32 << 10;
    let frames = unacknowledged(frame + 101, async |stream| {
        stream.write_all(&[7; 100]).await.unwrap();
        stream.write_all(&vec![7; frame - 1]).await.unwrap();
        assert_eq!(outstanding(stream), (1, frame - 1));
        stream.write_all(&[7; 2]).await.unwrap();
        assert_eq!(outstanding(stream), (2, 1), "a frame, and the byte that did not fit");
    });
    assert_eq!(frames, 3);
}

#[test]
fn flush_and_nodelay_send_held_bytes_at_once() {
    let frames = unacknowledged(40, async |stream| {
        stream.write_all(&[7; 10]).await.unwrap();
        stream.write_all(&[7; 10]).await.unwrap();
        stream.flush().await.unwrap();
        assert_eq!(outstanding(stream), (2, 0));
        stream.write_all(&[7; 10]).await.unwrap();
        assert_eq!(outstanding(stream), (2, 10));
        assert!(!stream.nodelay().unwrap());
        stream.set_nodelay(true).unwrap();
        assert_eq!(outstanding(stream), (3, 0));
        stream.write_all(&[7; 10]).await.unwrap();
        assert_eq!(outstanding(stream), (4, 0));
    });
    assert_eq!(frames, 4);
}

#[test]
fn buffers_and_long_bytes_follow_held_bytes() {
    let frames = unacknowledged(20 + (2 << 20), async |stream| {
        stream.write_all(&[7; 5]).await.unwrap();
        stream.write_all(&[7; 5]).await.unwrap();
        let buffer = registered(stream, &[7; 10]);
        stream.write_buf(buffer).await.unwrap();
        assert_eq!(outstanding(stream), (3, 0));
        stream.write_bytes(vec![7; 2 << 20]).await.unwrap();
        assert_eq!(outstanding(stream), (5, 0), "two pieces of a mebibyte are offered");
    });
    assert_eq!(frames, 5);
}

#[test]
fn peer_that_has_read_everything_counts_as_acknowledged() {
    run(async {
        let network = Network::new();
        let [mut client, mut server] = pair_in(&network).await;
        let mut bytes = [0; 10];
        for _ in 0..100 {
            client.write_all(&[7; 10]).await.unwrap();
            assert_eq!(outstanding(&client).1, 0, "an answer has acknowledged the last one");
            server.read_exact(&mut bytes).await.unwrap();
            server.write_all(&bytes).await.unwrap();
            client.read_exact(&mut bytes).await.unwrap();
        }
    });
}

#[test]
fn rest_of_a_frame_that_another_task_has_begun_to_read_is_noticed() {
    type Polls = fn(&RdmaStream, &mut Context<'_>) -> bool;
    let polls: [Polls; 3] = [
        |stream, context| pin!(stream.readable()).poll(context).is_ready(),
        |stream, context| pin!(stream.peek(&mut [0])).poll(context).is_ready(),
        |stream, context| stream.poll_peek(context, &mut ReadBuf::new(&mut [0])).is_ready(),
    ];
    for poll in polls {
        run(async {
            let [client, server] = pair().await.map(Arc::new);
            // Runs after the poll has found nothing: the other task reads the first byte.
            let (arrived, other) = (AtomicBool::new(false), Arc::clone(&server));
            let waker = calls_when_cloned(move || {
                if !arrived.swap(true, Ordering::Relaxed) {
                    assert_eq!(client.try_write(b"ab").unwrap(), 2);
                    while other.try_read(&mut [0]).is_err() {
                        std::thread::yield_now();
                    }
                }
            });
            assert!(poll(&server, &mut Context::from_waker(&waker)));
            assert_eq!(server.try_read(&mut [0]).unwrap(), 1);
        });
    }
}
