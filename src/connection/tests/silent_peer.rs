//! A peer that only has a connection manager, for tests of listeners.

use std::net::SocketAddr;
use std::time::Instant;

use rdma_provider::cm_contract::{CmChannel as _, CmEventKind, CmId as _, CmParams};
use rdma_provider::contract::Context as _;
use rdma_provider::types::Qpn;

use crate::connection::Handshake;
use crate::contained::tests::HANG;
use crate::software::Network;

/// A peer that requests connections and never confirms one.
#[derive(Debug)]
pub(super) struct SilentPeer {
    requests: Vec<rdma_soft::CmId>,
    // Dropped after its ids; the context is dropped last.
    channel: rdma_soft::CmChannel,
    _context: rdma_soft::Context,
}

impl SilentPeer {
    pub(super) fn new(network: &Network, name: &str) -> Self {
        let context = network.open(name).unwrap();
        Self {
            channel: context.create_cm_channel().unwrap(),
            requests: Vec::new(),
            _context: context,
        }
    }

    pub(super) fn request(&mut self, to: SocketAddr) {
        let id = self.channel.create_id().unwrap();
        id.resolve_addr(None, to, HANG).unwrap();
        self.wait(|kind| matches!(kind, CmEventKind::AddressResolved));
        id.resolve_route(HANG).unwrap();
        self.wait(|kind| matches!(kind, CmEventKind::RouteResolved));
        let hello =
            Handshake { buffer_size: 8192, receives: 68, max_message: 1 << 20, grows: false }
                .encode(b"")
                .unwrap();
        let params = CmParams {
            qpn: Qpn(0x100 + self.requests.len() as u32),
            private_data: &hello,
            responder_resources: 4,
            initiator_depth: 4,
            retry_count: 7,
            rnr_retry: 7,
            timeout: HANG,
            srq: false,
        };
        id.connect(&params).unwrap();
        self.requests.push(id);
    }

    /// Waits for an event of this kind. Drops events of earlier requests, which are never
    /// confirmed.
    fn wait(&self, is: impl Fn(&CmEventKind<rdma_soft::Soft>) -> bool) {
        let start = Instant::now();
        while !self.channel.take_event().unwrap().is_some_and(|event| is(&event.kind)) {
            assert!(start.elapsed() < HANG, "timed out");
            std::thread::yield_now();
        }
    }
}
