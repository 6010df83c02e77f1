//! ConnectX adapters: dynamically connected transport, with feature `mlx5`.

pub(super) mod dc;
