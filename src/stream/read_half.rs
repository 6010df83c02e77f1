use std::fmt;
use std::future::poll_fn;
use std::io::{self, IoSliceMut};
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::{BufMut, Bytes};
use rdma_provider::locks::Mutex;
use tokio::io::{AsyncBufRead, AsyncRead, Interest, ReadBuf, Ready};

use super::write_half::OwnedWriteHalf;
use super::{RdmaStream, ReuniteError, io_error};
use crate::connection::{Chunk, ConnectionCounters, ConnectionState, Handle, Taken, WaitGuard};
use crate::contained::wake_to_repoll;
use crate::coop::within_budget;
use crate::waiters::{Caller, Ticket};

/// The reading half of an [`RdmaStream`]. Dropping it discards bytes that it has buffered. The
/// peer's writes then wait, unless the other half is dropped too.
///
/// # Errors
///
/// As for the [stream](RdmaStream#errors).
///
/// # Cancel safety
///
/// As for the [stream](RdmaStream#cancel-safety).
pub struct OwnedReadHalf {
    slot: Mutex<Slot>,
    ticket: Option<Ticket>,
    handle: Arc<Handle>,
}

#[derive(Default)]
struct Slot {
    chunk: Option<(Chunk, usize)>,
    /// A method with `&self` has moved the chunk out, because it runs code of the program.
    is_taken: bool,
}

struct TakenSlot<'a> {
    slot: &'a Mutex<Slot>,
    chunk: Option<(Chunk, usize)>,
}

impl<'a> TakenSlot<'a> {
    fn take(slot: &'a Mutex<Slot>) -> Option<Self> {
        let mut locked = slot.lock();
        if std::mem::replace(&mut locked.is_taken, true) {
            return None;
        }
        let chunk = locked.chunk.take();
        drop(locked);
        Some(Self { slot, chunk })
    }
}

impl Drop for TakenSlot<'_> {
    fn drop(&mut self) {
        let mut locked = self.slot.lock();
        *locked = Slot { chunk: self.chunk.take(), is_taken: false };
    }
}

impl OwnedReadHalf {
    pub(super) fn new(handle: Arc<Handle>) -> Self {
        Self { slot: Mutex::default(), ticket: None, handle }
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

    /// Returns the next bytes, at least one, or `None` at the end. Up to 256 bytes are copied, as
    /// are all while the application holds
    /// [`spare_buffers`](crate::ConnectionConfig::spare_buffers) of them; others are returned in
    /// their receive buffer.
    pub async fn read_bytes(&mut self) -> io::Result<Option<Bytes>> {
        poll_fn(|context| self.poll_read_bytes(context)).await
    }

    /// Polls like [`read_bytes`](Self::read_bytes).
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
            handle
                .shared
                .poll_receiver(context, ticket, ConnectionState::poll_recv)
                .map_err(io_error)
        })
    }

    /// Waits until [`try_read`](Self::try_read) returns bytes, the end or an error. It may still
    /// return `WouldBlock` if another task reads.
    pub async fn readable(&self) -> io::Result<()> {
        let mut guard = WaitGuard::new(&self.handle.shared, ConnectionState::withdraw_receiver);
        poll_fn(|context| self.poll_readable(context, &mut guard.ticket)).await;
        Ok(())
    }

    /// Waits for a read like [`RdmaStream::ready`].
    ///
    /// # Errors
    ///
    /// `InvalidInput` if `interest` is not readable.
    pub async fn ready(&self, interest: Interest) -> io::Result<Ready> {
        if !interest.is_readable() {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let mut guard = WaitGuard::new(&self.handle.shared, ConnectionState::withdraw_receiver);
        Ok(poll_fn(|context| self.poll_ready(context, &mut guard.ticket)).await)
    }

    pub(super) fn poll_ready(
        &self,
        context: &mut Context<'_>,
        ticket: &mut Option<Ticket>,
    ) -> Poll<Ready> {
        self.poll_readable(context, ticket).map(|()| {
            // A read returns the end or an error once what has arrived was read.
            let is_closed =
                |state: &ConnectionState| state.is_at_end() || state.close_reason().is_some();
            if self.handle.shared.with(|state, _| is_closed(state)) {
                Ready::READABLE | Ready::READ_CLOSED
            } else {
                Ready::READABLE
            }
        })
    }

    fn poll_readable(&self, context: &mut Context<'_>, ticket: &mut Option<Ticket>) -> Poll<()> {
        within_budget(context, |context| {
            if self.has_chunk() {
                return Poll::Ready(());
            }
            match self.handle.shared.poll_receiver(context, ticket, ConnectionState::poll_readable)
            {
                // Meanwhile another task may have moved the last frame to the slot.
                Poll::Pending if self.has_chunk() => Poll::Ready(()),
                polled => polled,
            }
        })
    }

    pub(super) fn poll_read_ready(&self, context: &mut Context<'_>) -> Poll<()> {
        within_budget(context, |context| {
            if self.has_chunk() {
                return Poll::Ready(());
            }
            let shared = &self.handle.shared;
            let polled =
                shared.poll(context, |state, waker, caller| state.poll_read_ready(waker, caller));
            match polled {
                // As in `poll_readable`.
                Poll::Pending if self.has_chunk() => Poll::Ready(()),
                polled => polled,
            }
        })
    }

    fn has_chunk(&self) -> bool {
        let slot = self.slot.lock();
        slot.is_taken || slot.chunk.is_some()
    }

    /// Copies arrived bytes of at most one frame, without waiting. Returns 0 at the end, or for an
    /// empty buffer.
    ///
    /// # Errors
    ///
    /// `WouldBlock` if nothing has arrived.
    pub fn try_read(&self, buffer: &mut [u8]) -> io::Result<usize> {
        let mut into = ReadBuf::new(buffer);
        self.try_take(into.remaining(), |bytes| into.put_slice(bytes))
    }

    /// Reads like [`try_read`](Self::try_read).
    pub fn try_read_vectored(&self, buffers: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        let most = buffers.iter().fold(0_usize, |sum, buffer| sum.saturating_add(buffer.len()));
        self.try_take(most, |mut bytes| {
            for buffer in buffers.iter_mut() {
                let (next, rest) = bytes.split_at(bytes.len().min(buffer.len()));
                buffer[..next.len()].copy_from_slice(next);
                bytes = rest;
            }
        })
    }

    /// Reads like [`try_read`](Self::try_read), to the end of `buffer`.
    pub fn try_read_buf<B: BufMut>(&self, buffer: &mut B) -> io::Result<usize> {
        self.try_take(buffer.remaining_mut(), |bytes| buffer.put_slice(bytes))
    }

    /// Waits for bytes, then copies them like [`try_read`](Self::try_read), without consuming them.
    pub async fn peek(&self, buffer: &mut [u8]) -> io::Result<usize> {
        let mut buffer = ReadBuf::new(buffer);
        loop {
            self.readable().await?;
            if let Poll::Ready(peeked) = self.try_peek(&mut buffer) {
                return peeked;
            }
        }
    }

    /// Polls like [`peek`](Self::peek), and appends the bytes to `buffer`. As with `TcpStream`,
    /// only the task that last called this method or [`RdmaStream::poll_read_ready`] is woken.
    pub fn poll_peek(
        &self,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<usize>> {
        ready!(self.poll_read_ready(context));
        let peeked = self.try_peek(buffer);
        if peeked.is_pending() {
            // Another task takes bytes at this moment.
            wake_to_repoll(context);
        }
        peeked
    }

    fn try_peek(&self, into: &mut ReadBuf<'_>) -> Poll<io::Result<usize>> {
        let before = into.filled().len();
        let most = into.remaining();
        match self.try_see(|rest| into.put_slice(&rest[..rest.len().min(most)])) {
            Ok(_) => Poll::Ready(Ok(into.filled().len() - before)),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Poll::Pending,
            Err(error) => Poll::Ready(Err(error)),
        }
    }

    fn try_take(&self, most: usize, mut copy: impl FnMut(&[u8])) -> io::Result<usize> {
        if most == 0 {
            return Ok(0);
        }
        let mut taken = 0;
        let mut slot = self.try_see(|rest| {
            taken = rest.len().min(most);
            copy(&rest[..taken]);
        })?;
        let read = slot.chunk.take_if(|(chunk, consumed)| {
            *consumed += taken;
            *consumed == chunk.len()
        });
        drop(slot);
        self.release(read);
        Ok(taken)
    }

    fn try_see(&self, see: impl FnOnce(&[u8])) -> io::Result<TakenSlot<'_>> {
        let Some(mut slot) = TakenSlot::take(&self.slot) else {
            return Err(io::ErrorKind::WouldBlock.into());
        };
        if slot.chunk.is_none() {
            match self.handle.shared.with(|state, waker| state.try_read(waker)) {
                Poll::Pending => return Err(io::ErrorKind::WouldBlock.into()),
                Poll::Ready(next) => slot.chunk = next.map_err(io_error)?.map(|next| (next, 0)),
            }
        }
        if let Some((bytes, consumed)) = &slot.chunk {
            see(&bytes[*consumed..]);
        }
        Ok(slot)
    }

    /// Returns the local address.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.handle.addresses().map(|(local, _)| local)
    }

    /// Returns the peer's address.
    pub fn peer_addr(&self) -> io::Result<SocketAddr> {
        self.handle.addresses().map(|(_, peer)| peer)
    }

    /// Returns [`RdmaStream::counters`].
    #[must_use]
    pub fn counters(&self) -> ConnectionCounters {
        self.handle.counters()
    }

    pub(super) fn handle(&self) -> &Handle {
        &self.handle
    }

    fn rest(&mut self) -> Option<&[u8]> {
        self.slot.get_mut().chunk.as_ref().map(|(chunk, consumed)| &chunk[*consumed..])
    }

    fn advance(&mut self, bytes: usize) {
        let read = self.slot.get_mut().chunk.take_if(|(chunk, consumed)| {
            *consumed = chunk.len().min(consumed.saturating_add(bytes));
            *consumed == chunk.len()
        });
        self.release(read);
    }

    fn release(&self, chunk: Option<(Chunk, usize)>) {
        if let Some((chunk, _)) = chunk {
            self.handle.shared.with(|state, _| state.release_chunk(chunk));
        }
    }

    /// Puts the bytes into `into` if a whole frame fits, else into the chunk. Returns `false` at
    /// the end.
    fn poll_bytes(
        &mut self,
        context: &mut Context<'_>,
        mut into: Option<&mut ReadBuf<'_>>,
    ) -> Poll<io::Result<bool>> {
        let Self { ticket, handle, slot } = self;
        let take =
            |state: &mut ConnectionState, ticket: &mut _, waker: &_, caller: &mut Caller<'_>| {
                state.poll_read(&mut into, ticket, waker, caller)
            };
        let taken = ready!(handle.shared.poll_receiver(context, ticket, take));
        Poll::Ready(match taken.map_err(io_error)? {
            None => Ok(false),
            Some(Taken::Copied) => Ok(true),
            Some(Taken::Chunk(bytes)) => {
                slot.get_mut().chunk = Some((bytes, 0));
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
            if self.slot.get_mut().chunk.is_none() {
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
            if this.slot.get_mut().chunk.is_none() {
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
        let chunk = self.slot.get_mut().chunk.take();
        self.release(chunk);
        if self.ticket.is_some() {
            let Self { handle, ticket, .. } = self;
            handle.shared.with(|state, _| state.withdraw_receiver(ticket));
        }
    }
}

impl fmt::Debug for OwnedReadHalf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OwnedReadHalf")
            .field("peer", &self.handle.addresses().ok().map(|(_, peer)| peer))
            .finish_non_exhaustive()
    }
}
