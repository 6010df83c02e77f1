//! The scenarios, mounted by one test binary for each kind of device.

mod errors;
mod operations;
mod transitions;
