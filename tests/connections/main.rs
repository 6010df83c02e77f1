//! Connections: establishment by address, messages, operations, closing, and peers that break the
//! protocol.

#[path = "../connected/mod.rs"]
mod connected;
#[path = "../torture/mod.rs"]
mod torture;

mod by_address;
mod closing;
mod connecting_again;
mod elastic;
mod fairness;
mod hostile;
mod messages;
mod notifications;
mod one_sided;
mod reconnect;
mod reentrant;
mod registered;
mod service;
mod stream_contract;
mod streams;
