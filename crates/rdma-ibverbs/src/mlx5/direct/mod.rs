//! The direct data path: this crate writes work queue entries and reads completion queue entries
//! itself. libmlx5 still creates, modifies and destroys all objects.
//!
//! ```text
//! post ─▶ send_queue ─▶ entry ─▶ ring ──────────▶ adapter ──▶ completion_queue ─▶ completions
//!             │  receive_queue, shared_receive_queue ▲             │ table: queue pair by number
//!             └─▶ doorbell: record, register ────────┘             └▶ scatter, errors
//! ```
//!
//! `objects` asks libmlx5 for the memory and registers of an object, `device` decides whether a
//! device posts directly, `layout` has the formats. `registers` allocates doorbell registers,
//! `queue_pair` attaches queues to completion queues, `address` has the routes.
//!
//! A device posts either directly or through libmlx5, with all its queues: two writers of one ring,
//! or two readers of one completion queue, would overwrite each other. The direct path also keeps
//! doorbell registers of its own, which no queue pair of libmlx5 gets.

#![allow(unsafe_code)]

pub(crate) mod address;
mod completion_queue;
mod device;
mod doorbell;
pub mod entry;
mod errors;
#[cfg(any(test, fuzzing))]
#[allow(unreachable_pub, reason = "reachable for a fuzzer only")]
#[doc(hidden)]
pub mod fuzzing;
#[cfg(any(test, fuzzing))]
mod heap;
pub mod layout;
mod objects;
mod queue_pair;
mod queues;
mod receive_queue;
mod registers;
pub mod ring;
mod scatter;
mod send_queue;
mod shared_receive_queue;
mod table;

pub use completion_queue::CompletionQueue;
pub(crate) use device::{Device, Uses};
pub use errors::{BadEntry, status};
pub(crate) use objects::{NewCompletionQueue, create_compressed, route};
pub(crate) use queue_pair::{QueuePair, Target};
pub(crate) use registers::Registers;
pub(crate) use send_queue::SendQueue;
pub(crate) use shared_receive_queue::SharedReceiveQueue;
