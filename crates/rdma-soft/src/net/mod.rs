//! What carries packets between devices: memory of this process, with faults and a clock of its own, or UDP.

pub(crate) mod faults;
pub(crate) mod network;
pub(crate) mod udp;

pub use self::faults::{Faults, LinkCounters};
pub use self::network::{DeviceControl, Network};
pub use self::udp::interface::interface_at;
pub use self::udp::{UdpConfig, UdpError};
