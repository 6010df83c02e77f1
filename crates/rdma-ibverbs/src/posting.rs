//! How the queues of a device post and poll.

use rdma_provider::types::DataPath;

use super::mlx5::direct::Device;

/// The way in which the queues of a device post and poll.
#[derive(Debug, Clone, Copy)]
pub(super) enum Posting {
    /// `ibv_post_send` and `ibv_poll_cq`.
    Chain,
    /// `ibv_wr_*`, where the driver has them, and `ibv_poll_cq`.
    Extended,
    /// By this crate.
    Direct(Device),
}

impl Posting {
    /// Returns the name that programs see.
    pub(super) fn data_path(self) -> DataPath {
        match self {
            Self::Chain => DataPath::Chain,
            Self::Extended => DataPath::Extended,
            Self::Direct(_) => DataPath::Direct,
        }
    }

    /// Returns the device if its queues post directly.
    pub(super) fn direct(self) -> Option<Device> {
        match self {
            Self::Direct(device) => Some(device),
            Self::Chain | Self::Extended => None,
        }
    }
}
