//! Lifetimes of queue pairs and of what they use: runtimes, drop order, wakers, DC targets.
//! Also what these leave behind: allocations, descriptors, memory, spans.

#[path = "../common/alone.rs"]
mod alone;
#[path = "../connected/mod.rs"]
mod connected;
#[path = "../common/live.rs"]
mod live;
#[path = "../torture/mod.rs"]
mod torture;
#[path = "../common/udp.rs"]
mod udp;

mod allocations;
mod churn;
mod fork;
mod identity;
mod runtimes;
mod send_sync;
mod spans;
mod stress;
mod subscribers;
mod targets;
mod teardown;
mod threads;
mod wakers;
