//! Registered memory: who may access it, and the copies.

pub(crate) mod dma;
pub(crate) mod keys;
mod windows;

/// Page size modulo which the addresses of memory and of its registration must agree. Machines with
/// larger pages accept less.
pub(crate) const PAGE: u64 = 4096;
