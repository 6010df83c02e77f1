//! Shared receive queues.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use rdma_provider::locks::Mutex;

use rdma_provider::types::{AsyncEvent, SrqCaps};

use super::events::Events;
use crate::ring::Ring;
use crate::roce::responder::ReceiveWqe;

#[derive(Debug)]
pub(crate) struct State {
    pub(crate) queue: Ring<ReceiveWqe>,
    /// Fewer queued receives raise an event; 0 disables it.
    pub(crate) limit: u32,
}

#[derive(Debug)]
pub(crate) struct SrqInner {
    pub(crate) id: u64,
    pd: u32,
    pub(crate) caps: SrqCaps,
    events: Arc<Events>,
    /// Slots in use: posted and not yet polled.
    pub(crate) used: AtomicU32,
    pub(crate) state: Mutex<State>,
}

impl SrqInner {
    pub(crate) fn new(id: u64, pd: u32, caps: SrqCaps, events: &Arc<Events>) -> Arc<Self> {
        Arc::new(Self {
            id,
            pd,
            caps,
            events: Arc::clone(events),
            used: AtomicU32::new(0),
            state: Mutex::new(State { queue: Ring::new(), limit: 0 }),
        })
    }

    /// Takes the oldest receive, if any.
    pub(crate) fn take(&self, into: &mut ReceiveWqe) -> bool {
        let mut state = self.state.lock();
        let Some(front) = state.queue.front_mut() else { return false };
        std::mem::swap(front, into);
        state.queue.pop();
        if (state.queue.len() as u32) < state.limit {
            state.limit = 0;
            drop(state);
            self.events.raise(AsyncEvent::SrqLimitReached { srq: self.id });
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

    pub(crate) const fn pd(&self) -> u32 {
        self.pd
    }
}
