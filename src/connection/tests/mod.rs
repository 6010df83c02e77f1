//! Tests of listeners with failing peers, of drivers that do not run, of what connections share
//! and leave, and of streams.

mod iwarp;
mod reuse;
mod shared_completions;
mod silent_peer;
mod stopped_driver;
mod streams;
mod unaccepted;
mod unconfirmed;
mod waiting;
mod withdrawn;
