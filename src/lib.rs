//! RDMA that you await.

pub mod types;

mod completion;
mod error;
mod mem;
mod op;
mod provider;
mod sync;
pub mod verbs;

pub use completion::*;
pub use error::*;
pub use mem::*;
pub use op::*;
pub use verbs::{Buf, BufMut, Pool};
