//! ConnectX adapters: dynamically connected transport and the direct data path.
//!
//! Both need feature `mlx5`; without it, devices report neither.

pub(super) mod dc;
pub(super) mod dc_attributes;
pub mod direct;
