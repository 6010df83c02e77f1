//! Memory that long messages are fetched into.

use std::collections::VecDeque;
use std::future::Future;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll};

use bytes::Bytes;

use super::error::CloseReason;
use crate::error::{OpErrorKind, SetupError, VerbError};
use crate::memory::{
    BufMut, ExposedRegion, ExposedSlice, HostMemory, Pool, PoolError, RemoteRegion,
};
use crate::op::{QueuePair, Read};
use crate::types::Access;
use crate::verbs::ProtectionDomain;

/// Bytes of one READ: long enough for its answer to be most of what travels, short enough to let others in between.
const READ: u64 = 1 << 20;

/// READs of one message in flight: the next is on its way when one is done.
const READS: usize = 2;

/// Smallest buffers that are kept for reuse.
const SMALLEST: usize = 16 << 10;

/// Registered buffers for messages of up to [`READ`] bytes, in sizes of powers of two, kept for reuse as far as that is
/// allowed: to register memory takes longer than to fetch a message into it. It may take milliseconds, and so may ending a
/// registration: both are [`Chore`]s for a thread that may block, done without any lock.
#[derive(Debug)]
pub(super) struct Landings {
    kept: Arc<Kept>,
    /// Bytes that are kept, or will be.
    used: u64,
    keep: u64,
}

/// Buffers by size; made when first needed.
#[derive(Debug)]
struct Kept {
    pd: ProtectionDomain,
    pools: [OnceLock<Pool>; SIZES],
}

/// Sizes from [`SMALLEST`] to [`READ`].
const SIZES: usize = (READ as usize / SMALLEST).ilog2() as usize + 1;

impl Landings {
    /// Keeps up to `keep` bytes of buffers.
    pub(super) fn new(pd: &ProtectionDomain, keep: u64) -> Self {
        let pools = std::array::from_fn(|_| OnceLock::new());
        Self { kept: Arc::new(Kept { pd: pd.clone(), pools }), used: 0, keep }
    }

    /// A buffer for message `number` of `len` bytes, or what is to be done to have one.
    pub(super) fn find(&mut self, number: u64, len: u64) -> Result<BufMut, Chore> {
        let place = match size_of_buffer(len) {
            None => Place::Parts,
            Some((at, size)) => {
                let free = self
                    .kept
                    .pools
                    .get(at)
                    .and_then(OnceLock::get)
                    .map(|pool| pool.take_free(len as usize));
                if let Some(Ok(Some(buffer))) = free {
                    return Ok(buffer);
                }
                if self.used + size <= self.keep {
                    self.used += size;
                    Place::Kept
                } else {
                    Place::Once
                }
            }
        };
        Err(Chore { number, kept: self.kept.clone(), task: Task::Register { len, place } })
    }

    /// What ends the registration of a message that was fetched in parts.
    pub(super) fn release(&self, number: u64, region: ExposedRegion) -> Chore {
        Chore { number, kept: self.kept.clone(), task: Task::Release(region) }
    }

    /// So many bytes that were to be kept are not.
    pub(super) fn not_kept(&mut self, bytes: u64) {
        self.used -= bytes;
    }
}

/// Which of the sizes a message of `len` bytes takes, and how long that is; `None` above [`READ`].
fn size_of_buffer(len: u64) -> Option<(usize, u64)> {
    let size = len.checked_next_power_of_two()?.max(SMALLEST as u64);
    (size <= READ).then(|| ((size / SMALLEST as u64).ilog2() as usize, size))
}

/// Something that may take its time, done where that holds up nobody.
#[derive(Debug)]
pub(super) struct Chore {
    /// Of the message that it is for.
    number: u64,
    kept: Arc<Kept>,
    task: Task,
}

#[derive(Debug)]
enum Task {
    Register { len: u64, place: Place },
    Release(ExposedRegion),
}

/// Where a message is fetched to.
#[derive(Debug, Clone, Copy)]
enum Place {
    /// A buffer that is kept.
    Kept,
    /// A buffer of its own.
    Once,
    /// Memory of its own, filled by several READs.
    Parts,
}

/// A chore that is done. What is not needed any more is dropped without a lock.
#[derive(Debug)]
pub(super) struct Done {
    pub(super) number: u64,
    /// Bytes that were set aside to be kept and are not.
    pub(super) not_kept: u64,
    pub(super) result: Result<Made, CloseReason>,
}

/// What a chore gives.
#[derive(Debug)]
pub(super) enum Made {
    Buffer(BufMut),
    Region(ExposedRegion),
    Message(Bytes),
}

impl Chore {
    /// Takes as long as it takes.
    pub(super) fn run(self) -> Done {
        let Self { number, kept, task } = self;
        let (result, not_kept) = match task {
            Task::Release(region) => (release(region).map(Made::Message), 0),
            Task::Register { len, place } => {
                let (made, not_kept) = kept.register(len, place);
                let result = made.map_err(|error| {
                    tracing::warn!(%error, len, "no memory for a message");
                    CloseReason::Memory
                });
                (result, not_kept)
            }
        };
        Done { number, not_kept, result }
    }
}

impl Kept {
    /// Memory for a message, and bytes that were to be kept and are not.
    fn register(&self, len: u64, place: Place) -> (Result<Made, SetupError>, u64) {
        let Ok(bytes) = usize::try_from(len) else {
            return (Err(SetupError::Unsupported { what: "so long a message" }), 0);
        };
        match (place, size_of_buffer(len)) {
            (Place::Kept, Some((at, size))) => {
                let Some(place) = self.pools.get(at) else {
                    unreachable!("there is one for each size")
                };
                // One chore of a connection is done at a time, and nothing else grows the pool.
                let before = place.get().map_or(0, Pool::total);
                let buffer = self.grow(place, size as usize).and_then(|pool| {
                    pool.try_alloc(bytes).map_err(|error| match error {
                        PoolError::Register(error) => error,
                        PoolError::TooLong(limit) => limit.into(),
                        PoolError::Empty => unreachable!("it grows"),
                    })
                });
                // One may have come back meanwhile.
                let grown = place.get().map_or(0, Pool::total) > before;
                (buffer.map(Made::Buffer), if grown { 0 } else { size })
            }
            (Place::Parts, _) => {
                // From the heap, so that it can be given away without a copy. Nobody is granted access; that it is reached by
                // slices is what an exposed region is for.
                let region = zeroed(bytes)
                    .and_then(|memory| ExposedRegion::new(&self.pd, memory, Access::empty()));
                (region.map(Made::Region), 0)
            }
            (Place::Once | Place::Kept, _) => {
                let memory = HostMemory::try_zeroed(bytes);
                (memory.and_then(|memory| self.pd.register(memory)).map(Made::Buffer), 0)
            }
        }
    }

    fn grow<'a>(&self, place: &'a OnceLock<Pool>, size: usize) -> Result<&'a Pool, SetupError> {
        if let Some(pool) = place.get() {
            return Ok(pool);
        }
        let pool = Pool::builder(&self.pd).buffer_size(size).buffers(1).growing(true).build()?;
        Ok(place.get_or_init(|| pool))
    }
}

/// The message in a region that was filled.
fn release(region: ExposedRegion) -> Result<Bytes, CloseReason> {
    region.into_storage::<Vec<u8>>().map(Bytes::from).map_err(|region| {
        // The device does not end its registration; then the connection ends, and the memory is leaked.
        tracing::error!(?region, "a message that was fetched cannot be taken from its region");
        CloseReason::Operation(OpErrorKind::Post(VerbError::new("ibv_dereg_mr", VerbError::EIO)))
    })
}

/// Zeroed memory, or an error where `vec!` would end the process: a peer says how much.
fn zeroed(len: usize) -> Result<Vec<u8>, SetupError> {
    let mut memory = Vec::new();
    memory
        .try_reserve_exact(len)
        .map_err(|_| SetupError::Verb(VerbError::new("malloc", VerbError::ENOMEM)))?;
    memory.resize(len, 0);
    Ok(memory)
}

/// A message that is being fetched.
#[derive(Debug)]
pub(super) enum Landing {
    /// By one READ.
    Whole(Read<BufMut>),
    /// By several.
    Parts(Parts),
}

/// A message that is there.
#[derive(Debug)]
pub(super) enum Arrived {
    Message(Bytes),
    /// Its registration is still to be ended: [`Landings::release`].
    Region(ExposedRegion),
}

/// A message that is fetched by several READs.
#[derive(Debug)]
pub(super) struct Parts {
    /// `None` once it was given away.
    region: Option<ExposedRegion>,
    remote: RemoteRegion,
    /// Bytes for which a READ was posted.
    asked: u64,
    reads: VecDeque<Read<ExposedSlice>>,
}

impl Landing {
    /// Starts to fetch a message into a buffer of its length.
    pub(super) fn whole(qp: &QueuePair, buffer: BufMut, remote: RemoteRegion) -> Self {
        Self::Whole(qp.read(buffer, remote))
    }

    /// Starts to fetch a message into a region of its length.
    pub(super) fn parts(qp: &QueuePair, region: ExposedRegion, remote: RemoteRegion) -> Self {
        let mut parts =
            Parts { region: Some(region), remote, asked: 0, reads: VecDeque::with_capacity(READS) };
        parts.ask(qp);
        Self::Parts(parts)
    }

    /// The message, once it is all there.
    pub(super) fn poll(
        &mut self,
        qp: &QueuePair,
        context: &mut Context<'_>,
    ) -> Poll<Result<Arrived, OpErrorKind>> {
        match self {
            Self::Whole(read) => {
                let read = std::pin::Pin::new(read).poll(context);
                let done = read.map_ok(|buffer| Arrived::Message(buffer.freeze().into()));
                done.map_err(|error| error.kind())
            }
            Self::Parts(parts) => parts.poll(qp, context),
        }
    }
}

impl Parts {
    /// Posts READs as far as they may be in flight.
    fn ask(&mut self, qp: &QueuePair) {
        while let Some(region) = &self.region
            && self.reads.len() < READS
            && self.asked < self.remote.len()
        {
            let end = self.remote.len().min(self.asked + READ);
            let (Ok(slice), Ok(remote)) = (
                region.slice(self.asked as usize..end as usize),
                self.remote.slice(self.asked..end),
            ) else {
                unreachable!("within the length of both, which is the same")
            };
            self.reads.push_back(qp.read(slice, remote));
            self.asked = end;
        }
    }

    fn poll(
        &mut self,
        qp: &QueuePair,
        context: &mut Context<'_>,
    ) -> Poll<Result<Arrived, OpErrorKind>> {
        while let Some(read) = self.reads.front_mut() {
            let done = std::task::ready!(std::pin::Pin::new(read).poll(context));
            self.reads.pop_front();
            if let Err(error) = done {
                return Poll::Ready(Err(error.kind()));
            }
            self.ask(qp);
        }
        let Some(region) = self.region.take() else { unreachable!("it is given away once") };
        Poll::Ready(Ok(Arrived::Region(region)))
    }
}
