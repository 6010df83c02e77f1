//! Networks that carry packets between devices: in this process, with faults and virtual time, or
//! UDP.

pub(crate) mod faults;
mod links;
pub(crate) mod network;
pub(crate) mod node;
pub(crate) mod ports;
pub(crate) mod scheduler;
pub(crate) mod udp;

pub use self::faults::{Bottleneck, Faults, LinkCounters};
pub use self::links::LinkControl;
pub use self::network::{Alarm, Network};
pub use self::udp::interface::interface_at;
pub use self::udp::{UdpConfig, UdpError};
