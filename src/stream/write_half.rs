use std::fmt;
use std::future::poll_fn;
use std::io::{self, IoSlice};
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::{Buf as _, Bytes};
use tokio::io::{AsyncWrite, Interest, Ready};

use super::io_error;
use crate::connection::{
    CloseReason, ConnectionCounters, ConnectionState, Handle, MessageError, WaitGuard,
};
use crate::coop::within_budget;
use crate::memory::Buf;
use crate::waiters::{Caller, Ticket};

/// The writing half of an [`RdmaStream`](super::RdmaStream). Dropping it shuts down the direction.
///
/// # Errors
///
/// As for the [stream](super::RdmaStream#errors).
///
/// # Cancel safety
///
/// As for the [stream](super::RdmaStream#cancel-safety). A dropped `write_bytes` or `write_buf` may
/// have written the first bytes, like `write_all`.
pub struct OwnedWriteHalf {
    ticket: Option<Ticket>,
    handle: Arc<Handle>,
}

impl OwnedWriteHalf {
    pub(super) fn new(handle: Arc<Handle>) -> Self {
        Self { ticket: None, handle }
    }

    /// Writes bytes.
    ///
    /// - Up to [`max_eager`](crate::ConnectionConfig::max_eager) bytes are copied once, into
    ///   registered buffers. But at least 4 KiB that are in a buffer of the stream's [protection
    ///   domain](super::RdmaStream::protection_domain), such as a received one, are sent from
    ///   there.
    /// - The memory of more bytes is registered in pieces of up to 1 MiB, which the peer's device
    ///   reads.
    ///
    /// Memory that is not copied is in use until the peer's device has the bytes.
    pub async fn write_bytes(&mut self, bytes: impl Into<Bytes>) -> io::Result<()> {
        let mut bytes = bytes.into();
        while !bytes.is_empty() {
            let buffer = Buf::of_bytes(&bytes, self.handle.shared.qp.protection_domain());
            let written = poll_fn(|context| {
                self.poll(context, |state, ticket, waker, caller| {
                    state.poll_write_bytes(&bytes, buffer.as_ref(), ticket, waker, caller)
                })
            });
            bytes.advance(written.await?);
        }
        Ok(())
    }

    /// Writes a registered buffer without a copy if it belongs to the stream's [protection
    /// domain](super::RdmaStream::protection_domain), else like [`write_bytes`](Self::write_bytes).
    /// The buffer returns to its pool when the peer's device has the bytes and the last view is
    /// dropped.
    pub async fn write_buf(&mut self, buffer: impl Into<Buf>) -> io::Result<()> {
        let mut buffer = buffer.into();
        while !buffer.is_empty() {
            let written = poll_fn(|context| {
                self.poll(context, |state, ticket, waker, caller| {
                    state.poll_write_buffer(&buffer, ticket, waker, caller)
                })
            });
            let Ok(rest) = buffer.slice(written.await?..) else {
                unreachable!("at most the buffer is written")
            };
            buffer = rest;
        }
        Ok(())
    }

    /// Waits until [`try_write`](Self::try_write) returns a number of bytes or an error. It may
    /// still return `WouldBlock` if another task writes, or if no buffer can be registered, for
    /// example within the [budget](crate::ConnectionConfig::budget).
    pub async fn writable(&self) -> io::Result<()> {
        let mut guard = WaitGuard::new(&self.handle.shared, ConnectionState::withdraw_sender);
        poll_fn(|context| self.poll_writable(context, &mut guard.ticket)).await;
        Ok(())
    }

    /// Waits for a write like [`RdmaStream::ready`](super::RdmaStream::ready).
    ///
    /// # Errors
    ///
    /// `InvalidInput` if `interest` is not writable.
    pub async fn ready(&self, interest: Interest) -> io::Result<Ready> {
        if !interest.is_writable() {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let mut guard = WaitGuard::new(&self.handle.shared, ConnectionState::withdraw_sender);
        Ok(poll_fn(|context| self.poll_ready(context, &mut guard.ticket)).await)
    }

    pub(super) fn poll_ready(
        &self,
        context: &mut Context<'_>,
        ticket: &mut Option<Ticket>,
    ) -> Poll<Ready> {
        self.poll_writable(context, ticket).map(|()| {
            let is_closed = |state: &ConnectionState| state.protocol.phase().check_open().is_err();
            if self.handle.shared.with(|state, _| is_closed(state)) {
                Ready::WRITABLE | Ready::WRITE_CLOSED
            } else {
                Ready::WRITABLE
            }
        })
    }

    fn poll_writable(&self, context: &mut Context<'_>, ticket: &mut Option<Ticket>) -> Poll<()> {
        within_budget(context, |context| {
            self.handle
                .shared
                .poll(context, |state, waker, caller| state.poll_writable(ticket, waker, caller))
        })
    }

    pub(super) fn poll_write_ready(&self, context: &mut Context<'_>) -> Poll<()> {
        within_budget(context, |context| {
            let shared = &self.handle.shared;
            shared.poll(context, |state, waker, caller| state.poll_write_ready(waker, caller))
        })
    }

    /// Writes as many bytes as free buffers hold, without waiting. Returns their number.
    ///
    /// # Errors
    ///
    /// `WouldBlock` if no buffer is free.
    pub fn try_write(&self, bytes: &[u8]) -> io::Result<usize> {
        self.try_write_vectored(&[IoSlice::new(bytes)])
    }

    /// Writes like [`try_write`](Self::try_write).
    pub fn try_write_vectored(&self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        let written = self.handle.shared.with(|state, waker| state.try_write(slices, waker));
        written.map_err(io_error)?.map_err(|_| io::ErrorKind::WouldBlock.into())
    }

    /// Returns the local address.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.handle.addresses().map(|(local, _)| local)
    }

    /// Returns the peer's address.
    pub fn peer_addr(&self) -> io::Result<SocketAddr> {
        self.handle.addresses().map(|(_, peer)| peer)
    }

    /// Returns [`RdmaStream::counters`](super::RdmaStream::counters).
    #[must_use]
    pub fn counters(&self) -> ConnectionCounters {
        self.handle.counters()
    }

    fn poll<T>(
        &mut self,
        context: &mut Context<'_>,
        mut work: impl FnMut(
            &mut ConnectionState,
            &mut Option<Ticket>,
            &Waker,
            &mut Caller<'_>,
        ) -> Poll<Result<T, MessageError>>,
    ) -> Poll<io::Result<T>> {
        let Self { ticket, handle, .. } = self;
        let result = within_budget(context, |context| {
            let shared = &handle.shared;
            shared.poll(context, |state, waker, caller| work(state, ticket, waker, caller))
        });
        result.map_err(io_error)
    }

    pub(super) fn handle(&self) -> &Arc<Handle> {
        &self.handle
    }
}

impl AsyncWrite for OwnedWriteHalf {
    fn poll_write(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.poll_write_vectored(context, &[IoSlice::new(bytes)])
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.poll(context, |state, ticket, waker, caller| {
            state.poll_write(slices, ticket, waker, caller)
        })
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    /// Sends bytes that wait to be combined with later ones. It does not wait for the peer: without
    /// credits, they are sent as the peer reads.
    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        within_budget(context, |_| {
            self.handle.shared.with(|state, waker| state.push(waker));
            Poll::Ready(Ok(()))
        })
    }

    /// Ends this direction after the bytes written, without waiting for the peer. Like `TcpStream`,
    /// it succeeds on a stream that has ended, because reads and writes report the reason.
    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(match self.handle.shared.with(|state, waker| state.finish(waker)) {
            Ok(()) | Err(MessageError::Closed(_)) => Ok(()),
            Err(error) => Err(io_error(error)),
        })
    }
}

impl Drop for OwnedWriteHalf {
    fn drop(&mut self) {
        let Self { handle, ticket, .. } = self;
        handle.shared.abort_if_runtime_shuts_down();
        // The reading half of a stream is dropped first.
        let is_last = Arc::strong_count(handle) == 1;
        handle.shared.with(|state, waker| {
            state.withdraw_sender(ticket);
            if is_last && state.stream.linger == Some(Duration::ZERO) {
                return state.abort(CloseReason::Aborted, waker);
            }
            // Without effect on a closed connection.
            let _ = state.finish(waker);
        });
    }
}

impl fmt::Debug for OwnedWriteHalf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OwnedWriteHalf")
            .field("peer", &self.handle.addresses().ok().map(|(_, peer)| peer))
            .finish_non_exhaustive()
    }
}
