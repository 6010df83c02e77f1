//! Datagrams to multicast groups.

use std::net::Ipv4Addr;
use std::sync::atomic::{AtomicU8, Ordering};

use tokio_rdma::cm::{ConnectError, ConnectStep, MulticastGroup};
use tokio_rdma::error::SetupError;
use tokio_rdma::types::{AddressVector, Gid, Qkey, QpState, Qpn, Transport, WcFlags, WcStatus};
use tokio_rdma::verbs::Qp;

use crate::common::pair::{self, Pair, Shape};
use crate::common::raw::{End, Options, QKEY, address_of, connected, outcome, settle};
use crate::common::{
    Memory, Setup, hardware, in_every_mode, skip, skip_on_emulated_device, within,
};

/// Returns a group that no other test uses. Networks over UDP share groups, but no addresses; tests
/// on a real device share its address.
fn group_of(setup: &Setup) -> Gid {
    static TESTS: AtomicU8 = AtomicU8::new(0);
    let Gid([.., b, c, d]) = address_of(&setup.a).dgid;
    let d = if setup.is_software() { d } else { TESTS.fetch_add(1, Ordering::Relaxed) };
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
    if setup.a.attr().max_mcast_grp == 0 {
        let what = "the device lacks multicast";
        assert_eq!(a.qp.attach_multicast(group, 0), Err(SetupError::Unsupported { what }));
    }
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

in_every_mode! {
    member_receives_until_it_leaves,
    join_of_no_group_or_on_another_transport_is_refused,
}

async fn member_receives_until_it_leaves(mode: &str) {
    const TEST: &str = "member_receives_until_it_leaves";
    if skip_on_emulated_device(TEST, "its commands lack multicast") {
        return;
    }
    let pair = Pair::shaped(Setup::new(), &Shape::new(Transport::Ud, mode));
    let Pair { a, b, .. } = &pair;
    let gid = group_of(&pair.setup);
    let join = async |side: &pair::Side| side.qp.join_multicast(gid.to_ip()).await.unwrap();
    let group = within("a join", join(b)).await;
    assert_eq!((group.gid(), group.qkey()), (gid, Qkey::RDMA_UDP));
    // A route from the membership, and one from the address of the group.
    let sending = within("a join", join(a)).await;
    let of_group = sending.address_handle(&a.pd).unwrap();
    let (port, entry) = a.pd.device().default_path().unwrap();
    let made = AddressVector::new(port.port, entry.index, gid);
    let made = a.pd.address_handle(&made).unwrap();
    drop(sending);
    for route in [&of_group, &made] {
        let received = b.qp.recv(b.blank(100));
        a.qp.send_to(a.buffer(b"to all"), route, Qpn::MULTICAST, pair::QKEY).await.unwrap();
        let received = within("a datagram to the group", received).await.unwrap();
        assert_eq!(received.buffer[40..], *b"to all");
        let sender = received.sender().unwrap();
        assert_eq!((sender.qpn, sender.gid), (a.qp.qpn(), Some(a.qp.endpoint().gid)));
        assert_eq!(sender.destination, Some(gid));
        // To the sender alone.
        let answer = a.qp.recv(a.blank(100));
        let back = sender.address_handle(&b.pd).unwrap();
        b.qp.send_to(b.buffer(b"answer"), &back, sender.qpn, pair::QKEY).await.unwrap();
        assert_eq!(within("the answer", answer).await.unwrap().buffer[40..], *b"answer");
    }
    drop(group);
    assert!(matches!(b.qp.detach_multicast(gid, 0), Err(SetupError::Verb(_))), "not attached");
    let again = within("a join", join(b)).await;
    let received = b.qp.recv(b.blank(100));
    a.qp.send_to(a.buffer(b"again"), &made, Qpn::MULTICAST, pair::QKEY).await.unwrap();
    assert_eq!(within("a datagram", received).await.unwrap().buffer[40..], *b"again");
    // The queue pair leaves before its membership.
    b.qp.clone().close().await;
    drop(again);
}

async fn join_of_no_group_or_on_another_transport_is_refused(mode: &str) {
    const TEST: &str = "join_of_no_group_or_on_another_transport_is_refused";
    if skip_on_emulated_device(TEST, "it is an InfiniBand port without librdmacm") {
        return;
    }
    let pair = Pair::shaped(Setup::new(), &Shape::new(Transport::Ud, mode));
    let join = async |side: &pair::Side, group: Ipv4Addr| {
        side.qp.join_multicast(group.into()).await.map(drop).unwrap_err()
    };
    let refused = join(&pair.a, Ipv4Addr::LOCALHOST).await;
    assert_eq!(refused.step(), Some(ConnectStep::Join));
    let expected = SetupError::NotMulticast { group: Ipv4Addr::LOCALHOST.into() };
    assert!(
        matches!(&refused, ConnectError::Setup { error, .. } if **error == expected),
        "{refused}"
    );
    let other = MulticastGroup::join(
        &pair.a.qp,
        Ipv4Addr::new(239, 1, 2, 3).into(),
        ([203, 0, 113, 9], 0).into(),
    );
    let refused = other.await.map(drop).unwrap_err();
    assert!(
        matches!(refused, ConnectError::AddressNotAvailable { .. }) || hardware().is_some(),
        "{refused}"
    );
    let reliable = Pair::new(Transport::Rc, mode);
    let ConnectError::Setup { error, .. } = join(&reliable.a, Ipv4Addr::new(239, 1, 2, 3)).await
    else {
        panic!("joined by a reliable connection");
    };
    assert!(matches!(*error, SetupError::Mismatch { .. }), "{error}");
}
