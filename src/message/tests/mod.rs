//! Tests of listeners with failing peers, and of what closed connections leave.

mod reuse;
mod silent_peer;
mod unaccepted;
mod unconfirmed;
