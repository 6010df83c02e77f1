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
mod async_events;
mod batch;
mod busy_poll;
mod drain;
mod drive;
mod in_flight;
mod line;
#[cfg(all(test, loom))]
mod loom;
mod mode;
mod queue;
mod reactor;
mod request;
mod room;
mod runtime;
mod slot;
mod slots;
mod spin;
mod target;
mod teardown;
#[cfg(all(test, not(loom)))]
mod tests;
mod wake;
mod watch;
mod work_queue;

pub use async_events::{DeviceEvents, events};
pub(crate) use batch::BatchEntry;
pub use busy_poll::BusyPoller;
pub(crate) use drain::CqShared;
pub use drive::Drive;
pub(crate) use in_flight::InFlight;
pub use mode::CompletionMode;
pub use queue::{CompletionQueue, CompletionQueueBuilder, CompletionQueueCounters};
pub use request::WorkQueueCounters;
pub(crate) use request::{Key, Limits, Patience, Refusal, Request, To, What};
pub(crate) use slot::Claim;
pub(crate) use target::TargetCore;
pub(crate) use teardown::{QueuePairCore, Shared, end_shared};
pub(crate) use wake::{Deferral, wake};
pub(crate) use work_queue::{Poster, WorkQueue};
