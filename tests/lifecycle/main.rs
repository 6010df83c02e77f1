//! The life of queue pairs and what they share: runtimes that end, objects dropped in any order, wakers, DC targets, many queue
//! pairs at once.

#[path = "../connected/mod.rs"]
mod connected;
#[path = "../torture/mod.rs"]
mod torture;

mod identity;
mod runtimes;
mod send_sync;
mod stress;
mod targets;
mod teardown;
mod wakers;
