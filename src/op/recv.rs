use std::marker::PhantomData;
use std::sync::Arc;

use super::operation::{Operation, OperationKind};
use super::queue_pair::QueuePair;
use crate::engine::{WorkQueue, WorkRequest};
use crate::error::{OpErrorKind, TryError};
use crate::memory::Scatter;
use crate::types::{Imm, Qpn, Rkey, WcFlags, WcOpcode, WorkCompletion};

/// A receive [`Operation`], which returns the [`Received`] message.
pub type Recv<B> = Operation<ReceiveMessage<B>>;

/// A message that arrived, or the notification of a WRITE with immediate data.
#[derive(Debug)]
#[non_exhaustive]
pub struct Received<B> {
    /// The buffer, truncated to the bytes that arrived; empty for a WRITE with immediate data.
    ///
    /// A datagram begins with its 40-byte global routing header, see [`WcFlags::GRH`].
    pub buffer: B,
    /// The length in bytes of the message, or of the WRITE.
    pub len: usize,
    /// The immediate data, if the peer sent any.
    pub imm: Option<Imm>,
    /// The local key that the peer invalidated, if any. Drop its [`Lease`](crate::op::Lease), which
    /// is no longer in force.
    pub invalidated: Option<Rkey>,
    /// True for a WRITE with immediate data, which has written the exposed memory.
    pub written: bool,
    /// The queue pair it arrived on, for users of a shared receive queue.
    pub qpn: Qpn,
    /// The queue pair of the sender (UD), see [`sender`](Self::sender).
    pub src_qpn: Qpn,
    pub(super) src_lid: u16,
    pub(super) service_level: u8,
    /// The flags of the completion.
    pub flags: WcFlags,
}

/// The kind of receives: returns a [`Received`] message.
#[derive(Debug)]
pub struct ReceiveMessage<B>(PhantomData<fn() -> B>);

impl<B: Scatter> OperationKind for ReceiveMessage<B> {
    type Held = B;
    type Buffer = B;
    type Output = Received<B>;
    type Details = WorkCompletion;

    #[inline]
    fn details(completion: &WorkCompletion) -> WorkCompletion {
        *completion
    }

    #[inline]
    fn finish(mut held: B, completion: WorkCompletion) -> Received<B> {
        let written = completion.opcode == WcOpcode::RECV_RDMA_WITH_IMM;
        let len = completion.byte_len as usize;
        held.filled(if written { 0 } else { len });
        Received {
            buffer: held,
            len,
            imm: completion.imm(),
            invalidated: completion.invalidated(),
            written,
            qpn: completion.qpn,
            src_qpn: completion.src_qpn,
            src_lid: completion.src_lid,
            service_level: completion.service_level,
            flags: completion.flags,
        }
    }

    #[inline]
    fn into_buffer(held: B) -> B {
        held
    }
}

#[inline]
pub(crate) fn recv<B: Scatter>(queue: &Arc<WorkQueue>, buffer: B) -> Recv<B> {
    Operation::post(queue, WorkRequest::receive(), buffer)
}

#[inline]
pub(crate) fn try_recv<B: Scatter>(
    queue: &Arc<WorkQueue>,
    buffer: B,
) -> Result<Recv<B>, TryError<B>> {
    Operation::try_post(queue, WorkRequest::receive(), buffer)
}

impl QueuePair {
    /// Posts a receive for the next message. Messages, and WRITEs with immediate data, use receives
    /// in the order of posting.
    ///
    /// # Errors
    ///
    /// - [`LOC_LEN_ERR`](crate::types::WcStatus::LOC_LEN_ERR) if the message is longer than the
    ///   buffer;
    /// - [`WR_FLUSH_ERR`](crate::types::WcStatus::WR_FLUSH_ERR) when the connection fails or
    ///   closes;
    /// - [`OpErrorKind::Unsupported`] if the queue pair has a shared receive queue.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future does not cancel the receive: its message is lost. To wait with a
    /// deadline, keep the future: `timeout(deadline, &mut receive)`.
    #[inline]
    pub fn recv<B: Scatter>(&self, buffer: B) -> Recv<B> {
        match self.inner.core.receive() {
            Some(queue) => recv(queue, buffer),
            None => Operation::refused(SHARED, buffer),
        }
    }

    /// Posts a [`recv`](Self::recv) if the receive queue has a free slot.
    ///
    /// # Errors
    ///
    /// See [`TryError`].
    #[inline]
    pub fn try_recv<B: Scatter>(&self, buffer: B) -> Result<Recv<B>, TryError<B>> {
        match self.inner.core.receive() {
            Some(queue) => try_recv(queue, buffer),
            None => Ok(Operation::refused(SHARED, buffer)),
        }
    }
}

const SHARED: OpErrorKind =
    OpErrorKind::Unsupported { what: "receives of its own; post them to its shared receive queue" };
