//! The fields of IP headers that a path sets.

use rdma_provider::types::AddressVector;

/// The hop limit of [`AddressVector::new`], and of Linux unless configured otherwise.
const HOP_LIMIT: u8 = 64;

/// Traffic class and hop limit of a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Marking {
    pub(crate) traffic_class: u8,
    pub(crate) hop_limit: u8,
}

impl Default for Marking {
    fn default() -> Self {
        Self { traffic_class: 0, hop_limit: HOP_LIMIT }
    }
}

impl Marking {
    pub(crate) fn of(address: &AddressVector) -> Self {
        // Programs that set only what they need leave 0, which the kernel refuses.
        let hop_limit = if address.hop_limit == 0 { HOP_LIMIT } else { address.hop_limit };
        Self { traffic_class: address.traffic_class, hop_limit }
    }
}
