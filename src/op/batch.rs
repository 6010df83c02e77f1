use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use super::destination::{Destination, READ, SendRoute};
use super::operation::leak_on_panic;
use super::queue_pair::QueuePair;
use crate::coop::within_budget;
use crate::engine::{
    BatchEntry, Entries, InFlight, OnFull, Refusal, WorkKind, WorkQueue, WorkRequest,
};
use crate::error::{OpErrorKind, TryError};
use crate::memory::{Gather, RemoteRegion, Scatter};
use crate::types::{Imm, SendFlags, SendOp, Transport, WrId};

/// Work requests with one doorbell, one future, and one completion unless
/// [`signal_every`](Self::signal_every()) requests more.
///
/// Reuse a batch by [`BatchResult::into_batch`]: posting up to 32 work requests of one buffer each
/// then allocates nothing. [`Pool::alloc_many`](crate::memory::Pool::alloc_many) takes the buffers
/// of a batch at once.
///
/// ```
/// use tokio_rdma::Batch;
/// # use tokio_rdma::*;
///
/// # async fn example(qp: &QueuePair, pool: &Pool, remote: RemoteRegion)
/// # -> Result<(), Box<dyn std::error::Error>> {
/// let mut batch = Batch::new();
/// for block in 0..8 {
///     batch.write(pool.try_alloc(512)?, remote.slice(block * 512..(block + 1) * 512)?);
/// }
/// let buffers = qp.post_batch(batch).await.into_buffers()?;
/// # Ok(())
/// # }
/// ```
pub struct Batch<B> {
    entries: Entries,
    buffers: Vec<B>,
    /// The outcomes; before the batch is complete, successes left from an earlier use.
    results: Vec<Result<(), OpErrorKind>>,
    failed: bool,
    signal_every: u32,
    fence: bool,
}

impl<B: Gather> Batch<B> {
    /// Returns an empty batch.
    #[must_use]
    pub fn new() -> Self {
        Self {
            entries: Entries::new(),
            buffers: Vec::new(),
            results: Vec::new(),
            failed: false,
            signal_every: 0,
            fence: false,
        }
    }

    /// Requests a completion after every `work_requests` work requests, which frees send queue
    /// slots earlier. 0, the default, requests one after the last only.
    pub fn signal_every(&mut self, work_requests: u32) -> &mut Self {
        self.signal_every = work_requests;
        self
    }

    /// Makes the next work request wait for all earlier READs and atomics (`IBV_SEND_FENCE`).
    pub fn fence(&mut self) -> &mut Self {
        self.fence = true;
        self
    }

    /// Adds a SEND.
    #[inline]
    pub fn send(&mut self, buffer: B) -> &mut Self {
        self.push(WorkRequest::send(), buffer)
    }

    /// Adds a SEND with 4 bytes of immediate data.
    #[inline]
    pub fn send_with_imm(&mut self, buffer: B, imm: Imm) -> &mut Self {
        self.push(WorkRequest::send_with_imm(imm), buffer)
    }

    /// Adds a WRITE.
    #[inline]
    pub fn write(&mut self, buffer: B, remote: RemoteRegion) -> &mut Self {
        self.push(WorkRequest::write(remote), buffer)
    }

    /// Adds a WRITE that consumes a receive of the peer, which reports `imm`.
    #[inline]
    pub fn write_with_imm(&mut self, buffer: B, remote: RemoteRegion, imm: Imm) -> &mut Self {
        self.push(WorkRequest::write_with_imm(remote, imm), buffer)
    }

    /// Adds a READ.
    #[inline]
    pub fn read(&mut self, buffer: B, remote: RemoteRegion) -> &mut Self
    where
        B: Scatter,
    {
        self.push(WorkRequest::read(remote), buffer)
    }

    /// Returns the number of work requests.
    #[must_use]
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Returns true if the batch contains no work requests.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    #[inline(always)]
    fn push(&mut self, request: WorkRequest<'_>, buffer: B) -> &mut Self {
        let WorkKind::Send(op) = request.kind else { unreachable!("a batch has no receives") };
        self.entries.push(op, request.remote_len, buffer.single());
        self.buffers.push(buffer);
        if self.fence {
            self.fence_last();
        }
        self
    }

    #[cold]
    fn fence_last(&mut self) {
        self.entries.fence_last();
        self.fence = false;
    }
}

impl<B> Batch<B> {
    #[cold]
    fn fail(&mut self, kind: OpErrorKind) {
        self.results.clear();
        self.results.resize(self.entries.len(), Err(kind));
        self.failed = true;
    }

    fn complete(&mut self, last: Result<(), OpErrorKind>, failed: &[(u32, OpErrorKind)]) {
        self.results.resize(self.entries.len(), Ok(()));
        if last.is_err() || !failed.is_empty() {
            self.complete_with_failures(last, failed);
        }
    }

    #[cold]
    fn complete_with_failures(
        &mut self,
        last: Result<(), OpErrorKind>,
        failed: &[(u32, OpErrorKind)],
    ) {
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
            .field("entries", &&self.entries[..])
            .field("signal_every", &self.signal_every)
            .finish()
    }
}

impl QueuePair {
    /// Posts a batch with one doorbell (RC, UC), or queues its work requests one by one if too few
    /// send queue slots are free. An empty batch completes immediately.
    ///
    /// # Errors
    ///
    /// The [`BatchResult`] has one for each work request. If one is refused (too long, foreign,
    /// unsupported), or there are more than `max_send_wr` or 2^19, nothing is posted and all fail
    /// with that error.
    pub fn post_batch<B: Gather>(&self, batch: Batch<B>) -> BatchOp<B> {
        self.destination().post_batch(batch, SendFlags::empty())
    }

    /// Posts a batch if the send queue has free slots for all of it.
    ///
    /// # Errors
    ///
    /// [`TryError::Full`] with the batch otherwise.
    pub fn try_post_batch<B: Gather>(
        &self,
        batch: Batch<B>,
    ) -> Result<BatchOp<B>, TryError<Batch<B>>> {
        self.destination().try_post_batch(batch, SendFlags::empty())
    }
}

impl Destination<'_> {
    pub(crate) fn post_batch<B: Gather>(self, batch: Batch<B>, flags: SendFlags) -> BatchOp<B> {
        self.post_checked(batch, flags, batch_refusal)
    }

    /// Refuses work requests that consume a receive of the peer.
    pub(crate) fn post_one_sided<B: Gather>(self, batch: Batch<B>) -> BatchOp<B> {
        self.post_checked(batch, SendFlags::empty(), not_one_sided)
    }

    fn post_checked<B: Gather>(
        self,
        batch: Batch<B>,
        flags: SendFlags,
        check: BatchCheck,
    ) -> BatchOp<B> {
        match self.submit_batch(batch, flags, OnFull::Queue, check) {
            Ok(operation) => operation,
            Err(_) => unreachable!("a batch that may be queued is never refused as full"),
        }
    }

    pub(crate) fn try_post_batch<B: Gather>(
        self,
        batch: Batch<B>,
        flags: SendFlags,
    ) -> Result<BatchOp<B>, TryError<Batch<B>>> {
        self.submit_batch(batch, flags, OnFull::Try, batch_refusal).map_err(TryError::Full)
    }

    fn submit_batch<B: Gather>(
        self,
        mut batch: Batch<B>,
        flags: SendFlags,
        on_full: OnFull,
        check: BatchCheck,
    ) -> Result<BatchOp<B>, Batch<B>> {
        let checked =
            self.route().and_then(|route| check(&route, &batch.entries).map_or(Ok(route), Err));
        let route = match checked {
            Ok(_) if batch.is_empty() => {
                batch.complete(Ok(()), &[]);
                return Ok(BatchOp { state: State::Complete(batch) });
            }
            Ok(route) => route,
            Err(kind) => return Ok(BatchOp::refused(kind, batch)),
        };
        let (submitted, batch) = leak_on_panic(batch, |batch| {
            let queue = &route.queue_pair.send;
            queue.submit_batch(
                &batch.entries,
                &batch.buffers,
                flags,
                batch.signal_every,
                route.to,
                on_full,
            )
        });
        match submitted {
            Ok(claim) => Ok(BatchOp { state: State::InFlight(InFlight::new(claim, batch)) }),
            Err(Refusal::Full) => Err(batch),
            Err(Refusal::Error(kind)) => Ok(BatchOp::refused(kind, batch)),
        }
    }
}

type BatchCheck = fn(&SendRoute<'_>, &[BatchEntry]) -> Option<OpErrorKind>;

fn batch_refusal(route: &SendRoute<'_>, entries: &[BatchEntry]) -> Option<OpErrorKind> {
    if route.to.is_some() {
        // Datagrams are not batched; DC has all operations.
        return None;
    }
    let missing = || entries.iter().find_map(|entry| route.missing(entry.op));
    // RC has all operations that the device has.
    let Some(no_read) = route.unsupported(READ, &[Transport::Rc]) else {
        return if route.lacks_any() { missing() } else { None };
    };
    entries
        .iter()
        .find_map(|entry| match entry.op {
            SendOp::Read(_) => Some(no_read),
            _ => route.unsupported("batches (transport RC, UC or DC required)", &[Transport::Uc]),
        })
        .or_else(missing)
}

fn not_one_sided(_route: &SendRoute<'_>, entries: &[BatchEntry]) -> Option<OpErrorKind> {
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

/// A batch in flight. The future returns a [`BatchResult`].
///
/// # Cancel safety
///
/// Dropping the future does not cancel the batch. Its buffers return to their pool afterwards.
///
/// # Panics
///
/// Panics if polled after completion.
#[must_use = "it is already posted, but only awaiting it returns its result"]
pub struct BatchOp<B: Gather> {
    state: State<B>,
}

enum State<B: Gather> {
    InFlight(InFlight<Batch<B>>),
    Complete(Batch<B>),
    Taken,
}

impl<B: Gather> BatchOp<B> {
    pub(crate) fn refused(kind: OpErrorKind, mut batch: Batch<B>) -> Self {
        batch.fail(kind);
        Self { state: State::Complete(batch) }
    }

    pub(super) fn posted(&self) -> Option<(&Arc<WorkQueue>, WrId)> {
        match &self.state {
            State::InFlight(in_flight) => in_flight.posted(),
            State::Complete(_) | State::Taken => None,
        }
    }

    pub(super) fn is_finished(&self) -> bool {
        match &self.state {
            State::InFlight(in_flight) => in_flight.is_finished(),
            State::Complete(_) | State::Taken => true,
        }
    }
}

impl<B: Gather> Future for BatchOp<B> {
    type Output = BatchResult<B>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<BatchResult<B>> {
        if let State::InFlight(in_flight) = &mut self.state {
            return in_flight.poll_batch(context, |mut batch, last, failed| {
                batch.complete(last, &failed);
                BatchResult { batch }
            });
        }
        within_budget(context, |_| match std::mem::replace(&mut self.state, State::Taken) {
            State::Complete(batch) => Poll::Ready(BatchResult { batch }),
            _ => panic!("batch polled after completion"),
        })
    }
}

impl<B: Gather> fmt::Debug for BatchOp<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut debug = f.debug_struct("BatchOp");
        match &self.state {
            State::InFlight(in_flight) => debug.field("in_flight", in_flight).finish(),
            State::Complete(batch) => debug.field("batch", batch).finish(),
            State::Taken => debug.finish_non_exhaustive(),
        }
    }
}

/// The outcome of a batch, with work requests in the order of their addition, of one buffer each.
#[derive(Debug)]
#[must_use = "it may hold failures"]
pub struct BatchResult<B> {
    batch: Batch<B>,
}

impl<B: Gather> BatchResult<B> {
    /// Returns true if all work requests succeeded.
    #[must_use]
    pub fn is_ok(&self) -> bool {
        !self.batch.failed
    }

    pub(super) fn replace_failures(&mut self, replace: impl Fn(OpErrorKind) -> OpErrorKind) {
        self.batch.results.iter_mut().filter_map(|result| result.as_mut().err()).for_each(|kind| {
            *kind = replace(*kind);
        });
    }

    /// Returns the outcome of each work request.
    pub fn results(&self) -> &[Result<(), OpErrorKind>] {
        &self.batch.results
    }

    /// Returns the buffers if all work requests succeeded.
    ///
    /// # Errors
    ///
    /// The first failure, which flushed all later work requests. The buffers are dropped;
    /// [`drain`](Self::drain) keeps them.
    pub fn into_buffers(self) -> Result<Vec<B>, OpErrorKind> {
        match self.results().iter().find_map(|result| result.err()) {
            None => Ok(self.batch.buffers),
            Some(kind) => Err(kind),
        }
    }

    /// Returns the buffers.
    #[must_use]
    pub fn buffers(&self) -> &[B] {
        &self.batch.buffers
    }

    /// Removes and returns the buffers.
    pub fn drain(&mut self) -> impl Iterator<Item = B> + '_ {
        self.batch.buffers.drain(..)
    }

    /// Moves the buffers to the end of `buffers`.
    pub fn append_to(&mut self, buffers: &mut Vec<B>) {
        buffers.append(&mut self.batch.buffers);
    }

    /// Returns the batch, empty, for reuse. Drops buffers that were not [drained](Self::drain).
    #[must_use]
    pub fn into_batch(self) -> Batch<B> {
        let mut batch = self.batch;
        batch.entries.clear();
        B::drop_all(&mut batch.buffers);
        if std::mem::take(&mut batch.failed) {
            batch.results.clear();
        }
        batch
    }
}
