//! The path of an operation: post, wait, completion, wake-up.
//!
//! Completions are taken under the lock of the completion queue. A task that finds its own
//! completion takes it directly; all others are finished through their slots. Completion modes
//! differ only in which component polls. `docs/architecture.md` lists each step with its file.
//!
//! # Ownership
//!
//! ```text
//!  QueuePair ──▶ QueuePairCore ──▶ Qp, its WorkQueues
//!  CompletionQueue ──▶ Drainer ──▶ WorkQueue ──▶ slots
//!  Operation ──▶ InFlight: buffers, Claim ──▶ a slot, which references its WorkQueue
//! ```
//!
//! A work queue and its completion queue reference each other until the device has destroyed the
//! work queue and `Drainer::abandon` detaches it, so memory that the device may still write stays
//! alive. A work queue references its queue pair weakly, to destroy it if the completion queue
//! fails.
//!
//! # Lock order
//!
//! `QueuePairCore::change`, then `Drainer::state` (of several completion queues, by address), then
//! `WorkQueue::state`, then the locks of `Failures` and `WorkQueue::timestamps`. The provider's
//! lock of a completion queue that is read in place is taken under `Drainer::state`: before
//! `WorkQueue::state` by dispatch, after it by a reset, which therefore holds both. Cloning, waking
//! or dropping a waker and dropping a buffer can run user code, so [`wake_list`] and
//! [`later`](rdma_provider::later) keep them until the locks are released.

mod arm;
mod batch;
mod busy_poll;
mod capacity;
mod claim;
mod completion_counters;
mod completion_mode;
mod completion_queue;
mod dc_target;
mod deferral;
mod device_events;
mod drainer;
mod drive;
mod failures;
mod in_flight;
#[cfg(all(test, loom))]
mod loom;
mod queue_pair_core;
mod reactor;
mod runtime;
mod slot;
mod slot_table;
mod spin_budget;
#[cfg(all(test, not(loom)))]
mod tests;
mod wake_list;
mod work_queue;
mod work_request;
mod work_request_id;

pub(crate) use batch::{BatchEntry, Entries};
pub use busy_poll::BusyPoller;
pub(crate) use claim::Claim;
pub use completion_counters::CompletionQueueCounters;
pub use completion_mode::CompletionMode;
pub use completion_queue::{CompletionQueue, CompletionQueueBuilder};
pub(crate) use dc_target::TargetCore;
pub use device_events::DeviceEvents;
pub(crate) use device_events::{PortChanges, all_ports_are_down};
pub(crate) use drainer::Drainer;
pub use drive::Drive;
pub(crate) use in_flight::InFlight;
pub(crate) use queue_pair_core::{QueuePairCore, SharedReceives, destroy_shared};
pub(crate) use runtime::is_current;
pub(crate) use work_queue::{DeviceQueue, QUEUE_LINES, WorkQueue};
pub use work_request::WorkQueueCounters;
pub(crate) use work_request::{
    Limits, OnFull, Receiver, ReceiverKey, Refusal, WorkKind, WorkRequest,
};
