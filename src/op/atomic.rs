//! Atomics on 8 bytes of the peer's memory.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use super::checked::Checked;
use super::operation::{Finish, Operation};
use super::queue_pair::{QueuePair, room};
use crate::engine::What;
use crate::error::{OpError, OpErrorKind, TryError, VerbError};
use crate::memory::RemoteRegion;
use crate::memory::{BufMut, PoolError};
use crate::types::{SendOp, Transport, WorkCompletion};

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
        self.atomic(SendOp::CompareSwap { remote: remote.remote_addr(), compare, swap }, remote)
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
        self.atomic(SendOp::FetchAdd { remote: remote.remote_addr(), add }, remote)
    }

    /// As [`compare_swap`](Self::compare_swap), if there is room in the send queue.
    ///
    /// # Errors
    ///
    /// [`TryError::Full`] if there is none.
    pub fn try_compare_swap(&self, remote: RemoteRegion, compare: u64, swap: u64) -> Result<Atomic, TryError<()>> {
        self.try_atomic(SendOp::CompareSwap { remote: remote.remote_addr(), compare, swap }, remote)
    }

    /// As [`fetch_add`](Self::fetch_add), if there is room in the send queue.
    ///
    /// # Errors
    ///
    /// [`TryError::Full`] if there is none.
    pub fn try_fetch_add(&self, remote: RemoteRegion, add: u64) -> Result<Atomic, TryError<()>> {
        self.try_atomic(SendOp::FetchAdd { remote: remote.remote_addr(), add }, remote)
    }

    #[inline]
    fn atomic(&self, op: SendOp, remote: RemoteRegion) -> Atomic {
        let operation = self
            .prepare(&remote)
            .map(|word| Operation::post(self.send_queue(), What::Send(op), self.signaled(), room(&remote), word));
        Atomic::new(operation)
    }

    fn try_atomic(&self, op: SendOp, remote: RemoteRegion) -> Result<Atomic, TryError<()>> {
        let operation = match self.prepare(&remote) {
            Ok(word) => Ok(Operation::try_post(self.send_queue(), self.request(What::Send(op), room(&remote)), word)?),
            Err(kind) => Err(kind),
        };
        Ok(Atomic::new(operation))
    }

    /// Checks the target and takes a word for the result.
    #[inline]
    fn prepare(&self, remote: &RemoteRegion) -> Result<BufMut, OpErrorKind> {
        if let Some(kind) = self.unsupported("an atomic", &[Transport::Rc]) {
            return Err(kind);
        }
        self.word_for(remote)
    }

    /// A word for the result of an atomic on `remote`, if there can be one.
    #[inline]
    pub(crate) fn word_for(&self, remote: &RemoteRegion) -> Result<BufMut, OpErrorKind> {
        if remote.len() != 8 || !remote.addr().is_multiple_of(8) {
            return Err(OpErrorKind::Misaligned { addr: remote.addr(), len: remote.len() });
        }
        self.word().map_err(|error| match error {
            PoolError::TooLong(limit) => OpErrorKind::Limit(limit),
            _ => OpErrorKind::Post(VerbError::new("ibv_reg_mr", VerbError::ENOMEM)),
        })
    }
}

impl Atomic {
    #[inline]
    pub(crate) fn new(operation: Result<Operation<Original>, OpErrorKind>) -> Self {
        Self { operation: operation.into() }
    }
}

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
