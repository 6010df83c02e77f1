//! How one queue pair uses the queues of an mlx5 adapter.

/// What a queue pair uses of the direct data path of an mlx5 adapter, within what libmlx5's
/// environment variables permit the process: `MLX5_SCATTER_TO_CQE` and `MLX5_SHUT_UP_BF`.
///
/// Devices whose [`DataPath`](super::DataPath) is not `Direct` take the default only.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct DirectConfig {
    /// Which short data the adapter puts into completion queue entries instead of buffers. On
    /// devices with [`DeviceAttr::dma_buf`](super::DeviceAttr::dma_buf) it is none, because their
    /// buffers may not be addresses of this process, and `All` is refused.
    pub scatter_to_cqe: ScatterToCqe,
    /// Short posts are copied to the adapter's register (BlueFlame), which saves it a read of host
    /// memory. True by default.
    pub blue_flame: bool,
}

impl DirectConfig {
    /// The default, also available as `Default::default()`.
    pub const DEFAULT: Self = Self { scatter_to_cqe: ScatterToCqe::Receives, blue_flame: true };

    /// Sets [`scatter_to_cqe`](Self::scatter_to_cqe).
    #[must_use]
    pub const fn scatter_to_cqe(mut self, scatter: ScatterToCqe) -> Self {
        self.scatter_to_cqe = scatter;
        self
    }

    /// Sets [`blue_flame`](Self::blue_flame).
    #[must_use]
    pub const fn blue_flame(mut self, enabled: bool) -> Self {
        self.blue_flame = enabled;
        self
    }
}

impl Default for DirectConfig {
    fn default() -> Self {
        Self::DEFAULT
    }
}

/// Which short data the adapter puts into the completion queue entry, from which the processor
/// copies it: up to 32 bytes, or 64 with `MLX5_CQE_SIZE=128`. This saves one write over PCIe.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ScatterToCqe {
    /// None (`MLX5DV_QP_CREATE_DISABLE_SCATTER_TO_CQE`).
    Off,
    /// Received messages. The default.
    Receives,
    /// Received messages, and the results of READs and atomics
    /// (`MLX5DV_QP_CREATE_ALLOW_SCATTER_TO_CQE`).
    All,
}
