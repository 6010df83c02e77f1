//! The contract of Tokio's `AsyncRead` and `AsyncWrite`: each case runs by the same code on
//! `TcpStream` and on `RdmaStream`.

use std::future::{Future, poll_fn};
use std::io::{ErrorKind, IoSlice, IoSliceMut, Result};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::task::{Context, Poll, Wake, Waker};

use futures::future::poll_immediate;
use tokio::io::{AsyncBufReadExt, AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, BufReader};
use tokio::io::{Interest, ReadBuf, Ready, copy, copy_bidirectional};
use tokio::net::{TcpListener, TcpStream, tcp};
use tokio::runtime::{Handle, RuntimeFlavor};
use tokio_rdma::software::Network;
use tokio_rdma::{RdmaListener, RdmaStream, stream};

use crate::connected::{self, pattern};
use crate::torture::{Flavour, LONG, bounded, device, eventually, soon};

/// A stream of bytes with halves, as `TcpStream` has them.
trait Stream: AsyncRead + AsyncWrite + Unpin + Send + Sync + Sized + 'static {
    type ReadHalf: AsyncRead + Unpin + Send + 'static;
    type WriteHalf: AsyncWrite + Unpin + Send + 'static;

    /// A listener, and what connects to it.
    type Listener: Send;

    fn listen() -> impl Future<Output = Self::Listener> + Send;

    fn connect(listener: &Self::Listener) -> impl Future<Output = Self> + Send;

    fn accept(listener: &Self::Listener) -> impl Future<Output = Self> + Send;

    /// Connects, then accepts.
    async fn pair() -> [Self; 2] {
        let listener = Self::listen().await;
        let client = Self::connect(&listener).await;
        [client, Self::accept(&listener).await]
    }

    fn into_split(self) -> (Self::ReadHalf, Self::WriteHalf);

    /// Returns the halves of different streams.
    fn reunite(read: Self::ReadHalf, write: Self::WriteHalf) -> std::result::Result<Self, ()>;

    fn half_ready(read: &Self::ReadHalf) -> impl Future<Output = Result<Ready>> + Send;

    fn other_half_ready(write: &Self::WriteHalf) -> impl Future<Output = Result<Ready>> + Send;

    /// Ends both directions without delivering the end.
    fn reset(self);

    fn split(&mut self) -> (impl AsyncRead + Unpin, impl AsyncWrite + Unpin);

    fn readable(&self) -> impl Future<Output = Result<()>> + Send;

    fn writable(&self) -> impl Future<Output = Result<()>> + Send;

    fn ready(&self, interest: Interest) -> impl Future<Output = Result<Ready>> + Send;

    fn poll_read_ready(&self, context: &mut Context<'_>) -> Poll<Result<()>>;

    fn poll_write_ready(&self, context: &mut Context<'_>) -> Poll<Result<()>>;

    fn poll_peek(&self, context: &mut Context<'_>, buffer: &mut ReadBuf<'_>)
    -> Poll<Result<usize>>;

    fn peek(&self, buffer: &mut [u8]) -> impl Future<Output = Result<usize>> + Send;

    fn try_read(&self, buffer: &mut [u8]) -> Result<usize>;

    fn try_read_vectored(&self, buffers: &mut [IoSliceMut<'_>]) -> Result<usize>;

    fn try_read_buf(&self, buffer: &mut Vec<u8>) -> Result<usize>;

    fn try_write(&self, bytes: &[u8]) -> Result<usize>;

    fn try_write_vectored(&self, slices: &[IoSlice<'_>]) -> Result<usize>;

    fn set_nodelay(&self, nodelay: bool);
}

/// The methods of both streams that have the same signature.
macro_rules! same {
    () => {
        fn split(&mut self) -> (impl AsyncRead + Unpin, impl AsyncWrite + Unpin) {
            self.split()
        }

        async fn half_ready(read: &Self::ReadHalf) -> Result<Ready> {
            read.ready(Interest::READABLE).await
        }

        async fn other_half_ready(write: &Self::WriteHalf) -> Result<Ready> {
            write.ready(Interest::WRITABLE).await
        }

        async fn readable(&self) -> Result<()> {
            self.readable().await
        }

        async fn writable(&self) -> Result<()> {
            self.writable().await
        }

        async fn ready(&self, interest: Interest) -> Result<Ready> {
            self.ready(interest).await
        }

        fn poll_read_ready(&self, context: &mut Context<'_>) -> Poll<Result<()>> {
            self.poll_read_ready(context)
        }

        fn poll_write_ready(&self, context: &mut Context<'_>) -> Poll<Result<()>> {
            self.poll_write_ready(context)
        }

        fn poll_peek(
            &self,
            context: &mut Context<'_>,
            buffer: &mut ReadBuf<'_>,
        ) -> Poll<Result<usize>> {
            self.poll_peek(context, buffer)
        }

        async fn peek(&self, buffer: &mut [u8]) -> Result<usize> {
            self.peek(buffer).await
        }

        fn try_read(&self, buffer: &mut [u8]) -> Result<usize> {
            self.try_read(buffer)
        }

        fn try_read_vectored(&self, buffers: &mut [IoSliceMut<'_>]) -> Result<usize> {
            self.try_read_vectored(buffers)
        }

        fn try_read_buf(&self, buffer: &mut Vec<u8>) -> Result<usize> {
            self.try_read_buf(buffer)
        }

        fn try_write(&self, bytes: &[u8]) -> Result<usize> {
            self.try_write(bytes)
        }

        fn try_write_vectored(&self, slices: &[IoSlice<'_>]) -> Result<usize> {
            self.try_write_vectored(slices)
        }
    };
}

impl Stream for TcpStream {
    same!();

    type ReadHalf = tcp::OwnedReadHalf;
    type WriteHalf = tcp::OwnedWriteHalf;

    type Listener = TcpListener;

    async fn listen() -> TcpListener {
        TcpListener::bind("127.0.0.1:0").await.unwrap()
    }

    async fn connect(listener: &TcpListener) -> Self {
        Self::connect(listener.local_addr().unwrap()).await.unwrap()
    }

    async fn accept(listener: &TcpListener) -> Self {
        listener.accept().await.unwrap().0
    }

    fn into_split(self) -> (Self::ReadHalf, Self::WriteHalf) {
        self.into_split()
    }

    fn reunite(read: Self::ReadHalf, write: Self::WriteHalf) -> std::result::Result<Self, ()> {
        read.reunite(write).map_err(drop)
    }

    #[allow(deprecated, reason = "its successor is newer than the oldest supported Tokio")]
    fn reset(self) {
        self.set_linger(Some(std::time::Duration::ZERO)).unwrap();
    }

    fn set_nodelay(&self, nodelay: bool) {
        self.set_nodelay(nodelay).unwrap();
    }
}

impl Stream for RdmaStream {
    same!();

    type ReadHalf = stream::OwnedReadHalf;
    type WriteHalf = stream::OwnedWriteHalf;

    type Listener = RdmaListener;

    async fn listen() -> RdmaListener {
        let (device, _) = device(&Network::new());
        RdmaListener::bind(&device, connected::address(&device)).await.unwrap()
    }

    async fn connect(listener: &RdmaListener) -> Self {
        Self::connect(listener.device(), listener.local_addr().unwrap()).await.unwrap()
    }

    async fn accept(listener: &RdmaListener) -> Self {
        listener.accept().await.unwrap().0
    }

    fn into_split(self) -> (Self::ReadHalf, Self::WriteHalf) {
        self.into_split()
    }

    fn reunite(read: Self::ReadHalf, write: Self::WriteHalf) -> std::result::Result<Self, ()> {
        read.reunite(write).map_err(drop)
    }

    fn reset(self) {
        self.set_zero_linger().unwrap();
        assert_eq!(self.linger().unwrap(), Some(std::time::Duration::ZERO));
    }

    fn set_nodelay(&self, nodelay: bool) {
        self.set_nodelay(nodelay).unwrap();
    }
}

/// Runs each case on both streams and in both flavours of runtime.
macro_rules! cases {
    ($($case:ident),+ $(,)?) => {
        mod tcp_stream {
            $(#[test]
            fn $case() {
                super::run(stringify!($case), super::$case::<tokio::net::TcpStream>);
            })+
        }

        mod rdma_stream {
            $(#[test]
            fn $case() {
                super::run(stringify!($case), super::$case::<tokio_rdma::RdmaStream>);
            })+
        }
    };
}

cases![
    bytes_arrive_in_pieces_of_the_reader,
    empty_reads_and_writes_are_no_end,
    slices_arrive_in_order,
    waiting_reader_is_woken_by_bytes_and_by_the_end,
    last_waker_of_a_waiting_reader_is_woken,
    dropped_reads_lose_no_bytes,
    dropped_writes_have_written_nothing,
    writer_waits_for_a_slow_reader_and_is_woken,
    many_short_requests_are_written_before_the_answers_are_read,
    shutdown_may_be_repeated_and_leaves_the_other_direction_open,
    write_after_shutdown_is_a_broken_pipe,
    dropped_stream_ends_after_its_bytes,
    writes_to_a_dropped_peer_end_with_an_error,
    reset_stream_is_an_error_and_not_the_end,
    halves_end_and_reunite_as_expected,
    long_bytes_arrive_in_both_directions_at_once,
    lines_are_read_through_a_buffer,
    bytes_are_forwarded_to_another_transport,
    stream_that_is_always_ready_lets_other_tasks_run,
    ready_streams_are_read_without_waiting,
    ready_streams_are_written_without_waiting,
    readiness_is_polled_and_may_be_abandoned,
    abandoned_reads_and_writes_do_not_delay_others,
    borrowed_halves_read_and_write_at_once,
    connected_streams_deliver_before_and_after_they_are_accepted,
    dropped_listener_resets_streams_that_were_not_accepted,
];

fn run<F: Future<Output = ()> + 'static>(what: &'static str, case: fn() -> F) {
    for flavour in Flavour::ALL {
        bounded(what, LONG, move || flavour.runtime().block_on(soon(what, case())));
    }
}

/// A waker that counts.
#[derive(Default)]
struct Count(AtomicU32);

impl Wake for Count {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

impl Count {
    fn get(&self) -> u32 {
        self.0.load(Ordering::SeqCst)
    }
}

/// Polls once for bytes.
fn poll_read(
    stream: &mut (impl AsyncRead + Unpin),
    waker: &Waker,
    memory: &mut [u8],
) -> Poll<Result<usize>> {
    let mut buffer = ReadBuf::new(memory);
    let read = Pin::new(stream).poll_read(&mut Context::from_waker(waker), &mut buffer);
    read.map_ok(|()| buffer.filled().len())
}

async fn bytes_arrive_in_pieces_of_the_reader<S: Stream>() {
    let [mut one, mut two] = S::pair().await;
    let bytes = pattern(1000, 1);
    one.write_all(&bytes).await.unwrap();
    let mut received = Vec::new();
    for size in [1, 3, 10, 300].into_iter().cycle() {
        let mut memory = vec![0; size];
        let read = two.read(&mut memory).await.unwrap();
        assert!((1..=size).contains(&read), "{read} bytes");
        received.extend_from_slice(&memory[..read]);
        if received.len() == bytes.len() {
            break;
        }
    }
    assert!(received == bytes);
}

async fn empty_reads_and_writes_are_no_end<S: Stream>() {
    let [mut one, mut two] = S::pair().await;
    assert_eq!(one.write(&[]).await.unwrap(), 0);
    assert_eq!(one.write_vectored(&[IoSlice::new(&[]); 2]).await.unwrap(), 0);
    one.flush().await.unwrap();
    one.write_all(b"x").await.unwrap();
    let mut memory = [0; 8];
    assert_eq!(two.read(&mut []).await.unwrap(), 0);
    assert_eq!(two.read(&mut memory).await.unwrap(), 1);
}

async fn slices_arrive_in_order<S: Stream>() {
    let [mut one, mut two] = S::pair().await;
    assert!(one.is_write_vectored());
    let bytes = pattern(300_000, 2);
    let writing = async {
        let mut at = 0;
        while at < bytes.len() {
            let rest = &bytes[at..];
            let (first, second) = rest.split_at(rest.len() / 3);
            let slices = [&[], first, &[], second].map(IoSlice::new);
            let written = one.write_vectored(&slices).await.unwrap();
            assert!(written > 0);
            at += written;
        }
        one.shutdown().await.unwrap();
    };
    let mut received = Vec::new();
    let (_, ()) = tokio::join!(two.read_to_end(&mut received), writing);
    assert!(received == bytes);
}

async fn waiting_reader_is_woken_by_bytes_and_by_the_end<S: Stream>() {
    let [mut one, mut two] = S::pair().await;
    let mut memory = [0; 8];
    for round in 0..20 {
        let count = Arc::new(Count::default());
        let waker = Waker::from(count.clone());
        assert!(poll_read(&mut two, &waker, &mut memory).is_pending());
        let expected = if round < 19 {
            one.write_all(b"bytes").await.unwrap();
            5
        } else {
            one.shutdown().await.unwrap();
            0
        };
        eventually("wake", || count.get() > 0).await;
        let read = poll_fn(|context| poll_read(&mut two, context.waker(), &mut memory)).await;
        assert_eq!(read.unwrap(), expected);
    }
}

async fn last_waker_of_a_waiting_reader_is_woken<S: Stream>() {
    let [mut one, mut two] = S::pair().await;
    let mut memory = [0; 8];
    let counts = [(); 2].map(|()| Arc::new(Count::default()));
    for count in &counts {
        let waker = Waker::from(count.clone());
        assert!(poll_read(&mut two, &waker, &mut memory).is_pending());
    }
    one.write_all(b"x").await.unwrap();
    eventually("wake", || counts[1].get() > 0).await;
    assert_eq!(two.read(&mut memory).await.unwrap(), 1);
}

async fn dropped_reads_lose_no_bytes<S: Stream>() {
    let [mut one, mut two] = S::pair().await;
    let (mut memory, mut received) = ([0; 64], Vec::new());
    for number in 0..100_u8 {
        {
            let mut read = pin!(two.read(&mut memory));
            let polled = poll_fn(|context| Poll::Ready(read.as_mut().poll(context))).await;
            assert!(polled.is_pending());
        }
        one.write_all(&[number; 3]).await.unwrap();
        while received.len() < 3 * (usize::from(number) + 1) {
            let read = two.read(&mut memory[..2]).await.unwrap();
            received.extend_from_slice(&memory[..read]);
        }
    }
    let expected: Vec<u8> = (0..100).flat_map(|number| [number; 3]).collect();
    assert_eq!(received, expected);
}

async fn dropped_writes_have_written_nothing<S: Stream>() {
    let [mut one, mut two] = S::pair().await;
    let bytes = pattern(100_000, 3);
    let mut written = 0;
    // The future that waits is dropped. What was written is what the others have returned.
    loop {
        assert!(written < 256 << 20, "a writer without a reader never waits");
        let at = written % bytes.len();
        let polled = {
            let mut write = pin!(one.write(&bytes[at..]));
            poll_fn(|context| Poll::Ready(write.as_mut().poll(context))).await
        };
        match polled {
            Poll::Ready(result) => written += result.unwrap(),
            Poll::Pending => break,
        }
    }
    let mut received = Vec::new();
    let reading = async {
        let mut memory = vec![0; 10_000];
        while received.len() < written {
            let read = two.read(&mut memory).await.unwrap();
            received.extend_from_slice(&memory[..read]);
        }
    };
    reading.await;
    one.shutdown().await.unwrap();
    two.read_to_end(&mut received).await.unwrap();
    assert_eq!(received.len(), written);
    assert!(received.chunks(bytes.len()).all(|chunk| bytes.starts_with(chunk)));
}

async fn writer_waits_for_a_slow_reader_and_is_woken<S: Stream>() {
    let [mut one, mut two] = S::pair().await;
    let count = Arc::new(Count::default());
    let waker = Waker::from(count.clone());
    let memory = vec![7; 100_000];
    let mut written = 0_usize;
    let poll =
        |stream: &mut S| Pin::new(stream).poll_write(&mut Context::from_waker(&waker), &memory);
    while let Poll::Ready(result) = poll(&mut one) {
        written += result.unwrap();
        // Bytes in flight occupy limited memory.
        assert!(written < 256 << 20, "a writer without a reader never waits");
        tokio::task::yield_now().await;
    }
    let before = count.get();
    let mut into = vec![0; 100_000];
    while count.get() == before && written > 0 {
        written -= two.read(&mut into).await.unwrap();
        tokio::task::yield_now().await;
    }
    eventually("wake", || count.get() > before).await;
    let writing = async {
        one.write_all(&memory).await.unwrap();
        one.shutdown().await.unwrap();
    };
    let mut rest = Vec::new();
    let (_, ()) = tokio::join!(two.read_to_end(&mut rest), writing);
    assert_eq!(rest.len(), written + memory.len());
}

async fn many_short_requests_are_written_before_the_answers_are_read<S: Stream>() {
    const REQUESTS: usize = 3000;
    for (nodelay, flushes) in [(false, false), (false, true), (true, false)] {
        let [mut client, mut server] = S::pair().await;
        for stream in [&client, &server] {
            stream.set_nodelay(nodelay);
        }
        let serving = tokio::spawn(async move {
            let mut request = [0; 8];
            while server.read_exact(&mut request).await.is_ok() {
                server.write_all(&request).await.unwrap();
            }
        });
        for number in 0..REQUESTS {
            client.write_all(&number.to_be_bytes()).await.unwrap();
            if flushes {
                client.flush().await.unwrap();
            }
        }
        for number in 0..REQUESTS {
            assert_eq!(client.read_u64().await.unwrap(), number as u64);
        }
        drop(client);
        serving.await.unwrap();
    }
}

async fn shutdown_may_be_repeated_and_leaves_the_other_direction_open<S: Stream>() {
    let [mut one, mut two] = S::pair().await;
    one.write_all(b"last").await.unwrap();
    one.shutdown().await.unwrap();
    one.shutdown().await.unwrap();
    let mut received = Vec::new();
    two.read_to_end(&mut received).await.unwrap();
    assert_eq!(received, b"last");
    for _ in 0..3 {
        assert_eq!(two.read(&mut [0; 8]).await.unwrap(), 0, "the end is final");
    }
    two.write_all(b"answer").await.unwrap();
    two.shutdown().await.unwrap();
    let mut answer = Vec::new();
    one.read_to_end(&mut answer).await.unwrap();
    assert_eq!(answer, b"answer");
    assert_eq!(one.read(&mut [0; 8]).await.unwrap(), 0);
}

async fn write_after_shutdown_is_a_broken_pipe<S: Stream>() {
    let [mut one, _two] = S::pair().await;
    one.shutdown().await.unwrap();
    for _ in 0..2 {
        assert_eq!(one.write(b"late").await.unwrap_err().kind(), ErrorKind::BrokenPipe);
    }
}

async fn dropped_stream_ends_after_its_bytes<S: Stream>() {
    for len in [0, 1, 50_000] {
        let [mut one, mut two] = S::pair().await;
        let bytes = pattern(len, 4);
        let writing = tokio::spawn({
            let bytes = bytes.clone();
            async move { one.write_all(&bytes).await.unwrap() }
        });
        let mut received = Vec::new();
        two.read_to_end(&mut received).await.unwrap();
        assert!(received == bytes, "{len} bytes");
        writing.await.unwrap();
    }
}

async fn writes_to_a_dropped_peer_end_with_an_error<S: Stream>() {
    let [mut one, two] = S::pair().await;
    drop(two);
    assert_eq!(one.read(&mut [0; 8]).await.unwrap(), 0);
    let error = loop {
        match one.write(&[7; 1000]).await {
            Ok(written) => assert!(written > 0),
            Err(error) => break error,
        }
    };
    assert!([ErrorKind::BrokenPipe, ErrorKind::ConnectionReset].contains(&error.kind()), "{error}");
}

async fn reset_stream_is_an_error_and_not_the_end<S: Stream>() {
    let [one, mut two] = S::pair().await;
    one.reset();
    let error = two.read(&mut [0; 8]).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionReset, "{error}");
    let error = loop {
        match two.write(b"late").await {
            Ok(_) => tokio::task::yield_now().await,
            Err(error) => break error,
        }
    };
    assert!([ErrorKind::BrokenPipe, ErrorKind::ConnectionReset].contains(&error.kind()), "{error}");
}

async fn halves_end_and_reunite_as_expected<S: Stream>() {
    let [one, two] = S::pair().await;
    let ((one_read, one_write), (mut two_read, two_write)) = (one.into_split(), two.into_split());
    let one = S::reunite(one_read, one_write).unwrap();
    let (mut one_read, mut one_write) = one.into_split();
    assert_eq!(S::other_half_ready(&one_write).await.unwrap(), Ready::WRITABLE);
    one_write.write_all(b"then the end").await.unwrap();
    assert!(S::half_ready(&two_read).await.unwrap().is_readable());
    drop(one_write);
    let mut received = Vec::new();
    two_read.read_to_end(&mut received).await.unwrap();
    assert_eq!(received, b"then the end");

    // The other direction is open.
    let mut two = S::reunite(two_read, two_write).unwrap();
    two.write_all(b"answer").await.unwrap();
    let mut answer = [0; 6];
    one_read.read_exact(&mut answer).await.unwrap();
    assert_eq!(&answer, b"answer");

    let [other, _] = S::pair().await;
    let (_, other_write) = other.into_split();
    assert!(S::reunite(one_read, other_write).is_err());
}

async fn long_bytes_arrive_in_both_directions_at_once<S: Stream>() {
    let [one, two] = S::pair().await;
    let mut tasks = Vec::new();
    for (seed, stream) in [(5, one), (6, two)] {
        let (mut read, mut write) = stream.into_split();
        tasks.push(tokio::spawn(async move {
            write.write_all(&pattern(3_000_000, seed)).await.unwrap();
            write.shutdown().await.unwrap();
        }));
        tasks.push(tokio::spawn(async move {
            let mut received = Vec::new();
            read.read_to_end(&mut received).await.unwrap();
            assert!(received == pattern(3_000_000, 11 - seed));
        }));
    }
    for task in tasks {
        task.await.unwrap();
    }
}

async fn lines_are_read_through_a_buffer<S: Stream>() {
    let [mut one, two] = S::pair().await;
    let sent: String = (0..5000).map(|number| format!("line {number}\n")).collect();
    let writing = tokio::spawn({
        let sent = sent.clone();
        async move { one.write_all(sent.as_bytes()).await.unwrap() }
    });
    let mut lines = BufReader::with_capacity(100, two).lines();
    for number in 0..5000 {
        assert_eq!(lines.next_line().await.unwrap(), Some(format!("line {number}")));
    }
    assert_eq!(lines.next_line().await.unwrap(), None);
    writing.await.unwrap();
}

async fn bytes_are_forwarded_to_another_transport<S: Stream>() {
    let [mut client, mut front] = S::pair().await;
    let [mut back, mut server] = <TcpStream as Stream>::pair().await;
    let forwarding = tokio::spawn(async move { copy_bidirectional(&mut front, &mut back).await });
    let serving = tokio::spawn(async move {
        let mut request = Vec::new();
        server.read_to_end(&mut request).await.unwrap();
        server.write_all(&request[..request.len() / 2]).await.unwrap();
        server.shutdown().await.unwrap();
    });
    let request = pattern(1_000_000, 7);
    client.write_all(&request).await.unwrap();
    client.shutdown().await.unwrap();
    let mut answer = Vec::new();
    client.read_to_end(&mut answer).await.unwrap();
    assert!(answer == request[..request.len() / 2]);
    serving.await.unwrap();
    assert_eq!(forwarding.await.unwrap().unwrap(), (1_000_000, 500_000));
}

/// Returns true if `result` is `WouldBlock`.
fn would_block<T>(result: Result<T>) -> bool {
    result.is_err_and(|error| error.kind() == ErrorKind::WouldBlock)
}

/// Waits until a stream at which nothing has arrived is not readable. A `TcpStream` may claim to be
/// at first: when it is accepted, and if another event comes during the read that disproves it.
async fn until_not_readable<S: Stream>(stream: &S) {
    while poll_immediate(Box::pin(stream.readable())).await.is_some() {
        assert!(would_block(stream.try_read(&mut [0])));
        tokio::task::yield_now().await;
    }
}

async fn ready_streams_are_read_without_waiting<S: Stream>() {
    let [mut one, two] = S::pair().await;
    let mut memory = [0; 8];
    until_not_readable(&two).await;
    assert_eq!(two.ready(Interest::WRITABLE).await.unwrap(), Ready::WRITABLE);
    one.write_all(b"0123456789abcdef").await.unwrap();
    for _ in 0..2 {
        two.readable().await.unwrap();
        let peeked = two.peek(&mut memory).await.unwrap();
        assert_eq!(memory[..peeked], b"01234567"[..peeked]);
    }
    let both = Interest::READABLE | Interest::WRITABLE;
    let ready = two.ready(both).await.unwrap();
    assert!(ready.is_readable() && ready.is_writable() && !ready.is_read_closed(), "{ready:?}");
    assert_eq!(two.try_read(&mut []).unwrap(), 0);
    assert_eq!(two.try_read(&mut memory[..3]).unwrap(), 3);
    assert_eq!(memory[..3], *b"012");
    let (mut first, mut second) = ([0; 2], [0; 4]);
    let buffers = &mut [&mut first[..], &mut second].map(IoSliceMut::new);
    assert_eq!(two.try_read_vectored(buffers).unwrap(), 6);
    assert_eq!((&first, &second), (b"34", b"5678"));
    let mut rest = Vec::with_capacity(64);
    assert_eq!(two.try_read_buf(&mut rest).unwrap(), 7);
    assert_eq!(rest, b"9abcdef");
    assert!(would_block(two.try_read(&mut memory)));
    one.shutdown().await.unwrap();
    two.readable().await.unwrap();
    assert_eq!(two.try_read(&mut memory).unwrap(), 0);
    assert_eq!(two.peek(&mut memory).await.unwrap(), 0);
    assert!(two.ready(Interest::READABLE).await.unwrap().is_read_closed());
}

async fn ready_streams_are_written_without_waiting<S: Stream>() {
    let [one, mut two] = S::pair().await;
    let memory = vec![7; 100_000];
    let mut written = 0;
    one.writable().await.unwrap();
    while !would_block(one.try_write(&memory).map(|more| written += more)) {
        assert!(written < 256 << 20, "a writer without a reader never waits");
        tokio::task::yield_now().await;
    }
    let read = tokio::spawn(async move {
        let mut received = Vec::new();
        two.read_to_end(&mut received).await.unwrap();
        received
    });
    for _ in 0..20 {
        let slices = [&memory[..10], &memory].map(IoSlice::new);
        match one.try_write_vectored(&slices) {
            Err(error) if error.kind() == ErrorKind::WouldBlock => one.writable().await.unwrap(),
            more => written += more.unwrap(),
        }
    }
    drop(one);
    assert!(read.await.unwrap() == vec![7; written]);
}

async fn readiness_is_polled_and_may_be_abandoned<S: Stream>() {
    let [mut one, mut two] = S::pair().await;
    let counts = [(); 2].map(|()| Arc::new(Count::default()));
    let wakers = counts.clone().map(Waker::from);
    let mut memory = [0; 8];
    until_not_readable(&two).await;
    for waker in &wakers {
        assert!(two.poll_read_ready(&mut Context::from_waker(waker)).is_pending());
    }
    assert!(one.poll_write_ready(&mut Context::from_waker(&wakers[0])).is_ready());
    one.write_all(b"0123").await.unwrap();
    eventually("wake of the last task", || counts[1].get() > 0).await;
    for _ in 0..2 {
        let mut buffer = ReadBuf::new(&mut memory);
        buffer.put_slice(b"it");
        let peeked = poll_fn(|context| two.poll_peek(context, &mut buffer)).await;
        assert_eq!(peeked.unwrap(), 4);
        assert_eq!(buffer.filled(), b"it0123");
    }
    assert_eq!(two.try_read(&mut memory).unwrap(), 4);
    until_not_readable(&two).await;
    let mut buffer = ReadBuf::new(&mut memory);
    assert!(two.poll_peek(&mut Context::from_waker(&wakers[0]), &mut buffer).is_pending());
    one.write_all(b"x").await.unwrap();
    assert_eq!(two.read(&mut memory).await.unwrap(), 1);

    let bytes = vec![7; 100_000];
    let mut written = 0;
    while !would_block(one.try_write(&bytes).map(|more| written += more)) {
        assert!(written < 256 << 20, "a writer without a reader never waits");
        tokio::task::yield_now().await;
    }
    assert!(one.poll_write_ready(&mut Context::from_waker(&wakers[0])).is_pending());
    let mut received = vec![0; written];
    let (read, write) = tokio::join!(
        two.read_exact(&mut received),
        poll_fn(|context| one.poll_write_ready(context))
    );
    read.unwrap();
    write.unwrap();
    assert!(would_block(two.try_read(&mut memory)));
    assert!(two.poll_read_ready(&mut Context::from_waker(&wakers[0])).is_pending());
    drop(one);
    poll_fn(|context| two.poll_read_ready(context)).await.unwrap();
    assert_eq!(two.read(&mut memory).await.unwrap(), 0);
}

async fn abandoned_reads_and_writes_do_not_delay_others<S: Stream>() {
    let [mut one, mut two] = S::pair().await;
    let mut memory = [0; 8];
    // As a branch of `select!` leaves it that another one has beaten.
    assert!(poll_read(&mut two, Waker::noop(), &mut memory).is_pending());
    let two = Arc::new(two);
    let waiting = [(); 3].map(|()| {
        let two = two.clone();
        tokio::spawn(async move { two.readable().await })
    });
    one.write_all(b"x").await.unwrap();
    for task in waiting {
        task.await.unwrap().unwrap();
    }
    assert_eq!(two.peek(&mut memory).await.unwrap(), 1);
    assert_eq!(two.try_read(&mut memory).unwrap(), 1);

    let bytes = vec![7; 100_000];
    let mut written = 0;
    let mut poll_write = || {
        let context = &mut Context::from_waker(Waker::noop());
        Pin::new(&mut one).poll_write(context, &bytes)
    };
    while let Poll::Ready(more) = poll_write() {
        written += more.unwrap();
        assert!(written < 256 << 20, "a writer without a reader never waits");
        tokio::task::yield_now().await;
    }
    let mut two = Arc::into_inner(two).unwrap();
    let reading = tokio::spawn(async move {
        let mut received = Vec::new();
        two.read_to_end(&mut received).await.unwrap();
        received
    });
    loop {
        one.writable().await.unwrap();
        match one.try_write(&bytes) {
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            more => break written += more.unwrap(),
        }
    }
    drop(one);
    assert!(reading.await.unwrap() == vec![7; written]);
}

async fn borrowed_halves_read_and_write_at_once<S: Stream>() {
    let [mut one, two] = S::pair().await;
    let (mut echo_from, mut echo_to) = two.into_split();
    let echo = tokio::spawn(async move { copy(&mut echo_from, &mut echo_to).await });
    let (bytes, mut received) = (pattern(1_000_000, 9), vec![0; 1_000_000]);
    {
        let (mut read, mut write) = one.split();
        let (written, read) = tokio::join!(write.write_all(&bytes), read.read_exact(&mut received));
        written.unwrap();
        read.unwrap();
    }
    assert!(received == bytes);
    one.shutdown().await.unwrap();
    assert_eq!(one.read(&mut [0; 8]).await.unwrap(), 0, "the halves have ended nothing");
    assert_eq!(echo.await.unwrap().unwrap(), 1_000_000);
}

async fn connected_streams_deliver_before_and_after_they_are_accepted<S: Stream>() {
    let listener = S::listen().await;
    let mut clients = Vec::new();
    for number in 0..20 {
        let mut client = S::connect(&listener).await;
        client.write_all(&[number; 1000]).await.unwrap();
        clients.push(client);
    }
    let mut found = Vec::new();
    for _ in 0..20 {
        let mut server = S::accept(&listener).await;
        let mut bytes = [0; 1000];
        server.read_exact(&mut bytes).await.unwrap();
        assert_eq!(bytes, [bytes[0]; 1000]);
        found.push(bytes[0]);
        server.write_all(&bytes[..1]).await.unwrap();
        assert_eq!(clients[usize::from(bytes[0])].read_u8().await.unwrap(), bytes[0]);
    }
    found.sort_unstable();
    assert!(found.iter().copied().eq(0..20));
}

async fn dropped_listener_resets_streams_that_were_not_accepted<S: Stream>() {
    let listener = S::listen().await;
    let mut client = S::connect(&listener).await;
    client.write_all(b"request").await.unwrap();
    drop(listener);
    let error = client.read(&mut [0; 8]).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionReset, "{error}");
}

async fn stream_that_is_always_ready_lets_other_tasks_run<S: Stream>() {
    const LEN: usize = 10_000;
    let [mut one, mut two] = S::pair().await;
    one.write_all(&[7; LEN]).await.unwrap();
    let rounds = Arc::new(Count::default());
    let other = tokio::spawn({
        let rounds = rounds.clone();
        async move {
            loop {
                rounds.0.fetch_add(1, Ordering::SeqCst);
                tokio::task::yield_now().await;
            }
        }
    });
    for _ in 0..LEN {
        assert_eq!(two.read(&mut [0]).await.unwrap(), 1);
    }
    // On several threads, the other task needs no thread of this one.
    let shares_thread = Handle::current().runtime_flavor() == RuntimeFlavor::CurrentThread;
    assert!(!shares_thread || rounds.get() > 10, "{} rounds", rounds.get());
    other.abort();
}
