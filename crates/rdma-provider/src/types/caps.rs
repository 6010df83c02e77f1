//! Limits and state of devices, ports and queue pairs.

use std::fmt;

use super::{GidEntry, LinkLayer, Mtu, PortNum};

/// Limits and identity of a device, `ibv_query_device(3)`.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct DeviceAttr {
    /// Name listed by `ibv_devices(1)`, for example `mlx5_0`; software devices have names like
    /// `soft0`.
    pub name: String,
    /// Node GUID.
    pub guid: u64,
    /// Vendor ID, an IEEE OUI; 0 for the software device.
    pub vendor_id: u32,
    /// Vendor's part ID, usually the PCI device ID.
    pub vendor_part_id: u32,
    /// Version of the firmware, or of the software device.
    pub firmware: String,
    /// Number of ports, which count from 1.
    pub ports: u8,
    /// Maximum queue pairs.
    pub max_qp: u32,
    /// Maximum work requests of a send or receive queue.
    pub max_qp_wr: u32,
    /// Maximum scatter/gather elements of a work request.
    pub max_sge: u32,
    /// Maximum scatter elements of a READ: 1 with iWARP.
    pub max_read_sge: u32,
    /// Maximum inline bytes of a send.
    pub max_inline: u32,
    /// Maximum completion queues.
    pub max_cq: u32,
    /// Maximum completions in a completion queue.
    pub max_cqe: u32,
    /// Maximum registrations.
    pub max_mr: u32,
    /// Maximum bytes of a registration.
    pub max_mr_size: u64,
    /// Maximum memory windows of type 2; 0 if unsupported.
    pub max_mw: u32,
    /// Maximum protection domains.
    pub max_pd: u32,
    /// Maximum READs and atomics that a queue pair serves at once.
    pub max_qp_rd_atom: u8,
    /// Maximum READs and atomics that a queue pair issues at once.
    pub max_qp_init_rd_atom: u8,
    /// Maximum shared receive queues; 0 if unsupported.
    pub max_srq: u32,
    /// Maximum work requests of a shared receive queue.
    pub max_srq_wr: u32,
    /// Maximum scatter/gather elements of a shared receive.
    pub max_srq_sge: u32,
    /// Maximum multicast groups with attached queue pairs; 0 if multicast is unsupported.
    pub max_mcast_grp: u32,
    /// Maximum queue pairs attached to one multicast group.
    pub max_mcast_qp_attach: u32,
    /// Completion vectors, across which completion queues can be spread.
    pub completion_vectors: u32,
    /// Protocol of the device. An iWARP device connects queue pairs only by its connection manager
    /// and has only the transport RC.
    pub protocol: WireProtocol,
    /// True if SENDs and WRITEs can carry immediate data.
    pub immediate: bool,
    /// True if memory can be registered at other addresses than its own. Otherwise the device
    /// ignores the `iova` of `ibv_reg_mr_iova(3)`.
    pub iova: bool,
    /// Scope of atomic operations.
    pub atomic: AtomicCapability,
    /// True if memory can be registered unpinned (`IBV_ODP_SUPPORT`).
    pub on_demand_paging: bool,
    /// True if dma-buf memory can be registered; probed on opening. The device may still refuse the
    /// memory of an exporter.
    pub dma_buf: bool,
    /// True if the device itself places all payload, by keys. The libraries of other devices copy
    /// short payload to the address in the list, which must then be that of the memory: a region
    /// with other addresses is for peers only, and not local memory of operations.
    pub places_by_key: bool,
    /// Dynamically connected transport; `None` if unsupported or built without feature `mlx5`.
    pub dc: Option<DcAttr>,
    /// The clock that stamps completions; `None` if completions carry no timestamps.
    pub clock: Option<ClockAttr>,
    /// The code that posts work requests and polls completions.
    pub data_path: DataPath,
}

impl DeviceAttr {
    /// Returns true for an iWARP device.
    #[must_use]
    pub fn is_iwarp(&self) -> bool {
        self.protocol == WireProtocol::Iwarp
    }

    /// Creates attributes with one port, one completion vector and all limits zero.
    pub fn named(name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            guid: 0,
            vendor_id: 0,
            vendor_part_id: 0,
            firmware: String::new(),
            ports: 1,
            max_qp: 0,
            max_qp_wr: 0,
            max_sge: 0,
            max_read_sge: 0,
            max_inline: 0,
            max_cq: 0,
            max_cqe: 0,
            max_mr: 0,
            max_mr_size: 0,
            max_mw: 0,
            max_pd: 0,
            max_qp_rd_atom: 0,
            max_qp_init_rd_atom: 0,
            max_srq: 0,
            max_srq_wr: 0,
            max_srq_sge: 0,
            max_mcast_grp: 0,
            max_mcast_qp_attach: 0,
            completion_vectors: 1,
            protocol: WireProtocol::InfiniBand,
            immediate: true,
            iova: true,
            atomic: AtomicCapability::None,
            on_demand_paging: false,
            dma_buf: false,
            places_by_key: false,
            dc: None,
            clock: None,
            data_path: DataPath::Software,
        }
    }
}

/// The protocol of a device, `transport_type` of `struct ibv_device`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum WireProtocol {
    /// InfiniBand or RoCE, which [`PortAttr::link_layer`] tells apart.
    InfiniBand,
    /// iWARP: RDMA over TCP connections (RFC 5040 to 5044).
    Iwarp,
}

impl fmt::Display for WireProtocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::InfiniBand => "InfiniBand or RoCE",
            Self::Iwarp => "iWARP",
        })
    }
}

/// The code that posts work requests and polls completions of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DataPath {
    /// The software device.
    Software,
    /// `ibv_post_send(3)` and `ibv_poll_cq(3)`.
    Chain,
    /// `ibv_wr_*` (`ibv_wr_post(3)`) where the driver has them, and `ibv_poll_cq(3)`.
    Extended,
    /// This crate writes and reads the queues of the adapter itself.
    Direct,
}

impl fmt::Display for DataPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Software => "software device",
            Self::Chain => "libibverbs (ibv_post_send)",
            Self::Extended => "libibverbs (ibv_wr_post)",
            Self::Direct => "direct, without libibverbs",
        })
    }
}

/// DC limits of a device, `mlx5dv_query_device(3)`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct DcAttr {
    /// Maximum READs and atomics that a target serves at once per initiator: `max_dc_rd_atom`.
    pub max_rd_atomic: u8,
    /// Maximum READs and atomics that an initiator issues at once: `max_dc_init_rd_atom`.
    pub max_init_rd_atomic: u8,
}

impl DcAttr {
    /// Creates DC limits.
    #[must_use]
    pub const fn new(max_rd_atomic: u8, max_init_rd_atomic: u8) -> Self {
        Self { max_rd_atomic, max_init_rd_atomic }
    }
}

/// The clock of a device, `ibv_query_device_ex(3)`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct ClockAttr {
    /// Nominal frequency in kilohertz, `hca_core_clock`; not 0.
    pub khz: u64,
    /// The bits of a [`Timestamp`](super::Timestamp), `completion_timestamp_mask`: the low bits,
    /// which wrap around. Not 0.
    pub mask: u64,
}

impl ClockAttr {
    /// Returns the attributes of a clock; `None` if either is 0, which means that there is no
    /// clock.
    #[must_use]
    pub const fn new(khz: u64, mask: u64) -> Option<Self> {
        if khz == 0 || mask == 0 { None } else { Some(Self { khz, mask }) }
    }
}

/// The scope of a device's atomic operations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum AtomicCapability {
    /// Atomics are unsupported.
    None,
    /// Operations are atomic with respect to the same device.
    Device,
    /// Operations are atomic with respect to all accesses, including the processor's.
    Global,
}

/// State and limits of a port, `ibv_query_port(3)`.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct PortAttr {
    /// Port number.
    pub port: PortNum,
    /// Link state.
    pub state: PortState,
    /// Physical state of the link.
    pub physical_state: PhysicalState,
    /// Lanes of the link in use (`active_width`); 0 if unknown.
    pub lanes: u8,
    /// Nominal rate of a lane in megabits per second (`active_speed`); 0 if unknown. 14,000 for
    /// FDR, 100,000 for NDR and what is faster.
    pub lane_mbps: u32,
    /// Link layer of the port.
    pub link_layer: LinkLayer,
    /// Maximum MTU of the port.
    pub max_mtu: Mtu,
    /// Active MTU.
    pub active_mtu: Mtu,
    /// Maximum bytes of a message.
    pub max_msg_size: u32,
    /// Local identifier (InfiniBand); 0 on Ethernet.
    pub lid: u16,
    /// GID table without empty entries.
    pub gids: Vec<GidEntry>,
    /// Partition keys of [`Context::pkey_table`](crate::contract::Context::pkey_table).
    pub pkeys: u16,
    /// Packets that the port dropped because of their partition key, `bad_pkey_cntr` of
    /// `ibv_query_port(3)`. Some drivers always report 0, as SoftRoCE does.
    pub bad_pkeys: u32,
}

impl PortAttr {
    /// Creates attributes of an active Ethernet port with the limits of the wire format.
    pub fn ethernet(port: PortNum, gids: Vec<GidEntry>) -> Self {
        Self {
            port,
            state: PortState::Active,
            physical_state: PhysicalState::LinkUp,
            lanes: 0,
            lane_mbps: 0,
            link_layer: LinkLayer::Ethernet,
            max_mtu: Mtu::Mtu4096,
            active_mtu: Mtu::Mtu4096,
            max_msg_size: 1 << 31,
            lid: 0,
            gids,
            // RoCE has only the default partition.
            pkeys: 1,
            bad_pkeys: 0,
        }
    }

    /// Returns the nominal rate of the link in megabits per second, or `None` if it is unknown, as
    /// on the software device. SoftRoCE reports 2,500 if its interface has no speed.
    #[must_use]
    pub fn rate_mbps(&self) -> Option<u32> {
        Some(u32::from(self.lanes) * self.lane_mbps).filter(|&rate| rate > 0)
    }
}

/// Physical state of a port, `phys_state` of `ibv_query_port(3)` (IBTA 14.2.5.6).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PhysicalState {
    /// The port takes no part.
    Sleep,
    /// The port looks for a peer: typically no cable, or the other end is off.
    Polling,
    /// The port is disabled.
    Disabled,
    /// The ends agree on lanes and speed.
    Training,
    /// The link works.
    LinkUp,
    /// The link recovers from errors.
    ErrorRecovery,
    /// The link is tested.
    Test,
    /// An unknown code.
    Other(u8),
}

/// Link state of a port.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PortState {
    /// The link is down.
    Down,
    /// The link is up, but not configured.
    Initializing,
    /// The link is configured, but carries no data yet.
    Armed,
    /// The link carries data.
    Active,
    /// An unknown code.
    Other(u8),
}

/// Sizes of a queue pair; granted values may be larger than requested.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct QpCaps {
    /// Capacity of the send queue in work requests.
    pub max_send_wr: u32,
    /// Capacity of the receive queue in work requests; 0 with a shared receive queue.
    pub max_recv_wr: u32,
    /// Scatter/gather elements of a send.
    pub max_send_sge: u32,
    /// Scatter/gather elements of a receive.
    pub max_recv_sge: u32,
    /// Inline bytes of a send.
    pub max_inline: u32,
}

/// Sizes of a shared receive queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SrqCaps {
    /// Capacity in work requests.
    pub max_wr: u32,
    /// Scatter/gather elements of a receive.
    pub max_sge: u32,
}
