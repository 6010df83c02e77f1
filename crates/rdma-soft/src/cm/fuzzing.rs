//! The fuzz target: bytes that arrive at queue pair 1, and invariants of the reaction.

use rdma_provider::types::{Gid, Mtu, Psn, Qpn};

use super::machine::{Machine, Numbers, Output};
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
    for (now, bytes) in bytes.chunks(256).enumerate() {
        let now = now as u64 * 1_000_000;
        match Mad::decode(bytes) {
            Ok(mut mad) => {
                assert_eq!(Mad::decode(&mad.encode()).as_ref(), Ok(&mad));
                // Random GIDs would be refused before most of the code is reached.
                if let Message::Req(req) = &mut mad.message {
                    (req.local_gid, req.remote_gid) = (peer, ours);
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
    }
}
