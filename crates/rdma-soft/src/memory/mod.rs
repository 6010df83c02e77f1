//! Registered memory: who may access it, and the copies.

pub(crate) mod dma;
pub(crate) mod keys;
mod windows;
