//! What a fuzzer feeds: bytes that arrive at queue pair 1, with what must hold whatever they are.

use rdma_provider::types::{Gid, Mtu, Psn, Qpn};

use super::machine::{Machine, Numbers, Output};
use super::mad::MadError;
use super::message::{CommId, Mad, Message};

/// The same numbers each time.
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

/// Datagrams of 256 bytes, each as it is, and as a manager that listens takes it. What is a message encodes to the same
/// one; each is answered by two at most (a stale connection is refused, and ended), in what decodes again.
pub fn mad(bytes: &[u8]) {
    let (ours, peer) = (Gid([1; 16]), Gid([2; 16]));
    let mut machine = Machine::new(ours, 1, Mtu::Mtu4096, 1);
    machine.listen(1, ([0, 0, 0, 0], 7).into(), 4);
    for (now, bytes) in bytes.chunks(256).enumerate() {
        let now = now as u64 * 1_000_000;
        match Mad::decode(bytes) {
            Ok(mut mad) => {
                assert_eq!(Mad::decode(&mad.encode()).as_ref(), Ok(&mad));
                // Most would fail at what the network knows.
                if let Message::Req(req) = &mut mad.message {
                    (req.local_gid, req.remote_gid) = (peer, ours);
                }
                machine.on_message(now, peer, mad, Numbered);
            }
            Err(MadError::Request { transaction, remote_id, reason }) => {
                machine.refuse_unseen(now, peer, transaction, remote_id, reason);
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
