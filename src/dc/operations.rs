//! The operations of dynamic connections: the same for a sender, for a peer of a pool, and for a lease of an initiator.

use super::{DcLease, DcPoolPeer, DcSender, Pooled};
use crate::error::TryError;
use crate::memory::{Gather, RemoteRegion, Scatter};
use crate::op::{Atomic, AtomicRequest, Batch, BatchOp, Read, Send, SendRequest, Write};
use crate::types::Imm;

/// Implements the operations of `$owner` by its `submit`, `submit_inline` and `try_submit`, which find the destination. Futures
/// are wrapped in `$wrap`, if it is given.
macro_rules! operations {
    ($owner:ty $(, $wrap:ident)?) => {
        operations!(@of $owner, [$($wrap)?]);
    };
    (@of $owner:ty, [$($wrap:ident)?]) => {
        impl $owner {
            /// Writes to the peer's memory: [`QueuePair::write`](crate::QueuePair::write).
            pub fn write<B: Gather>(&self, buffer: B, remote: RemoteRegion) -> operations!(@out $($wrap)?, Write<B>) {
                self.submit(move |to| to.post(SendRequest::write(remote), buffer))
            }

            /// Writes to the peer's memory and consumes a receive of the peer's shared queue:
            /// [`QueuePair::write_with_imm`](crate::QueuePair::write_with_imm).
            pub fn write_with_imm<B: Gather>(
                &self,
                buffer: B,
                remote: RemoteRegion,
                imm: Imm,
            ) -> operations!(@out $($wrap)?, Write<B>) {
                self.submit(move |to| to.post(SendRequest::write_with_imm(remote, imm), buffer))
            }

            /// Writes bytes that this call copies: [`QueuePair::write_inline`](crate::QueuePair::write_inline).
            pub fn write_inline(&self, bytes: &[u8], remote: RemoteRegion) -> operations!(@out $($wrap)?, Write<()>) {
                self.submit_inline(bytes, move |to, bytes| to.post_inline(SendRequest::write(remote), bytes))
            }

            /// Writes bytes that this call copies and consumes a receive of the peer's shared queue:
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

            /// Writes to the peer's memory without waiting: [`QueuePair::try_write`](crate::QueuePair::try_write).
            ///
            /// # Errors
            ///
            /// [`TryError::Full`] with the buffer if it would have to wait: for a free slot of the send queue, or in a pool for
            /// an initiator.
            pub fn try_write<B: Gather>(&self, buffer: B, remote: RemoteRegion) -> Result<Write<B>, TryError<B>> {
                self.try_submit(buffer, |to, buffer| to.try_post(SendRequest::write(remote), buffer))
            }

            /// Reads the peer's memory: [`QueuePair::read`](crate::QueuePair::read).
            pub fn read<B: Scatter>(&self, buffer: B, remote: RemoteRegion) -> operations!(@out $($wrap)?, Read<B>) {
                self.submit(move |to| to.post(SendRequest::read(remote), buffer))
            }

            /// Reads the peer's memory without waiting: [`QueuePair::try_read`](crate::QueuePair::try_read).
            ///
            /// # Errors
            ///
            /// [`TryError::Full`] as [`try_write`](Self::try_write).
            pub fn try_read<B: Scatter>(&self, buffer: B, remote: RemoteRegion) -> Result<Read<B>, TryError<B>> {
                self.try_submit(buffer, |to, buffer| to.try_post(SendRequest::read(remote), buffer))
            }

            /// Sends a message, which fills the next receive of the peer's shared queue:
            /// [`QueuePair::send`](crate::QueuePair::send).
            pub fn send<B: Gather>(&self, buffer: B) -> operations!(@out $($wrap)?, Send<B>) {
                self.submit(move |to| to.post(SendRequest::send(), buffer))
            }

            /// Sends a message with four bytes beside it: [`QueuePair::send_with_imm`](crate::QueuePair::send_with_imm).
            pub fn send_with_imm<B: Gather>(&self, buffer: B, imm: Imm) -> operations!(@out $($wrap)?, Send<B>) {
                self.submit(move |to| to.post(SendRequest::send_with_imm(imm), buffer))
            }

            /// Sends bytes that this call copies: [`QueuePair::send_inline`](crate::QueuePair::send_inline).
            pub fn send_inline(&self, bytes: &[u8]) -> operations!(@out $($wrap)?, Send<()>) {
                self.submit_inline(bytes, |to, bytes| to.post_inline(SendRequest::send(), bytes))
            }

            /// Sends bytes that this call copies, with four bytes beside them:
            /// [`QueuePair::send_inline_with_imm`](crate::QueuePair::send_inline_with_imm).
            pub fn send_inline_with_imm(&self, bytes: &[u8], imm: Imm) -> operations!(@out $($wrap)?, Send<()>) {
                self.submit_inline(bytes, move |to, bytes| to.post_inline(SendRequest::send_with_imm(imm), bytes))
            }

            /// Sends a message without waiting: [`QueuePair::try_send`](crate::QueuePair::try_send).
            ///
            /// # Errors
            ///
            /// [`TryError::Full`] as [`try_write`](Self::try_write).
            pub fn try_send<B: Gather>(&self, buffer: B) -> Result<Send<B>, TryError<B>> {
                self.try_submit(buffer, |to, buffer| to.try_post(SendRequest::send(), buffer))
            }

            /// Compares and swaps a word of the peer's memory: [`QueuePair::compare_swap`](crate::QueuePair::compare_swap).
            pub fn compare_swap(
                &self,
                remote: RemoteRegion,
                compare: u64,
                swap: u64,
            ) -> operations!(@out $($wrap)?, Atomic) {
                self.submit(move |to| to.post_atomic(AtomicRequest::compare_swap(remote, compare, swap)))
            }

            /// Adds to a word of the peer's memory: [`QueuePair::fetch_add`](crate::QueuePair::fetch_add).
            pub fn fetch_add(&self, remote: RemoteRegion, add: u64) -> operations!(@out $($wrap)?, Atomic) {
                self.submit(move |to| to.post_atomic(AtomicRequest::fetch_add(remote, add)))
            }

            /// Posts a batch, all of it to this peer: [`QueuePair::post_batch`](crate::QueuePair::post_batch). A pool counts it
            /// as one operation.
            pub fn post_batch<B: Gather>(&self, batch: Batch<B>) -> operations!(@out $($wrap)?, BatchOp<B>) {
                self.submit(move |to| to.post_batch(batch))
            }

            /// Posts a batch without waiting: [`QueuePair::try_post_batch`](crate::QueuePair::try_post_batch).
            ///
            /// # Errors
            ///
            /// [`TryError::Full`] with the batch if part of it would have to wait: for a free slot of the send queue, or in a pool
            /// for an initiator.
            pub fn try_post_batch<B: Gather>(&self, batch: Batch<B>) -> Result<BatchOp<B>, TryError<Batch<B>>> {
                match self.try_submit(batch, |to, batch| to.try_post_batch(batch)) {
                    Err(TryError::Refused(error)) => Ok(BatchOp::refused(error.kind(), error.into_buffer())),
                    result => result,
                }
            }
        }
    };
    (@out $wrap:ident, $future:ty) => { $wrap<$future> };
    (@out , $future:ty) => { $future };
}

operations!(DcSender<'_>);
operations!(DcPoolPeer, Pooled);
operations!(DcLease);
