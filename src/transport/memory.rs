//! Memory that long messages are fetched into.

use std::collections::VecDeque;
use std::future::Future;
use std::task::{Context, Poll};

use bytes::Bytes;

use crate::error::{OpErrorKind, SetupError, VerbError};
use crate::mem::{HostMemory, RemoteRegion};
use crate::op::{QueuePair, Read};
use crate::types::Access;
use crate::verbs::{BufMut, ExposedRegion, ExposedSlice, Pool, PoolError, ProtectionDomain};

/// Bytes of one READ: long enough for its answer to be most of what travels, short enough to let others in between.
const READ: u64 = 1 << 20;

/// READs of one message in flight: the next is on its way when one is done.
const READS: usize = 2;

/// Smallest buffers that are kept for reuse.
const SMALLEST: usize = 16 << 10;

/// Registered buffers for messages of up to [`READ`] bytes, in sizes of powers of two, kept for reuse as far as that is
/// allowed: to register memory takes longer than to fetch a message into it.
#[derive(Debug)]
pub(super) struct Landings {
    pd: ProtectionDomain,
    /// By size; made when first needed.
    pools: Vec<Option<Pool>>,
    kept: u64,
    keep: u64,
}

impl Landings {
    /// Keeps up to `keep` bytes of buffers.
    pub(super) fn new(pd: &ProtectionDomain, keep: u64) -> Self {
        let sizes = (READ as usize / SMALLEST).ilog2() as usize + 1;
        Self { pd: pd.clone(), pools: (0..sizes).map(|_| None).collect(), kept: 0, keep }
    }

    /// A buffer of `len` bytes, at most [`READ`].
    fn buffer(&mut self, len: usize) -> Result<BufMut, SetupError> {
        let size = len.next_power_of_two().max(SMALLEST);
        let fits = self.kept + size as u64 <= self.keep;
        let Some(pool) = self.pools.get_mut((size / SMALLEST).ilog2() as usize) else {
            return self.once(len);
        };
        let pool = match pool {
            Some(pool) => {
                if pool.available() == 0 {
                    if !fits {
                        return self.once(len);
                    }
                    self.kept += size as u64;
                }
                pool
            }
            None if fits => {
                self.kept += size as u64;
                pool.insert(Pool::builder(&self.pd).buffer_size(size).buffers(1).growing(true).build()?)
            }
            None => return self.once(len),
        };
        pool.try_alloc(len).map_err(|error| match error {
            PoolError::Register(error) => error,
            PoolError::TooLong(limit) => limit.into(),
            PoolError::Empty => unreachable!("it grows"),
        })
    }

    /// A buffer that is not kept.
    fn once(&self, len: usize) -> Result<BufMut, SetupError> {
        self.pd.register(HostMemory::zeroed(len)?)
    }

    /// Starts to fetch a message.
    pub(super) fn fetch(&mut self, qp: &QueuePair, remote: RemoteRegion) -> Result<Landing, SetupError> {
        if remote.len() <= READ {
            let buffer = self.buffer(remote.len() as usize)?;
            return Ok(Landing::Whole(qp.read(buffer, remote)));
        }
        let len = usize::try_from(remote.len()).map_err(|_| SetupError::Unsupported { what: "so long a message" })?;
        // From the heap, so that it can be given away without a copy. Nobody is granted access; that it is reached by slices
        // is what an exposed region is for.
        let region = ExposedRegion::new(&self.pd, zeroed(len)?, Access::empty())?;
        let mut parts = Parts { region: Some(region), remote, asked: 0, reads: VecDeque::with_capacity(READS) };
        parts.ask(qp)?;
        Ok(Landing::Parts(parts))
    }
}

/// Zeroed memory, or an error where `vec!` would end the process: a peer says how much.
fn zeroed(len: usize) -> Result<Vec<u8>, SetupError> {
    let mut memory = Vec::new();
    memory.try_reserve_exact(len).map_err(|_| SetupError::Verb(VerbError::new("malloc", VerbError::ENOMEM)))?;
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
    /// The message, once it is all there.
    pub(super) fn poll(&mut self, qp: &QueuePair, context: &mut Context<'_>) -> Poll<Result<Bytes, OpErrorKind>> {
        match self {
            Self::Whole(read) => {
                let read = std::pin::Pin::new(read).poll(context);
                read.map(|result| result.map(|buffer| buffer.freeze().into()).map_err(|error| error.kind()))
            }
            Self::Parts(parts) => parts.poll(qp, context),
        }
    }
}

impl Parts {
    /// Posts READs as far as they may be in flight.
    fn ask(&mut self, qp: &QueuePair) -> Result<(), SetupError> {
        while let Some(region) = &self.region
            && self.reads.len() < READS
            && self.asked < self.remote.len()
        {
            let end = self.remote.len().min(self.asked + READ);
            let slice = region.slice(self.asked as usize..end as usize)?;
            let Ok(remote) = self.remote.slice(self.asked..end) else { unreachable!("within its length") };
            self.reads.push_back(qp.read(slice, remote));
            self.asked = end;
        }
        Ok(())
    }

    fn poll(&mut self, qp: &QueuePair, context: &mut Context<'_>) -> Poll<Result<Bytes, OpErrorKind>> {
        while let Some(read) = self.reads.front_mut() {
            let done = std::task::ready!(std::pin::Pin::new(read).poll(context));
            self.reads.pop_front();
            if let Err(error) = done {
                return Poll::Ready(Err(error.kind()));
            }
            if let Err(error) = self.ask(qp) {
                unreachable!("the first slices were within the region: {error}");
            }
        }
        let Some(region) = self.region.take() else { unreachable!("it is given away once") };
        match region.into_storage::<Vec<u8>>() {
            Ok(memory) => Poll::Ready(Ok(memory.into())),
            Err(region) => {
                // The device does not end its registration; then the connection ends, and the memory is leaked.
                tracing::error!(?region, "a message that was fetched cannot be taken from its region");
                Poll::Ready(Err(OpErrorKind::Post(VerbError::new("ibv_dereg_mr", VerbError::EIO))))
            }
        }
    }
}
