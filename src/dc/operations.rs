use super::{DcLease, DcPoolPeer, DcSender, PooledOperation};
use crate::error::TryError;
use crate::memory::{Gather, RemoteRegion, Scatter};
use crate::op::{Atomic, AtomicRequest, Batch, BatchOp, Read, Send, SendRequest, Write};
use crate::types::Imm;

/// Implements the operations of `$owner` by its `submit`, `submit_inline` and `try_submit`, which
/// find the destination. `$wrap` wraps the futures.
macro_rules! operations {
    ($owner:ty $(, $wrap:ident)?) => {
        operations!(@of $owner, [$($wrap)?]);
    };
    (@of $owner:ty, [$($wrap:ident)?]) => {
        impl $owner {
            /// Writes to the peer's memory, see [`QueuePair::write`](crate::QueuePair::write).
            pub fn write<B: Gather>(
                &self,
                buffer: B,
                remote: RemoteRegion,
            ) -> operations!(@out $($wrap)?, Write<B>) {
                self.submit(move |to| to.post(SendRequest::write(remote), buffer))
            }

            /// Writes and consumes a receive of the peer's shared queue, see
            /// [`QueuePair::write_with_imm`](crate::QueuePair::write_with_imm).
            pub fn write_with_imm<B: Gather>(
                &self,
                buffer: B,
                remote: RemoteRegion,
                imm: Imm,
            ) -> operations!(@out $($wrap)?, Write<B>) {
                self.submit(move |to| to.post(SendRequest::write_with_imm(remote, imm), buffer))
            }

            /// Writes a copy of `bytes`, see
            /// [`QueuePair::write_inline`](crate::QueuePair::write_inline).
            pub fn write_inline(
                &self,
                bytes: &[u8],
                remote: RemoteRegion,
            ) -> operations!(@out $($wrap)?, Write<()>) {
                self.submit_inline(bytes, move |to, bytes| {
                    to.post_inline(SendRequest::write(remote), bytes)
                })
            }

            /// Writes a copy of `bytes` and consumes a receive, see
            /// [`QueuePair::write_inline_with_imm`](crate::QueuePair::write_inline_with_imm).
            pub fn write_inline_with_imm(
                &self,
                bytes: &[u8],
                remote: RemoteRegion,
                imm: Imm,
            ) -> operations!(@out $($wrap)?, Write<()>) {
                self.submit_inline(bytes, move |to, bytes| {
                    to.post_inline(SendRequest::write_with_imm(remote, imm), bytes)
                })
            }

            /// Writes without waiting, see [`QueuePair::try_write`](crate::QueuePair::try_write).
            ///
            /// # Errors
            ///
            /// See [`TryError`].
            pub fn try_write<B: Gather>(
                &self,
                buffer: B,
                remote: RemoteRegion,
            ) -> Result<Write<B>, TryError<B>> {
                self.try_submit(buffer, |to, buffer| {
                    to.try_post(SendRequest::write(remote), buffer)
                })
            }

            /// Reads the peer's memory, see [`QueuePair::read`](crate::QueuePair::read).
            pub fn read<B: Scatter>(
                &self,
                buffer: B,
                remote: RemoteRegion,
            ) -> operations!(@out $($wrap)?, Read<B>) {
                self.submit(move |to| to.post(SendRequest::read(remote), buffer))
            }

            /// Reads without waiting, see [`QueuePair::try_read`](crate::QueuePair::try_read).
            ///
            /// # Errors
            ///
            /// See [`TryError`].
            pub fn try_read<B: Scatter>(
                &self,
                buffer: B,
                remote: RemoteRegion,
            ) -> Result<Read<B>, TryError<B>> {
                self.try_submit(buffer, |to, buffer| {
                    to.try_post(SendRequest::read(remote), buffer)
                })
            }

            /// Sends a message to the peer's shared receive queue, see
            /// [`QueuePair::send`](crate::QueuePair::send).
            pub fn send<B: Gather>(&self, buffer: B) -> operations!(@out $($wrap)?, Send<B>) {
                self.submit(move |to| to.post(SendRequest::send(), buffer))
            }

            /// Sends a message with immediate data, see
            /// [`QueuePair::send_with_imm`](crate::QueuePair::send_with_imm).
            pub fn send_with_imm<B: Gather>(
                &self,
                buffer: B,
                imm: Imm,
            ) -> operations!(@out $($wrap)?, Send<B>) {
                self.submit(move |to| to.post(SendRequest::send_with_imm(imm), buffer))
            }

            /// Sends a copy of `bytes`, see
            /// [`QueuePair::send_inline`](crate::QueuePair::send_inline).
            pub fn send_inline(&self, bytes: &[u8]) -> operations!(@out $($wrap)?, Send<()>) {
                self.submit_inline(bytes, |to, bytes| to.post_inline(SendRequest::send(), bytes))
            }

            /// Sends a copy of `bytes` with immediate data, see
            /// [`QueuePair::send_inline_with_imm`](crate::QueuePair::send_inline_with_imm).
            pub fn send_inline_with_imm(
                &self,
                bytes: &[u8],
                imm: Imm,
            ) -> operations!(@out $($wrap)?, Send<()>) {
                self.submit_inline(bytes, move |to, bytes| {
                    to.post_inline(SendRequest::send_with_imm(imm), bytes)
                })
            }

            /// Sends without waiting, see [`QueuePair::try_send`](crate::QueuePair::try_send).
            ///
            /// # Errors
            ///
            /// See [`TryError`].
            pub fn try_send<B: Gather>(&self, buffer: B) -> Result<Send<B>, TryError<B>> {
                self.try_submit(buffer, |to, buffer| to.try_post(SendRequest::send(), buffer))
            }

            /// Compares and swaps a word of the peer's memory, see
            /// [`QueuePair::compare_swap`](crate::QueuePair::compare_swap).
            pub fn compare_swap(
                &self,
                remote: RemoteRegion,
                compare: u64,
                swap: u64,
            ) -> operations!(@out $($wrap)?, Atomic) {
                self.submit(move |to| {
                    to.post_atomic(AtomicRequest::compare_swap(remote, compare, swap))
                })
            }

            /// Adds to a word of the peer's memory, see
            /// [`QueuePair::fetch_add`](crate::QueuePair::fetch_add).
            pub fn fetch_add(
                &self,
                remote: RemoteRegion,
                add: u64,
            ) -> operations!(@out $($wrap)?, Atomic) {
                self.submit(move |to| to.post_atomic(AtomicRequest::fetch_add(remote, add)))
            }

            /// Posts a batch to this peer, see
            /// [`QueuePair::post_batch`](crate::QueuePair::post_batch).
            pub fn post_batch<B: Gather>(
                &self,
                batch: Batch<B>,
            ) -> operations!(@out $($wrap)?, BatchOp<B>) {
                self.submit(move |to| to.post_batch(batch))
            }

            /// Posts a batch without waiting, see
            /// [`QueuePair::try_post_batch`](crate::QueuePair::try_post_batch).
            ///
            /// # Errors
            ///
            /// [`TryError::Full`] without free slots for the whole batch or, in a pool, without an
            /// available initiator.
            pub fn try_post_batch<B: Gather>(
                &self,
                batch: Batch<B>,
            ) -> Result<BatchOp<B>, TryError<Batch<B>>> {
                match self.try_submit(batch, |to, batch| to.try_post_batch(batch)) {
                    Err(TryError::Refused(error)) => {
                        Ok(BatchOp::refused(error.kind(), error.into_buffer()))
                    }
                    result => result,
                }
            }
        }
    };
    (@out $wrap:ident, $future:ty) => { $wrap<$future> };
    (@out , $future:ty) => { $future };
}

operations!(DcSender<'_>);
operations!(DcPoolPeer, PooledOperation);
operations!(DcLease);
