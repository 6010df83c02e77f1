//! The fields of IP headers that a path sets.

use rdma_provider::types::{AddressVector, Gid};

/// Traffic class, hop limit and flow label of a packet. Over IPv4, the flow label is 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct IpFields {
    pub(crate) traffic_class: u8,
    pub(crate) hop_limit: u8,
    pub(crate) flow_label: u32,
}

/// The device that sent a packet, and the fields of the packet's IP header.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Origin {
    pub(crate) gid: Gid,
    pub(crate) ip_fields: IpFields,
}

impl Default for IpFields {
    fn default() -> Self {
        Self { traffic_class: 0, hop_limit: AddressVector::DEFAULT_HOP_LIMIT, flow_label: 0 }
    }
}

impl IpFields {
    /// The value of both ECN bits by which a switch reports congestion (RFC 3168).
    const CE: u8 = 3;

    /// Returns whether a switch may mark the packet.
    pub(crate) const fn is_markable(self) -> bool {
        self.traffic_class & Self::CE != 0
    }

    pub(crate) const fn is_marked(self) -> bool {
        self.traffic_class & Self::CE == Self::CE
    }

    pub(crate) const fn marked(self) -> Self {
        Self { traffic_class: self.traffic_class | Self::CE, ..self }
    }

    /// Returns the fields of packets that switches do not mark.
    pub(crate) const fn not_markable(self) -> Self {
        Self { traffic_class: self.traffic_class & !Self::CE, ..self }
    }

    pub(crate) fn of(address: &AddressVector) -> Self {
        let &AddressVector { dgid, traffic_class, flow_label, .. } = address;
        // Programs that set only what they need leave 0, which the kernel refuses.
        let hop_limit = match address.hop_limit {
            0 => AddressVector::DEFAULT_HOP_LIMIT,
            set => set,
        };
        let flow_label = if dgid.to_ip().is_ipv4() { 0 } else { flow_label & 0xf_ffff };
        Self { traffic_class, hop_limit, flow_label }
    }
}
