//! Queries for the queue pair that serves datagrams.

use rdma_provider::cm_contract::{MAX_FOUND_DATA, MAX_QUERY_DATA};
use rdma_provider::types::{Qkey, RejectReason};

use super::super::limits::MAX_HALF_OPEN_PER_PEER;
use super::super::message::{Private, SidrReq, SidrStatus};
use super::*;

const BACKLOG: u32 = 4;

fn to(host: u8, port: u16) -> Destination {
    Destination {
        gid: B,
        local: address(1, 40_000),
        peer: address(host, port),
        mtu: Mtu::Mtu4096,
        pkey: 0xffff,
    }
}

fn pair() -> Pair {
    let mut pair = Pair::new();
    pair.b.stop_listening(LISTENER);
    pair.b.serve(LISTENER, address(2, PORT), BACKLOG);
    pair
}

fn query(pair: &mut Pair, data: &[u8]) -> CommId {
    pair.a.query(pair.now, to(2, PORT), &params(0, data)).unwrap()
}

fn nothing_left(pair: &mut Pair) {
    for machine in [&mut pair.a, &mut pair.b] {
        assert_eq!((machine.sidr.sizes(), machine.half_open.total()), ([0; 4], 0));
        assert_eq!(machine.deadline(), None);
        let out = Out::of(machine);
        assert!(out.sent.is_empty() && out.events.is_empty() && out.requests.is_empty());
    }
}

#[test]
fn query_is_answered_with_the_queue_pair_of_the_service() {
    let mut pair = pair();
    let (question, answer) = ([7; MAX_QUERY_DATA], [9; MAX_FOUND_DATA]);
    let ours = query(&mut pair, &question);
    let sent = pair.deliver_to_b().sent;
    let Message::SidrReq(request) = &sent[0].1.message else { panic!("{sent:?}") };
    assert_eq!((request.service, request.pkey), (0x0111_0000 | u64::from(PORT), 0xffff));
    assert_eq!(request.addresses, Some((address(1, 40_000), address(2, 0).ip())));
    let theirs = Out::of(&mut pair.b).requests[0];
    let path = pair.b.request_path(theirs).unwrap();
    assert_eq!(path, ((address(2, PORT), address(1, 40_000)), (A, Mtu::Mtu4096)));
    pair.b.answer_query(theirs, (Qpn(0x1234), Qkey(5)), &answer).unwrap();
    pair.deliver_to_a();
    let events = Out::of(&mut pair.a).events;
    let private_data = answer.to_vec();
    let found = Event::ServiceFound { peer: B, qpn: Qpn(0x1234), qkey: Qkey(5), private_data };
    assert_eq!(events, [(ours, found)]);
    assert!(pair.b.answer_query(theirs, (Qpn(0x1234), Qkey(5)), &answer).is_err(), "once");
    nothing_left(&mut pair);
}

#[test]
fn query_for_another_port_or_host_is_refused() {
    let mut pair = pair();
    for (host, port) in [(2, PORT + 1), (3, PORT)] {
        let ours = pair.a.query(pair.now, to(host, port), &params(0, b"")).unwrap();
        pair.deliver_to_b();
        pair.deliver_to_a();
        let refused = Event::Rejected(RejectReason::INVALID_SERVICE_ID, Vec::new());
        assert_eq!(Out::of(&mut pair.a).events, [(ours, refused)]);
    }
    // A listener for connections serves no datagrams.
    pair.b.stop_listening(LISTENER);
    pair.b.listen(LISTENER, address(2, PORT), 4);
    query(&mut pair, b"");
    pair.deliver_to_b();
    pair.deliver_to_a();
    assert_eq!(Out::of(&mut pair.a).names(), ["rejected"]);
    nothing_left(&mut pair);
}

#[test]
fn lost_request_and_lost_answer_are_repeated() {
    let mut pair = pair();
    let ours = query(&mut pair, b"");
    // Lost.
    Out::of(&mut pair.a);
    pair.next_deadline();
    pair.deliver_to_b();
    let theirs = Out::of(&mut pair.b).requests[0];
    // A duplicate while the program decides is ignored.
    pair.next_deadline();
    pair.deliver_to_b();
    let out = Out::of(&mut pair.b);
    assert!(out.requests.is_empty() && out.sent.is_empty());
    pair.b.answer_query(theirs, (Qpn(9), Qkey(5)), b"").unwrap();
    // Lost.
    Out::of(&mut pair.b);
    pair.next_deadline();
    pair.deliver_to_b();
    let again = Out::of(&mut pair.b).requests[0];
    pair.b.answer_query(again, (Qpn(9), Qkey(5)), b"").unwrap();
    pair.deliver_to_a();
    let events = Out::of(&mut pair.a).events;
    assert!(matches!(events[..], [(id, Event::ServiceFound { .. })] if id == ours), "{events:?}");
    nothing_left(&mut pair);
}

#[test]
fn unanswered_query_ends_at_its_time_limit() {
    let mut pair = pair();
    let ours = query(&mut pair, b"");
    let mut transmissions = Out::of(&mut pair.a).sent.len();
    while pair.next_deadline() {
        let out = Out::of(&mut pair.a);
        transmissions += out.sent.len();
        if let [(id, event)] = &out.events[..] {
            assert_eq!((*id, event), (ours, &Event::Unreachable));
        }
    }
    let patience = u64::try_from(PATIENCE.as_nanos()).unwrap();
    assert_eq!(pair.now, 1_000 + patience);
    assert!((4..10).contains(&transmissions), "{transmissions}");
    nothing_left(&mut pair);
}

#[test]
fn dropped_ids_refuse_requests_and_withdraw_queries() {
    let mut pair = pair();
    let ours = query(&mut pair, b"");
    pair.deliver_to_b();
    let theirs = Out::of(&mut pair.b).requests[0];
    pair.b.release(pair.now, theirs);
    pair.deliver_to_a();
    let refused = Event::Rejected(RejectReason::CONSUMER, Vec::new());
    assert_eq!(Out::of(&mut pair.a).events, [(ours, refused)]);
    let ours = query(&mut pair, b"");
    pair.deliver_to_b();
    pair.a.release(pair.now, ours);
    let theirs = Out::of(&mut pair.b).requests[0];
    pair.b.answer_query(theirs, (Qpn(9), Qkey(5)), b"").unwrap();
    pair.deliver_to_a();
    nothing_left(&mut pair);
}

#[test]
fn answers_of_others_and_of_invalid_queue_pairs_find_no_service() {
    let mut pair = pair();
    let ours = query(&mut pair, b"");
    let transaction = pair.deliver_to_b().sent[0].1.transaction;
    let theirs = Out::of(&mut pair.b).requests[0];
    pair.b.answer_query(theirs, (Qpn(9), Qkey(5)), b"").unwrap();
    let (_, good) = Out::of(&mut pair.b).sent.remove(0);
    let changed = |change: fn(&mut super::super::message::SidrRep), transaction| {
        let Message::SidrRep(mut rep) = good.message.clone() else { panic!() };
        change(&mut rep);
        Mad { transaction, message: Message::SidrRep(rep) }
    };
    for (from, mad) in [
        (A, good.clone()),
        (B, changed(|_| {}, transaction + 1)),
        (B, changed(|rep| rep.request_id ^= 1, transaction)),
    ] {
        pair.a.on_message(pair.now, from, mad, psn);
        assert!(Out::of(&mut pair.a).events.is_empty());
    }
    pair.a.on_message(pair.now, B, changed(|rep| rep.qpn = Qpn(1), transaction), psn);
    let refused = Event::Rejected(RejectReason::NO_QP, Vec::new());
    assert_eq!(Out::of(&mut pair.a).events, [(ours, refused)]);
    for (status, reason) in [(3, RejectReason::NO_QP), (77, RejectReason::UNSUPPORTED)] {
        let ours = query(&mut pair, b"");
        let transaction = Out::of(&mut pair.a).sent[0].1.transaction;
        let mut mad = changed(|_| {}, transaction);
        if let Message::SidrRep(rep) = &mut mad.message {
            (rep.request_id, rep.status) = (ours, SidrStatus(status));
        }
        pair.a.on_message(pair.now, B, mad, psn);
        let refused = Event::Rejected(reason, Vec::new());
        assert_eq!(Out::of(&mut pair.a).events, [(ours, refused)]);
    }
}

#[test]
fn flood_of_requests_is_bounded_by_the_backlog_and_for_each_peer() {
    let flood = |pair: &mut Pair, from: Gid, count: u32| {
        for request_id in 1..=count {
            let request = SidrReq {
                request_id,
                pkey: 0xffff,
                service: 0x0111_0000 | u64::from(PORT),
                addresses: Some((address(1, 9), address(2, 0).ip())),
                private_data: Private::empty(),
            };
            let message = Message::SidrReq(Box::new(request));
            pair.b.on_message(pair.now, from, Mad { transaction: 1, message }, psn);
        }
        Out::of(&mut pair.b).requests
    };
    let mut few = pair();
    let requests = flood(&mut few, A, 100);
    assert_eq!(requests.len() as u32, BACKLOG);
    few.b.release(few.now, requests[0]);
    Out::of(&mut few.b);
    assert_eq!(flood(&mut few, A, 100).len(), 1);

    let mut many = Pair::new();
    many.b.stop_listening(LISTENER);
    many.b.serve(LISTENER, address(2, PORT), u32::MAX);
    let requests = flood(&mut many, A, 10_000);
    assert_eq!(requests.len() as u32, MAX_HALF_OPEN_PER_PEER);
    assert_eq!(flood(&mut many, B, 1).len(), 1, "other peers are served");
    many.b.stop_listening(LISTENER);
    requests.into_iter().for_each(|id| many.b.release(many.now, id));
    assert_eq!(many.b.half_open.total(), 1);
}
