//! WRITE: into the peer's memory.

use super::operation::{Operation, Return};
use super::queue_pair::{QueuePair, room};
use crate::engine::{Request, What};
use crate::error::TryError;
use crate::memory::Gather;
use crate::memory::RemoteRegion;
use crate::types::{Imm, SendOp, Transport};

/// A WRITE in flight; gives the buffer back.
///
/// # Cancel safety
///
/// As [`Operation`]: dropped, it goes on, and the buffer stays with the queue pair until it is done.
pub type Write<B> = Operation<Return<B>>;

const CONNECTED: &[Transport] = &[Transport::Rc, Transport::Uc];

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
        self.post_write(SendOp::Write(remote.remote_addr()), buffer, remote)
    }

    /// As [`write`](Self::write), and consumes a receive of the peer, which reports `imm` and the number of bytes.
    #[inline(always)]
    pub fn write_with_imm<B: Gather>(&self, buffer: B, remote: RemoteRegion, imm: Imm) -> Write<B> {
        self.post_write(SendOp::WriteWithImm(remote.remote_addr(), imm), buffer, remote)
    }

    /// As [`write`](Self::write), of at most `max_inline` bytes that are copied now: `bytes` can be reused at once.
    #[inline(always)]
    pub fn write_inline(&self, bytes: &[u8], remote: RemoteRegion) -> Write<()> {
        self.post_write_inline(SendOp::Write(remote.remote_addr()), bytes, remote)
    }

    /// [`write_with_imm`](Self::write_with_imm) and [`write_inline`](Self::write_inline) in one.
    #[inline(always)]
    pub fn write_inline_with_imm(&self, bytes: &[u8], remote: RemoteRegion, imm: Imm) -> Write<()> {
        self.post_write_inline(SendOp::WriteWithImm(remote.remote_addr(), imm), bytes, remote)
    }

    /// As [`write`](Self::write), if there is room in the send queue.
    ///
    /// # Errors
    ///
    /// [`TryError::Full`] with the buffer if there is none.
    #[inline(always)]
    pub fn try_write<B: Gather>(&self, buffer: B, remote: RemoteRegion) -> Result<Write<B>, TryError<B>> {
        if let Some(kind) = self.unsupported("WRITE", CONNECTED) {
            return Ok(Operation::refused(kind, buffer));
        }
        let request = self.request(What::Send(SendOp::Write(remote.remote_addr())), room(&remote));
        Operation::try_post(self.send_queue(), request, buffer)
    }

    #[inline(always)]
    fn post_write_inline(&self, op: SendOp, bytes: &[u8], remote: RemoteRegion) -> Write<()> {
        if let Some(kind) = self.unsupported("WRITE", CONNECTED) {
            return Operation::refused(kind, ());
        }
        let request = Request { inline: Some(bytes), ..self.request(What::Send(op), room(&remote)) };
        Operation::post_any(self.send_queue(), request, ())
    }

    #[inline(always)]
    fn post_write<B: Gather>(&self, op: SendOp, buffer: B, remote: RemoteRegion) -> Write<B> {
        if let Some(kind) = self.unsupported("WRITE", CONNECTED) {
            return Operation::refused(kind, buffer);
        }
        Operation::post(self.send_queue(), What::Send(op), self.signaled(), room(&remote), buffer)
    }
}
