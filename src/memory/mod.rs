//! Registered memory: buffers and pools for local use, and memory that peers access.

mod buf;
mod dma_buf_region;
mod exposed_region;
mod free_list;
mod gather;
mod host_memory;
mod memory_window;
mod pool;
mod read_only;
mod registration;
mod remote_region;
mod slab_index;
mod storage;
mod window_set;

pub use buf::{Buf, BufMut};
pub use dma_buf_region::DmaBufRegion;
pub use exposed_region::{ExposedRegion, ExposedSlice};
pub use gather::{Gather, Scatter};
pub(crate) use gather::{PdKey, Sealed, SgeList};
pub use host_memory::HostMemory;
pub use memory_window::MemoryWindow;
pub use pool::{Pool, PoolBuilder, PoolError};
pub(crate) use read_only::ReadOnlyRegion;
pub use remote_region::RemoteRegion;
pub use storage::Storage;
pub(crate) use window_set::{BoundWindow, WindowSet};
