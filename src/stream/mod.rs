//! Byte streams, shaped like `tokio::net::TcpStream` and `TcpListener`; `docs/streams.md` lists the
//! differences. A stream is a [`connection`](crate::connection) whose frames carry bytes instead of
//! messages.
//!
//! ```
//! use tokio::io::{AsyncReadExt, AsyncWriteExt};
//! use tokio_rdma::{Device, RdmaListener, RdmaStream};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let device = Device::software()?;
//! let listener = RdmaListener::bind(&device, "127.0.0.1:0").await?;
//! let connecting = RdmaStream::connect(&device, listener.local_addr()?);
//! let ((mut server, _), mut client) = tokio::try_join!(listener.accept(), connecting)?;
//!
//! client.write_all(b"hello").await?;
//! client.shutdown().await?;
//! let mut request = Vec::new();
//! server.read_to_end(&mut request).await?;
//! assert_eq!(request, b"hello");
//! # Ok(())
//! # }
//! ```

mod listener;
mod read_half;
mod write_half;

use std::fmt;
use std::future::poll_fn;
use std::io::{self, IoSlice, IoSliceMut};
use std::net::SocketAddr;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::{BufMut, Bytes};
use tokio::io::{AsyncBufRead, AsyncRead, AsyncWrite, Interest, ReadBuf, Ready};
use tokio::net::ToSocketAddrs;

pub use listener::RdmaListener;
pub use read_half::OwnedReadHalf;
pub use write_half::OwnedWriteHalf;

use crate::connection::{
    CloseReason, Connection, ConnectionConfig, ConnectionCounters, ConnectionState, Handle,
    MessageError, WaitGuard,
};
use crate::memory::Buf;
use crate::verbs::{Device, ProtectionDomain};

/// A reliable, ordered stream of bytes between two peers, like `tokio::net::TcpStream`.
///
/// It implements [`AsyncRead`], [`AsyncBufRead`] and [`AsyncWrite`], so hyper, axum, tonic and
/// rustls run over it unchanged. [`write_bytes`](Self::write_bytes), [`write_buf`](Self::write_buf)
/// and [`read_bytes`](Self::read_bytes) move memory without a copy.
///
/// # Writing
///
/// A write returns when the bytes are in registered memory of this side, as with TCP. Short writes
/// are combined while an earlier one is in flight, unless [`set_nodelay`](Self::set_nodelay)
/// disables that; `flush` sends them without waiting for the peer. If the peer does not read,
/// writes fill its receives, and short ones also the [send
/// buffers](ConnectionConfig::send_buffers), before they wait.
///
/// # Closing
///
/// `shutdown` ends this side's bytes; the other direction stays open. A program that exits when
/// `shutdown` returns may lose bytes that have not arrived: first wait for an answer, or with
/// [`closed`](Self::closed) for the end in both directions.
///
/// Dropping the stream shuts it down in the background, and discards what was not read. This takes
/// at most [`close_timeout`](ConnectionConfig::close_timeout), which you raise if peers read
/// slowly, or until the runtime shuts down; once the peer's device has everything, the peer has one
/// second to finish.
///
/// # Errors
///
/// Reads return the end only if the peer has shut down its side and all bytes have arrived, or if
/// this side's [`RdmaListener`] shuts down. Every other end is an error, whose source is a
/// [`MessageError`] with the [`CloseReason`]. Methods that only wait, query or set something never
/// fail; their `Result` is that of `TcpStream`.
///
/// | Kind | Cause |
/// |---|---|
/// | `ConnectionReset` | the peer aborted, is gone, or its runtime has shut down |
/// | `TimedOut` | no answer to retransmissions or [keepalive]; the peer [stalls], sends [nothing] |
/// | `BrokenPipe` | a write after `shutdown`, or after both sides have ended |
/// | `ConnectionAborted` | this side aborted, or its runtime or listener has shut down |
/// | `ConnectionRefused` | the listener refused the connection after it was established |
/// | `OutOfMemory` | memory cannot be registered |
/// | `InvalidData` | the peer violated the protocol |
///
/// [keepalive]: ConnectionConfig::keepalive
/// [stalls]: ConnectionConfig::stall_timeout
/// [nothing]: crate::ListenerConfig::first_message_timeout
///
/// # Cancel safety
///
/// Futures of one call, such as `read`, `write` and `ready`, lose no bytes when they are dropped.
/// Futures of several calls, such as `read_exact` and `write_all`, may have moved some bytes. A
/// dropped `connect` withdraws the request.
pub struct RdmaStream {
    // Dropped first; see `OwnedWriteHalf`.
    read: OwnedReadHalf,
    write: OwnedWriteHalf,
}

/// The borrowed reading half of [`RdmaStream::split`].
pub type ReadHalf<'a> = &'a mut OwnedReadHalf;

/// The borrowed writing half of [`RdmaStream::split`].
pub type WriteHalf<'a> = &'a mut OwnedWriteHalf;

impl RdmaStream {
    /// Calls [`connect_with`](Self::connect_with) with [`ConnectionConfig::for_streams`].
    pub async fn connect(
        device: &Device,
        address: impl ToSocketAddrs + fmt::Debug,
    ) -> io::Result<Self> {
        Self::connect_with(device, address, &ConnectionConfig::for_streams()).await
    }

    /// Connects to an [`RdmaListener`] at the first address that answers.
    ///
    /// # Errors
    ///
    /// As for [`Connection::connect_with`]; the source is an
    /// [`EstablishError`](crate::EstablishError).
    pub async fn connect_with(
        device: &Device,
        address: impl ToSocketAddrs + fmt::Debug,
        config: &ConnectionConfig,
    ) -> io::Result<Self> {
        let connection = Connection::connect_with(device, address, &config.with_bytes()).await?;
        Ok(Self::new(connection))
    }

    fn new(connection: Connection) -> Self {
        let handle = connection.shared_handle();
        Self { read: OwnedReadHalf::new(handle.clone()), write: OwnedWriteHalf::new(handle) }
    }

    /// Splits the stream into borrowed halves, for one task that reads and writes at a time.
    pub fn split(&mut self) -> (ReadHalf<'_>, WriteHalf<'_>) {
        (&mut self.read, &mut self.write)
    }

    /// Splits the stream into halves for two tasks.
    #[must_use]
    pub fn into_split(self) -> (OwnedReadHalf, OwnedWriteHalf) {
        (self.read, self.write)
    }

    /// Writes bytes like [`OwnedWriteHalf::write_bytes`].
    pub async fn write_bytes(&mut self, bytes: impl Into<Bytes>) -> io::Result<()> {
        self.write.write_bytes(bytes).await
    }

    /// Writes a registered buffer like [`OwnedWriteHalf::write_buf`].
    pub async fn write_buf(&mut self, buffer: impl Into<Buf>) -> io::Result<()> {
        self.write.write_buf(buffer).await
    }

    /// Returns the next bytes like [`OwnedReadHalf::read_bytes`].
    pub async fn read_bytes(&mut self) -> io::Result<Option<Bytes>> {
        self.read.read_bytes().await
    }

    /// Waits until the stream is readable or writable, as `interest` requests; other states are
    /// ignored.
    ///
    /// # Errors
    ///
    /// `InvalidInput` if `interest` is neither readable nor writable.
    pub async fn ready(&self, interest: Interest) -> io::Result<Ready> {
        if !interest.is_readable() && !interest.is_writable() {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let shared = &self.handle().shared;
        let mut readers = WaitGuard::new(shared, ConnectionState::withdraw_receiver);
        let mut writers = WaitGuard::new(shared, ConnectionState::withdraw_sender);
        let ready = poll_fn(|context| {
            let mut ready = Ready::EMPTY;
            if interest.is_readable()
                && let Poll::Ready(read) = self.read.poll_ready(context, &mut readers.ticket)
            {
                ready |= read;
            }
            if interest.is_writable()
                && let Poll::Ready(write) = self.write.poll_ready(context, &mut writers.ticket)
            {
                ready |= write;
            }
            if ready.is_empty() { Poll::Pending } else { Poll::Ready(ready) }
        });
        Ok(ready.await)
    }

    /// Polls like [`readable`](Self::readable). Only the task that last called this method or
    /// [`poll_peek`](Self::poll_peek) is woken.
    pub fn poll_read_ready(&self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.read.poll_read_ready(context).map(Ok)
    }

    /// Polls like [`writable`](Self::writable). Only the task of the last call is woken.
    pub fn poll_write_ready(&self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.write.poll_write_ready(context).map(Ok)
    }

    /// Waits until [`try_read`](Self::try_read) succeeds, like [`OwnedReadHalf::readable`].
    pub async fn readable(&self) -> io::Result<()> {
        self.read.readable().await
    }

    /// Waits until [`try_write`](Self::try_write) succeeds, like [`OwnedWriteHalf::writable`].
    pub async fn writable(&self) -> io::Result<()> {
        self.write.writable().await
    }

    /// Reads without consuming, like [`OwnedReadHalf::peek`].
    pub async fn peek(&self, buffer: &mut [u8]) -> io::Result<usize> {
        self.read.peek(buffer).await
    }

    /// Polls like [`OwnedReadHalf::poll_peek`].
    pub fn poll_peek(
        &self,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<usize>> {
        self.read.poll_peek(context, buffer)
    }

    /// Reads like [`OwnedReadHalf::try_read`].
    pub fn try_read(&self, buffer: &mut [u8]) -> io::Result<usize> {
        self.read.try_read(buffer)
    }

    /// Reads like [`OwnedReadHalf::try_read_vectored`].
    pub fn try_read_vectored(&self, buffers: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        self.read.try_read_vectored(buffers)
    }

    /// Reads like [`OwnedReadHalf::try_read_buf`].
    pub fn try_read_buf<B: BufMut>(&self, buffer: &mut B) -> io::Result<usize> {
        self.read.try_read_buf(buffer)
    }

    /// Writes like [`OwnedWriteHalf::try_write`].
    pub fn try_write(&self, bytes: &[u8]) -> io::Result<usize> {
        self.write.try_write(bytes)
    }

    /// Writes like [`OwnedWriteHalf::try_write_vectored`].
    pub fn try_write_vectored(&self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        self.write.try_write_vectored(slices)
    }

    /// Sets how long a dropped stream continues to send, like `SO_LINGER`; default
    /// [`close_timeout`](ConnectionConfig::close_timeout). With zero, a drop resets the peer.
    pub fn set_linger(&self, linger: Option<Duration>) -> io::Result<()> {
        self.handle().shared.with(|state, _| state.stream.linger = linger);
        Ok(())
    }

    /// Calls [`set_linger`](Self::set_linger) with zero.
    pub fn set_zero_linger(&self) -> io::Result<()> {
        self.set_linger(Some(Duration::ZERO))
    }

    /// Returns what [`set_linger`](Self::set_linger) has set.
    pub fn linger(&self) -> io::Result<Option<Duration>> {
        Ok(self.handle().shared.with(|state, _| state.stream.linger))
    }

    /// Disables the combination of short writes, like `TCP_NODELAY`.
    pub fn set_nodelay(&self, nodelay: bool) -> io::Result<()> {
        self.handle().shared.with(|state, waker| state.set_nodelay(nodelay, waker));
        Ok(())
    }

    /// Returns true if short writes are sent at once; false by default.
    pub fn nodelay(&self) -> io::Result<bool> {
        Ok(self.handle().shared.with(|state, _| state.stream.nodelay))
    }

    /// Ends the stream in both directions at once. The peer's reads fail with
    /// [`ConnectionReset`](io::ErrorKind::ConnectionReset), after bytes that have arrived.
    pub fn abort(&self) {
        self.handle().shared.abort(CloseReason::Aborted);
    }

    /// Returns the reason of the end, if the stream has ended in both directions.
    #[must_use]
    pub fn close_reason(&self) -> Option<CloseReason> {
        self.handle().close_reason()
    }

    /// Waits until the stream has ended in both directions, and returns the reason.
    pub async fn closed(&self) -> CloseReason {
        self.handle().closed().await
    }

    /// Returns the local address.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.handle().addresses().map(|(local, _)| local)
    }

    /// Returns the peer's address.
    pub fn peer_addr(&self) -> io::Result<SocketAddr> {
        self.handle().addresses().map(|(_, peer)| peer)
    }

    /// Returns the peer's [`ConnectionConfig::user_data`].
    #[must_use]
    pub fn user_data(&self) -> &Bytes {
        &self.handle().user_data
    }

    /// Returns the protection domain to register memory for [`write_buf`](Self::write_buf) in.
    #[must_use]
    pub fn protection_domain(&self) -> &ProtectionDomain {
        self.handle().shared.qp.protection_domain()
    }

    /// Returns the counters of the connection. Each frame of the stream counts as a message.
    #[must_use]
    pub fn counters(&self) -> ConnectionCounters {
        self.handle().counters()
    }

    pub(crate) fn handle(&self) -> &Handle {
        self.read.handle()
    }
}

impl AsyncRead for RdmaStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.read).poll_read(context, buffer)
    }
}

impl AsyncBufRead for RdmaStream {
    fn poll_fill_buf(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<&[u8]>> {
        Pin::new(&mut self.get_mut().read).poll_fill_buf(context)
    }

    fn consume(mut self: Pin<&mut Self>, bytes: usize) {
        Pin::new(&mut self.read).consume(bytes);
    }
}

impl AsyncWrite for RdmaStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.write).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.write).poll_write_vectored(context, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.write.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.write).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.write).poll_shutdown(context)
    }
}

impl fmt::Debug for RdmaStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RdmaStream")
            .field("local", &self.handle().addresses.map(|(local, _)| local))
            .field("peer", &self.handle().addresses().ok().map(|(_, peer)| peer))
            .field("close_reason", &self.close_reason())
            .finish_non_exhaustive()
    }
}

/// The halves passed to [`OwnedReadHalf::reunite`] belong to different streams.
#[derive(Debug)]
pub struct ReuniteError(pub OwnedReadHalf, pub OwnedWriteHalf);

impl fmt::Display for ReuniteError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("failed to reunite halves: they belong to different streams")
    }
}

impl std::error::Error for ReuniteError {}

fn io_error(error: MessageError) -> io::Error {
    let kind = match &error {
        MessageError::Closed(CloseReason::Clean | CloseReason::Local) => io::ErrorKind::BrokenPipe,
        MessageError::Closed(CloseReason::Operation(kind)) => match kind.io_kind() {
            io::ErrorKind::TimedOut => io::ErrorKind::TimedOut,
            _ => io::ErrorKind::ConnectionReset,
        },
        _ => error.io_kind(),
    };
    io::Error::new(kind, error)
}
