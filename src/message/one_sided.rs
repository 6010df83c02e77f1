//! Operations on the peer's memory, beside the messages.
//!
//! They share the queue pair, and its send queue, with the messages: what consumes a receive of the peer is not for services,
//! since the peer takes it for a frame.

use super::connection::Connection;
use crate::error::{LimitError, SetupError};
use crate::memory::{BufMut, ExposedRegion, Gather, Pool, PoolError, Scatter};
use crate::memory::{HostMemory, RemoteRegion, Storage};
use crate::op::{Atomic, AtomicRequest, Batch, BatchOp, Read, SendRequest, Write};
use crate::types::Access;
use crate::verbs::ProtectionDomain;

impl Connection {
    /// Its protection domain: what is exposed there, the peer reaches.
    #[must_use]
    pub fn protection_domain(&self) -> &ProtectionDomain {
        self.qp().protection_domain()
    }

    /// Exposes memory to the peer; send it the [`grant`](ExposedRegion::grant).
    ///
    /// # Errors
    ///
    /// As [`ExposedRegion::new`].
    pub fn expose<S: Storage>(
        &self,
        memory: S,
        access: Access,
    ) -> Result<ExposedRegion, SetupError> {
        ExposedRegion::new(self.protection_domain(), memory, access)
    }

    /// A buffer of `len` bytes for operations: from a pool up to `receive_buffer_size`, beyond that registered for this.
    ///
    /// # Errors
    ///
    /// [`SetupError`] if it is longer than a buffer can be, or cannot be registered.
    pub fn alloc(&self, len: usize) -> Result<BufMut, SetupError> {
        let handle = self.handle();
        if len > handle.buffer_size {
            // Before there is memory for it.
            LimitError::check("buffer bytes", len as u64, u64::from(u32::MAX))?;
            return self.protection_domain().register(HostMemory::try_zeroed(len)?);
        }
        let pool = match handle.buffers.get() {
            Some(pool) => pool,
            None => {
                let pool = Pool::builder(self.protection_domain())
                    .buffer_size(handle.buffer_size)
                    .buffers(16);
                let pool = pool.growing(true).build()?;
                handle.buffers.get_or_init(|| pool)
            }
        };
        pool.try_alloc(len).map_err(|error| match error {
            PoolError::Register(error) => error,
            PoolError::TooLong(limit) => limit.into(),
            PoolError::Empty => unreachable!("it grows"),
        })
    }

    /// A buffer for operations that holds a copy of `bytes`.
    ///
    /// # Errors
    ///
    /// As [`alloc`](Self::alloc).
    pub fn copy_from(&self, bytes: &[u8]) -> Result<BufMut, SetupError> {
        let mut buffer = self.alloc(bytes.len())?;
        buffer.copy_from_slice(bytes);
        Ok(buffer)
    }

    /// Writes to memory of the peer: [`QueuePair::write`](crate::QueuePair::write). A message sent afterwards tells the peer, and
    /// makes it visible.
    ///
    /// # Errors
    ///
    /// As there, of the future, with the buffer; [`OpErrorKind::Closed`](crate::OpErrorKind::Closed) once the connection is gone.
    ///
    /// # Cancel safety
    ///
    /// As [`Operation`](crate::op::Operation): the bytes are written even if the future is dropped.
    pub fn write<B: Gather>(&self, buffer: B, remote: RemoteRegion) -> Write<B> {
        self.qp().destination().post(SendRequest::write(remote), buffer)
    }

    /// As [`write`](Self::write), of at most [`max_inline`](super::ConnectionConfig::max_inline) bytes that are copied now: no
    /// buffer is needed, and `bytes` can be reused at once.
    ///
    /// # Errors
    ///
    /// As [`write`](Self::write), and [`OpErrorKind::Limit`](crate::OpErrorKind::Limit) beyond `max_inline`.
    ///
    /// # Cancel safety
    ///
    /// As [`Operation`](crate::op::Operation): the bytes are written even if the future is dropped.
    pub fn write_inline(&self, bytes: &[u8], remote: RemoteRegion) -> Write<()> {
        self.qp().destination().post_inline(SendRequest::write(remote), bytes)
    }

    /// Reads memory of the peer: [`QueuePair::read`](crate::QueuePair::read).
    ///
    /// # Errors
    ///
    /// As there, of the future, with the buffer, whose content is arbitrary then.
    ///
    /// # Cancel safety
    ///
    /// As [`Operation`](crate::op::Operation): if the future is dropped, the buffer comes back to its pool when the device has filled
    /// it.
    pub fn read<B: Scatter>(&self, buffer: B, remote: RemoteRegion) -> Read<B> {
        self.qp().destination().post(SendRequest::read(remote), buffer)
    }

    /// Compares and swaps a word of the peer's memory: [`QueuePair::compare_swap`](crate::QueuePair::compare_swap).
    ///
    /// # Errors
    ///
    /// As there, of the future.
    ///
    /// # Cancel safety
    ///
    /// As [`Operation`](crate::op::Operation): it is done even if the future is dropped.
    pub fn compare_swap(&self, remote: RemoteRegion, compare: u64, swap: u64) -> Atomic {
        self.qp().destination().post_atomic(AtomicRequest::compare_swap(remote, compare, swap))
    }

    /// Adds to a word of the peer's memory: [`QueuePair::fetch_add`](crate::QueuePair::fetch_add).
    ///
    /// # Errors
    ///
    /// As there, of the future.
    ///
    /// # Cancel safety
    ///
    /// As [`Operation`](crate::op::Operation): it is done even if the future is dropped.
    pub fn fetch_add(&self, remote: RemoteRegion, add: u64) -> Atomic {
        self.qp().destination().post_atomic(AtomicRequest::fetch_add(remote, add))
    }

    /// Posts many WRITEs and READs with one doorbell: [`QueuePair::post_batch`](crate::QueuePair::post_batch). If the send queue
    /// has no room for all of them, they join the line of messages and operations one by one.
    ///
    /// A READ may be answered after a WRITE behind it is carried out. Where that matters, put [`Batch::fence`] between the two; as
    /// the first of a batch it waits for READs and atomics that were posted before the batch.
    ///
    /// ```
    /// # use tokio_rdma::{Access, Batch, Connection, RemoteRegion};
    /// # async fn example(connection: &Connection, remote: RemoteRegion) -> Result<(), Box<dyn std::error::Error>> {
    /// let mut batch = Batch::new();
    /// for (block, bytes) in [[1; 512], [2; 512]].iter().enumerate() {
    ///     let start = 512 * block as u64;
    ///     batch.write(connection.copy_from(bytes)?, remote.slice(start..start + 512)?);
    /// }
    /// batch.read(connection.alloc(64)?, remote.slice(1024..1088)?);
    /// let buffers = connection.post_batch(batch).await.into_buffers()?;
    /// println!("{:?}", &buffers[2][..]);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// In the result, for each work request, with all buffers. If one is refused, none is posted and all have its error:
    /// [`OpErrorKind::NotOneSided`](crate::OpErrorKind::NotOneSided), which names it, for what consumes a receive of the peer (SEND,
    /// SEND and WRITE with immediate data), [`OpErrorKind::Limit`](crate::OpErrorKind::Limit) for more than
    /// [`max_send_wr`](super::ConnectionConfig::max_send_wr) or too many bytes. One that fails at the peer ends the connection.
    ///
    /// # Cancel safety
    ///
    /// As [`Operation`](crate::op::Operation): the batch goes on if the future is dropped.
    pub fn post_batch<B: Gather>(&self, batch: Batch<B>) -> BatchOp<B> {
        self.qp().destination().post_one_sided(batch)
    }
}
