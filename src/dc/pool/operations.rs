//! Operations to a peer of a pool, and through a lease: the same ones.

use super::peer::{Attempt, DcLease, DcPoolPeer};
use super::pooled::Pooled;
use crate::error::{OpError, TryError};
use crate::memory::{Gather, RemoteRegion, Scatter};
use crate::op::{Atomic, Batch, BatchOp, Operation, Read, Send, Write};
use crate::types::Imm;

macro_rules! operations {
    ($owner:ty, $($before:tt)*) => {
        operations!(@of $owner, [$($before)*]);
    };
    (@of $owner:ty, [$($wrap:ident)?]) => {
        impl $owner {
            /// As [`DcSender::write`](crate::dc::DcSender::write).
            pub fn write<B: Gather>(&self, buffer: B, remote: RemoteRegion) -> operations!(@out $($wrap)?, Write<B>) {
                self.submit(move |to| match to {
                    Ok(to) => to.write(buffer, remote),
                    Err(kind) => Operation::refused(kind, buffer),
                })
            }

            /// As [`DcSender::write_with_imm`](crate::dc::DcSender::write_with_imm).
            pub fn write_with_imm<B: Gather>(
                &self,
                buffer: B,
                remote: RemoteRegion,
                imm: Imm,
            ) -> operations!(@out $($wrap)?, Write<B>) {
                self.submit(move |to| match to {
                    Ok(to) => to.write_with_imm(buffer, remote, imm),
                    Err(kind) => Operation::refused(kind, buffer),
                })
            }

            /// As [`DcSender::write_inline`](crate::dc::DcSender::write_inline).
            pub fn write_inline(&self, bytes: &[u8], remote: RemoteRegion) -> operations!(@out $($wrap)?, Write<()>) {
                self.submit_inline(bytes, move |to, bytes| match to {
                    Ok(to) => to.write_inline(bytes, remote),
                    Err(kind) => Operation::refused(kind, ()),
                })
            }

            /// As [`DcSender::write_inline_with_imm`](crate::dc::DcSender::write_inline_with_imm).
            pub fn write_inline_with_imm(
                &self,
                bytes: &[u8],
                remote: RemoteRegion,
                imm: Imm,
            ) -> operations!(@out $($wrap)?, Write<()>) {
                self.submit_inline(bytes, move |to, bytes| match to {
                    Ok(to) => to.write_inline_with_imm(bytes, remote, imm),
                    Err(kind) => Operation::refused(kind, ()),
                })
            }

            /// As [`DcSender::try_write`](crate::dc::DcSender::try_write); it never waits.
            ///
            /// # Errors
            ///
            /// [`TryError::Full`] with the buffer if it would have to wait for an initiator or for room.
            pub fn try_write<B: Gather>(&self, buffer: B, remote: RemoteRegion) -> Result<Write<B>, TryError<B>> {
                self.try_submit(move |attempt| match attempt {
                    Attempt::Now(to) => to.try_write(buffer, remote),
                    Attempt::Full => Err(TryError::Full(buffer)),
                    Attempt::Refused(kind) => Err(TryError::Refused(OpError::new(kind, buffer))),
                })
            }

            /// As [`DcSender::read`](crate::dc::DcSender::read).
            pub fn read<B: Scatter>(&self, buffer: B, remote: RemoteRegion) -> operations!(@out $($wrap)?, Read<B>) {
                self.submit(move |to| match to {
                    Ok(to) => to.read(buffer, remote),
                    Err(kind) => Operation::refused(kind, buffer),
                })
            }

            /// As [`DcSender::try_read`](crate::dc::DcSender::try_read); it never waits.
            ///
            /// # Errors
            ///
            /// [`TryError::Full`] with the buffer if it would have to wait for an initiator or for room.
            pub fn try_read<B: Scatter>(&self, buffer: B, remote: RemoteRegion) -> Result<Read<B>, TryError<B>> {
                self.try_submit(move |attempt| match attempt {
                    Attempt::Now(to) => to.try_read(buffer, remote),
                    Attempt::Full => Err(TryError::Full(buffer)),
                    Attempt::Refused(kind) => Err(TryError::Refused(OpError::new(kind, buffer))),
                })
            }

            /// As [`DcSender::send`](crate::dc::DcSender::send).
            pub fn send<B: Gather>(&self, buffer: B) -> operations!(@out $($wrap)?, Send<B>) {
                self.submit(move |to| match to {
                    Ok(to) => to.send(buffer),
                    Err(kind) => Operation::refused(kind, buffer),
                })
            }

            /// As [`DcSender::send_with_imm`](crate::dc::DcSender::send_with_imm).
            pub fn send_with_imm<B: Gather>(&self, buffer: B, imm: Imm) -> operations!(@out $($wrap)?, Send<B>) {
                self.submit(move |to| match to {
                    Ok(to) => to.send_with_imm(buffer, imm),
                    Err(kind) => Operation::refused(kind, buffer),
                })
            }

            /// As [`DcSender::send_inline`](crate::dc::DcSender::send_inline).
            pub fn send_inline(&self, bytes: &[u8]) -> operations!(@out $($wrap)?, Send<()>) {
                self.submit_inline(bytes, |to, bytes| match to {
                    Ok(to) => to.send_inline(bytes),
                    Err(kind) => Operation::refused(kind, ()),
                })
            }

            /// As [`DcSender::send_inline_with_imm`](crate::dc::DcSender::send_inline_with_imm).
            pub fn send_inline_with_imm(&self, bytes: &[u8], imm: Imm) -> operations!(@out $($wrap)?, Send<()>) {
                self.submit_inline(bytes, move |to, bytes| match to {
                    Ok(to) => to.send_inline_with_imm(bytes, imm),
                    Err(kind) => Operation::refused(kind, ()),
                })
            }

            /// As [`DcSender::try_send`](crate::dc::DcSender::try_send); it never waits.
            ///
            /// # Errors
            ///
            /// [`TryError::Full`] with the buffer if it would have to wait for an initiator or for room.
            pub fn try_send<B: Gather>(&self, buffer: B) -> Result<Send<B>, TryError<B>> {
                self.try_submit(move |attempt| match attempt {
                    Attempt::Now(to) => to.try_send(buffer),
                    Attempt::Full => Err(TryError::Full(buffer)),
                    Attempt::Refused(kind) => Err(TryError::Refused(OpError::new(kind, buffer))),
                })
            }

            /// As [`DcSender::compare_swap`](crate::dc::DcSender::compare_swap).
            pub fn compare_swap(&self, remote: RemoteRegion, compare: u64, swap: u64) -> operations!(@out $($wrap)?, Atomic) {
                self.submit(move |to| match to {
                    Ok(to) => to.compare_swap(remote, compare, swap),
                    Err(kind) => Atomic::new(Err(kind)),
                })
            }

            /// As [`DcSender::fetch_add`](crate::dc::DcSender::fetch_add).
            pub fn fetch_add(&self, remote: RemoteRegion, add: u64) -> operations!(@out $($wrap)?, Atomic) {
                self.submit(move |to| match to {
                    Ok(to) => to.fetch_add(remote, add),
                    Err(kind) => Atomic::new(Err(kind)),
                })
            }

            /// As [`DcSender::post_batch`](crate::dc::DcSender::post_batch); it counts as one operation.
            pub fn post_batch<B: Gather>(&self, batch: Batch<B>) -> operations!(@out $($wrap)?, BatchOp<B>) {
                self.submit(move |to| match to {
                    Ok(to) => to.post_batch(batch),
                    Err(kind) => BatchOp::refused(kind, batch),
                })
            }

            /// As [`DcSender::try_post_batch`](crate::dc::DcSender::try_post_batch); it never waits.
            ///
            /// # Errors
            ///
            /// [`TryError::Full`] with the batch if it would have to wait for an initiator or for room.
            pub fn try_post_batch<B: Gather>(&self, batch: Batch<B>) -> Result<BatchOp<B>, TryError<Batch<B>>> {
                self.try_submit(move |attempt| match attempt {
                    Attempt::Now(to) => to.try_post_batch(batch),
                    Attempt::Full => Err(TryError::Full(batch)),
                    Attempt::Refused(kind) => Ok(BatchOp::refused(kind, batch)),
                })
            }
        }
    };
    (@out $wrap:ident, $future:ty) => { $wrap<$future> };
    (@out , $future:ty) => { $future };
}

operations!(DcPoolPeer, Pooled);
operations!(DcLease,);
