//! Shared receive queues.

// Implements an `unsafe fn` of the contract; contains no unsafe block.
#![allow(unsafe_code)]

use std::sync::Arc;
use std::sync::atomic::Ordering;

use rdma_provider::VerbError;
use rdma_provider::contract::{self, PostError};
use rdma_provider::types::{RecvWr, SrqCaps};

use crate::device::DeviceInner;
use crate::device::shared_receive_queue::SrqInner;

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
pub struct Srq {
    pub(crate) queue: Arc<SrqInner>,
    pub(crate) device: Arc<DeviceInner>,
}

impl contract::Srq for Srq {
    fn id(&self) -> u64 {
        self.queue.id
    }

    fn caps(&self) -> SrqCaps {
        self.queue.caps
    }

    fn set_limit(&self, limit: u32) -> Result<(), VerbError> {
        if limit > self.queue.caps.max_wr {
            return Err(VerbError::new("ibv_modify_srq", VerbError::EINVAL));
        }
        self.queue.state.lock().limit = limit;
        Ok(())
    }

    fn limit(&self) -> Result<u32, VerbError> {
        Ok(self.queue.state.lock().limit)
    }

    unsafe fn post_recv(&self, list: &[RecvWr<'_>]) -> Result<(), PostError> {
        let mut state = self.queue.state.lock();
        for (posted, wr) in list.iter().enumerate() {
            let refuse = |errno| {
                Err(PostError { posted, error: VerbError::new("ibv_post_srq_recv", errno) })
            };
            if wr.sges.len() > self.queue.caps.max_sge as usize {
                return refuse(VerbError::EINVAL);
            }
            // Only posts, under the lock, increment the count.
            if self.queue.used.load(Ordering::Acquire) >= self.queue.caps.max_wr {
                return refuse(VerbError::ENOMEM);
            }
            self.queue.used.fetch_add(1, Ordering::Relaxed);
            state.queue.push_slot().assign(wr, 0);
        }
        Ok(())
    }

    fn destroy(&mut self) -> Result<(), VerbError> {
        self.device.check_destroy("ibv_destroy_srq")
    }
}

impl Drop for Srq {
    fn drop(&mut self) {
        let mut state = self.queue.state.lock();
        state.queue.clear();
    }
}
