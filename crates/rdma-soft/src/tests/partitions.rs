//! P_Keys of queue pairs and targets.

use rdma_provider::types::WcStatus;

use super::dc::{InitiatorEnd, Setup, TargetEnd};
use super::*;

/// Creates networks in memory and of packets, with devices whose only P_Keys are these.
fn networks(ours: u16, theirs: u16) -> [(Network, [Context; 2]); 2] {
    [Network::new(), Network::simulated(1, Faults::none())].map(|network| {
        let open = |(name, pkey)| {
            let context = network.open(name).unwrap();
            network.control(name).unwrap().set_pkeys(&[pkey]);
            context
        };
        let contexts = [("a", ours), ("b", theirs)].map(open);
        (network, contexts)
    })
}

fn violations(contexts: &[Context; 2]) -> [u32; 2] {
    [0, 1].map(|at| contexts[at].port(PortNum(1)).unwrap().bad_pkeys)
}

/// Two that communicate, and three that do not: other partitions, and limited members.
const COMMUNICATING: [(u16, u16); 2] = [(0x8001, 0x8001), (0x8001, 0x0001)];
const SEPARATE: [(u16, u16); 3] = [(0x8001, 0x8002), (0xffff, 0x8001), (0x0001, 0x0001)];

#[test]
fn reliable_requests_reach_members_of_the_partition_only() {
    let options = Options { timeout: 1, retry_count: 2, ..Options::default() };
    let sent = |(ours, theirs): (u16, u16)| {
        networks(ours, theirs).map(|(network, contexts)| {
            let (a, b) = connected(&network, &options);
            let (from, to) = (a.buffer(5000), b.buffer(5000));
            from.fill((0..5000).map(|at| at as u8));
            // One packet, and several.
            for (id, length) in [(1, 8), (2, 5000)] {
                a.send(id, SendOp::Write(to.remote(0)), &[from.sge(0, length)]).unwrap();
            }
            let statuses = outcome(&a.wait(2)).into_iter().map(|(_, status)| status);
            let arrived = to.bytes(0, 5000) == from.bytes(0, 5000);
            let empty = to.bytes(0, 5000) == [0; 5000];
            let dropped = b.qp.counters().1.dropped;
            (statuses.collect::<Vec<_>>(), arrived, empty, dropped, violations(&contexts))
        })
    };
    for pkeys in COMMUNICATING {
        for found in sent(pkeys) {
            assert_eq!(found, (vec![WcStatus::SUCCESS; 2], true, false, 0, [0, 0]), "{pkeys:?}");
        }
    }
    for pkeys in SEPARATE {
        for (statuses, _, empty, dropped, [ours, theirs]) in sent(pkeys) {
            assert_eq!(statuses, [WcStatus::RETRY_EXC_ERR, WcStatus::WR_FLUSH_ERR], "{pkeys:?}");
            assert!(empty, "{pkeys:?}");
            assert!(dropped >= 3, "the packet and two retries: {dropped}");
            assert_eq!((ours, u64::from(theirs)), (0, dropped));
        }
    }
}

#[test]
fn datagrams_reach_members_of_the_partition_only() {
    for pkeys in COMMUNICATING.iter().chain(&SEPARATE) {
        for (network, contexts) in networks(pkeys.0, pkeys.1) {
            let options = Options { transport: Transport::Ud, ..Options::default() };
            let (a, b) = connected(&network, &options);
            let (from, to) = (a.buffer(8), b.buffer(64));
            b.recv(2, &[to.sge(0, 64)]).unwrap();
            a.send_to(1, &b, b.qp.qpn(), QKEY, &[from.sge(0, 8)]).unwrap();
            assert_eq!(outcome(&a.wait(1)), [(1, WcStatus::SUCCESS)]);
            network.run_until_idle(Duration::from_secs(1));
            let arrives = COMMUNICATING.contains(pkeys);
            assert_eq!(b.poll().len(), usize::from(arrives), "{pkeys:?}");
            assert_eq!(violations(&contexts), [0, u32::from(!arrives)], "{pkeys:?}");
        }
    }
}

#[test]
fn dynamic_connections_reach_members_of_the_partition_only() {
    for pkeys in COMMUNICATING.iter().chain(&SEPARATE) {
        for (network, contexts) in networks(pkeys.0, pkeys.1) {
            let setup = Setup { timeout: 12, retries: 1, ..Setup::default() };
            let target = TargetEnd::new(&network, "b", &setup);
            let initiator = InitiatorEnd::new(&network, "a", &setup);
            let (from, to) = (initiator.buffer(8), target.buffer(8));
            let write = SendOp::Write(to.remote(0));
            initiator.send(1, write, &target.handle(), &[from.sge(0, 8)]).unwrap();
            let arrives = COMMUNICATING.contains(pkeys);
            let expected = if arrives { WcStatus::SUCCESS } else { WcStatus::RETRY_EXC_ERR };
            assert_eq!(outcome(&initiator.wait(1)), [(1, expected)], "{pkeys:?}");
            assert_eq!(violations(&contexts)[1] > 0, !arrives, "{pkeys:?}");
        }
    }
}

#[test]
fn index_of_an_empty_or_missing_entry_is_refused() {
    let network = Network::new();
    let options = Options::default();
    let end = End::new(&network, "a", &options);
    let port = || end.context.port(PortNum(1)).unwrap();
    assert_eq!((port().pkeys, end.context.pkey_table(PortNum(1)).unwrap()), (1, vec![0xffff]));
    network.control("a").unwrap().set_pkeys(&[0xffff, 0, 0x8000, 0x0007]);
    assert_eq!(port().pkeys, 4);
    assert_eq!(end.context.next_event(), Ok(Some(AsyncEvent::PkeyChange(PortNum(1)))));
    let init = |index| QpAttr {
        pkey_index: Some(index),
        port: Some(PortNum(1)),
        access: Some(Access::empty()),
        ..QpAttr::to_state(QpState::Init)
    };
    for index in [1, 2, 4, u16::MAX] {
        assert!(end.qp.modify(&init(index)).is_err(), "{index}");
    }
    end.qp.modify(&init(3)).unwrap();
    assert_eq!(end.qp.query().unwrap().1.pkey_index, Some(3));
}
