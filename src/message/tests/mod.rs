//! Tests of listeners with failing peers, of drivers that do not run, and of what connections share
//! and leave.

mod reuse;
mod shared_completions;
mod silent_peer;
mod stopped_driver;
mod unaccepted;
mod unconfirmed;
mod waiting;
mod withdrawn;
