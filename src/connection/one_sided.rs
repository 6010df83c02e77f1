//! One-sided operations on the peer's memory. Only [`Connection::write_with_imm`] consumes a
//! receive of the peer, for which it waits for a credit: the peer would take others for frames.

use std::future::poll_fn;
use std::ops::Range;

use super::handle::{Connection, Handle};
use super::shared::WaitGuard;
use super::state::ConnectionState;
use crate::coop::within_budget;
use crate::engine::WorkRequest;
use crate::error::{LimitError, OpError, SetupError};
use crate::memory::{BufMut, ExposedRegion, Gather, Pool, PoolError, Scatter};
use crate::memory::{HostMemory, RemoteRegion, Storage};
use crate::op::{Atomic, Batch, BatchOp, PendingLease, Read, Write};
use crate::types::{Access, Imm};
use crate::verbs::ProtectionDomain;

/// The size of pooled buffers beyond `receive_buffer_size`: the longest eager message by default.
const LONG_BUFFER: usize = 64 << 10;

impl Handle {
    pub(super) fn try_alloc(&self, len: usize) -> Result<BufMut, SetupError> {
        let pd = self.shared.qp.protection_domain();
        let sizes = [(self.buffer_size, 16), (LONG_BUFFER, 4)];
        let fitting = sizes.iter().zip(&self.buffers).find(|((size, _), _)| len <= *size);
        let Some((&(size, count), pool)) = fitting else {
            // Checked before memory is allocated.
            LimitError::check("buffer bytes", len as u64, u64::from(u32::MAX))?;
            return pd.register(HostMemory::try_zeroed(len)?);
        };
        let pool = match pool.get() {
            Some(pool) => pool,
            None => {
                let made = Pool::builder(pd).buffer_size(size).buffers(count).growing(true);
                let made = made.build()?;
                pool.get_or_init(|| made)
            }
        };
        pool.try_alloc(len).map_err(|error| match error {
            PoolError::Register(error) => error,
            PoolError::Limit(limit) => limit.into(),
            PoolError::Empty => unreachable!("the pool grows"),
        })
    }
}

impl Connection {
    /// Returns the protection domain. The peer can access memory exposed in it.
    #[must_use]
    pub fn protection_domain(&self) -> &ProtectionDomain {
        self.qp().protection_domain()
    }

    /// Exposes memory to the peer. Send the [`grant`](ExposedRegion::grant) in a message.
    ///
    /// # Errors
    ///
    /// As for [`ExposedRegion::new`].
    pub fn expose<S: Storage>(
        &self,
        memory: S,
        access: Access,
    ) -> Result<ExposedRegion, SetupError> {
        ExposedRegion::new(self.protection_domain(), memory, access)
    }

    /// Grants the peer access to a part of a region, see
    /// [`QueuePair::lease`](crate::QueuePair::lease). Send the [`grant`](crate::op::Lease::grant)
    /// in a message.
    pub fn lease(
        &self,
        region: &ExposedRegion,
        range: Range<usize>,
        access: Access,
    ) -> PendingLease {
        self.qp().lease(region, range, access)
    }

    /// Allocates a buffer of `len` bytes, from pools up to `receive_buffer_size` and 64 KiB. Longer
    /// ones are registered individually.
    ///
    /// # Errors
    ///
    /// [`SetupError`] if the length is unsupported or registration fails.
    pub fn try_alloc(&self, len: usize) -> Result<BufMut, SetupError> {
        self.handle().try_alloc(len)
    }

    /// Allocates a buffer like [`try_alloc`](Self::try_alloc), with a copy of `bytes`.
    ///
    /// # Errors
    ///
    /// As for `try_alloc`.
    pub fn copy_from(&self, bytes: &[u8]) -> Result<BufMut, SetupError> {
        let mut buffer = self.try_alloc(bytes.len())?;
        buffer.copy_from_slice(bytes);
        Ok(buffer)
    }

    /// Writes to the peer's memory like [`QueuePair::write`](crate::QueuePair::write).
    pub fn write<B: Gather>(&self, buffer: B, remote: RemoteRegion) -> Write<B> {
        self.qp().destination().post(WorkRequest::write(remote), buffer)
    }

    /// Like [`write`](Self::write), but copies `bytes` at once. Fails with
    /// [`OpErrorKind::Limit`](crate::OpErrorKind::Limit) above
    /// [`max_inline`](super::ConnectionConfig::max_inline) bytes.
    pub fn write_inline(&self, bytes: &[u8], remote: RemoteRegion) -> Write<()> {
        self.qp().destination().post(WorkRequest::write(remote).inline(bytes), ())
    }

    /// Like [`write`](Self::write), but also notifies the peer: its
    /// [`notifications`](Self::notifications) yield `imm` and the length, and the data is then
    /// visible. The WRITE may be empty.
    ///
    /// A notification takes a receive of the peer, so it waits for a credit in the same FIFO as
    /// [`send`](Self::send). A peer that does not take notifications receives no more messages,
    /// either.
    ///
    /// # Errors
    ///
    /// As for `write`, and [`OpErrorKind::Closed`](crate::OpErrorKind::Closed) after
    /// [`finish`](Self::finish).
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped while it waits for a credit, nothing is written. Afterwards,
    /// dropping it does not stop the [`Operation`](crate::op::Operation).
    pub async fn write_with_imm<B: Gather>(
        &self,
        buffer: B,
        remote: RemoteRegion,
        imm: Imm,
    ) -> Result<B, OpError<B>> {
        let shared = &self.handle().shared;
        self.withdraw_sink();
        let mut buffer = Some(buffer);
        let mut guard = WaitGuard::new(shared, ConnectionState::withdraw_sender);
        let write = poll_fn(|context| {
            within_budget(context, |context| {
                shared.poll(context, |state, waker, caller| {
                    let (ticket, request) = (&mut guard.ticket, (remote, imm));
                    state.poll_write_with_imm(&mut buffer, request, ticket, waker, caller)
                })
            })
        });
        match write.await {
            Some(write) => write.await,
            None => unreachable!("the future has the buffer until it is posted"),
        }
    }

    /// Reads the peer's memory like [`QueuePair::read`](crate::QueuePair::read). After an error,
    /// the content of the buffer is arbitrary.
    pub fn read<B: Scatter>(&self, buffer: B, remote: RemoteRegion) -> Read<B> {
        self.qp().destination().post(WorkRequest::read(remote), buffer)
    }

    /// Compares and swaps like [`QueuePair::compare_swap`](crate::QueuePair::compare_swap).
    pub fn compare_swap(&self, remote: RemoteRegion, compare: u64, swap: u64) -> Atomic {
        self.qp().destination().post_atomic(WorkRequest::compare_swap(remote, compare, swap))
    }

    /// Adds like [`QueuePair::fetch_add`](crate::QueuePair::fetch_add).
    pub fn fetch_add(&self, remote: RemoteRegion, add: u64) -> Atomic {
        self.qp().destination().post_atomic(WorkRequest::fetch_add(remote, add))
    }

    /// Posts WRITEs and READs with one doorbell, like
    /// [`QueuePair::post_batch`](crate::QueuePair::post_batch). If they do not all fit the send
    /// queue, they are queued one by one. READs may be answered after later WRITEs are carried out,
    /// unless [`Batch::fence`] separates them.
    ///
    /// # Errors
    ///
    /// As for `QueuePair::post_batch`;
    /// [`OpErrorKind::NotOneSided`](crate::OpErrorKind::NotOneSided) with the index of a SEND or an
    /// operation with immediate data, which consumes a receive of the peer.
    pub fn post_batch<B: Gather>(&self, batch: Batch<B>) -> BatchOp<B> {
        self.qp().destination().post_one_sided(batch)
    }
}
