//! Shared receive queues.

// Implements an `unsafe fn` of the contract; contains no unsafe block.
#![allow(unsafe_code)]

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use rdma_provider::locks::Mutex;

use rdma_provider::VerbError;
use rdma_provider::contract::{self, PostError};
use rdma_provider::types::{AsyncEvent, RecvWr, SrqCaps};

use super::ContextInner;
use crate::ring::Ring;
use crate::roce::responder::ReceiveWqe;

#[derive(Debug)]
struct State {
    queue: Ring<ReceiveWqe>,
    /// Fewer queued receives raise an event; 0 disables it.
    limit: u32,
}

#[derive(Debug)]
pub(crate) struct SrqInner {
    id: u64,
    pd: u32,
    caps: SrqCaps,
    context: Arc<ContextInner>,
    /// Slots in use: posted and not yet polled.
    used: AtomicU32,
    state: Mutex<State>,
}

impl SrqInner {
    /// Takes the oldest receive, if any.
    pub(crate) fn take(&self, into: &mut ReceiveWqe) -> bool {
        let mut state = self.state.lock();
        let Some(front) = state.queue.front_mut() else { return false };
        std::mem::swap(front, into);
        state.queue.pop();
        if (state.queue.len() as u32) < state.limit {
            state.limit = 0;
            drop(state);
            self.context.event(AsyncEvent::SrqLimitReached { srq: self.id });
        }
        true
    }

    /// Requeues a receive whose message will not complete.
    pub(crate) fn return_receive(&self, receive: &mut ReceiveWqe) {
        std::mem::swap(self.state.lock().queue.push_slot(), receive);
    }

    /// Frees a slot whose completion was polled or purged.
    pub(crate) fn release(&self) {
        self.used.fetch_sub(1, Ordering::Release);
    }

    pub(crate) const fn context(&self) -> &Arc<ContextInner> {
        &self.context
    }

    pub(crate) const fn pd(&self) -> u32 {
        self.pd
    }
}

/// A shared receive queue, see [`contract::Srq`].
///
/// Polling the completion of a receive frees its slot.
///
/// ```
/// use rdma_soft::Network;
/// use rdma_soft::contract::{Context as _, Pd as _, Srq as _};
/// use rdma_soft::types::SrqCaps;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let pd = Network::new().open("a")?.create_pd()?;
/// let srq = pd.create_srq(SrqCaps { max_wr: 16, max_sge: 1 })?;
/// srq.set_limit(4)?;
/// assert_eq!(srq.limit()?, 4);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Srq(pub(crate) Arc<SrqInner>);

impl Srq {
    pub(crate) fn new(id: u64, pd: u32, caps: SrqCaps, context: Arc<ContextInner>) -> Self {
        Self(Arc::new(SrqInner {
            id,
            pd,
            caps,
            context,
            used: AtomicU32::new(0),
            state: Mutex::new(State { queue: Ring::new(), limit: 0 }),
        }))
    }
}

impl contract::Srq for Srq {
    fn id(&self) -> u64 {
        self.0.id
    }

    fn caps(&self) -> SrqCaps {
        self.0.caps
    }

    fn set_limit(&self, limit: u32) -> Result<(), VerbError> {
        if limit > self.0.caps.max_wr {
            return Err(VerbError::new("ibv_modify_srq", VerbError::EINVAL));
        }
        self.0.state.lock().limit = limit;
        Ok(())
    }

    fn limit(&self) -> Result<u32, VerbError> {
        Ok(self.0.state.lock().limit)
    }

    unsafe fn post_recv(&self, list: &[RecvWr<'_>]) -> Result<(), PostError> {
        let mut state = self.0.state.lock();
        for (posted, wr) in list.iter().enumerate() {
            let refuse = |errno| {
                Err(PostError { posted, error: VerbError::new("ibv_post_srq_recv", errno) })
            };
            if wr.sges.len() > self.0.caps.max_sge as usize {
                return refuse(VerbError::EINVAL);
            }
            // Only posts, under the lock, increment the count.
            if self.0.used.load(Ordering::Acquire) >= self.0.caps.max_wr {
                return refuse(VerbError::ENOMEM);
            }
            self.0.used.fetch_add(1, Ordering::Relaxed);
            state.queue.push_slot().assign(wr, 0);
        }
        Ok(())
    }

    fn destroy(&mut self) -> Result<(), VerbError> {
        self.0.context.device().check_destroy("ibv_destroy_srq")
    }
}

impl Drop for Srq {
    fn drop(&mut self) {
        let mut state = self.0.state.lock();
        state.queue.clear();
    }
}
