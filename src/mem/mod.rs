//! `[1]` Memory a device may touch.
//!
//! [`HostMemory`] is what the crate allocates itself, [`Storage`] what users bring. [`shared`] reads and
//! writes memory that peers reach at the same time; [`RemoteRegion`] names a peer's memory.

mod host;
mod remote;
pub(crate) mod shared;
mod storage;

pub use host::HostMemory;
pub use remote::RemoteRegion;
pub use storage::Storage;
