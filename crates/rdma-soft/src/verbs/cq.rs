//! Completion queues.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use rdma_provider::VerbError;
use rdma_provider::contract;
use rdma_provider::types::{TimestampedCompletion, WorkCompletion};

use crate::device::DeviceInner;
use crate::device::completion_queue::{Arm, CqCounters, CqInner, Health, State};

/// A completion queue, see [`contract::Cq`].
///
/// Destroying or resetting a queue pair removes its completions from the queue.
///
/// ```
/// use rdma_soft::Network;
/// use rdma_soft::contract::{Context as _, Cq as _, CqInit};
/// use rdma_soft::types::WorkCompletion;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let context = Network::new().open("a")?;
/// let cq = context.create_cq(&CqInit::new(16))?;
/// let mut completions = [WorkCompletion::default(); 4];
/// assert_eq!(cq.poll(&mut completions)?, 0);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Cq {
    pub(crate) queue: Arc<CqInner>,
    pub(crate) device: Arc<DeviceInner>,
}

impl Cq {
    #[cold]
    fn poll_failed(
        &self,
        state: &mut State,
        out: &mut [WorkCompletion],
    ) -> Result<usize, VerbError> {
        if state.is_exhausted() {
            return Err(VerbError::new("ibv_poll_cq", VerbError::EIO));
        }
        let count = state.take(out);
        self.queue.waiting.store(state.left(), Ordering::Release);
        Ok(count)
    }

    /// Returns its counters.
    pub fn counters(&self) -> CqCounters {
        self.queue.state.lock().counters
    }
}

impl contract::Cq for Cq {
    fn id(&self) -> u64 {
        self.queue.id
    }

    fn capacity(&self) -> u32 {
        self.queue.capacity.load(Ordering::Relaxed)
    }

    fn poll(&self, out: &mut [WorkCompletion]) -> Result<usize, VerbError> {
        if self.queue.waiting.load(Ordering::Acquire) == 0 {
            return Ok(0);
        }
        let mut state = self.queue.state.lock();
        let state = &mut *state;
        if state.health != Health::Good {
            return self.poll_failed(state, out);
        }
        let count = state.take(out);
        self.queue.waiting.store(state.entries.len(), Ordering::Release);
        Ok(count)
    }

    fn poll_timestamped(&self, out: &mut [TimestampedCompletion]) -> Result<usize, VerbError> {
        const VERB: &str = "ibv_start_poll";
        let state = &mut *self.queue.state.lock();
        if !state.has_stamps() {
            return Err(VerbError::new(VERB, VerbError::EINVAL));
        }
        if state.is_exhausted() {
            return Err(VerbError::new(VERB, VerbError::EIO));
        }
        let count = state.take_stamped(out);
        self.queue.waiting.store(state.left(), Ordering::Release);
        Ok(count)
    }

    #[inline]
    fn is_empty(&self) -> Option<bool> {
        Some(self.queue.waiting.load(Ordering::Acquire) == 0)
    }

    fn arm(&self, solicited_only: bool) -> Result<(), VerbError> {
        let wanted = if solicited_only { Arm::Solicited } else { Arm::Next };
        self.queue.state.lock().arm(wanted);
        Ok(())
    }

    fn resize(&self, capacity: u32) -> Result<(), VerbError> {
        const VERB: &str = "ibv_resize_cq";
        self.device.check_alive(VERB)?;
        let valid = (1..=self.device.attr().max_cqe).contains(&capacity);
        if valid && self.queue.resize(capacity) {
            return Ok(());
        }
        Err(VerbError::new(VERB, VerbError::EINVAL))
    }

    fn moderate(&self, _completions: u16, _period: u16) -> Result<(), VerbError> {
        // There are no interrupts to moderate.
        Err(VerbError::new("ibv_modify_cq", VerbError::EOPNOTSUPP))
    }

    fn ack(&self, events: u32) {
        let Some((_, subscriber)) = &self.queue.channel else {
            rdma_provider::error!(
                cq = self.queue.id,
                events,
                "acknowledged events of a completion queue without channel; ignoring them"
            );
            return;
        };
        let before = subscriber.unacknowledged.fetch_sub(events, Ordering::Relaxed);
        if before < events {
            subscriber.unacknowledged.fetch_add(events - before, Ordering::Relaxed);
            rdma_provider::error!(
                cq = self.queue.id,
                events,
                given = before,
                "acknowledged more events than were returned; ignoring the excess"
            );
        }
    }
}

impl Drop for Cq {
    fn drop(&mut self) {
        self.device.remove_completion_queue(self.queue.id);
        if let Some((channel, subscriber)) = &self.queue.channel {
            channel.0.retain(|event| !Arc::ptr_eq(event, subscriber));
            // libibverbs would block until they are acknowledged.
            let missing = subscriber.unacknowledged.load(Ordering::Relaxed);
            if missing > 0 {
                rdma_provider::error!(
                    cq = self.queue.id,
                    missing,
                    "destroyed completion queue with unacknowledged events; libibverbs would block"
                );
            }
        }
        let users = self.queue.queue_pairs();
        if !users.is_empty() {
            rdma_provider::error!(
                cq = self.queue.id,
                ?users,
                "destroyed completion queue before its queue pairs; their completions are lost"
            );
        }
    }
}
