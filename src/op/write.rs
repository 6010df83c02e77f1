//! WRITE: into the peer's memory.

use super::operation::{Operation, Return};
use super::post::SendRequest;
use super::queue_pair::QueuePair;
use crate::error::TryError;
use crate::memory::{Gather, RemoteRegion};
use crate::types::Imm;

/// A WRITE in flight; gives the buffer back.
///
/// # Cancel safety
///
/// As [`Operation`]: dropped, it goes on, and the buffer stays with the queue pair until it is done.
pub type Write<B> = Operation<Return<B>>;

impl QueuePair {
    /// Writes the buffer's bytes to the start of `remote` (RC, UC).
    ///
    /// Success means that the peer's device has taken them (RC) or that they were sent (UC). The peer is not told:
    /// a message sent afterwards, or [`write_with_imm`](Self::write_with_imm), tells it, and makes them visible.
    ///
    /// # Errors
    ///
    /// Of the future, with the buffer: [`OpErrorKind::Limit`](crate::OpErrorKind::Limit) if the buffer is longer than
    /// `remote`, [`REM_ACCESS_ERR`](crate::types::WcStatus::REM_ACCESS_ERR) if the peer does not grant it (any more);
    /// the connection has ended then.
    ///
    /// # Cancel safety
    ///
    /// As [`Operation`]: the bytes are written even if the future is dropped.
    #[inline(always)]
    pub fn write<B: Gather>(&self, buffer: B, remote: RemoteRegion) -> Write<B> {
        self.destination().post(SendRequest::write(remote), buffer)
    }

    /// As [`write`](Self::write), and consumes a receive of the peer, which reports `imm` and the number of bytes.
    #[inline(always)]
    pub fn write_with_imm<B: Gather>(&self, buffer: B, remote: RemoteRegion, imm: Imm) -> Write<B> {
        self.destination().post(SendRequest::write_with_imm(remote, imm), buffer)
    }

    /// As [`write`](Self::write), of at most `max_inline` bytes that are copied now: `bytes` can be reused at once.
    #[inline(always)]
    pub fn write_inline(&self, bytes: &[u8], remote: RemoteRegion) -> Write<()> {
        self.destination().post_inline(SendRequest::write(remote), bytes)
    }

    /// [`write_with_imm`](Self::write_with_imm) and [`write_inline`](Self::write_inline) in one.
    #[inline(always)]
    pub fn write_inline_with_imm(&self, bytes: &[u8], remote: RemoteRegion, imm: Imm) -> Write<()> {
        self.destination().post_inline(SendRequest::write_with_imm(remote, imm), bytes)
    }

    /// As [`write`](Self::write), if there is room in the send queue.
    ///
    /// # Errors
    ///
    /// [`TryError::Full`] with the buffer if there is none.
    #[inline(always)]
    pub fn try_write<B: Gather>(
        &self,
        buffer: B,
        remote: RemoteRegion,
    ) -> Result<Write<B>, TryError<B>> {
        self.destination().try_post(SendRequest::write(remote), buffer)
    }
}
