//! The fields of IP headers that a path sets.

use rdma_provider::types::AddressVector;

/// Traffic class and hop limit of a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct IpFields {
    pub(crate) traffic_class: u8,
    pub(crate) hop_limit: u8,
}

impl Default for IpFields {
    fn default() -> Self {
        Self { traffic_class: 0, hop_limit: AddressVector::DEFAULT_HOP_LIMIT }
    }
}

impl IpFields {
    pub(crate) fn of(address: &AddressVector) -> Self {
        // Programs that set only what they need leave 0, which the kernel refuses.
        let hop_limit = match address.hop_limit {
            0 => AddressVector::DEFAULT_HOP_LIMIT,
            set => set,
        };
        Self { traffic_class: address.traffic_class, hop_limit }
    }
}
