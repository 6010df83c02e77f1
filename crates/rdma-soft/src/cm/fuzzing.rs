//! The fuzz target: bytes that arrive at queue pair 1, and invariants of the reaction.

use std::time::Duration;

use rdma_provider::cm_contract::CmParams;
use rdma_provider::types::{Gid, Mtu, Psn, Qpn};

use super::machine::{Destination, Machine, Numbers, Output};
use super::mad::MadError;
use super::message::{CommId, Mad, Message};

/// A source of constant numbers.
struct Numbered;

impl Numbers for Numbered {
    fn psn(&mut self) -> Option<Psn> {
        Some(Psn::new(1))
    }

    fn id(&mut self) -> Option<CommId> {
        None
    }

    fn reserve(&mut self) -> Option<Qpn> {
        Some(Qpn(0x5000))
    }
}

/// Decodes datagrams of 256 bytes and passes them to a listening machine.
///
/// Decoded messages survive encoding and decoding. Each datagram causes at most two messages (a
/// stale connection causes a REJ and a DREQ), and these decode, too.
pub fn mad(bytes: &[u8]) {
    let (ours, peer) = (Gid([1; 16]), Gid([2; 16]));
    let mut machine = Machine::new(ours, 1, Mtu::Mtu4096, 1);
    machine.listen(1, ([0, 0, 0, 0], 7).into(), 4);
    machine.serve(2, ([0, 0, 0, 0], 7).into(), 4);
    let (local, service) = (([10, 0, 0, 1], 9).into(), ([10, 0, 0, 2], 7).into());
    let to = Destination { gid: peer, local, peer: service, mtu: Mtu::Mtu4096, pkey: 0xffff };
    let params = CmParams {
        qpn: Qpn(2),
        private_data: &[],
        responder_resources: 0,
        initiator_depth: 0,
        retry_count: 0,
        rnr_retry: 0,
        timeout: Duration::from_secs(1),
        srq: false,
    };
    let query = machine.query(0, to, &params).ok();
    let transaction = match machine.next_output() {
        Some(Output::Send { mad, .. }) => mad.transaction,
        _ => 0,
    };
    for (now, bytes) in bytes.chunks(256).enumerate() {
        let now = now as u64 * 1_000_000;
        match Mad::decode(bytes) {
            Ok(mut mad) => {
                assert_eq!(Mad::decode(&mad.encode()).as_ref(), Ok(&mad));
                // Random GIDs would be refused before most of the code is reached.
                if let Message::Req(req) = &mut mad.message {
                    (req.local_gid, req.remote_gid) = (peer, ours);
                }
                if let (Message::SidrRep(rep), Some(query)) = (&mut mad.message, query) {
                    (rep.request_id, mad.transaction) = (query, transaction);
                }
                machine.on_message(now, peer, mad, Numbered);
            }
            Err(MadError::Request { transaction, remote_id, reason }) => {
                machine.reject_unacceptable(now, peer, transaction, remote_id, reason);
            }
            Err(_) => {}
        }
        let mut answers = 0;
        while let Some(output) = machine.next_output() {
            if let Output::Send { to, mad } = output {
                assert_eq!(to, peer);
                assert_eq!(Mad::decode(&mad.encode()).as_ref(), Ok(&mad));
                answers += 1;
            }
        }
        assert!(answers <= 2, "{answers}");
        machine.on_timer(now);
        // The query may be repeated.
        while machine.next_output().is_some() {}
    }
}
