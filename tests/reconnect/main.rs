//! Connections that are made anew, sets of peers, and what belongs to one connection only.

#[path = "../connected/mod.rs"]
mod connected;
#[path = "../torture/mod.rs"]
mod torture;

mod attempts;
mod devices;
mod generations;
mod links;
mod peers;
mod restarts;
mod setup;
