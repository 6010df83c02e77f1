//! The reading half of a stream.

use std::fmt;
use std::future::poll_fn;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use tokio::io::{AsyncBufRead, AsyncRead, ReadBuf};

use super::reading::{Chunk, Taken};
use super::write_half::OwnedWriteHalf;
use super::{RdmaStream, ReuniteError, addresses, io_error};
use crate::coop::within_budget;
use crate::message::connection::Handle;
use crate::message::core::{ConnectionCounters, Core};
use crate::waiters::{Caller, Ticket};

/// The reading half of an [`RdmaStream`].
///
/// Dropping it discards bytes that were read into its buffer and not consumed. The peer's writes
/// then wait, unless the other half is dropped too.
pub struct OwnedReadHalf {
    /// Bytes in the memory in which they have arrived, and how many of them are consumed.
    chunk: Option<(Chunk, usize)>,
    ticket: Option<Ticket>,
    handle: Arc<Handle>,
}

impl OwnedReadHalf {
    pub(super) fn new(handle: Arc<Handle>) -> Self {
        Self { chunk: None, ticket: None, handle }
    }

    /// Reunites the halves of a stream.
    ///
    /// # Errors
    ///
    /// Returns the halves if they belong to different streams.
    pub fn reunite(self, write: OwnedWriteHalf) -> Result<RdmaStream, ReuniteError> {
        if Arc::ptr_eq(&self.handle, write.handle()) {
            Ok(RdmaStream { read: self, write })
        } else {
            Err(ReuniteError(self, write))
        }
    }

    /// Returns the next bytes, at least one, or `None` at the end.
    ///
    /// They are in the memory in which they have arrived if more than 256 bytes have, and if the
    /// service holds at most [`spare_buffers`](crate::ConnectionConfig::spare_buffers) of them.
    /// Otherwise they are a copy.
    ///
    /// # Errors
    ///
    /// See [`RdmaStream`].
    ///
    /// # Cancel safety
    ///
    /// Dropping the future loses no bytes.
    pub async fn read_bytes(&mut self) -> io::Result<Option<Bytes>> {
        poll_fn(|context| self.poll_read_bytes(context)).await
    }

    /// Polls for what [`read_bytes`](Self::read_bytes) returns.
    ///
    /// # Errors
    ///
    /// See [`RdmaStream`].
    pub fn poll_read_bytes(
        &mut self,
        context: &mut Context<'_>,
    ) -> Poll<io::Result<Option<Bytes>>> {
        within_budget(context, |context| {
            if let Some(rest) = self.rest() {
                let (bytes, len) = (Bytes::copy_from_slice(rest), rest.len());
                self.advance(len);
                return Poll::Ready(Ok(Some(bytes)));
            }
            let Self { ticket, handle, .. } = self;
            handle.shared.poll_receiver(context, ticket, Core::poll_recv).map_err(io_error)
        })
    }

    /// Returns the local address.
    ///
    /// # Errors
    ///
    /// None; `TcpStream` has the same signature.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        addresses(&self.handle).map(|(local, _)| local)
    }

    /// Returns the peer's address.
    ///
    /// # Errors
    ///
    /// None; `TcpStream` has the same signature.
    pub fn peer_addr(&self) -> io::Result<SocketAddr> {
        addresses(&self.handle).map(|(_, peer)| peer)
    }

    /// Returns the counters of the connection, like [`RdmaStream::counters`].
    #[must_use]
    pub fn counters(&self) -> ConnectionCounters {
        self.handle.counters()
    }

    pub(super) fn handle(&self) -> &Handle {
        &self.handle
    }

    /// Returns the bytes of the chunk that are not consumed.
    fn rest(&self) -> Option<&[u8]> {
        self.chunk.as_ref().map(|(chunk, consumed)| &chunk[*consumed..])
    }

    /// Consumes bytes of the chunk, at most all.
    fn advance(&mut self, bytes: usize) {
        let Some((chunk, consumed)) = &mut self.chunk else { return };
        *consumed = chunk.len().min(consumed.saturating_add(bytes));
        if *consumed == chunk.len() {
            self.release();
        }
    }

    fn release(&mut self) {
        if let Some((chunk, _)) = self.chunk.take() {
            let left = self.handle.shared.with(|core, _| core.release_chunk(chunk));
            drop(left);
        }
    }

    /// Waits for bytes: in `into` if whole frames fit, else in the chunk. Returns `false` at the
    /// end.
    fn poll_bytes(
        &mut self,
        context: &mut Context<'_>,
        mut into: Option<&mut ReadBuf<'_>>,
    ) -> Poll<io::Result<bool>> {
        let Self { ticket, handle, chunk } = self;
        let take = |core: &mut Core, ticket: &mut _, driver: &_, caller: &mut Caller<'_>| {
            core.poll_read(&mut into, ticket, driver, caller)
        };
        let taken = ready!(handle.shared.poll_receiver(context, ticket, take));
        Poll::Ready(match taken.map_err(io_error)? {
            None => Ok(false),
            Some(Taken::Copied) => Ok(true),
            Some(Taken::Chunk(bytes)) => {
                *chunk = Some((bytes, 0));
                Ok(true)
            }
        })
    }
}

impl AsyncRead for OwnedReadHalf {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if buffer.remaining() == 0 {
            return Poll::Ready(Ok(()));
        }
        within_budget(context, |context| {
            if self.chunk.is_none() {
                ready!(self.poll_bytes(context, Some(buffer)))?;
            }
            if let Some(rest) = self.rest() {
                let len = rest.len().min(buffer.remaining());
                buffer.put_slice(&rest[..len]);
                self.advance(len);
            }
            Poll::Ready(Ok(()))
        })
    }
}

impl AsyncBufRead for OwnedReadHalf {
    fn poll_fill_buf(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<&[u8]>> {
        let this = self.get_mut();
        ready!(within_budget(context, |context| {
            if this.chunk.is_none() {
                this.poll_bytes(context, None)
            } else {
                Poll::Ready(Ok(true))
            }
        }))?;
        Poll::Ready(Ok(this.rest().unwrap_or_default()))
    }

    fn consume(mut self: Pin<&mut Self>, bytes: usize) {
        self.advance(bytes);
    }
}

impl Drop for OwnedReadHalf {
    fn drop(&mut self) {
        self.release();
        if self.ticket.is_some() {
            let Self { handle, ticket, .. } = self;
            handle.shared.with(|core, _| core.withdraw_receiver(ticket));
        }
    }
}

impl fmt::Debug for OwnedReadHalf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OwnedReadHalf")
            .field("peer", &self.handle.peer_addr())
            .field("buffered", &self.rest().map_or(0, <[u8]>::len))
            .finish_non_exhaustive()
    }
}
