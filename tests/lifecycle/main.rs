//! Lifetimes of queue pairs and of what they use: runtimes, drop order, wakers, DC targets.

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
