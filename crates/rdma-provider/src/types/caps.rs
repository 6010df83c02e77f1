//! What a device, a port and a queue pair can do: limits as the device reports them.

use super::{GidEntry, LinkLayer, Mtu, PortNum};

/// Limits and identity of a device, `ibv_query_device(3)`.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct DeviceAttr {
    /// Name as in `ibv_devices`, for example `mlx5_0`; the software device is `soft0`.
    pub name: String,
    /// Node GUID.
    pub guid: u64,
    /// Number of the vendor (an IEEE OUI: 0x02c9 is Mellanox); 0 for the software device.
    pub vendor_id: u32,
    /// The vendor's number of the part, on most the PCI device ID.
    pub vendor_part_id: u32,
    /// Version of the firmware, or of the program that the device is.
    pub firmware: String,
    /// Ports, counted from 1.
    pub ports: u8,
    /// Most queue pairs.
    pub max_qp: u32,
    /// Most work requests of a send or receive queue.
    pub max_qp_wr: u32,
    /// Most scatter/gather elements of a work request.
    pub max_sge: u32,
    /// Most inline bytes of a send.
    pub max_inline: u32,
    /// Most completion queues.
    pub max_cq: u32,
    /// Most entries of a completion queue.
    pub max_cqe: u32,
    /// Most registrations.
    pub max_mr: u32,
    /// Largest registration, bytes.
    pub max_mr_size: u64,
    /// Most memory windows of type 2; 0 means not supported.
    pub max_mw: u32,
    /// Most protection domains.
    pub max_pd: u32,
    /// Most READ and atomic requests that a queue pair serves at once.
    pub max_qp_rd_atom: u8,
    /// Most READ and atomic requests that a queue pair issues at once.
    pub max_qp_init_rd_atom: u8,
    /// Most shared receive queues; 0 means not supported.
    pub max_srq: u32,
    /// Most work requests of a shared receive queue.
    pub max_srq_wr: u32,
    /// Most scatter/gather elements of a shared receive.
    pub max_srq_sge: u32,
    /// Completion vectors, over which completion queues can be spread.
    pub completion_vectors: u32,
    /// Against whom atomics are atomic.
    pub atomic: AtomicCapability,
    /// Registrations can be made of memory that is not pinned (`IBV_ODP_SUPPORT`).
    pub on_demand_paging: bool,
    /// Registrations can be made of memory that a dma-buf names, that of other devices too. Tried when the device was
    /// opened; a device may still refuse the memory of a certain exporter.
    pub dma_buf: bool,
    /// Dynamically connected transport; `None` without it, and on real devices without feature `mlx5`.
    pub dc: Option<DcAttr>,
}

impl DeviceAttr {
    /// Attributes of a device called `name` with every limit zero, to be filled in by its provider.
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
            completion_vectors: 1,
            atomic: AtomicCapability::None,
            on_demand_paging: false,
            dma_buf: false,
            dc: None,
        }
    }
}

/// What a device can do of the dynamically connected transport, `mlx5dv_query_device(3)`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct DcAttr {
    /// Most READ and atomic requests that a target serves at once for each initiator: `max_dc_rd_atom`.
    pub max_rd_atomic: u8,
    /// Most READ and atomic requests that an initiator issues at once: `max_dc_init_rd_atom`.
    pub max_init_rd_atomic: u8,
    /// Streams of an initiator, within which order is kept and of which one may fail alone; `None` without them. This crate
    /// uses none.
    pub streams: Option<DciStreams>,
}

impl DcAttr {
    /// A device that serves and issues so many READ and atomic requests, without streams.
    #[must_use]
    pub const fn new(max_rd_atomic: u8, max_init_rd_atomic: u8) -> Self {
        Self { max_rd_atomic, max_init_rd_atomic, streams: None }
    }
}

/// Streams of a DC initiator, `struct mlx5dv_dci_streams_caps`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DciStreams {
    /// Most at once, as the exponent of a power of two.
    pub max_log_concurrent: u8,
    /// Most that may have failed before the initiator fails as a whole, as the exponent of a power of two.
    pub max_log_errored: u8,
}

/// Against whom a device's atomics are atomic.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum AtomicCapability {
    /// No atomics.
    None,
    /// Against other atomics through the same device.
    Device,
    /// Against all, the processor included.
    Global,
}

/// State and limits of a port, `ibv_query_port(3)`.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct PortAttr {
    /// Which port.
    pub port: PortNum,
    /// Link state.
    pub state: PortState,
    /// What the port is attached to.
    pub link_layer: LinkLayer,
    /// Largest MTU of the port.
    pub max_mtu: Mtu,
    /// MTU in use.
    pub active_mtu: Mtu,
    /// Largest message, bytes.
    pub max_msg_size: u32,
    /// Local identifier (InfiniBand); 0 on Ethernet.
    pub lid: u16,
    /// The GID table without its empty entries.
    pub gids: Vec<GidEntry>,
    /// Entries of the partition key table, which
    /// [`Context::pkey_table`](crate::contract::Context::pkey_table) reads.
    pub pkeys: u16,
}

impl PortAttr {
    /// An active Ethernet port with one GID, all limits those of the wire format.
    pub fn ethernet(port: PortNum, gids: Vec<GidEntry>) -> Self {
        Self {
            port,
            state: PortState::Active,
            link_layer: LinkLayer::Ethernet,
            max_mtu: Mtu::Mtu4096,
            active_mtu: Mtu::Mtu4096,
            max_msg_size: 1 << 31,
            lid: 0,
            gids,
            // The default partition: all that RoCE has.
            pkeys: 1,
        }
    }
}

/// Link state of a port.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PortState {
    /// No link.
    Down,
    /// Link without configuration.
    Initializing,
    /// Configured, not yet carrying data.
    Armed,
    /// Carries data.
    Active,
    /// A code this crate does not know.
    Other(u8),
}

/// Sizes of a queue pair: asked for at creation, granted values come back rounded up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct QpCaps {
    /// Work requests that the send queue holds.
    pub max_send_wr: u32,
    /// Work requests that the receive queue holds; 0 with a shared receive queue.
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
    /// Work requests that the queue holds.
    pub max_wr: u32,
    /// Scatter/gather elements of a receive.
    pub max_sge: u32,
}
