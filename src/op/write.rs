use super::operation::{Operation, ReturnBuffer};
use super::queue_pair::QueuePair;
use crate::engine::WorkRequest;
use crate::error::TryError;
use crate::memory::{Gather, RemoteRegion};

/// A WRITE [`Operation`], which returns the buffer.
pub type Write<B> = Operation<ReturnBuffer<B>>;

impl QueuePair {
    /// Writes the buffer to the start of `remote` (RC, UC).
    ///
    /// Success means that the peer's device has accepted the data (RC), or that it was sent (UC). A
    /// later message, or [immediate data](Self::with_imm), notifies the peer and makes the data
    /// visible to it.
    ///
    /// # Errors
    ///
    /// - [`OpErrorKind::Limit`](crate::OpErrorKind::Limit) if the buffer is longer than `remote`;
    /// - [`REM_ACCESS_ERR`](crate::types::WcStatus::REM_ACCESS_ERR) if the peer grants no access,
    ///   or no longer (RC).
    #[inline(always)]
    pub fn write<B: Gather>(&self, buffer: B, remote: RemoteRegion) -> Write<B> {
        self.destination().post(WorkRequest::write(remote), buffer)
    }

    /// Posts a [`write`](Self::write) of at most `max_inline` bytes, which this call copies.
    #[inline]
    pub fn write_inline(&self, bytes: &[u8], remote: RemoteRegion) -> Write<()> {
        self.destination().post(WorkRequest::write(remote).inline(bytes), ())
    }

    /// Posts a [`write`](Self::write) if the send queue has a free slot.
    ///
    /// # Errors
    ///
    /// See [`TryError`].
    #[inline]
    pub fn try_write<B: Gather>(
        &self,
        buffer: B,
        remote: RemoteRegion,
    ) -> Result<Write<B>, TryError<B>> {
        self.destination().try_post(WorkRequest::write(remote), buffer)
    }
}
