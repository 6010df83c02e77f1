//! Completion queues that connections share, so that each takes few descriptors and little memory.
//!
//! Connections made in different runtimes use different queues: a queue is registered with each
//! runtime that waits for it, and an event wakes them all.

#![forbid(unsafe_code)]

use std::sync::Arc;

use rdma_provider::locks::Mutex;
use tokio::runtime::{self, Handle};

use super::resources::ResourceCache;
use crate::engine::{CompletionMode, CompletionQueue};
use crate::error::SetupError;
use crate::verbs::Device;

/// Entries of the first queues of each worker thread. New queues have as many as all full ones, so
/// that few connections take little memory and many connections few queues.
const FIRST_ENTRIES: u32 = 512;
const MAX_ENTRIES: u32 = 1 << 16;

#[derive(Debug, Default)]
pub(super) struct SharedCompletions(Mutex<Vec<Pair>>);

/// The completion queues of sends and receives: two in mode `Event`, otherwise one. With two, the
/// queue of sends is armed only while a task waits for a send. Other sends then raise no events.
#[derive(Debug)]
struct Pair {
    /// `None` for connections that were prepared outside of a runtime.
    runtime: Option<runtime::Id>,
    mode: CompletionMode,
    queues: [CompletionQueue; 2],
    capacity: [u32; 2],
    free: [u32; 2],
    connections: u32,
}

impl SharedCompletions {
    /// Returns queues with `entries` free entries, for a connection of the current runtime, which
    /// has a pair per worker thread, and more when all are full.
    fn take(
        &self,
        device: &Device,
        mode: &CompletionMode,
        entries: [u32; 2],
    ) -> Result<([CompletionQueue; 2], [u32; 2]), SetupError> {
        let handle = Handle::try_current().ok();
        let runtime = handle.as_ref().map(Handle::id);
        let workers = handle.map_or(1, |handle| handle.metrics().num_workers());
        let needed = Pair::needed(mode, entries);
        // Queues are destroyed without the lock.
        let mut failed = Vec::new();
        let mut pairs = self.0.lock();
        while let Some(at) = pairs.iter().position(Pair::has_failed) {
            failed.push(pairs.swap_remove(at));
        }
        let of_runtime = |pair: &&Pair| pair.runtime == runtime && pair.mode.same(mode);
        let (count, before) = pairs
            .iter()
            .filter(of_runtime)
            .fold((0, 0), |(count, entries), pair| (count + 1, entries + pair.capacity[0]));
        let emptiest = (0..pairs.len())
            .filter(|&at| of_runtime(&&pairs[at]) && pairs[at].fits(needed))
            .min_by_key(|&at| pairs[at].connections);
        let at = match emptiest {
            Some(at) if pairs[at].connections == 0 || count >= workers => at,
            _ => {
                let usual = if count < workers { 0 } else { before };
                let usual = usual.clamp(FIRST_ENTRIES, MAX_ENTRIES).min(device.attr().max_cqe);
                let usual = needed.map(|needed| if needed > 0 { needed.max(usual) } else { 0 });
                let new = Pair::new(device, runtime, mode, usual);
                // The device may still have enough for this connection alone.
                let new = new.or_else(|_| Pair::new(device, runtime, mode, needed));
                match (new, emptiest) {
                    (Ok(new), _) => {
                        pairs.push(new);
                        pairs.len() - 1
                    }
                    (Err(_), Some(at)) => at,
                    (Err(error), None) => return Err(error),
                }
            }
        };
        let pair = &mut pairs[at];
        pair.free = [pair.free[0] - needed[0], pair.free[1] - needed[1]];
        pair.connections += 1;
        Ok((pair.queues.clone(), needed))
    }

    fn release(&self, queues: &[CompletionQueue; 2], taken: [u32; 2]) {
        let mut pairs = self.0.lock();
        // `take` removes a pair that has failed.
        let Some(at) = pairs.iter().position(|pair| pair.queues[0].same(&queues[0])) else {
            return;
        };
        let pair = &mut pairs[at];
        pair.free = [pair.free[0] + taken[0], pair.free[1] + taken[1]];
        pair.connections -= 1;
        if pair.connections > 0 {
            return;
        }
        // One unused pair is kept for a later connection, unless a thread polls it.
        let polled = matches!(pair.mode, CompletionMode::BusyPoll(_));
        let other = (0..pairs.len()).find(|&other| other != at && pairs[other].connections == 0);
        let unneeded = if polled { Some(at) } else { other };
        let removed = unneeded.map(|at| pairs.swap_remove(at));
        drop(pairs);
        drop(removed);
    }
}

impl Pair {
    /// The second number is 0 if one queue serves both.
    fn needed(mode: &CompletionMode, [sends, receives]: [u32; 2]) -> [u32; 2] {
        if let CompletionMode::Event = mode { [sends, receives] } else { [sends + receives, 0] }
    }

    fn new(
        device: &Device,
        runtime: Option<runtime::Id>,
        mode: &CompletionMode,
        capacity: [u32; 2],
    ) -> Result<Self, SetupError> {
        let queue =
            |entries| CompletionQueue::builder(device).mode(mode.clone()).capacity(entries).build();
        let first = queue(capacity[0])?;
        let second = if capacity[1] > 0 { queue(capacity[1])? } else { first.clone() };
        let queues = [first, second];
        let mode = mode.clone();
        Ok(Self { runtime, mode, queues, capacity, free: capacity, connections: 0 })
    }

    fn fits(&self, needed: [u32; 2]) -> bool {
        self.free[0] >= needed[0] && self.free[1] >= needed[1]
    }

    fn has_failed(&self) -> bool {
        self.queues.iter().any(|queue| queue.failure().is_some())
    }
}

#[derive(Debug)]
pub(super) struct QueueLease {
    pub(super) queues: [CompletionQueue; 2],
    taken: [u32; 2],
    cache: Arc<ResourceCache>,
}

impl QueueLease {
    pub(super) fn new(
        cache: Arc<ResourceCache>,
        mode: &CompletionMode,
        entries: [u32; 2],
    ) -> Result<Self, SetupError> {
        let (queues, taken) = cache.queues.take(cache.device(), mode, entries)?;
        Ok(Self { queues, taken, cache })
    }
}

impl Drop for QueueLease {
    fn drop(&mut self) {
        self.cache.queues.release(&self.queues, self.taken);
    }
}
