//! `[4]` From a completion to a woken task.
//!
//! ```text
//!  post:  InFlight ──▶ WorkQueue ──▶ Slot claimed ──▶ doorbell
//!                        │ no room: queued, first in, first out
//!  wait:  InFlight::poll ── result there? ── drain once ── spin (hybrid) ── register, arm, park
//!  wake:  channel event (Reactor) │ dedicated thread (BusyPoller) │ another waiter
//!                        └──────────▶ drain: poll CQ ▶ finish slots ▶ free room ▶ wake
//! ```
//!
//! There is one drain path, under the lock of the completion queue; who calls it is all that completion
//! modes differ in. The layer knows no contents of buffers and no peers.

mod arm;
mod batch_post;
mod busy_poll;
mod capacity;
mod completion_mode;
mod completion_queue;
mod dc_target;
mod device_events;
mod drain;
mod drive;
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
mod wait_queue;
mod wake_list;
mod watch;
mod work_queue;
mod work_request;

pub(crate) use batch_post::BatchEntry;
pub use busy_poll::BusyPoller;
pub use completion_mode::CompletionMode;
pub use completion_queue::{CompletionQueue, CompletionQueueBuilder, CompletionQueueCounters};
pub(crate) use dc_target::TargetCore;
pub use device_events::DeviceEvents;
pub(crate) use drain::CqShared;
pub use drive::Drive;
pub(crate) use in_flight::InFlight;
pub(crate) use queue_pair_core::{QueuePairCore, Shared, end_shared};
pub(crate) use slot::Claim;
pub(crate) use wake_list::{Deferral, wake};
pub(crate) use work_queue::{Poster, WorkQueue};
pub use work_request::WorkQueueCounters;
pub(crate) use work_request::{Key, Limits, Patience, Refusal, Request, To, What};
