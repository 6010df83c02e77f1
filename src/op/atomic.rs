//! Atomics on 8 bytes of the peer's memory.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use super::checked::Checked;
use super::operation::{Finish, Operation};
use super::post::{Destination, Route, SendRequest};
use super::queue_pair::QueuePair;
use crate::error::{OpError, OpErrorKind, TryError, VerbError};
use crate::memory::{BufMut, PoolError, RemoteRegion};
use crate::types::{SendOp, WorkCompletion};

/// An atomic in flight; gives the value that was there before.
///
/// # Cancel safety
///
/// As [`Operation`]: it is done even if the future is dropped.
///
/// # Panics
///
/// If polled again after it was ready.
#[derive(Debug)]
#[must_use = "it is posted already, but only awaiting it tells whether it succeeded"]
pub struct Atomic {
    operation: Checked<Original>,
}

impl QueuePair {
    /// Stores `swap` in the 8 bytes of `remote` if they hold `compare`, and gives what they held before (RC).
    ///
    /// It is done exactly once, whatever the network loses or repeats. Whether it is atomic against the peer's
    /// processor too, [`DeviceAttr::atomic`](crate::types::DeviceAttr::atomic) of the peer's device tells.
    ///
    /// # Errors
    ///
    /// Of the future: [`OpErrorKind::Misaligned`] if `remote` is not 8 bytes on an 8-byte boundary,
    /// [`REM_ACCESS_ERR`](crate::types::WcStatus::REM_ACCESS_ERR) if the peer does not grant it (any more); the
    /// connection has ended then.
    ///
    /// # Cancel safety
    ///
    /// As [`Operation`]: it is done even if the future is dropped.
    #[inline]
    pub fn compare_swap(&self, remote: RemoteRegion, compare: u64, swap: u64) -> Atomic {
        self.destination().post_atomic(AtomicRequest::compare_swap(remote, compare, swap))
    }

    /// Adds `add`, wrapping, to the 8 bytes of `remote`, and gives what they held before (RC). See
    /// [`compare_swap`](Self::compare_swap).
    ///
    /// # Errors
    ///
    /// As [`compare_swap`](Self::compare_swap).
    ///
    /// # Cancel safety
    ///
    /// As [`Operation`]: it is done even if the future is dropped.
    #[inline]
    pub fn fetch_add(&self, remote: RemoteRegion, add: u64) -> Atomic {
        self.destination().post_atomic(AtomicRequest::fetch_add(remote, add))
    }

    /// As [`compare_swap`](Self::compare_swap), if there is room in the send queue.
    ///
    /// # Errors
    ///
    /// [`TryError::Full`] if there is none.
    pub fn try_compare_swap(
        &self,
        remote: RemoteRegion,
        compare: u64,
        swap: u64,
    ) -> Result<Atomic, TryError<()>> {
        self.destination().try_post_atomic(AtomicRequest::compare_swap(remote, compare, swap))
    }

    /// As [`fetch_add`](Self::fetch_add), if there is room in the send queue.
    ///
    /// # Errors
    ///
    /// [`TryError::Full`] if there is none.
    pub fn try_fetch_add(&self, remote: RemoteRegion, add: u64) -> Result<Atomic, TryError<()>> {
        self.destination().try_post_atomic(AtomicRequest::fetch_add(remote, add))
    }
}

/// An atomic operation on 8 bytes of the peer's memory.
#[derive(Debug, Clone, Copy)]
pub(crate) struct AtomicRequest {
    op: SendOp,
    remote: RemoteRegion,
}

impl AtomicRequest {
    #[inline]
    pub(crate) const fn compare_swap(remote: RemoteRegion, compare: u64, swap: u64) -> Self {
        Self { op: SendOp::CompareSwap { remote: remote.remote_addr(), compare, swap }, remote }
    }

    #[inline]
    pub(crate) const fn fetch_add(remote: RemoteRegion, add: u64) -> Self {
        Self { op: SendOp::FetchAdd { remote: remote.remote_addr(), add }, remote }
    }
}

impl<'a> Destination<'a> {
    /// Posts an atomic operation, with a registered word that its result arrives in.
    #[inline]
    pub(crate) fn post_atomic(self, atomic: AtomicRequest) -> Atomic {
        let operation =
            self.prepare(&atomic).map(|(route, request, word)| route.post(request, word));
        Atomic { operation: operation.into() }
    }

    /// Posts an atomic operation if the send queue has a free slot.
    fn try_post_atomic(self, atomic: AtomicRequest) -> Result<Atomic, TryError<()>> {
        let operation = match self.prepare(&atomic) {
            Ok((route, request, word)) => {
                Ok(Operation::try_post(&route.queue_pair.send, route.request(request), word)?)
            }
            Err(kind) => Err(kind),
        };
        Ok(Atomic { operation: operation.into() })
    }

    /// Checks the operation and allocates a word for its result.
    #[inline]
    fn prepare(
        self,
        &AtomicRequest { op, remote }: &AtomicRequest,
    ) -> Result<Prepared<'a>, OpErrorKind> {
        let route = self.route_for(op)?;
        if remote.len() != 8 || !remote.addr().is_multiple_of(8) {
            return Err(OpErrorKind::Misaligned { addr: remote.addr(), len: remote.len() });
        }
        let word = route.queue_pair.word().map_err(|error| match error {
            PoolError::TooLong(limit) => OpErrorKind::Limit(limit),
            _ => OpErrorKind::Post(VerbError::new("ibv_reg_mr", VerbError::ENOMEM)),
        })?;
        Ok((route, SendRequest { op, remote_len: remote.len() }, word))
    }
}

/// The route of an atomic operation, its request, and the word that its result arrives in.
type Prepared<'a> = (Route<'a>, SendRequest, BufMut);

impl Future for Atomic {
    type Output = Result<u64, OpError<()>>;

    #[inline]
    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        Pin::new(&mut self.operation).poll(context)
    }
}

/// Reads the original value out of the word it arrived in.
#[derive(Debug)]
pub(crate) struct Original(());

impl Finish for Original {
    type Held = BufMut;
    type Buffer = ();
    type Output = u64;
    type Seen = ();

    #[inline]
    fn see(_completion: &WorkCompletion) {}

    #[inline]
    fn finish(held: BufMut, (): ()) -> u64 {
        // Devices leave it in the byte order of this machine.
        match held.first_chunk() {
            Some(bytes) => u64::from_ne_bytes(*bytes),
            None => unreachable!("words are 8 bytes"),
        }
    }

    fn give_back(_held: BufMut) {}
}
