//! Memory for long messages, and the READs that fill it.

use std::collections::VecDeque;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll};

use bytes::Bytes;

use super::error::CloseReason;
use crate::error::{OpErrorKind, SetupError, VerbError};
use crate::memory::{
    Buf, BufMut, ExposedRegion, ExposedSlice, HostMemory, Pool, PoolError, RemoteRegion,
};
use crate::op::{QueuePair, Read};
use crate::types::Access;
use crate::verbs::ProtectionDomain;

/// Amortises headers, but lets other traffic interleave.
const READ_LEN: u64 = 1 << 20;

const MAX_READS: usize = 2;

const MIN_BUFFER: usize = 16 << 10;

/// Registered buffers up to [`READ_LEN`], in powers of two. They are pooled because registration
/// takes longer than a fetch: perhaps milliseconds, so [`Job`]s do it without locks.
#[derive(Debug)]
pub(super) struct FetchMemory {
    pools: Arc<Pools>,
    /// Bytes in the pools or reserved by jobs.
    pooled: u64,
    max_pooled: u64,
}

#[derive(Debug)]
struct Pools {
    pd: ProtectionDomain,
    by_size: [OnceLock<Pool>; SIZES],
}

const SIZES: usize = (READ_LEN as usize / MIN_BUFFER).ilog2() as usize + 1;

impl FetchMemory {
    pub(super) fn new(pd: &ProtectionDomain, max_pooled: u64) -> Self {
        let by_size = std::array::from_fn(|_| OnceLock::new());
        Self { pools: Arc::new(Pools { pd: pd.clone(), by_size }), pooled: 0, max_pooled }
    }

    /// Returns a job if a buffer must be prepared.
    pub(super) fn find(&mut self, number: u64, len: u64) -> Result<BufMut, Job> {
        let target = match size_of_buffer(len) {
            None => Target::Parts,
            Some((at, size)) => {
                let free = self
                    .pools
                    .by_size
                    .get(at)
                    .and_then(OnceLock::get)
                    .map(|pool| pool.take_free(len as usize));
                if let Some(Ok(Some(buffer))) = free {
                    return Ok(buffer);
                }
                if self.pooled + size <= self.max_pooled {
                    self.pooled += size;
                    Target::Pooled
                } else {
                    Target::Dedicated
                }
            }
        };
        Err(Job { number, pools: self.pools.clone(), task: Task::Register { len, target } })
    }

    pub(super) fn release(&self, number: u64, region: ExposedRegion) -> Job {
        Job { number, pools: self.pools.clone(), task: Task::Release(region) }
    }

    pub(super) fn pooled(&self) -> u64 {
        self.pooled
    }

    pub(super) fn emptied(&self) -> Self {
        Self::new(&self.pools.pd, self.max_pooled)
    }

    pub(super) fn cancel_reservation(&mut self, bytes: u64) {
        self.pooled -= bytes;
    }
}

fn size_of_buffer(len: u64) -> Option<(usize, u64)> {
    let size = len.checked_next_power_of_two()?.max(MIN_BUFFER as u64);
    (size <= READ_LEN).then(|| ((size / MIN_BUFFER as u64).ilog2() as usize, size))
}

#[derive(Debug)]
pub(super) struct Job {
    number: u64,
    pools: Arc<Pools>,
    task: Task,
}

#[derive(Debug)]
enum Task {
    Register { len: u64, target: Target },
    Release(ExposedRegion),
}

#[derive(Debug, Clone, Copy)]
enum Target {
    Pooled,
    /// Registered for one message only.
    Dedicated,
    Parts,
}

#[derive(Debug)]
pub(super) struct JobDone {
    pub(super) number: u64,
    /// Reserved bytes that were not pooled.
    pub(super) unpooled: u64,
    pub(super) result: Result<JobOutput, CloseReason>,
}

#[derive(Debug)]
pub(super) enum JobOutput {
    Buffer(BufMut),
    Region(ExposedRegion),
    Message(Bytes),
}

impl Job {
    pub(super) fn run(self) -> JobDone {
        let Self { number, pools, task } = self;
        let (result, unpooled) = match task {
            Task::Release(region) => (release(region).map(JobOutput::Message), 0),
            Task::Register { len, target } => {
                let (made, unpooled) = pools.register(len, target);
                let result = made.map_err(|error| {
                    rdma_provider::warn!(
                        %error,
                        len,
                        "failed to register memory for a message; closing the connection"
                    );
                    CloseReason::Memory
                });
                (result, unpooled)
            }
        };
        JobDone { number, unpooled, result }
    }
}

impl Pools {
    fn register(&self, len: u64, target: Target) -> (Result<JobOutput, SetupError>, u64) {
        let Ok(bytes) = usize::try_from(len) else {
            return (
                Err(SetupError::Unsupported {
                    what: "the message is longer than the address space",
                }),
                0,
            );
        };
        match (target, size_of_buffer(len)) {
            (Target::Pooled, Some((at, size))) => {
                let Some(target) = self.by_size.get(at) else {
                    unreachable!("each size has a pool")
                };
                // Only jobs grow the pool, one at a time.
                let before = target.get().map_or(0, Pool::total);
                let buffer = self.grow(target, size as usize).and_then(|pool| {
                    pool.try_alloc(bytes).map_err(|error| match error {
                        PoolError::Register(error) => error,
                        PoolError::Limit(limit) => limit.into(),
                        PoolError::Empty => unreachable!("the pool grows"),
                    })
                });
                // A returned buffer may have been used instead.
                let grown = target.get().map_or(0, Pool::total) > before;
                (buffer.map(JobOutput::Buffer), if grown { 0 } else { size })
            }
            (Target::Parts, _) => {
                // On the heap, to become a `Bytes` without a copy; an exposed region for its
                // slices, without remote access.
                let region = zeroed(bytes)
                    .and_then(|memory| ExposedRegion::new(&self.pd, memory, Access::empty()));
                (region.map(JobOutput::Region), 0)
            }
            (Target::Dedicated | Target::Pooled, _) => {
                let memory = HostMemory::try_zeroed(bytes);
                (memory.and_then(|memory| self.pd.register(memory)).map(JobOutput::Buffer), 0)
            }
        }
    }

    fn grow<'a>(&self, target: &'a OnceLock<Pool>, size: usize) -> Result<&'a Pool, SetupError> {
        if let Some(pool) = target.get() {
            return Ok(pool);
        }
        let pool = Pool::builder(&self.pd).buffer_size(size).buffers(1).growing(true).build()?;
        Ok(target.get_or_init(|| pool))
    }
}

fn release(region: ExposedRegion) -> Result<Bytes, CloseReason> {
    region.into_storage::<Vec<u8>>().map(Bytes::from).map_err(|region| {
        // The connection terminates and the memory is leaked.
        rdma_provider::error!(
            ?region,
            "failed to deregister a fetched message; leaking its memory"
        );
        CloseReason::Operation(OpErrorKind::Post(VerbError::new("ibv_dereg_mr", VerbError::EIO)))
    })
}

/// Unlike `vec!`, does not abort the process if a peer's length is too large.
fn zeroed(len: usize) -> Result<Vec<u8>, SetupError> {
    let mut memory = Vec::new();
    memory
        .try_reserve_exact(len)
        .map_err(|_| SetupError::Verb(VerbError::new("malloc", VerbError::ENOMEM)))?;
    memory.resize(len, 0);
    Ok(memory)
}

#[derive(Debug)]
pub(super) enum Fetch {
    Whole(Read<BufMut>),
    Parts(Parts),
}

#[derive(Debug)]
pub(super) enum FetchOutput {
    Message(Buf),
    /// Memory still to be deregistered by [`FetchMemory::release`].
    Region(ExposedRegion),
}

#[derive(Debug)]
pub(super) struct Parts {
    /// Taken on completion.
    region: Option<ExposedRegion>,
    remote: RemoteRegion,
    /// Bytes covered by posted READs.
    posted: u64,
    reads: VecDeque<Read<ExposedSlice>>,
}

impl Fetch {
    pub(super) fn whole(qp: &QueuePair, buffer: BufMut, remote: RemoteRegion) -> Self {
        Self::Whole(qp.read(buffer, remote))
    }

    pub(super) fn parts(qp: &QueuePair, region: ExposedRegion, remote: RemoteRegion) -> Self {
        let mut parts = Parts {
            region: Some(region),
            remote,
            posted: 0,
            reads: VecDeque::with_capacity(MAX_READS),
        };
        parts.post_reads(qp);
        Self::Parts(parts)
    }

    pub(super) fn poll(
        &mut self,
        qp: &QueuePair,
        context: &mut Context<'_>,
    ) -> Poll<Result<FetchOutput, OpErrorKind>> {
        match self {
            Self::Whole(read) => {
                let read = read.poll_unconstrained(context);
                let done = read.map_ok(|buffer| FetchOutput::Message(buffer.freeze()));
                done.map_err(|error| error.kind())
            }
            Self::Parts(parts) => parts.poll(qp, context),
        }
    }
}

impl Parts {
    fn post_reads(&mut self, qp: &QueuePair) {
        while let Some(region) = &self.region
            && self.reads.len() < MAX_READS
            && self.posted < self.remote.len()
        {
            let end = self.remote.len().min(self.posted + READ_LEN);
            let (Ok(slice), Ok(remote)) = (
                region.slice(self.posted as usize..end as usize),
                self.remote.slice(self.posted..end),
            ) else {
                unreachable!("local and remote region have the same length")
            };
            self.reads.push_back(qp.read(slice, remote));
            self.posted = end;
        }
    }

    fn poll(
        &mut self,
        qp: &QueuePair,
        context: &mut Context<'_>,
    ) -> Poll<Result<FetchOutput, OpErrorKind>> {
        while let Some(read) = self.reads.front_mut() {
            let done = std::task::ready!(read.poll_unconstrained(context));
            self.reads.pop_front();
            if let Err(error) = done {
                return Poll::Ready(Err(error.kind()));
            }
            self.post_reads(qp);
        }
        let Some(region) = self.region.take() else { unreachable!("the region is taken once") };
        Poll::Ready(Ok(FetchOutput::Region(region)))
    }
}
