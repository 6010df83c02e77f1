//! Connections that are made anew, sets of peers, and what belongs to one connection only.

mod attempts;
mod devices;
mod generations;
mod links;
mod peers;
mod restarts;
mod setup;
