//! From a posted work request to a woken task.
//!
//! ```text
//!  post:  Operation ──▶ WorkQueue ──▶ slot claimed ──▶ device
//!                          │ no capacity: queued, first in, first out
//!  wait:  InFlight::poll ── outcome in the slot? ── take completions once ── poll again (hybrid) ── register, arm, park
//!  wake:  event (Reactor) │ thread (BusyPoller) │ another task that waits
//!                          └──▶ take completions ▶ free capacity ▶ finish slots ▶ wake
//! ```
//!
//! Completions are taken under the lock of the completion queue, by whoever comes first: a task that waits for one of them takes
//! its own without the detour of its slot ([`wait`](completion_queue_core)), all others are finished in their slots. Completion
//! modes differ in who comes, and in nothing else. This module knows no contents of buffers and no peers.
//!
//! # Who owns what
//!
//! ```text
//!  QueuePair ──▶ QueuePairCore ──▶ Qp, its WorkQueues
//!  CompletionQueue ──▶ CompletionQueueCore ──▶ WorkQueue ──▶ slots          until the device has forgotten the work queue
//!  Operation ──▶ InFlight: buffers, Claim ──▶ a slot, and in it a share of its WorkQueue
//! ```
//!
//! A work queue has a share of its completion queue, which has one of the work queue until the device has forgotten it
//! (`CompletionQueueCore::forget`): what the device may still write stays, even if nothing else keeps it. Of its queue pair a work
//! queue has a weak reference, for the case that the completion queue fails.
//!
//! # Order of locks
//!
//! `QueuePairCore::change`, then `CompletionQueueCore::state`, then `WorkQueue::posting`, then those of `Failures`. Under none of
//! them a waker is cloned, woken or dropped, nor a buffer dropped, for that can run code of users: [`wake_list`] keeps them until
//! the locks are released.

mod arm;
mod batch;
mod busy_poll;
mod capacity;
mod claim;
mod completion_counters;
mod completion_mode;
mod completion_queue;
mod completion_queue_core;
mod dc_target;
mod device_events;
mod drive;
mod failures;
mod in_flight;
#[cfg(all(test, loom))]
mod loom;
mod posting;
mod queue_pair_core;
mod reactor;
mod runtime;
mod slot;
mod slot_table;
mod spin_budget;
#[cfg(all(test, not(loom)))]
mod tests;
mod wait_queue;
mod wake_list;
mod watch;
mod work_queue;
mod work_request;
mod work_request_id;

pub(crate) use batch::BatchEntry;
pub use busy_poll::BusyPoller;
pub(crate) use claim::Claim;
pub use completion_counters::CompletionQueueCounters;
pub use completion_mode::CompletionMode;
pub use completion_queue::{CompletionQueue, CompletionQueueBuilder};
pub(crate) use completion_queue_core::CompletionQueueCore;
pub(crate) use dc_target::TargetCore;
pub use device_events::DeviceEvents;
pub use drive::Drive;
pub(crate) use in_flight::InFlight;
pub(crate) use posting::Poster;
pub(crate) use queue_pair_core::{QueuePairCore, Shared, end_shared};
pub(crate) use wake_list::{Deferral, wake};
pub(crate) use work_queue::WorkQueue;
pub use work_request::WorkQueueCounters;
pub(crate) use work_request::{Key, Limits, Patience, Refusal, Request, To, What};
