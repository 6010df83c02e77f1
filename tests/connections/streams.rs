//! Byte streams: content, back pressure, endings, and peers that break the protocol.
//!
//! Uses the device that `TOKIO_RDMA_DEVICE` names, or the software device. `TOKIO_RDMA_SECONDS`
//! sets how long the streams of the crowd run.

use std::future::poll_fn;
use std::io::ErrorKind;
use std::net::SocketAddr;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Wake, Waker};
use std::time::Duration;

use crate::connected::{self, brief, config, pattern, run};
use crate::torture::{
    self, Flavour, LONG, Seed, bounded, device, eventually, scaled, slow_network, soon,
};
use bytes::Bytes;
use futures::FutureExt;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWrite, AsyncWriteExt, Interest};
use tokio::sync::oneshot;
use tokio_rdma::connection::{BufferBudget, Handshake, RefusalReason, Service, Violation};
use tokio_rdma::software::Network;
use tokio_rdma::stream::{OwnedReadHalf, OwnedWriteHalf};
use tokio_rdma::types::{Imm, Rkey};
use tokio_rdma::{
    CloseReason, CompletionMode, CompletionQueue, Connection, ConnectionConfig, Device,
    EstablishError, Listener, ListenerConfig, MessageError, Pool, QueuePair, RdmaListener,
    RdmaStream, RemoteRegion, cm,
};

/// Connects two streams on one device.
pub(crate) async fn streams(config: &ConnectionConfig) -> [RdmaStream; 2] {
    streams_in(&Network::new(), config).await
}

async fn streams_in(network: &Network, config: &ConnectionConfig) -> [RdmaStream; 2] {
    streams_between(network, config, config).await
}

async fn streams_between(
    network: &Network,
    client: &ConnectionConfig,
    server: &ConnectionConfig,
) -> [RdmaStream; 2] {
    let (device, _) = device(network);
    let listener =
        RdmaListener::bind_with(&device, connected::address(&device), server).await.unwrap();
    let connecting = RdmaStream::connect_with(&device, listener.local_addr().unwrap(), client);
    let both = async { tokio::try_join!(connecting, listener.accept()) };
    let (client, (server, peer)) = soon("connect", both).await.unwrap();
    assert_eq!(client.local_addr().unwrap(), peer);
    [client, server]
}

#[test]
fn receives_grow_although_the_writer_always_holds_bytes() {
    if torture::hardware().is_some() {
        // Its reader may always be ahead.
        return;
    }
    run("a writer ahead", || async {
        let [mut ours, mut theirs] = streams(&ConnectionConfig::for_streams()).await;
        let writing = tokio::spawn(async move {
            for _ in 0..400 {
                soon("write", ours.write_all(&[7; 64 << 10])).await.unwrap();
            }
            ours
        });
        let mut read = vec![0; 64 << 10];
        for number in 0..400 {
            soon("read", theirs.read_exact(&mut read)).await.unwrap();
            if number == 200 {
                assert_eq!(theirs.counters().receives, 28);
            }
        }
        drop(soon("writing", writing).await.unwrap());
    });
}

#[test]
fn stream_is_writable_once_the_peer_has_read_everything() {
    run("a writable stream", || async {
        // No frame of the peer announces what it has read, except those that are due.
        let quiet = ConnectionConfig::for_streams().keepalive(None);
        let quiet = quiet.shrink_after(Duration::from_secs(3600));
        // Fewer send buffers than releases of receives that the peer need not announce.
        for (send_buffers, receives) in [(16, 128), (1, 24)] {
            let server = quiet.clone().receive_buffers(receives);
            let client = quiet.clone().send_buffers(send_buffers);
            let ends = streams_between(&Network::new(), &client, &server).await;
            let [mut ours, mut theirs] = ends;
            let mut read = vec![0; 32 << 10];
            for _ in 0..60 {
                soon("writable", ours.writable()).await.unwrap();
                let writing = async { ours.write_all(&[7; 32 << 10]).await.unwrap() };
                let reading = async { theirs.read_exact(&mut read).await.unwrap() };
                soon("write and read", async { tokio::join!(writing, reading) }).await;
            }
        }
    });
}

#[test]
fn writer_that_waits_for_buffers_goes_on_although_fewer_can_be_registered() {
    if torture::hardware().is_some() {
        // Its receives do not stay short.
        return;
    }
    run("fewer buffers", || async {
        let config = |budget| {
            ConnectionConfig::for_streams()
                .receive_buffer_size(1024)
                .receive_buffers(5)
                .spare_buffers(2)
                .shrink_after(Duration::from_secs(3600))
                .budget(&BufferBudget::new(budget))
        };
        let ends = streams_between(&Network::new(), &config(30_000), &config(10_000)).await;
        let [mut ours, mut theirs] = ends;
        // The writer holds bytes, and waits.
        let mut written = 0;
        while let Ok(number) = ours.try_write(&[7; 500]) {
            written += number;
        }
        let rest = vec![7; 200_000 - written];
        let (waits, waiting) = oneshot::channel();
        let writing = tokio::spawn(async move {
            let (mut waits, mut writing) = (Some(waits), pin!(ours.write_all(&rest)));
            let written = poll_fn(|context| {
                let written = writing.as_mut().poll(context);
                waits.take().filter(|_| written.is_pending()).map(|waits| waits.send(()));
                written
            });
            soon("writes", written).await.unwrap();
        });
        soon("a writer that waits", waiting).await.unwrap();
        let mut read = vec![0; 200_000];
        soon("read", theirs.read_exact(&mut read)).await.unwrap();
        soon("writing", writing).await.unwrap();
    });
}

#[test]
fn half_refuses_to_wait_for_the_other_direction() {
    run("readiness of halves", || async {
        let [ours, _theirs] = streams(&config()).await;
        let (read, write) = ours.into_split();
        let refused = [
            soon("reading half", read.ready(Interest::WRITABLE)).await,
            soon("writing half", write.ready(Interest::READABLE)).await,
        ];
        assert!(
            refused.map(Result::unwrap_err).iter().all(|e| e.kind() == ErrorKind::InvalidInput)
        );
    });
}

#[test]
fn lent_buffers_of_a_stream_return_although_nothing_else_happens() {
    run("lent buffers", || async {
        let [mut ours, mut theirs] = streams_in(&slow_network(1), &config().keepalive(None)).await;
        let pool = Pool::new(ours.protection_domain(), 900, 1).unwrap();
        for number in 0..12 {
            let mut buffer = soon("the buffer", pool.alloc(900)).await.unwrap();
            buffer.fill(7);
            soon("write", ours.write_buf(buffer.freeze())).await.unwrap();
            // The last bytes are not read, so the peer sends nothing more.
            if number < 8 {
                let mut read = [0; 900];
                soon("read", theirs.read_exact(&mut read)).await.unwrap();
                assert_eq!(read, [7; 900]);
            }
        }
    });
}

#[test]
fn writes_of_any_length_fill_the_send_buffers_of_a_stream_without_a_reader() {
    const HELD: usize = 512 << 10;
    run("writes without a reader", || async {
        for (len, nodelay) in [(7, false), (7, true), (384, true), (5000, false), (65_536, true)] {
            let budget = BufferBudget::new(16 << 20);
            let config = ConnectionConfig::for_streams().budget(&budget);
            let [mut ours, mut theirs] = streams(&config).await;
            ours.set_nodelay(nodelay).unwrap();
            let bytes = pattern(HELD.next_multiple_of(len), 3);
            for piece in bytes.chunks(len) {
                soon("write", ours.write_all(piece)).await.unwrap();
            }
            assert!(budget.counters().used < 4 << 20, "{:?}", budget.counters());
            soon("flush", ours.flush()).await.unwrap();
            soon("shutdown", ours.shutdown()).await.unwrap();
            let mut received = Vec::new();
            soon("read", theirs.read_to_end(&mut received)).await.unwrap();
            assert!(received == bytes, "{len} bytes each, nodelay {nodelay}");
        }
    });
}

#[test]
fn writes_fill_half_of_the_send_buffers_while_the_peer_has_its_first_receives() {
    run("first receives", || async {
        let network = Network::new();
        let [mut ours, mut theirs] = streams_in(&network, &ConnectionConfig::for_streams()).await;
        let bytes = pattern(256 << 10, 3);
        let mut written = 0;
        // Nothing else runs meanwhile, so the peer's receives stay the first ones.
        while let Some(more) = ours.write(&bytes[written..]).now_or_never() {
            written += more.unwrap();
            if written == bytes.len() {
                break;
            }
        }
        assert_eq!(written, bytes.len());
        soon("shutdown", ours.shutdown()).await.unwrap();
        let mut received = Vec::new();
        soon("read", theirs.read_to_end(&mut received)).await.unwrap();
        assert!(received == bytes);
    });
}

/// Returns the settings of [`config`] with small buffers.
fn small() -> ConnectionConfig {
    config().receive_buffer_size(1000).receive_buffers(4).spare_buffers(2).send_buffers(3)
}

/// Returns why the stream of an error closed.
fn reason(error: &std::io::Error) -> Option<CloseReason> {
    match error.get_ref()?.downcast_ref()? {
        MessageError::Closed(reason) => Some(*reason),
        _ => None,
    }
}

/// Writes `bytes` in pieces of random lengths, in each way that there is.
async fn write_all(stream: &mut OwnedWriteHalf, bytes: &Bytes, random: &mut fastrand::Rng) {
    let mut at = 0;
    while at < bytes.len() {
        let longest = [1, 10, 300, 5_000, 200_000][random.usize(..5)];
        let piece = bytes.slice(at..bytes.len().min(at + random.usize(1..=longest)));
        match random.u32(..4) {
            0 => stream.write_bytes(piece.clone()).await.unwrap(),
            1 => {
                let middle = piece.len() / 2;
                let slices = [&piece[..middle], &[], &piece[middle..]].map(std::io::IoSlice::new);
                let written = stream.write_vectored(&slices).await.unwrap();
                at += written;
                continue;
            }
            2 => {
                stream.write_all(&piece).await.unwrap();
                stream.flush().await.unwrap();
            }
            _ => stream.write_all(&piece).await.unwrap(),
        }
        at += piece.len();
    }
}

/// Reads and compares until the end, in each way that there is.
async fn read_all(stream: &mut OwnedReadHalf, bytes: &Bytes, random: &mut fastrand::Rng) {
    let (mut at, mut memory) = (0, vec![0; 100_000]);
    loop {
        let read = match random.u32(..3) {
            0 => {
                let Some(part) = stream.read_bytes().await.unwrap() else { break };
                assert!(!part.is_empty() && bytes[at..].starts_with(&part), "at {at}");
                part.len()
            }
            1 => {
                let part = stream.fill_buf().await.unwrap();
                let consumed = part.len().min(random.usize(1..50_000));
                assert!(bytes[at..].starts_with(part), "at {at}");
                stream.consume(consumed);
                consumed
            }
            _ => {
                let into = random.usize(1..memory.len());
                let read = stream.read(&mut memory[..into]).await.unwrap();
                assert!(bytes[at..].starts_with(&memory[..read]), "at {at}");
                read
            }
        };
        at += read;
        if read == 0 {
            break;
        }
    }
    assert_eq!(at, bytes.len(), "the end comes after all bytes");
}

#[test]
fn random_pieces_arrive_in_order_in_both_directions() {
    let seed = Seed::new("--test connections random_pieces");
    let value = seed.value;
    run("random pieces", move || async move {
        let tiny = small().receive_buffer_size(20).receive_buffers(1).send_buffers(1);
        let wide = config().receive_buffer_size(32 << 10);
        for (number, (config, len)) in
            [(wide, 1 << 20), (small().max_eager(2000), 300_000), (tiny.max_eager(20), 5_000)]
                .into_iter()
                .enumerate()
        {
            let ends = streams(&config).await;
            let patterns = [0, 1].map(|end| pattern(scaled(len) as usize, value ^ end));
            let mut tasks = Vec::new();
            for (end, stream) in ends.into_iter().enumerate() {
                let (mut read, mut write) = stream.into_split();
                let [sent, received] = [patterns[end].clone(), patterns[1 - end].clone()];
                let mut random = fastrand::Rng::with_seed(value ^ (number * 2 + end) as u64);
                let mut other = random.fork();
                tasks.push(tokio::spawn(async move {
                    write_all(&mut write, &sent, &mut random).await;
                    write.shutdown().await.unwrap();
                }));
                tasks.push(tokio::spawn(async move {
                    read_all(&mut read, &received, &mut other).await;
                }));
            }
            for task in tasks {
                soon("a half", task).await.unwrap();
            }
        }
    });
    drop(seed);
}

/// The reading half of a stream, which the waker of its writer uses.
struct ReadsWhenWoken(OwnedReadHalf, AtomicBool);

impl Wake for ReadsWhenWoken {
    fn wake(self: Arc<Self>) {
        let read = self.0.try_read(&mut [0; 8]);
        assert_eq!(read.unwrap_err().kind(), ErrorKind::WouldBlock);
        self.1.store(true, Ordering::Relaxed);
    }
}

#[test]
fn writer_woken_by_a_read_without_waiting_may_use_the_stream() {
    run("reads without waiting", || async {
        let [ours, theirs] = streams(&small()).await;
        let (read, mut write) = ours.into_split();
        let reader = Arc::new(ReadsWhenWoken(read, AtomicBool::new(false)));
        let waker = Waker::from(reader.clone());
        for _ in 0..50 {
            let context = &mut Context::from_waker(&waker);
            while Pin::new(&mut write).poll_write(context, &[7; 700]).is_ready() {}
            // The credits of these bytes are found by the other side's reads, unless its driver
            // runs at the same time.
            eventually("the writer is woken", || {
                while theirs.try_read(&mut [0; 1000]).is_ok() {}
                let nothing = reader.0.try_read(&mut [0; 8]);
                assert_eq!(nothing.unwrap_err().kind(), ErrorKind::WouldBlock);
                reader.1.swap(false, Ordering::Relaxed)
            })
            .await;
        }
    });
}

#[test]
fn two_full_writers_wait_until_one_reads() {
    run("full writers", || async {
        let [mut one, mut two] = streams(&small()).await;
        // Both write until they wait.
        let mut written = [0; 2];
        for (stream, written) in [&mut one, &mut two].into_iter().zip(&mut written) {
            eventually("writes wait", || {
                match stream.write(&[7; 700]).now_or_never() {
                    Some(result) => *written += result.unwrap(),
                    None => return true,
                }
                false
            })
            .await;
        }
        let bytes = vec![7; 100_000];
        let (mut read, mut write) = one.into_split();
        let writing = tokio::spawn(async move {
            write.write_all(&bytes).await.unwrap();
            write.shutdown().await.unwrap();
        });
        let mut all = Vec::new();
        soon("reads", two.read_to_end(&mut all)).await.unwrap();
        assert_eq!(all.len(), written[0] + 100_000);
        soon("writer", writing).await.unwrap();
        two.shutdown().await.unwrap();
        all.clear();
        soon("reads", read.read_to_end(&mut all)).await.unwrap();
        assert_eq!(all, vec![7; written[1]]);
    });
}

#[test]
fn crowd_of_streams_with_random_sizes_verifies_its_content() {
    let seed = Seed::new("--test connections crowd_of_streams");
    let value = seed.value;
    let seconds = std::env::var("TOKIO_RDMA_SECONDS")
        .map_or(torture::CROWD_SECONDS, |seconds| seconds.parse().expect("a number"));
    bounded("crowd", 4 * LONG + Duration::from_secs(2 * seconds), move || {
        Flavour::MultiThread.runtime().block_on(async {
            let (device, _) = device(&Network::new());
            let queue = CompletionQueue::builder(&device).capacity(64 * 2 * 200).build().unwrap();
            let config = small().completion_queue(&queue).max_eager(2000);
            let at = connected::address(&device);
            let listener = RdmaListener::bind_with(&device, at, &config).await.unwrap();
            let address = listener.local_addr().unwrap();
            let stop = Arc::new(AtomicBool::new(false));
            let mut rounds = Vec::new();
            for number in 0..64 {
                let connecting = RdmaStream::connect_with(&device, address, &config);
                let (client, (server, _)) =
                    tokio::try_join!(connecting, listener.accept()).unwrap();
                for (end, stream) in [client, server].into_iter().enumerate() {
                    let random = fastrand::Rng::with_seed(value ^ (2 * number + end as u64));
                    rounds.push(tokio::spawn(talk(stream, random, stop.clone())));
                }
            }
            tokio::time::sleep(Duration::from_secs(seconds)).await;
            stop.store(true, Ordering::Relaxed);
            let mut bytes = 0;
            for talk in rounds {
                bytes += talk.await.unwrap();
            }
            eprintln!("{bytes} bytes sent and received");
            assert!(bytes > 64 * 1000, "{bytes} bytes");
            eventually("queue pairs end", || queue.counters().reserved == 0).await;
        });
    });
    drop(seed);
}

/// Sends blocks, each a length and a pattern of it, and verifies the peer's blocks. Returns the
/// bytes received.
async fn talk(stream: RdmaStream, mut random: fastrand::Rng, stop: Arc<AtomicBool>) -> u64 {
    let (mut read, mut write) = stream.into_split();
    let sending = tokio::spawn(async move {
        while !stop.load(Ordering::Relaxed) {
            let len = [0, 1, 100, 3_000, 100_000][random.usize(..5)];
            let len = random.u32(..=len);
            write.write_u32(len).await.unwrap();
            write_all(&mut write, &pattern(len as usize, len.into()), &mut random).await;
        }
        write.shutdown().await.unwrap();
    });
    let (mut received, mut block) = (0, Vec::new());
    while !soon("bytes", read.fill_buf()).await.unwrap().is_empty() {
        let len = read.read_u32().await.unwrap();
        block.resize(len as usize, 0);
        read.read_exact(&mut block).await.unwrap();
        assert!(block == pattern(len as usize, len.into()), "a block of {len} bytes");
        received += 4 + u64::from(len);
    }
    soon("sender", sending).await.unwrap();
    received
}

#[test]
fn dropped_stream_still_delivers_what_was_written_to_a_slow_reader() {
    run("drop", || async {
        let long = pattern(3 << 20, 3);
        for len in [1, 1000, 3000, long.len()] {
            let [mut client, mut server] = streams(&small().max_eager(2000)).await;
            server.write_all(b"never read").await.unwrap();
            let sent = long.slice(..len);
            let sending = tokio::spawn({
                let sent = sent.clone();
                async move { client.write_bytes(sent).await.unwrap() }
            });
            let mut received = Vec::new();
            while received.len() < len {
                torture::yields(10).await;
                let part = soon("bytes", server.read_bytes()).await.unwrap();
                received.extend_from_slice(&part.expect("not the end"));
            }
            assert!(received == sent, "{len} bytes");
            assert_eq!(soon("end", server.read_bytes()).await.unwrap(), None);
            soon("sender", sending).await.unwrap();
            server.shutdown().await.unwrap();
            assert_eq!(soon("closed", server.closed()).await, CloseReason::Clean);
        }
    });
}

#[test]
fn peer_that_is_gone_is_an_error_and_not_the_end() {
    if torture::hardware().is_some() {
        torture::skipped("lost peers: the port of a real device cannot be switched off");
        return;
    }
    run("lost peers", || async {
        let network = Network::new();
        let devices = ["lost", "left"].map(|name| Device::software_in(&network, name).unwrap());
        let config = config()
            .retries(brief())
            .keepalive(Some((Duration::from_secs(1), Duration::from_secs(1))));
        let listener = RdmaListener::bind_with(&devices[0], "127.0.0.1:0", &config).await.unwrap();
        let address = listener.local_addr().unwrap();
        let connecting = RdmaStream::connect_with(&devices[1], address, &config);
        let ((mut lost, _), mut left) = tokio::try_join!(listener.accept(), connecting).unwrap();
        lost.write_all(b"before").await.unwrap();
        let mut before = [0; 6];
        soon("bytes", left.read_exact(&mut before)).await.unwrap();
        network.control("lost").unwrap().set_port(false);
        let error = soon("an error", left.read(&mut before)).await.unwrap_err();
        let expected = [ErrorKind::TimedOut, ErrorKind::ConnectionReset];
        assert!(expected.contains(&error.kind()), "{error:?}");
        let again = left.read(&mut before).await.unwrap_err();
        assert!(expected.contains(&again.kind()), "{again:?}");
        let write = left.write_all(b"late").await.unwrap_err();
        assert!(expected.contains(&write.kind()), "{write:?}");
        network.control("lost").unwrap().set_port(true);
    });
}

#[test]
fn runtime_that_shuts_down_is_the_reason_on_other_runtimes_too() {
    for _ in 0..scaled(50) {
        bounded("runtime", LONG, || {
            let [runtime, other] = [(); 2].map(|()| Flavour::MultiThread.runtime());
            runtime.block_on(async {
                let (device, _) = device(&Network::new());
                let listener =
                    RdmaListener::bind(&device, connected::address(&device)).await.unwrap();
                let address = listener.local_addr().unwrap();
                // Only the client's driver belongs to the other runtime.
                let connecting =
                    other.spawn(async move { RdmaStream::connect(&device, address).await });
                let (mut server, _) = soon("accept", listener.accept()).await.unwrap();
                let mut client = soon("connect", connecting).await.unwrap().unwrap();
                tokio::spawn(async move { while server.write_all(&[7; 5000]).await.is_ok() {} });
                let ending = std::thread::spawn(move || other.shutdown_background());
                let error = loop {
                    match soon("an error", client.read(&mut [0; 100_000])).await {
                        Ok(0) => panic!("the end"),
                        Ok(_) => {}
                        Err(error) => break error,
                    }
                };
                assert_eq!(error.kind(), ErrorKind::ConnectionAborted, "{error}");
                ending.join().unwrap();
            });
        });
    }
}

#[test]
fn runtime_that_shuts_down_does_not_look_like_the_end() {
    bounded("runtime", LONG, || {
        let [serving, reading] = [(); 2].map(|()| Flavour::MultiThread.runtime());
        let (device, _) = device(&Network::new());
        let binding = RdmaListener::bind(&device, connected::address(&device));
        let listener = serving.block_on(binding).unwrap();
        let address = listener.local_addr().unwrap();
        serving.spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                tokio::spawn(async move {
                    stream.write_all(b"first").await.unwrap();
                    std::future::pending::<()>().await;
                    drop(stream);
                });
            }
        });
        reading.block_on(async {
            let mut streams = Vec::new();
            // The runtime drops the tasks of each stream in any order.
            for _ in 0..scaled(32) {
                let connecting = RdmaStream::connect(&device, address);
                let mut stream = soon("connect", connecting).await.unwrap();
                soon("bytes", stream.read_exact(&mut [0; 5])).await.unwrap();
                streams.push(stream);
            }
            std::thread::spawn(|| serving.shutdown_background()).join().unwrap();
            for mut stream in streams {
                let end = soon("an error", stream.read(&mut [0; 8])).await;
                assert_eq!(end.map_err(|error| error.kind()), Err(ErrorKind::ConnectionReset));
            }
        });
    });
}

#[test]
fn writes_end_with_an_error_once_the_peer_has_dropped_its_stream() {
    run("dropped", || async {
        let [mut client, server] = streams(&small()).await;
        drop(server);
        assert_eq!(soon("end", client.read(&mut [0; 8])).await.unwrap(), 0);
        let written = soon("an error", async {
            loop {
                if let Err(error) = client.write_all(&[1; 500]).await {
                    break error;
                }
            }
        })
        .await;
        let expected = [ErrorKind::BrokenPipe, ErrorKind::ConnectionReset];
        assert!(expected.contains(&written.kind()), "{written:?}");
    });
}

/// A queue pair of the test, connected to a listener for streams.
struct Peer {
    qp: QueuePair,
    pool: Pool,
    _link: cm::CmConnection,
}

const DATA: u32 = 0;
const OFFER: u32 = 1;
const ACK: u32 = 2;
const FIN: u32 = 4;
const PART: u32 = 6;

fn header(kind: u32, released: u32) -> Imm {
    Imm(kind << 29 | released << 14)
}

/// Returns the private data of a client for streams.
fn handshake() -> Vec<u8> {
    let hello = Handshake { buffer_size: 4096, receives: 68, max_message: 1 << 20, grows: false };
    let mut bytes = hello.encode(b"").unwrap();
    bytes[5] = 1;
    bytes
}

/// Connects a queue pair of the test.
async fn connect_peer(
    device: &Device,
    address: SocketAddr,
    hello: Vec<u8>,
) -> Result<Peer, cm::ConnectError> {
    let pd = device.protection_domain().unwrap();
    let queue = CompletionQueue::new(device, CompletionMode::Event).unwrap();
    let options = cm::ConnectConfig::default().private_data(hello);
    let make = |route: &cm::Route| route.prepare(QueuePair::builder(&pd, &queue)).build();
    let (qp, link) = soon("connect", cm::connect(device, address, &options, make)).await?;
    Ok(Peer { qp, pool: Pool::new(&pd, 8192, 4).unwrap(), _link: link })
}

#[test]
fn each_violation_ends_the_stream_with_its_name() {
    run("violations", || async {
        let (device, _) = device(&Network::new());
        let at = connected::address(&device);
        let listener = RdmaListener::bind_with(&device, at, &small()).await.unwrap();
        let region = RemoteRegion::new(0x1000, 1 << 40, Rkey(7)).to_bytes();
        let invalid = |kind| Violation::Header { header: header(kind, 0).0 };
        let cases = [
            ("empty frame", vec![], DATA, 0, Violation::FrameLength { len: 0 }),
            ("part", vec![1], PART, 0, invalid(PART)),
            ("change of receives", vec![1], 7, 0, Violation::FrameLength { len: 1 }),
            ("credits", vec![], ACK, 1, Violation::Credits { announced: 1, in_use: 0 }),
            ("end with bytes", vec![1; 9], FIN, 0, Violation::FrameLength { len: 9 }),
            (
                "long offer",
                region.to_vec(),
                OFFER,
                0,
                Violation::TooLong { len: 1 << 40, allowed: 64 << 20 },
            ),
        ];
        for (what, payload, kind, released, violation) in cases {
            let address = listener.local_addr().unwrap();
            let connecting = connect_peer(&device, address, handshake());
            let (peer, accepted) = tokio::join!(connecting, listener.accept());
            let (peer, (mut stream, _)) = (peer.unwrap(), accepted.unwrap());
            let bytes = peer.pool.copy_from(&payload).unwrap();
            drop(soon("send", peer.qp.with_imm(header(kind, released)).send(bytes)).await);
            let error = soon("an error", stream.read(&mut [0; 8])).await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidData, "{what}: {error}");
            assert_eq!(reason(&error), Some(CloseReason::Violation(violation)), "{what}");
            assert!(error.to_string().contains(&violation.to_string()), "{what}: {error}");
        }
        // More frames than receives.
        let connecting = connect_peer(&device, listener.local_addr().unwrap(), handshake());
        let (peer, accepted) = tokio::join!(connecting, listener.accept());
        let (peer, (mut stream, _)) = (peer.unwrap(), accepted.unwrap());
        let mut frames = 0;
        while frames < 8 {
            let send = peer.qp.with_imm(header(DATA, 0)).send_inline(&[frames]);
            soon("send", send).await.unwrap();
            frames += 1;
        }
        // The stream reads none, so the next one finds no receive.
        drop(peer.qp.with_imm(header(DATA, 0)).send_inline(&[frames]));
        let mut bytes = [0; 8];
        soon("bytes", stream.read_exact(&mut bytes)).await.unwrap();
        assert_eq!(bytes, [0, 1, 2, 3, 4, 5, 6, 7]);
        // Its receives are posted again, so that it arrives without a credit.
        let error = soon("an error", stream.read(&mut [0; 8])).await;
        assert!(matches!(error, Ok(1)) || error.is_err(), "{error:?}");
    });
}

#[test]
fn other_content_is_refused_with_a_text_that_says_so() {
    run("other content", || async {
        let (device, pd) = device(&Network::new());
        let at = connected::address(&device);
        let config = config();
        let messages = Listener::bind_with(&device, at, &config).await.unwrap();
        let bytes = RdmaListener::bind_with(&device, at, &config).await.unwrap();
        let [for_messages, for_bytes] =
            [messages.local_addr().unwrap(), bytes.local_addr().unwrap()];
        let stats = async || {
            let serving = tokio::spawn({
                async move {
                    let (connection, (stream, _)) =
                        tokio::join!(messages.accept(), bytes.accept().map(Result::unwrap));
                    (connection.unwrap(), stream, messages.stats(), bytes.stats())
                }
            });
            let error = soon("refusal", RdmaStream::connect_with(&device, for_messages, &config));
            let error = error.await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::ConnectionRefused);
            let text = error.to_string();
            assert!(text.ends_with("the listener carries messages; connect with Connection"));

            let connecting = Connection::connect_with(&device, for_bytes, &config);
            let refused = soon("refusal", connecting).await.unwrap_err();
            let reason = RefusalReason::OtherService(Service::Bytes);
            assert_eq!(refused, EstablishError::Refused { address: for_bytes, reason });

            let plain = connect_peer(&device, for_bytes, Vec::new()).await.err().unwrap();
            assert!(plain.to_string().ends_with("connect with tokio_rdma::RdmaStream"), "{plain}");

            let connecting = RdmaStream::connect_with(&device, for_bytes, &config);
            let _stream = soon("connect", connecting).await.unwrap();
            let connecting = Connection::connect_with(&device, for_messages, &config);
            let _connection = soon("connect", connecting).await.unwrap();
            soon("accept", serving).await.unwrap()
        };
        let (_connection, _stream, messages, bytes) = stats().await;
        assert_eq!((messages.refused_protocol, bytes.refused_protocol), (1, 2));

        // A listener of the connection manager accepts without a handshake.
        let other = cm::Listener::bind(&device, at).await.unwrap();
        let address = other.local_addr();
        let serving = async {
            let queue = CompletionQueue::new(&device, CompletionMode::Event).unwrap();
            let request = other.accept().await.unwrap();
            let qp = request.prepare(QueuePair::builder(&pd, &queue)).build().unwrap();
            drop(request.accept(&qp, &cm::ConnectConfig::default()).await);
        };
        let connecting = RdmaStream::connect_with(&device, address, &config);
        let (refused, ()) = soon("refusal", async { tokio::join!(connecting, serving) }).await;
        let text = refused.unwrap_err().to_string();
        assert!(text.contains("is not a tokio_rdma::Listener or RdmaListener"), "{text}");
    });
}

#[test]
fn other_content_is_refused_before_accept_is_called() {
    for backlog in [0, 128] {
        run("refusal", move || async move {
            let (device, _) = device(&Network::new());
            let (at, config) = (connected::address(&device), config());
            let limits = ListenerConfig::new(config.clone()).backlog(backlog);
            let listener = Listener::bind_with(&device, at, &limits).await.unwrap();
            let address = listener.local_addr().unwrap();
            if backlog == 0 && torture::hardware().is_some() {
                return;
            }
            let connecting = RdmaStream::connect_with(&device, address, &config);
            let error = soon("refusal", connecting).await.unwrap_err();
            let reason = RefusalReason::OtherService(Service::Messages);
            let expected = EstablishError::Refused { address, reason };
            let found = error.get_ref().and_then(|cause| cause.downcast_ref());
            assert_eq!(found, Some(&expected));

            let listener = RdmaListener::bind_with(&device, at, &limits).await.unwrap();
            let address = listener.local_addr().unwrap();
            let connecting = Connection::connect_with(&device, address, &config);
            let reason = RefusalReason::OtherService(Service::Bytes);
            let error = soon("refusal", connecting).await.unwrap_err();
            assert_eq!(error, EstablishError::Refused { address, reason });
        });
    }
}

#[test]
fn bytes_arrive_in_order_while_windows_grow_and_shrink() {
    let seed = Seed::new("--test connections bytes_arrive_in_order_while");
    let value = seed.value;
    run("windows", move || async move {
        let config = ConnectionConfig::for_streams().shrink_after(Duration::from_millis(1));
        let [client, server] = streams(&config).await;
        let [ours, theirs] = [client, server].map(RdmaStream::into_split);
        let [(mut from, mut into), (mut answers, mut answered)] =
            [(theirs.0, ours.1), (ours.0, theirs.1)];
        let talk = async |from: &mut OwnedReadHalf, into: &mut OwnedWriteHalf, seed: u64| {
            let mut random = fastrand::Rng::with_seed(seed);
            for round in 0..30 {
                let most = [100, 600, 10_000, 300_000][random.usize(..4)];
                let bytes = pattern(random.usize(1..most), round);
                let (mut other, mut received) = (random.fork(), vec![0; bytes.len()]);
                let writing = async {
                    write_all(into, &bytes, &mut random).await;
                    into.flush().await.unwrap();
                };
                tokio::join!(writing, async { from.read_exact(&mut received).await.unwrap() });
                assert!(received == bytes, "round {round}");
                if other.bool() {
                    let small = || from.counters().buffer_memory <= 10 * 384;
                    while !small() {
                        tokio::task::yield_now().await;
                    }
                }
            }
        };
        let both = async {
            tokio::join!(
                talk(&mut from, &mut into, value),
                talk(&mut answers, &mut answered, value.wrapping_add(1))
            );
        };
        soon("both directions", both).await;
    });
    drop(seed);
}

#[test]
fn shutdown_after_a_reset_by_the_peer_succeeds() {
    run("shutdown after a reset", || async {
        let [mut one, two] = streams(&config()).await;
        two.abort();
        let error = soon("reset", one.read(&mut [0])).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ConnectionReset);
        soon("closed", one.closed()).await;
        one.shutdown().await.unwrap();
        one.shutdown().await.unwrap();
        assert!(one.write(b"x").await.is_err());
    });
}
