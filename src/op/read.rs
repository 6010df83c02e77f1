//! READ: from the peer's memory.

use super::operation::{Operation, Return};
use super::post::SendRequest;
use super::queue_pair::QueuePair;
use crate::error::TryError;
use crate::memory::{RemoteRegion, Scatter};

/// A READ in flight; gives the buffer back, filled.
///
/// # Cancel safety
///
/// As [`Operation`]: dropped, it goes on, and the buffer stays with the queue pair until it is done.
pub type Read<B> = Operation<Return<B>>;

impl QueuePair {
    /// Fills the buffer, all of its length, from the start of `remote` (RC).
    ///
    /// # Errors
    ///
    /// Of the future, with the buffer, whose content is arbitrary then:
    /// [`OpErrorKind::Limit`](crate::OpErrorKind::Limit) if the buffer is longer than `remote`,
    /// [`REM_ACCESS_ERR`](crate::types::WcStatus::REM_ACCESS_ERR) if the peer does not grant it (any more); the
    /// connection has ended then.
    ///
    /// # Cancel safety
    ///
    /// As [`Operation`]: if the future is dropped, the buffer comes back to its pool when the device has filled it.
    #[inline(always)]
    pub fn read<B: Scatter>(&self, buffer: B, remote: RemoteRegion) -> Read<B> {
        self.destination().post(SendRequest::read(remote), buffer)
    }

    /// As [`read`](Self::read), if there is room in the send queue.
    ///
    /// # Errors
    ///
    /// [`TryError::Full`] with the buffer if there is none.
    #[inline(always)]
    pub fn try_read<B: Scatter>(
        &self,
        buffer: B,
        remote: RemoteRegion,
    ) -> Result<Read<B>, TryError<B>> {
        self.destination().try_post(SendRequest::read(remote), buffer)
    }
}
