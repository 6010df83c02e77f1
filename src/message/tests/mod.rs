//! Tests of listeners with failing peers, and of what connections share and leave.

mod reuse;
mod shared_completions;
mod silent_peer;
mod unaccepted;
mod unconfirmed;
