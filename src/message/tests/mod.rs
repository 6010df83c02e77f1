//! Tests of listeners against peers that never become connections, and of every public error.

mod all_errors;
mod stranger;
mod unaccepted;
mod unconfirmed;
