use super::operation::{Operation, ReturnBuffer};
use super::queue_pair::QueuePair;
use crate::engine::WorkRequest;
use crate::error::TryError;
use crate::memory::{RemoteRegion, Scatter};

/// A READ [`Operation`], which returns the filled buffer.
pub type Read<B> = Operation<ReturnBuffer<B>>;

impl QueuePair {
    /// Fills the whole buffer from the start of `remote` (RC).
    ///
    /// # Errors
    ///
    /// - [`OpErrorKind::Limit`](crate::OpErrorKind::Limit) if the buffer is longer than `remote`;
    /// - [`REM_ACCESS_ERR`](crate::types::WcStatus::REM_ACCESS_ERR) if the peer grants no access,
    ///   or no longer.
    #[inline(always)]
    pub fn read<B: Scatter>(&self, buffer: B, remote: RemoteRegion) -> Read<B> {
        self.destination().post(WorkRequest::read(remote), buffer)
    }

    /// Posts a [`read`](Self::read) if the send queue has a free slot.
    ///
    /// # Errors
    ///
    /// See [`TryError`].
    #[inline]
    pub fn try_read<B: Scatter>(
        &self,
        buffer: B,
        remote: RemoteRegion,
    ) -> Result<Read<B>, TryError<B>> {
        self.destination().try_post(WorkRequest::read(remote), buffer)
    }
}
