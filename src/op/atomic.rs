use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use super::checked::Checked;
use super::destination::Destination;
use super::operation::{Operation, OperationKind};
use super::queue_pair::QueuePair;
use crate::engine::{WorkQueue, WorkRequest};
use crate::error::{OpError, OpErrorKind, TryError, VerbError};
use crate::memory::{BufMut, PoolError, RemoteRegion};
use crate::types::{WorkCompletion, WrId};

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
        self.destination().post_atomic(WorkRequest::compare_swap(remote, compare, swap))
    }

    /// Adds `add`, wrapping, to the 8 bytes of `remote`, and returns the previous value, like
    /// [`compare_swap`](Self::compare_swap).
    #[inline]
    pub fn fetch_add(&self, remote: RemoteRegion, add: u64) -> Atomic {
        self.destination().post_atomic(WorkRequest::fetch_add(remote, add))
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
        self.destination().try_post_atomic(WorkRequest::compare_swap(remote, compare, swap))
    }

    /// Posts a [`fetch_add`](Self::fetch_add) if the send queue has a free slot.
    ///
    /// # Errors
    ///
    /// See [`TryError`].
    pub fn try_fetch_add(&self, remote: RemoteRegion, add: u64) -> Result<Atomic, TryError<()>> {
        self.destination().try_post_atomic(WorkRequest::fetch_add(remote, add))
    }
}

impl<'a> Destination<'a> {
    #[inline]
    pub(crate) fn post_atomic(self, request: WorkRequest<'a>) -> Atomic {
        let operation = self
            .prepare(request)
            .map(|(queue, request, word)| Operation::post(queue, request, word));
        Atomic { operation: operation.into() }
    }

    fn try_post_atomic(self, request: WorkRequest<'a>) -> Result<Atomic, TryError<()>> {
        let operation = match self.prepare(request) {
            Ok((queue, request, word)) => Ok(Operation::try_post(queue, request, word)?),
            Err(kind) => Err(kind),
        };
        Ok(Atomic { operation: operation.into() })
    }

    #[inline]
    fn prepare(self, request: WorkRequest<'a>) -> Result<Prepared<'a>, OpErrorKind> {
        let addr = request.accessed().map_or(0, |accessed| accessed.addr);
        let len = request.remote_len;
        let route = self.route()?;
        let (queue, request) = self.address(request)?;
        if len != 8 || !addr.is_multiple_of(8) {
            return Err(OpErrorKind::Misaligned { addr, len });
        }
        let word = route.queue_pair.alloc_atomic_result().map_err(|error| match error {
            PoolError::Limit(limit) => OpErrorKind::Limit(limit),
            _ => OpErrorKind::Post(VerbError::new("ibv_reg_mr", VerbError::ENOMEM)),
        })?;
        Ok((queue, request, word))
    }
}

type Prepared<'a> = (&'a Arc<WorkQueue>, WorkRequest<'a>, BufMut);

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
