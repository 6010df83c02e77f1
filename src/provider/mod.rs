//! `[2]` Who executes the verbs.
//!
//! [`contract`], with [`cm_contract`] for the connection manager, says in words and signatures what the layers above rely on; [`dispatch`] is the closed
//! set of providers that keep it. Nothing above this line knows which one is at work.

pub(crate) mod cm_contract;
pub(crate) mod contract;
pub(crate) mod dispatch;
#[cfg(feature = "ibverbs")]
pub(crate) mod ibverbs;
pub(crate) mod soft;
