//! The objects of the [contract](rdma_provider::contract): each owns an object of a device, and
//! destroys it when it is dropped.

mod context;
mod cq;
mod dct;
mod qp;
mod srq;

pub use context::{Ah, Context, Mr, Mw, Pd};
pub use cq::Cq;
pub use dct::Dct;
pub use qp::Qp;
pub use srq::Srq;
