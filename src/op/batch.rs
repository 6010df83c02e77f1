//! Many work requests, one doorbell.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use super::operation::kept;
use super::post::{Destination, Route, SendRequest};
use super::queue_pair::QueuePair;
use crate::engine::{BatchEntry, InFlight, Patience, Refusal};
use crate::error::{OpErrorKind, TryError};
use crate::memory::{Gather, RemoteRegion, Scatter};
use crate::types::{Imm, SendFlags, SendOp, Transport};

/// Work requests to be posted together: one doorbell, one completion (or some), one future.
///
/// It can be used again: [`BatchResult::into_batch`] gives it back empty, with the memory it has grown to, so that
/// batches of up to 32 work requests with a buffer each are posted without an allocation.
///
/// ```
/// # use tokio_rdma::{Access, CompletionMode, CompletionQueue, Device, ExposedRegion, Pool, QueuePair};
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let device = Device::open_default()?;
/// # let pd = device.protection_domain()?;
/// # let queue = CompletionQueue::new(&device, CompletionMode::Event)?;
/// # let qp = QueuePair::new(&pd, &queue)?;
/// # qp.connect(&qp.endpoint())?;
/// # let pool = Pool::new(&pd, 512, 8)?;
/// # let region = ExposedRegion::new(&pd, vec![0; 4096], Access::REMOTE_WRITE)?;
/// # let remote = region.grant();
/// let mut batch = tokio_rdma::Batch::new();
/// for block in 0..8 {
///     batch.write(pool.try_alloc(512)?, remote.slice(block * 512..(block + 1) * 512)?);
/// }
/// let result = qp.post_batch(batch).await;
/// assert!(result.is_ok());
/// # Ok(())
/// # }
/// ```
pub struct Batch<B> {
    entries: Vec<BatchEntry>,
    buffers: Vec<B>,
    /// What became of each; successes only, perhaps not as many, unless `failed`.
    results: Vec<Result<(), OpErrorKind>>,
    /// Not all of it succeeded.
    failed: bool,
    /// A completion for each so many, besides the last; 0 for none.
    signal_every: u32,
    flags: SendFlags,
}

impl<B: Gather> Batch<B> {
    /// An empty batch.
    #[must_use]
    pub fn new() -> Self {
        Self {
            entries: Vec::new(),
            buffers: Vec::new(),
            results: Vec::new(),
            failed: false,
            signal_every: 0,
            flags: SendFlags::empty(),
        }
    }

    /// Asks for a completion after every `work_requests` and not only after the last: room in the send queue comes
    /// free earlier. 0, the default, asks for none.
    pub fn signal_every(&mut self, work_requests: u32) -> &mut Self {
        self.signal_every = work_requests;
        self
    }

    /// Lets what is added next wait for all READs and atomics before it.
    pub fn fence(&mut self) -> &mut Self {
        self.flags |= SendFlags::FENCE;
        self
    }

    /// Adds a SEND.
    #[inline(always)]
    pub fn send(&mut self, buffer: B) -> &mut Self {
        self.push(SendRequest::send(), buffer)
    }

    /// Adds a SEND with four bytes beside it.
    #[inline(always)]
    pub fn send_with_imm(&mut self, buffer: B, imm: Imm) -> &mut Self {
        self.push(SendRequest::send_with_imm(imm), buffer)
    }

    /// Adds a WRITE.
    #[inline(always)]
    pub fn write(&mut self, buffer: B, remote: RemoteRegion) -> &mut Self {
        self.push(SendRequest::write(remote), buffer)
    }

    /// Adds a WRITE that consumes a receive of the peer and reports `imm`.
    #[inline(always)]
    pub fn write_with_imm(&mut self, buffer: B, remote: RemoteRegion, imm: Imm) -> &mut Self {
        self.push(SendRequest::write_with_imm(remote, imm), buffer)
    }

    /// Adds a READ.
    #[inline(always)]
    pub fn read(&mut self, buffer: B, remote: RemoteRegion) -> &mut Self
    where
        B: Scatter,
    {
        self.push(SendRequest::read(remote), buffer)
    }

    /// Work requests so far.
    #[must_use]
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// True without any.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    #[inline(always)]
    fn push(&mut self, request: SendRequest, buffer: B) -> &mut Self {
        let SendRequest { op, remote_len: room } = request;
        self.entries.push(BatchEntry { op, flags: std::mem::take(&mut self.flags), room });
        self.buffers.push(buffer);
        self
    }
}

impl<B> Batch<B> {
    /// None of it was posted.
    #[cold]
    fn fail(&mut self, kind: OpErrorKind) {
        self.results.clear();
        self.results.resize(self.entries.len(), Err(kind));
        self.failed = true;
    }

    /// It is over: so ended its last work request, and these before it failed.
    fn end(&mut self, last: Result<(), OpErrorKind>, failed: &[(u32, OpErrorKind)]) {
        self.results.resize(self.entries.len(), Ok(()));
        if last.is_err() || !failed.is_empty() {
            self.end_in_part(last, failed);
        }
    }

    #[cold]
    fn end_in_part(&mut self, last: Result<(), OpErrorKind>, failed: &[(u32, OpErrorKind)]) {
        self.failed = true;
        for &(part, kind) in failed {
            self.results[part as usize] = Err(kind);
        }
        if let Some(result) = self.results.last_mut() {
            *result = last;
        }
    }
}

impl<B: Gather> Default for Batch<B> {
    fn default() -> Self {
        Self::new()
    }
}

impl<B> fmt::Debug for Batch<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Batch")
            .field("entries", &self.entries)
            .field("signal_every", &self.signal_every)
            .finish()
    }
}

impl QueuePair {
    /// Posts all of a batch with one doorbell (RC, UC); if the send queue has no room for all of it, they join the
    /// line one by one.
    ///
    /// An empty batch is done at once.
    ///
    /// # Errors
    ///
    /// In the result, for each work request. If one is refused before posting (too long, foreign, more than
    /// `max_send_wr` or 2^19), none is posted and all have that error.
    ///
    /// # Cancel safety
    ///
    /// As [`Operation`](super::Operation): the batch goes on if the future is dropped.
    pub fn post_batch<B: Gather>(&self, batch: Batch<B>) -> BatchOp<B> {
        self.destination().post_batch(batch)
    }

    /// As [`post_batch`](Self::post_batch), if there is room for all of it.
    ///
    /// # Errors
    ///
    /// [`TryError::Full`] with the batch if there is not.
    pub fn try_post_batch<B: Gather>(
        &self,
        batch: Batch<B>,
    ) -> Result<BatchOp<B>, TryError<Batch<B>>> {
        self.destination().try_post_batch(batch)
    }
}

impl Destination<'_> {
    /// Posts all of a batch with one doorbell, or queues its work requests.
    pub(crate) fn post_batch<B: Gather>(self, batch: Batch<B>) -> BatchOp<B> {
        self.post_checked(batch, batch_refusal)
    }

    /// Posts a batch of WRITEs and READs, for a peer whose receives are for the messages of a connection. A batch with work that
    /// would consume one of them is refused.
    pub(crate) fn post_one_sided<B: Gather>(self, batch: Batch<B>) -> BatchOp<B> {
        self.post_checked(batch, not_one_sided)
    }

    fn post_checked<B: Gather>(self, batch: Batch<B>, check: BatchCheck) -> BatchOp<B> {
        match self.submit_batch(batch, Patience::Queue, check) {
            Ok(operation) => operation,
            Err(_) => unreachable!("patience waits for room"),
        }
    }

    /// Posts all of a batch if the send queue has free slots for it.
    pub(crate) fn try_post_batch<B: Gather>(
        self,
        batch: Batch<B>,
    ) -> Result<BatchOp<B>, TryError<Batch<B>>> {
        self.submit_batch(batch, Patience::Try, batch_refusal).map_err(TryError::Full)
    }

    fn submit_batch<B: Gather>(
        self,
        mut batch: Batch<B>,
        patience: Patience,
        check: BatchCheck,
    ) -> Result<BatchOp<B>, Batch<B>> {
        let checked =
            self.route().and_then(|route| check(&route, &batch.entries).map_or(Ok(route), Err));
        let route = match checked {
            Ok(_) if batch.is_empty() => {
                batch.end(Ok(()), &[]);
                return Ok(BatchOp { in_flight: None, batch: Some(batch) });
            }
            Ok(route) => route,
            Err(kind) => return Ok(BatchOp::refused(kind, batch)),
        };
        let (submitted, mut batch) = kept(batch, |batch| {
            let queue = &route.queue_pair.send;
            queue.submit_batch(
                &batch.entries,
                &batch.buffers,
                route.flags,
                batch.signal_every,
                route.to,
                patience,
            )
        });
        match submitted {
            Ok(claim) => {
                let in_flight = InFlight::new(claim, std::mem::take(&mut batch.buffers));
                Ok(BatchOp { in_flight: Some(in_flight), batch: Some(batch) })
            }
            Err(Refusal::Full) => Err(batch),
            Err(Refusal::Error(kind)) => Ok(BatchOp::refused(kind, batch)),
        }
    }
}

/// Decides why a batch may not be posted to a route, if it may not.
type BatchCheck = fn(&Route<'_>, &[BatchEntry]) -> Option<OpErrorKind>;

/// Refuses what the transport of the route does not have.
fn batch_refusal(route: &Route<'_>, entries: &[BatchEntry]) -> Option<OpErrorKind> {
    if route.to.is_some() {
        // A dynamic connection has every operation of a batch; datagrams are not sent in batches.
        return None;
    }
    // A reliable connection has every operation of a batch.
    let no_read = route.unsupported("READ", &[Transport::Rc])?;
    entries.iter().find_map(|entry| match entry.op {
        SendOp::Read(_) => Some(no_read),
        _ => route.unsupported("a batch", &[Transport::Uc]),
    })
}

/// Refuses what would consume a receive of the peer.
fn not_one_sided(_route: &Route<'_>, entries: &[BatchEntry]) -> Option<OpErrorKind> {
    entries.iter().enumerate().find_map(|(index, entry)| {
        let what = match entry.op {
            SendOp::Write(_) | SendOp::Read(_) => return None,
            SendOp::Send => "SEND",
            SendOp::SendWithImm(_) => "SEND with immediate data",
            SendOp::WriteWithImm(..) => "WRITE with immediate data",
            _ => "work request of another kind",
        };
        Some(OpErrorKind::NotOneSided { index, what })
    })
}

/// A batch in flight; gives a [`BatchResult`].
///
/// # Cancel safety
///
/// As [`Operation`](super::Operation): the batch goes on if the future is dropped, and its buffers come back to their pool.
///
/// # Panics
///
/// If polled again after it was ready.
#[must_use = "it is posted already, but only awaiting it tells whether it succeeded"]
pub struct BatchOp<B: Gather> {
    /// `None` if nothing was posted.
    in_flight: Option<InFlight<Vec<B>>>,
    batch: Option<Batch<B>>,
}

impl<B: Gather> BatchOp<B> {
    /// None of it was posted.
    pub(crate) fn refused(kind: OpErrorKind, mut batch: Batch<B>) -> Self {
        batch.fail(kind);
        Self { in_flight: None, batch: Some(batch) }
    }
}

impl<B: Gather> Future for BatchOp<B> {
    type Output = BatchResult<B>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<BatchResult<B>> {
        let Self { in_flight, batch } = &mut *self;
        let Some(posted) = batch else { panic!("a batch was polled after it had completed") };
        if let Some(in_flight) = in_flight {
            let (buffers, last, failed) = ready!(in_flight.poll_batch(context));
            posted.buffers = buffers;
            posted.end(last, &failed);
        }
        match batch.take() {
            Some(batch) => Poll::Ready(BatchResult { batch }),
            None => unreachable!("checked above"),
        }
    }
}

impl<B: Gather> fmt::Debug for BatchOp<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BatchOp")
            .field("in_flight", &self.in_flight)
            .field("batch", &self.batch)
            .finish()
    }
}

/// What became of a batch, in the order in which its work requests were added.
#[derive(Debug)]
#[must_use = "it may hold failures"]
pub struct BatchResult<B> {
    batch: Batch<B>,
}

impl<B: Gather> BatchResult<B> {
    /// True if all succeeded.
    #[must_use]
    pub fn is_ok(&self) -> bool {
        !self.batch.failed
    }

    /// The outcome of each.
    pub fn results(&self) -> &[Result<(), OpErrorKind>] {
        &self.batch.results
    }

    /// The first failure: those behind it were flushed because of it.
    ///
    /// # Errors
    ///
    /// That failure.
    pub fn into_buffers(self) -> Result<Vec<B>, OpErrorKind> {
        match self.results().iter().find_map(|result| result.err()) {
            None => Ok(self.batch.buffers),
            Some(kind) => Err(kind),
        }
    }

    /// The buffers, one for each.
    #[must_use]
    pub fn buffers(&self) -> &[B] {
        &self.batch.buffers
    }

    /// Takes the buffers out, one for each.
    pub fn drain(&mut self) -> impl Iterator<Item = B> + '_ {
        self.batch.buffers.drain(..)
    }

    /// The batch, empty, to be used again; drops buffers that were not taken.
    #[must_use]
    pub fn into_batch(self) -> Batch<B> {
        let mut batch = self.batch;
        batch.entries.clear();
        batch.buffers.clear();
        if std::mem::take(&mut batch.failed) {
            batch.results.clear();
        }
        batch
    }
}
