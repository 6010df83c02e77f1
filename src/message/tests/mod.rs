//! Tests of listeners with failing peers.

mod silent_peer;
mod unaccepted;
mod unconfirmed;
