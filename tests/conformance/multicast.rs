//! Datagrams to multicast groups.

use std::net::Ipv4Addr;

use tokio_rdma::error::SetupError;
use tokio_rdma::types::{AddressVector, Gid, Qkey, QpState, Qpn, Transport, WcFlags, WcStatus};
use tokio_rdma::verbs::Qp;

use crate::common::raw::{End, Options, QKEY, address_of, connected, outcome, settle};
use crate::common::{Memory, Setup, hardware, skip};

/// Returns a group that no other network uses: the address of a device of the test, which is
/// unique, in 239.0.0.0/8.
fn group_of(setup: &Setup) -> Gid {
    let Gid([.., b, c, d]) = address_of(&setup.a).dgid;
    Ipv4Addr::new(239, b, c, d).into()
}

fn ready(setup: &Setup, options: &Options) -> End {
    let end = End::new(&setup.b, options);
    end.init(options);
    end.qp.modify(&tokio_rdma::types::QpAttr::to_state(QpState::Rtr)).unwrap();
    end
}

/// Skips tests on devices that need more than the attachment of a queue pair.
fn is_skipped(test: &str) -> bool {
    let device = hardware();
    if let Some(name) = &device {
        skip(test, &format!("{name} needs a join by the connection manager"));
    }
    device.is_some()
}

#[test]
fn group_delivers_a_copy_to_each_attached_queue_pair() {
    if is_skipped("group_delivers_a_copy_to_each_attached_queue_pair") {
        return;
    }
    let options = Options::of(Transport::Ud);
    let (sender, first, setup) = connected(&options);
    let (second, other) = (ready(&setup, &options), ready(&setup, &options));
    let group = group_of(&setup);
    let to = AddressVector { dgid: group, ..address_of(&setup.a) };
    let from = Memory::patterned(&sender.pd, 8, 3);
    let receivers = [&first, &second, &other];
    let memory = receivers.map(|end| end.memory(64));
    let post = |id| {
        for (end, memory) in receivers.iter().zip(&memory) {
            end.recv(id, &[memory.sge(0, 64)]).unwrap();
        }
    };
    let send = |qpn, qkey| {
        sender.send_at(1, &to, qpn, qkey, &[from.sge(0, 8)]).unwrap();
        assert_eq!(outcome(&sender.sent(1)), [(1, WcStatus::SUCCESS)]);
        settle(&sender.device, &first.device);
    };
    let arrived = || receivers.map(|end| outcome(&end.received_now()).len());

    // Twice is once.
    for end in [&first, &first, &second] {
        end.qp.attach_multicast(group, 0).unwrap();
    }
    post(1);
    send(Qpn::MULTICAST, QKEY);
    for (end, memory) in receivers.iter().zip(&memory).take(2) {
        let received = end.received(1)[0];
        assert_eq!((received.status, received.byte_len), (WcStatus::SUCCESS, 48));
        assert_eq!((received.src_qpn, received.flags), (sender.qp.qpn(), WcFlags::GRH));
        assert_eq!(memory.bytes(40, 8), from.all());
        assert_eq!(memory.bytes(36, 4), group.0[12..], "the destination");
    }
    assert_eq!(arrived(), [0, 0, 0]);

    post(2);
    send(Qpn::MULTICAST, Qkey(QKEY.0 + 1));
    send(first.qp.qpn(), QKEY);
    assert_eq!(arrived(), [0, 0, 0]);
    // To the multicast number, but not to a group.
    sender.send_to(1, &first, Qpn::MULTICAST, QKEY, &[]).unwrap();
    sender.sent(1);
    settle(&sender.device, &first.device);
    assert_eq!(arrived(), [0, 0, 0]);

    first.qp.detach_multicast(group, 0).unwrap();
    send(Qpn::MULTICAST, QKEY);
    assert_eq!(outcome(&second.received(1)), [(2, WcStatus::SUCCESS)]);
    assert_eq!(arrived(), [0, 0, 0]);
    second.qp.detach_multicast(group, 0).unwrap();
    send(Qpn::MULTICAST, QKEY);
    assert_eq!(arrived(), [0, 0, 0]);
    other.qp.attach_multicast(group, 0).unwrap();
    send(Qpn::MULTICAST, QKEY);
    assert_eq!(outcome(&other.received(1)), [(1, WcStatus::SUCCESS)]);
    assert_eq!(arrived(), [0, 0, 0]);
}

#[test]
fn attached_sender_receives_its_own_datagrams() {
    if is_skipped("attached_sender_receives_its_own_datagrams") {
        return;
    }
    let (sender, peer, setup) = connected(&Options::of(Transport::Ud));
    let group = group_of(&setup);
    let to = AddressVector { dgid: group, ..address_of(&setup.a) };
    for end in [&sender, &peer] {
        end.qp.attach_multicast(group, 0).unwrap();
        end.recv(7, &[end.scratch.sge(0, 64)]).unwrap();
    }
    sender.send_at(1, &to, Qpn::MULTICAST, QKEY, &[]).unwrap();
    for end in [&sender, &peer] {
        assert_eq!(outcome(&end.received(1)), [(7, WcStatus::SUCCESS)]);
    }
}

#[test]
fn destroyed_queue_pair_leaves_its_groups() {
    if is_skipped("destroyed_queue_pair_leaves_its_groups") {
        return;
    }
    let options = Options::of(Transport::Ud);
    let (sender, peer, setup) = connected(&options);
    let group = group_of(&setup);
    let to = AddressVector { dgid: group, ..address_of(&setup.a) };
    let destroyed = ready(&setup, &options);
    let End { qp, .. } = destroyed;
    qp.attach_multicast(group, 0).unwrap();
    qp.destroy().unwrap();
    sender.send_at(1, &to, Qpn::MULTICAST, QKEY, &[]).unwrap();
    assert_eq!(outcome(&sender.sent(1)), [(1, WcStatus::SUCCESS)]);
    peer.qp.attach_multicast(group, 0).unwrap();
    peer.recv(7, &[peer.scratch.sge(0, 64)]).unwrap();
    sender.send_at(2, &to, Qpn::MULTICAST, QKEY, &[]).unwrap();
    assert_eq!(outcome(&peer.received(1)), [(7, WcStatus::SUCCESS)]);
}

#[test]
fn attachment_without_a_group_or_to_another_transport_is_refused() {
    let options = Options::of(Transport::Ud);
    let (a, b, setup) = connected(&options);
    let group = group_of(&setup);
    let unicast = address_of(&setup.b).dgid;
    let refused = a.qp.attach_multicast(unicast, 0);
    assert_eq!(refused, Err(SetupError::NotMulticast { group: unicast }));
    let reliable = End::new(&setup.a, &Options::default());
    for call in [Qp::attach_multicast, Qp::detach_multicast] {
        assert!(matches!(call(&reliable.qp, group, 0), Err(SetupError::Mismatch { .. })));
    }
    assert!(matches!(b.qp.detach_multicast(group, 0), Err(SetupError::Verb(_))));
}

#[test]
fn group_beyond_the_limits_of_the_device_is_refused() {
    if is_skipped("group_beyond_the_limits_of_the_device_is_refused") {
        return;
    }
    let options = Options::of(Transport::Ud);
    let (a, _, setup) = connected(&options);
    let attr = setup.a.attr();
    let group = group_of(&setup);
    let nth = |index: u32| {
        let mut group = group;
        group.0[13] ^= 0x80 | index as u8;
        group
    };
    for index in 0..attr.max_mcast_grp {
        a.qp.attach_multicast(nth(index), 0).unwrap();
    }
    let expected = SetupError::GroupsFull {
        qpn: a.qp.qpn(),
        group,
        groups: attr.max_mcast_grp,
        queue_pairs: attr.max_mcast_qp_attach,
    };
    assert_eq!(a.qp.attach_multicast(group, 0), Err(expected));
    a.qp.attach_multicast(nth(0), 0).unwrap();
    let pairs: Vec<_> =
        (1..attr.max_mcast_qp_attach).map(|_| End::new(&setup.a, &options)).collect();
    pairs.iter().for_each(|end| end.qp.attach_multicast(nth(0), 0).unwrap());
    let more = End::new(&setup.a, &options);
    let refused = more.qp.attach_multicast(nth(0), 0);
    assert!(matches!(refused, Err(SetupError::GroupsFull { .. })), "{refused:?}");
    drop(pairs);
    more.qp.attach_multicast(nth(0), 0).unwrap();
    a.qp.detach_multicast(nth(1), 0).unwrap();
    a.qp.attach_multicast(group, 0).unwrap();
}
