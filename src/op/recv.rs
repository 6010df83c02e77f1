//! RECV: room for the peer's next message.

use std::marker::PhantomData;
use std::sync::Arc;

use super::operation::{Finish, Operation};
use super::queue_pair::QueuePair;
use crate::engine::{Request, What, WorkQueue};
use crate::error::{OpErrorKind, TryError};
use crate::memory::Scatter;
use crate::types::{Imm, Qpn, Rkey, SendFlags, WcFlags, WcOpcode, WorkCompletion};

/// A receive in flight; gives what was [`Received`].
///
/// # Cancel safety
///
/// As [`Operation`]: dropped, it still takes a message, which is lost then.
pub type Recv<B> = Operation<Receipt<B>>;

/// A message that arrived, or the news of a peer's WRITE_WITH_IMM.
#[derive(Debug)]
#[non_exhaustive]
pub struct Received<B> {
    /// The buffer, cut down to the bytes that arrived; empty for a WRITE_WITH_IMM.
    ///
    /// A datagram's first 40 bytes are its routing header, see [`WcFlags::GRH`].
    pub buffer: B,
    /// Bytes of the message, or bytes that the WRITE_WITH_IMM wrote.
    pub len: usize,
    /// Four bytes beside it, if the peer sent them.
    pub imm: Option<Imm>,
    /// The key of ours that the peer invalidated with it, if it did: that of a [`Lease`](crate::op::Lease), which has ended
    /// then and is to be dropped.
    pub invalidated: Option<Rkey>,
    /// True if it is a WRITE_WITH_IMM: the data are where the peer wrote them.
    pub written: bool,
    /// Queue pair it arrived on: of interest with a shared receive queue.
    pub qpn: Qpn,
    /// The sender (UD).
    pub src_qpn: Qpn,
    /// Flags of the completion.
    pub flags: WcFlags,
}

/// Makes a [`Received`] of a buffer.
#[derive(Debug)]
pub struct Receipt<B>(PhantomData<fn() -> B>);

impl<B: Scatter> Finish for Receipt<B> {
    type Held = B;
    type Buffer = B;
    type Output = Received<B>;
    type Seen = WorkCompletion;

    #[inline]
    fn see(completion: &WorkCompletion) -> WorkCompletion {
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
            flags: completion.flags,
        }
    }

    #[inline]
    fn give_back(held: B) -> B {
        held
    }
}

#[inline(always)]
pub(crate) fn recv<B: Scatter>(queue: &Arc<WorkQueue>, buffer: B) -> Recv<B> {
    Operation::post(queue, What::Receive, SendFlags::empty(), u64::MAX, buffer)
}

#[inline]
pub(crate) fn try_recv<B: Scatter>(
    queue: &Arc<WorkQueue>,
    buffer: B,
) -> Result<Recv<B>, TryError<B>> {
    Operation::try_post(queue, Request::new(What::Receive, SendFlags::empty(), u64::MAX), buffer)
}

impl QueuePair {
    /// Posts a receive: the next message that finds it first goes into `buffer`, all of its length.
    ///
    /// Messages fill receives in the order in which both were posted. A WRITE_WITH_IMM of the peer consumes
    /// one too.
    ///
    /// # Errors
    ///
    /// Of the future, with the buffer: [`LOC_LEN_ERR`](crate::types::WcStatus::LOC_LEN_ERR) if the message is longer,
    /// [`WR_FLUSH_ERR`](crate::types::WcStatus::WR_FLUSH_ERR) when the connection ends,
    /// [`OpErrorKind::Unsupported`] if receives come from a shared queue.
    ///
    /// # Cancel safety
    ///
    /// The receive stays posted if the future is dropped, and the message that finds it is lost, its buffer back
    /// in its pool. To wait with a deadline, poll the same future again: `timeout(deadline, &mut receive)`.
    #[inline(always)]
    pub fn recv<B: Scatter>(&self, buffer: B) -> Recv<B> {
        match self.inner.core.receive() {
            Some(queue) => recv(queue, buffer),
            None => Operation::refused(SHARED, buffer),
        }
    }

    /// As [`recv`](Self::recv), if there is room in the receive queue.
    ///
    /// # Errors
    ///
    /// [`TryError::Full`] with the buffer if there is none.
    #[inline(always)]
    pub fn try_recv<B: Scatter>(&self, buffer: B) -> Result<Recv<B>, TryError<B>> {
        match self.inner.core.receive() {
            Some(queue) => try_recv(queue, buffer),
            None => Ok(Operation::refused(SHARED, buffer)),
        }
    }
}

const SHARED: OpErrorKind =
    OpErrorKind::Unsupported { what: "a receive of its own beside a shared receive queue" };
