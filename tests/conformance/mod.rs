//! The scenarios; one test program for each kind of device includes them.

mod batches;
mod completions;
mod datagram_services;
mod datagrams;
mod deadlines;
mod direct_config;
mod dma_buf;
mod dynamic;
mod errors;
mod events;
mod iwarp;
mod leases;
mod lifetimes;
mod misuse;
mod multicast;
mod operations;
mod paths;
mod ports;
#[cfg(feature = "ibverbs")]
mod raw_handles;
mod registrations;
mod shared;
mod states;
mod timestamps;
mod transitions;
mod walk;
mod windows;
mod wrong_transport;
mod zero_bytes;
