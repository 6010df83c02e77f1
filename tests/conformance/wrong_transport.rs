//! Packets for a queue pair of another transport, which drops them (IBTA 9.6.1.1).

use tokio_rdma::types::{QpState, SendOp, Transport, WcStatus};

use crate::common::Setup;
use crate::common::raw::{End, Options, QKEY, connect, outcome, rtr_to, settle};

/// Sends a message within a connected pair.
fn works(from: &End, to: &End) {
    to.recv(50, &[]).unwrap();
    from.send(51, SendOp::Send, &[]).unwrap();
    assert_eq!(outcome(&from.sent(1)), [(51, WcStatus::SUCCESS)]);
    assert_eq!(outcome(&to.received(1)), [(50, WcStatus::SUCCESS)]);
}

fn sends_to(end: &End, options: &Options, other: &End) {
    end.init(options);
    end.qp.modify(&rtr_to(options, other.address(), other.qp.qpn())).unwrap();
    end.rts(options);
}

#[test]
fn message_to_a_queue_pair_of_another_transport_is_dropped() {
    let setup = Setup::new();
    let all = [Transport::Rc, Transport::Uc, Transport::Ud];
    for (from, to) in all.into_iter().flat_map(|from| all.map(|to| (from, to))) {
        if from == to {
            continue;
        }
        let what = format!("{from:?} to {to:?}");
        let theirs = Options::of(to);
        let (peer, target) = (End::new(&setup.a, &theirs), End::new(&setup.b, &theirs));
        connect(&peer, &target, &theirs);
        let memory = target.memory(64);
        target.recv(1, &[memory.sge(0, 64)]).unwrap();
        let ours = Options { retry_count: 1, timeout: 4, ..Options::of(from) };
        let a = End::new(&setup.a, &ours);
        let (payload, len) = (a.memory(64), 8);
        let sges = [payload.sge(0, len)];
        let status = match from {
            Transport::Ud => {
                a.init(&ours);
                a.rtr(&ours, &target);
                a.rts(&ours);
                a.send_to(2, &target, target.qp.qpn(), QKEY, &sges).unwrap();
                WcStatus::SUCCESS
            }
            _ => {
                sends_to(&a, &ours, &target);
                a.send(2, SendOp::Send, &sges).unwrap();
                if from == Transport::Rc { WcStatus::RETRY_EXC_ERR } else { WcStatus::SUCCESS }
            }
        };
        assert_eq!(outcome(&a.sent(1)), [(2, status)], "{what}");
        settle(&setup.a, &setup.b);
        assert_eq!(outcome(&target.received(0)), [], "{what}");
        assert_eq!(target.state(), QpState::Rts, "{what}");
        assert_eq!(memory.all(), [0; 64], "{what}");
        // The receive is still there, and the queue pair works.
        if to == Transport::Ud {
            peer.send_to(3, &target, target.qp.qpn(), QKEY, &[]).unwrap();
        } else {
            peer.send(3, SendOp::Send, &[]).unwrap();
        }
        assert_eq!(outcome(&peer.sent(1)), [(3, WcStatus::SUCCESS)], "{what}");
        assert_eq!(outcome(&target.received(1)), [(1, WcStatus::SUCCESS)], "{what}");
        if to != Transport::Ud {
            works(&target, &peer);
        }
    }
}
