use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use super::checked::Checked;
use super::operation::{Operation, OperationKind};
use super::post::{Destination, SendRequest, SendRoute};
use super::queue_pair::QueuePair;
use crate::engine::WorkQueue;
use crate::error::{OpError, OpErrorKind, TryError, VerbError};
use crate::memory::{BufMut, PoolError, RemoteRegion};
use crate::types::{SendOp, WorkCompletion, WrId};

/// An atomic operation in flight. The future returns the previous value.
///
/// # Cancel safety
///
/// Dropping the future does not cancel the operation.
///
/// # Panics
///
/// Panics if polled after completion.
#[derive(Debug)]
#[must_use = "it is already posted, but only awaiting it returns its result"]
pub struct Atomic {
    operation: Checked<ReturnOriginal>,
}

impl Atomic {
    pub(super) fn posted(&self) -> Option<(&Arc<WorkQueue>, WrId)> {
        self.operation.posted()
    }

    pub(super) fn is_finished(&self) -> bool {
        self.operation.is_finished()
    }
}

impl QueuePair {
    /// Stores `swap` in the 8 bytes of `remote` if they hold `compare`, and returns the previous
    /// value (RC).
    ///
    /// It executes exactly once, even if packets are lost or repeated. The peer's
    /// [`DeviceAttr::atomic`](crate::types::DeviceAttr::atomic) tells whether it is atomic for the
    /// peer's processors too.
    ///
    /// # Errors
    ///
    /// - [`OpErrorKind::Misaligned`] if `remote` is not 8 bytes at a multiple of 8;
    /// - [`REM_ACCESS_ERR`](crate::types::WcStatus::REM_ACCESS_ERR) if the peer grants no access,
    ///   or no longer.
    #[inline]
    pub fn compare_swap(&self, remote: RemoteRegion, compare: u64, swap: u64) -> Atomic {
        self.destination().post_atomic(AtomicRequest::compare_swap(remote, compare, swap))
    }

    /// Adds `add`, wrapping, to the 8 bytes of `remote`, and returns the previous value (RC).
    ///
    /// Otherwise like [`compare_swap`](Self::compare_swap).
    #[inline]
    pub fn fetch_add(&self, remote: RemoteRegion, add: u64) -> Atomic {
        self.destination().post_atomic(AtomicRequest::fetch_add(remote, add))
    }

    /// Posts a [`compare_swap`](Self::compare_swap) if the send queue has a free slot.
    ///
    /// # Errors
    ///
    /// See [`TryError`].
    pub fn try_compare_swap(
        &self,
        remote: RemoteRegion,
        compare: u64,
        swap: u64,
    ) -> Result<Atomic, TryError<()>> {
        self.destination().try_post_atomic(AtomicRequest::compare_swap(remote, compare, swap))
    }

    /// Posts a [`fetch_add`](Self::fetch_add) if the send queue has a free slot.
    ///
    /// # Errors
    ///
    /// See [`TryError`].
    pub fn try_fetch_add(&self, remote: RemoteRegion, add: u64) -> Result<Atomic, TryError<()>> {
        self.destination().try_post_atomic(AtomicRequest::fetch_add(remote, add))
    }
}

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
    #[inline]
    pub(crate) fn post_atomic(self, atomic: AtomicRequest) -> Atomic {
        let operation =
            self.prepare(&atomic).map(|(route, request, word)| route.post(request, word));
        Atomic { operation: operation.into() }
    }

    fn try_post_atomic(self, atomic: AtomicRequest) -> Result<Atomic, TryError<()>> {
        let operation = match self.prepare(&atomic) {
            Ok((route, request, word)) => {
                Ok(Operation::try_post(&route.queue_pair.send, route.request(request), word)?)
            }
            Err(kind) => Err(kind),
        };
        Ok(Atomic { operation: operation.into() })
    }

    #[inline]
    fn prepare(
        self,
        &AtomicRequest { op, remote }: &AtomicRequest,
    ) -> Result<Prepared<'a>, OpErrorKind> {
        let route = self.route_for(op)?;
        if remote.len() != 8 || !remote.addr().is_multiple_of(8) {
            return Err(OpErrorKind::Misaligned { addr: remote.addr(), len: remote.len() });
        }
        let word = route.queue_pair.alloc_atomic_result().map_err(|error| match error {
            PoolError::Limit(limit) => OpErrorKind::Limit(limit),
            _ => OpErrorKind::Post(VerbError::new("ibv_reg_mr", VerbError::ENOMEM)),
        })?;
        Ok((route, SendRequest { op, remote_len: remote.len() }, word))
    }
}

type Prepared<'a> = (SendRoute<'a>, SendRequest, BufMut);

impl Future for Atomic {
    type Output = Result<u64, OpError<()>>;

    #[inline]
    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        Pin::new(&mut self.operation).poll(context)
    }
}

#[derive(Debug)]
pub(crate) struct ReturnOriginal(());

impl OperationKind for ReturnOriginal {
    type Held = BufMut;
    type Buffer = ();
    type Output = u64;
    type Details = ();

    #[inline]
    fn details(_completion: &WorkCompletion) {}

    #[inline]
    fn finish(held: BufMut, (): ()) -> u64 {
        // In this machine's byte order.
        match held.first_chunk() {
            Some(bytes) => u64::from_ne_bytes(*bytes),
            None => unreachable!("an atomic result is 8 bytes long"),
        }
    }

    fn into_buffer(_held: BufMut) {}
}
