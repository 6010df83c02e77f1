//! Tests of retransmissions, deadlines and the lifetime of records.

use std::collections::VecDeque;

use rdma_provider::types::{AckTimeout, QpState, RejectReason};

use super::super::limits::{MAX_HALF_OPEN, MAX_HALF_OPEN_PER_PEER, SCARCE_RETRIES, SCARCE_TIMEOUT};
use super::super::machine::{
    FIRST_WAIT, LONGEST_WAIT, MAX_DREQS, MAX_RETRIES, PEER_ACK_TIMEOUT, RESPONSE_TIMEOUT, backoff,
};
use super::super::message::{About, CmTimeout, Drep, Dreq, Mra, PathFields, Private, Rej, Req};
use super::*;

fn nanoseconds(time: Duration) -> u64 {
    time.as_nanos().try_into().unwrap()
}

#[test]
fn rep_and_dreq_are_retransmitted_until_the_limit() {
    for what in ["REP", "DREQ"] {
        let mut pair = Pair::new();
        let (mut machine, id) = match what {
            "REP" => {
                pair.connect(0x100);
                pair.deliver_to_b();
                let id = pair.deliver_to_a().requests[0];
                pair.b.accept(pair.now, id, &params(0x200, b"")).unwrap();
                (pair.b, id)
            }
            _ => {
                let (id, _) = pair.established(0x100);
                pair.a.disconnect(pair.now, id).unwrap();
                (pair.a, id)
            }
        };
        let first = Out::of(&mut machine);
        assert_eq!(first.kinds(), [what]);
        let mut now = pair.now;
        let (times, wait): (_, &dyn Fn(u8) -> u64) = match what {
            "REP" => (MAX_RETRIES, &|_| RESPONSE_TIMEOUT.nanoseconds()),
            _ => (MAX_DREQS - 1, &|repeated| backoff(id, repeated)),
        };
        for repeated in 0..times {
            now += wait(repeated);
            assert_eq!(machine.deadline(), Some(now), "{what}");
            machine.on_timer(now - 1);
            assert!(Out::of(&mut machine).sent.is_empty(), "{what}");
            machine.on_timer(now);
            assert_eq!(Out::of(&mut machine).sent, first.sent, "{what}");
        }
        now += wait(times);
        assert_eq!(machine.deadline(), Some(now), "{what}");
        machine.on_timer(now);
        let last = Out::of(&mut machine);
        if what == "DREQ" {
            assert_eq!((last.kinds(), last.names()), (vec![], vec!["disconnected"]));
            assert_eq!(state(&machine, id), Some(State::TimeWait));
        } else {
            assert_eq!((last.kinds(), last.names()), (vec!["REJ"], vec!["unreachable"]));
            let Message::Rej(rej) = &last.sent[0].1.message else { panic!() };
            assert_eq!(rej.reason, RejectReason::TIMEOUT);
            assert_eq!(machine.sizes(), [0; 4], "{what}");
        }
    }
}

#[test]
fn retransmission_timeouts_double_and_differ_between_connections() {
    let mut first = Vec::new();
    for id in 1..=100 {
        for repeated in 0..=u8::MAX {
            let longest = FIRST_WAIT.nanoseconds() << repeated.min(4);
            let wait = backoff(id, repeated);
            assert!((longest / 4 * 3..=longest).contains(&wait), "{id}, {repeated}: {wait}");
        }
        first.push(backoff(id, 0));
    }
    assert_eq!(backoff(1, 4), backoff(1, 4));
    assert_eq!(FIRST_WAIT.nanoseconds() << 4, LONGEST_WAIT.nanoseconds());
    first.sort_unstable();
    first.dedup();
    assert_eq!(first.len(), 100);
    let tenth = FIRST_WAIT.nanoseconds() / 40;
    assert!(first.windows(2).all(|pair| pair[1] - pair[0] < tenth), "{first:?}");
}

#[test]
fn req_is_retransmitted_until_its_deadline() {
    // The last two timeouts are shorter than the first wait.
    for (patience, repetitions) in
        [(60_000, 14..=21), (15_000, 6..=8), (1_000, 1..=2), (100, 0..=0), (0, 0..=0)]
    {
        let mut pair = Pair::new();
        let patience = Duration::from_millis(patience);
        let id = pair.connect_within(0x100, patience);
        let first = Out::of(&mut pair.a);
        let deadline = pair.now + nanoseconds(patience);
        let mut repeated = 0;
        loop {
            let at = pair.a.deadline().unwrap();
            assert!(at <= deadline, "{patience:?}");
            if at == deadline {
                break;
            }
            assert_eq!(at, pair.now + backoff(id, repeated), "{patience:?}");
            assert!(pair.next_deadline());
            assert_eq!(Out::of(&mut pair.a).sent, first.sent, "{patience:?}");
            repeated += 1;
        }
        assert!(repetitions.contains(&repeated), "{patience:?}: {repeated}");
        pair.a.on_timer(deadline.saturating_sub(1).max(pair.now));
        if deadline > pair.now {
            assert!(Out::of(&mut pair.a).events.is_empty(), "{patience:?}");
        }
        pair.a.on_timer(deadline);
        let last = Out::of(&mut pair.a);
        if deadline > pair.now {
            assert_eq!((last.kinds(), last.names()), (vec!["REJ"], vec!["unreachable"]));
            let Message::Rej(rej) = &last.sent[0].1.message else { panic!() };
            assert_eq!(rej.reason, RejectReason::TIMEOUT);
        }
        assert_eq!(pair.a.sizes(), [0; 4], "{patience:?}");
    }
}

#[test]
fn mra_extends_the_wait_up_to_the_deadline() {
    let mut pair = Pair::new();
    pair.connect(0x100);
    let deadline = pair.now + nanoseconds(PATIENCE);
    pair.deliver_to_b();
    let mut asked = 0;
    while pair.a.deadline() != Some(deadline) {
        assert!(pair.next_deadline());
        assert_eq!(pair.deliver_to_b().kinds(), ["REQ"]);
        assert_eq!(pair.deliver_to_a().kinds(), ["MRA"]);
        assert_eq!(pair.a.deadline(), Some(deadline.min(pair.now + CmTimeout(20).nanoseconds())));
        asked += 1;
    }
    assert_eq!(asked, 4);
    pair.a.on_timer(deadline - 1);
    assert!(Out::of(&mut pair.a).events.is_empty());
    pair.a.on_timer(deadline);
    assert_eq!(Out::of(&mut pair.a).names(), ["unreachable"]);
    let mut pair = Pair::new();
    let ours = pair.connect_within(0x100, Duration::from_secs(300));
    pair.deliver_to_b();
    for _ in 0..3 * MAX_RETRIES {
        assert!(pair.next_deadline());
        assert_eq!(pair.deliver_to_b().kinds(), ["REQ"]);
        assert_eq!(pair.deliver_to_a().kinds(), ["MRA"]);
    }
    assert_eq!(state(&pair.a, ours), Some(State::ReqSent));
}

#[test]
fn mra_about_another_message_extends_no_wait() {
    let mut pair = Pair::new();
    let ours = pair.connect(0x100);
    pair.deliver_to_b();
    let before = pair.a.deadline();
    for (about, extends) in [(About::Rep, false), (About::Other, false), (About::Req, true)] {
        let mra = Mra { local_id: 9, remote_id: ours, about, service_timeout: CmTimeout(20) };
        pair.a.on_message(pair.now, B, Mad { transaction: 1, message: Message::Mra(mra) }, psn);
        assert_eq!(pair.a.deadline() != before, extends, "{about:?}");
    }
}

#[test]
fn req_waits_for_service_timeout_and_is_retransmitted() {
    // The kernel's MRA asks for 69 s.
    let mut pair = Pair::new();
    let ours = pair.connect_within(0x100, Duration::from_secs(100));
    let deadline = pair.now + 100_000_000_000;
    let mra = |code| Mra {
        local_id: 9,
        remote_id: ours,
        about: About::Req,
        service_timeout: CmTimeout(code),
    };
    Out::of(&mut pair.a);
    pair.now += 100;
    pair.a.on_message(pair.now, B, Mad { transaction: 1, message: Message::Mra(mra(24)) }, psn);
    assert_eq!(pair.a.deadline(), Some(pair.now + CmTimeout(24).nanoseconds()));
    assert!(pair.next_deadline());
    assert_eq!(Out::of(&mut pair.a).kinds(), ["REQ"]);
    assert_eq!(pair.a.deadline(), Some(pair.now + backoff(ours, 1)));
    // An MRA without delay causes at most one retransmission per millisecond.
    pair.a.on_message(pair.now, B, Mad { transaction: 1, message: Message::Mra(mra(0)) }, psn);
    assert_eq!(pair.a.deadline(), Some(pair.now + CmTimeout(8).nanoseconds()));
    pair.a.on_message(pair.now, B, Mad { transaction: 1, message: Message::Mra(mra(31)) }, psn);
    assert_eq!(pair.a.deadline(), Some(deadline));
}

#[test]
fn req_carries_timeouts_for_the_peer() {
    let mut pair = Pair::new();
    let ours = pair.connect(0x100);
    let out = pair.deliver_to_b();
    let Message::Req(request) = &out.sent[0].1.message else { panic!() };
    assert_eq!(request.ack_timeout, PEER_ACK_TIMEOUT);
    assert_eq!((request.local_timeout, request.max_retries), (RESPONSE_TIMEOUT, MAX_RETRIES));
    assert_eq!((request.retry_count, request.rnr_retry), (6, 7));
    let theirs = pair.deliver_to_a().requests[0];
    pair.b.accept(pair.now, theirs, &params(0x200, b"")).unwrap();
    pair.deliver_to_a();
    let timeout = |machine: &Machine, id| {
        machine.connection(id).unwrap().qp_attr(QpState::Rts).unwrap().timeout
    };
    assert_eq!(timeout(&pair.b, theirs), Some(PEER_ACK_TIMEOUT));
    assert_eq!(timeout(&pair.a, ours), Some(AckTimeout::from_code(14)));
}

#[test]
fn slow_peer_accepts_500_simultaneous_requests() {
    // The peer takes 8 ms per message and loses messages beyond a queue of 64.
    const COST: u64 = 8_000_000;
    const CAPACITY: usize = 64;
    let mut pair = Pair::new();
    pair.b.listen(LISTENER, address(2, PORT), 1_024);
    let start = pair.now;
    for qpn in 0..500 {
        pair.connect_within(0x100 + qpn, Duration::from_secs(30));
    }
    let (mut waiting, mut free_at) = (VecDeque::new(), start);
    let (mut lost, mut accepted, mut established) = (0, 0, 0);
    while established < 500 {
        let out = Out::of(&mut pair.a);
        for (id, event) in &out.events {
            assert_eq!(name(event), "response", "after {} ns", pair.now - start);
            pair.a.establish(*id).unwrap();
        }
        for (_, mad) in out.sent.into_iter().chain(Out::of(&mut pair.a).sent) {
            if waiting.len() < CAPACITY { waiting.push_back(mad) } else { lost += 1 }
        }
        let timer = [pair.a.deadline(), pair.b.deadline()].into_iter().flatten().min();
        if timer.is_some_and(|at| waiting.is_empty() || at < free_at) {
            assert!(pair.next_deadline());
        } else {
            pair.now = pair.now.max(free_at);
            free_at = pair.now + COST;
            let mad = waiting.pop_front().unwrap();
            pair.b.on_message(pair.now, A, mad, psn);
        }
        let out = Out::of(&mut pair.b);
        established += out.names().iter().filter(|name| **name == "established").count();
        for id in out.requests {
            accepted += 1;
            pair.b.accept(pair.now, id, &params(0x1_0000 + accepted, b"")).unwrap();
        }
        for (_, mad) in out.sent.into_iter().chain(Out::of(&mut pair.b).sent) {
            pair.a.on_message(pair.now, B, mad, psn);
        }
    }
    assert!(lost > 0);
}

#[test]
fn rej_lost_after_mra_is_retransmitted() {
    let mut pair = Pair::new();
    pair.connect(0x100);
    pair.deliver_to_b();
    let theirs = Out::of(&mut pair.b).requests[0];
    assert!(pair.next_deadline());
    pair.deliver_to_b();
    assert_eq!(pair.deliver_to_a().kinds(), ["MRA"]);
    pair.b.reject(pair.now, theirs, b"").unwrap();
    pair.b.release(pair.now, theirs);
    // Lost after each retransmission of the REQ except the last.
    for _ in 0..3 {
        assert_eq!(Out::of(&mut pair.b).kinds(), ["REJ"]);
        assert!(pair.next_deadline());
        pair.deliver_to_b();
    }
    let out = pair.deliver_to_a();
    assert_eq!((out.kinds(), out.requests.len()), (vec!["REJ"], 0));
    assert_eq!(pair.deliver_to_b().names(), ["rejected"]);
}

#[test]
fn rej_without_local_id_withdraws_request_of_that_peer() {
    let mut pair = Pair::new();
    let ours = pair.connect(0x100);
    pair.deliver_to_b();
    let theirs = Out::of(&mut pair.b).requests[0];
    pair.a.release(pair.now, ours);
    assert_eq!(pair.deliver_to_b().kinds(), ["REJ"]);
    assert_eq!(Out::of(&mut pair.b).names(), ["rejected"]);
    assert_eq!(state(&pair.b, theirs), Some(State::Withdrawn));
    assert!(pair.b.accept(pair.now, theirs, &params(0x200, b"")).is_err());
    pair.b.release(pair.now, theirs);
    assert!(Out::of(&mut pair.b).sent.is_empty());
    assert_eq!(pair.b.sizes(), [0; 4]);
    let mut pair = Pair::new();
    let ours = pair.connect(0x100);
    pair.deliver_to_b();
    let theirs = Out::of(&mut pair.b).requests[0];
    pair.a.release(pair.now, ours);
    let rejection = Out::of(&mut pair.a).sent.remove(0).1;
    pair.b.on_message(pair.now, Gid([0xc; 16]), rejection, psn);
    assert_eq!(state(&pair.b, theirs), Some(State::ReqRcvd));
}

#[test]
fn requests_beyond_the_backlog_get_mra() {
    let mut pair = Pair::new();
    for qpn in 0..12 {
        pair.connect(0x100 + qpn);
    }
    pair.deliver_to_b();
    let out = pair.deliver_to_a();
    // Nothing is stored for the four requests beyond the backlog.
    assert_eq!(out.kinds(), ["MRA"; 4]);
    let waiting = out.requests;
    assert_eq!((waiting.len(), pair.b.sizes()[0]), (8, 8));
    for &id in &waiting[..4] {
        pair.b.reject(pair.now, id, b"").unwrap();
    }
    assert_eq!(pair.deliver_to_a().kinds(), ["REJ"; 4]);
    assert!(pair.next_deadline());
    pair.deliver_to_b();
    let later = Out::of(&mut pair.b);
    assert_eq!(later.requests.len(), 4);
    for &id in &waiting[4..] {
        pair.b.release(pair.now, id);
    }
    pair.deliver_to_a();
    let more = pair.connect(0x300);
    pair.deliver_to_b();
    assert_eq!(
        (Out::of(&mut pair.b).requests.len(), state(&pair.a, more)),
        (1, Some(State::ReqSent))
    );
}

#[test]
fn withdrawn_and_rejected_requests_leave_state_bounded() {
    // A program that does not poll: withdrawn requests count until it does.
    let mut pair = Pair::new();
    let mut requests = Vec::new();
    for qpn in 0..100 {
        let ours = pair.connect(0x100 + qpn);
        pair.deliver_to_b();
        pair.a.release(pair.now, ours);
        pair.deliver_to_b();
        requests.extend(pair.deliver_to_a().requests);
    }
    assert_eq!((requests.len(), pair.b.sizes()), (8, [8, 8, 0, 0]));
    for id in requests {
        pair.b.release(pair.now, id);
    }
    assert_eq!(pair.b.sizes(), [0; 4]);
    // A program that rejects at once: the latest rejections are kept for a limited time.
    for qpn in 0..3_000 {
        pair.connect(0x1000 + qpn);
        pair.deliver_to_b();
        for id in pair.deliver_to_a().requests {
            pair.b.reject(pair.now, id, b"").unwrap();
            pair.b.release(pair.now, id);
        }
        pair.deliver_to_a();
    }
    assert_eq!(pair.b.sizes()[0], 1024);
    while pair.next_deadline() {}
    assert_eq!(pair.b.sizes(), [0; 4]);
}

#[test]
fn reused_remote_queue_pair_ends_stale_connection() {
    let mut pair = Pair::new();
    let (_, theirs) = pair.established(0x100);
    // The peer restarts with the same address.
    pair.a = Machine::new(A, 1, Mtu::Mtu4096, 42);
    let again = pair.connect(0x100);
    pair.deliver_to_b();
    let out = pair.deliver_to_a();
    assert_eq!(out.kinds(), ["REJ", "DREQ"]);
    assert_eq!(state(&pair.b, theirs), Some(State::DreqSent));
    let out = pair.deliver_to_b();
    assert_eq!(out.names(), ["rejected"]);
    assert!(matches!(&out.events[0],
            (id, Event::Rejected(RejectReason::STALE_CONNECTION, _)) if *id == again));
    assert_eq!(out.kinds(), ["DREP"], "for a forgotten connection");
    assert_eq!(Out::of(&mut pair.b).names(), ["disconnected"]);
}

#[test]
fn rep_from_a_queue_pair_in_use_is_refused_and_harms_only_its_own_connection() {
    let mut pair = Pair::new();
    let (first, _) = pair.established(0x100);
    let ours = pair.connect(0x200);
    pair.deliver_to_b();
    let theirs = pair.deliver_to_a().requests[0];
    // The number of the first connection's queue pair.
    pair.b.accept(pair.now, theirs, &params(0x101, b"")).unwrap();
    pair.deliver_to_a();
    let out = pair.deliver_to_b();
    assert!(
        matches!(&out.events[..],
            [(id, Event::Rejected(RejectReason::STALE_CONNECTION, _))] if *id == ours),
        "{out:?}"
    );
    let [(_, Mad { message: Message::Rej(rej), .. })] = &out.sent[..] else { panic!("{out:?}") };
    assert_eq!((rej.local_id, rej.remote_id, rej.about), (ours, theirs, About::Rep));
    assert_eq!(Out::of(&mut pair.b).names(), ["rejected"]);
    assert_eq!((state(&pair.a, ours), state(&pair.b, theirs)), (None, None));
    assert_eq!(state(&pair.a, first), Some(State::Established));
    assert_eq!(pair.a.queue_pairs.get(&(B, Qpn(0x101))), Some(&first));
}

#[test]
fn rejected_queue_pair_may_send_new_req_at_once() {
    let mut pair = Pair::new();
    let first = pair.connect(0x100);
    let request = pair.deliver_to_b();
    let theirs = pair.deliver_to_a().requests[0];
    pair.b.reject(pair.now, theirs, b"").unwrap();
    pair.b.release(pair.now, theirs);
    assert_eq!(pair.deliver_to_a().kinds(), ["REJ"]);
    assert_eq!(state(&pair.a, first), None);
    assert_eq!(pair.deliver_to_b().names(), ["rejected"]);
    // The request was not accepted, so there is no stale connection.
    pair.connect_within(0x100, Duration::from_secs(60));
    pair.deliver_to_b();
    let out = pair.deliver_to_a();
    assert_eq!((out.kinds().len(), out.requests.len()), (0, 1), "{out:?}");
    // A retransmission of the first request still gets the same answer.
    pair.b.on_message(pair.now, A, request.sent[0].1.clone(), psn);
    assert_eq!(pair.deliver_to_a().kinds(), ["REJ"]);
    // The second request remains when the record of the first is removed.
    while state(&pair.b, theirs).is_some() {
        assert!(pair.next_deadline());
        pair.deliver_to_b();
        pair.deliver_to_a();
    }
    assert_eq!(pair.b.sizes()[..3], [1, 1, 1]);
}

#[test]
fn requested_timeouts_are_clamped() {
    for (asked, held) in [(31, 20), (0, 8), (15, 15)] {
        let mut pair = Pair::new();
        pair.connect(0x100);
        let mut mad = Out::of(&mut pair.a).sent.remove(0).1;
        if let Message::Req(request) = &mut mad.message {
            request.local_timeout = CmTimeout(asked);
        }
        pair.b.on_message(pair.now, A, mad, psn);
        let theirs = Out::of(&mut pair.b).requests[0];
        pair.b.accept(pair.now, theirs, &params(0x200, b"")).unwrap();
        assert_eq!(pair.b.deadline(), Some(pair.now + CmTimeout(held).nanoseconds()), "{asked}");
    }
}

#[test]
fn each_message_may_be_lost_or_duplicated() {
    for fate in ["lost", "twice"] {
        for unlucky in 0..6 {
            let mut pair = Pair::new();
            let ours = pair.connect(0x100);
            let (mut sent, mut seen) = (0, Vec::new());
            let mut steps = 0;
            loop {
                let (a, b) = (Out::of(&mut pair.a), Out::of(&mut pair.b));
                let quiet = a.sent.is_empty() && b.sent.is_empty();
                for id in b.requests {
                    pair.b.accept(pair.now, id, &params(0x200, b"")).unwrap();
                }
                for (side, out) in [("a", &a.events), ("b", &b.events)] {
                    for (id, event) in out {
                        seen.push(format!("{side} {}", name(event)));
                        match (side, event) {
                            ("a", Event::Response(_)) => pair.a.establish(*id).unwrap(),
                            ("b", Event::Established) => pair.a.disconnect(pair.now, ours).unwrap(),
                            _ => {}
                        }
                    }
                }
                for (to, mad) in a.sent.into_iter().chain(b.sent) {
                    let times = match (sent == unlucky, fate) {
                        (true, "lost") => 0,
                        (true, _) => 2,
                        (false, _) => 1,
                    };
                    sent += 1;
                    for _ in 0..times {
                        match to == B {
                            true => pair.b.on_message(pair.now, A, mad.clone(), psn),
                            false => pair.a.on_message(pair.now, B, mad.clone(), psn),
                        }
                    }
                }
                steps += 1;
                assert!(steps < 100, "{fate} {unlucky}: {seen:?}");
                if quiet
                    && pair.a.deadline().is_none()
                    && pair.b.deadline().is_none()
                    && pair.a.sizes() == [0; 4]
                {
                    break;
                }
                if quiet {
                    pair.next_deadline();
                }
            }
            seen.sort();
            let expected = [
                "a disconnected",
                "a response",
                "a timewait exit",
                "b disconnected",
                "b established",
                "b timewait exit",
            ];
            assert_eq!(seen, expected, "{fate} {unlucky}");
            assert_eq!((pair.a.sizes(), pair.b.sizes()), ([0; 4], [0; 4]), "{fate} {unlucky}");
        }
    }
}

#[test]
fn traffic_before_rtu_confirms_and_stray_packets_do_not() {
    let mut pair = Pair::new();
    let ours = pair.connect(0x100);
    pair.deliver_to_b();
    let theirs = pair.deliver_to_a().requests[0];
    pair.b.on_traffic(theirs, Qpn(0x200));
    assert_eq!(state(&pair.b, theirs), Some(State::ReqRcvd), "not accepted yet");
    pair.b.accept(pair.now, theirs, &params(0x200, b"")).unwrap();
    pair.b.on_traffic(theirs, Qpn(0x201));
    pair.b.on_traffic(theirs + 1, Qpn(0x200));
    assert_eq!(state(&pair.b, theirs), Some(State::RepSent));
    pair.deliver_to_a();
    pair.a.establish(ours).unwrap();
    let late = Out::of(&mut pair.a).sent.remove(0).1;
    pair.b.on_traffic(theirs, Qpn(0x200));
    assert_eq!(
        (Out::of(&mut pair.b).names(), state(&pair.b, theirs)),
        (vec!["established"], Some(State::Established))
    );
    assert_eq!(pair.b.deadline(), None);
    pair.b.on_traffic(theirs, Qpn(0x200));
    pair.b.on_message(pair.now, A, late, psn);
    let out = Out::of(&mut pair.b);
    assert!(out.events.is_empty() && out.sent.is_empty(), "{out:?}");
}

// Shows S4.
#[test]
fn one_peer_cannot_use_all_half_open_records() {
    let mut pair = Pair::new();
    pair.b.listen(LISTENER, address(2, PORT), 10_000);
    let beyond = 20;
    for qpn in 0..MAX_HALF_OPEN_PER_PEER + beyond {
        pair.connect(0x100 + qpn);
    }
    pair.deliver_to_b();
    let out = pair.deliver_to_a();
    assert_eq!(
        (out.requests.len() as u32, out.sent.len() as u32),
        (MAX_HALF_OPEN_PER_PEER, beyond)
    );
    assert!(out.kinds().iter().all(|kind| *kind == "MRA"), "delayed by MRA");
    // Accepting frees no record: otherwise unconfirmed requests could allocate queue pairs without
    // limit.
    for (number, &id) in out.requests.iter().enumerate() {
        pair.b.accept(pair.now, id, &params(0x1_0000 + number as u32, b"")).unwrap();
    }
    let answers = Out::of(&mut pair.b);
    assert!(pair.next_deadline());
    let late = Out::of(&mut pair.a).sent;
    assert_eq!(late.len() as u32, beyond);
    let give = |pair: &mut Pair| {
        late.iter().for_each(|(_, mad)| pair.b.on_message(pair.now, A, mad.clone(), psn))
    };
    give(&mut pair);
    assert!(Out::of(&mut pair.b).requests.is_empty());
    let Message::Req(request) = &late[0].1.message else { panic!() };
    let other = Gid([0xc; 16]);
    let request = Message::Req(Box::new(Req { local_gid: other, ..(**request).clone() }));
    pair.b.on_message(pair.now, other, Mad { transaction: 1, message: request }, psn);
    assert_eq!(Out::of(&mut pair.b).requests.len(), 1);
    for (_, mad) in answers.sent {
        pair.a.on_message(pair.now, B, mad, psn);
    }
    for (id, event) in Out::of(&mut pair.a).events {
        assert_eq!(name(&event), "response");
        pair.a.establish(id).unwrap();
    }
    pair.deliver_to_b();
    Out::of(&mut pair.b);
    give(&mut pair);
    assert_eq!(Out::of(&mut pair.b).requests.len() as u32, beyond);
    assert_eq!(pair.b.half_open.total(), 1 + beyond);
}

#[test]
fn unconfirmed_requests_expire_sooner_when_records_are_scarce() {
    // Requests from `count` forged sources with the longest timeouts; all are accepted.
    let forge = |count: u32| {
        let mut pair = Pair::new();
        pair.b.listen(LISTENER, address(2, PORT), 10_000);
        pair.connect(0x100);
        let Message::Req(request) = Out::of(&mut pair.a).sent.remove(0).1.message else { panic!() };
        for number in 0..count {
            let gid = Gid(u128::from(number + 1).to_be_bytes());
            let (local_timeout, max_retries) = (CmTimeout(20), 15);
            let forged = Req { local_gid: gid, local_timeout, max_retries, ..(*request).clone() };
            let mad = Mad { transaction: 1, message: Message::Req(Box::new(forged)) };
            pair.b.on_message(pair.now, gid, mad, psn);
        }
        let requests = Out::of(&mut pair.b).requests;
        assert_eq!(requests.len(), count as usize);
        for (number, &id) in requests.iter().enumerate() {
            pair.b.accept(pair.now, id, &params(0x1_0000 + number as u32, b"")).unwrap();
        }
        Out::of(&mut pair.b);
        pair
    };
    let until_below_half = |mut pair: Pair| {
        let start = pair.now;
        while pair.b.half_open.total() > MAX_HALF_OPEN / 2 {
            assert!(pair.next_deadline());
            Out::of(&mut pair.b);
        }
        (pair.now - start, pair)
    };
    let (took, mut pair) = until_below_half(forge(MAX_HALF_OPEN));
    assert_eq!(
        took,
        u64::from(SCARCE_RETRIES + 1) * SCARCE_TIMEOUT,
        "all were accepted while records were scarce"
    );
    // The remaining ones keep the timeouts they asked for, and end.
    let rest = pair.b.half_open.total();
    assert_eq!(rest, MAX_HALF_OPEN / 2);
    while pair.next_deadline() {
        Out::of(&mut pair.b);
    }
    assert!(pair.now - 1_000 > 40_000_000_000, "{}", pair.now);
    assert_eq!((pair.b.half_open.total(), pair.b.sizes()), (0, [0; 4]));
    let mut few = forge(MAX_HALF_OPEN / 2);
    while few.now < 20_000_000_000 {
        assert!(few.next_deadline());
        Out::of(&mut few.b);
    }
    assert_eq!(few.b.half_open.total(), MAX_HALF_OPEN / 2);
}

// Shows S4.
#[test]
fn answers_beyond_the_limit_are_dropped() {
    let mut pair = Pair::new();
    let stray = |number| Message::Drep(Drep { local_id: 1, remote_id: number });
    let dreq = |number| Message::Dreq(Dreq { local_id: number, remote_id: 7, remote_qpn: Qpn(5) });
    for number in 1..=if cfg!(debug_assertions) { 20_000 } else { 100_000 } {
        pair.b.on_message(pair.now, A, Mad { transaction: 1, message: stray(number) }, psn);
        pair.b.on_message(pair.now, A, Mad { transaction: 1, message: dreq(number) }, psn);
    }
    let flood = Out::of(&mut pair.b).sent.len();
    assert!((1_000..10_000).contains(&flood), "{flood}");
    // A REQ that arrives meanwhile is processed. The program's REP is not limited.
    let ours = pair.connect(0x100);
    pair.deliver_to_b();
    let theirs = Out::of(&mut pair.b).requests[0];
    pair.b.accept(pair.now, theirs, &params(0x200, b"")).unwrap();
    assert_eq!(pair.deliver_to_a().kinds(), ["REP"]);
    assert_eq!(state(&pair.a, ours), Some(State::RepRcvd));
    pair.now += 1_000_000_000;
    pair.b.on_message(pair.now, A, Mad { transaction: 1, message: dreq(9) }, psn);
    assert_eq!(Out::of(&mut pair.b).kinds(), ["DREP"], "the limit recovers after a pause");
}

#[test]
fn dropped_answer_takes_no_message_and_no_event_with_it() {
    let mut pair = Pair::new();
    let (ours, theirs) = pair.established(0x100);
    pair.connect(0x200);
    pair.deliver_to_b();
    let other = pair.deliver_to_a().requests[0];
    pair.b.accept(pair.now, other, &params(0x300, b"")).unwrap();
    while pair.b.answers.take(pair.now, A) {}
    // Its DREP is dropped. The REP still waits to be sent.
    pair.a.disconnect(pair.now, ours).unwrap();
    assert_eq!(pair.deliver_to_b().kinds(), ["DREQ"]);
    let out = Out::of(&mut pair.b);
    assert_eq!((out.kinds(), out.names()), (vec!["REP"], vec!["disconnected"]));
    assert_eq!(state(&pair.b, theirs), Some(State::TimeWait));
    // The repeated DREQ is answered, so that the peer does not wait in vain.
    while state(&pair.a, ours) == Some(State::DreqSent) {
        assert!(pair.next_deadline());
        pair.deliver_to_b();
        pair.deliver_to_a();
    }
    assert_eq!(state(&pair.a, ours), Some(State::TimeWait));
}

#[test]
fn both_sides_use_the_smaller_path_mtu() {
    for (port, asked) in Mtu::ALL.into_iter().flat_map(|port| Mtu::ALL.map(|asked| (port, asked))) {
        let mut pair = Pair::new();
        pair.b = Machine::new(B, 2, port, 5);
        pair.b.listen(LISTENER, address(2, PORT), 8);
        let to = Destination {
            gid: B,
            local: address(1, 40_000),
            peer: address(2, PORT),
            mtu: asked,
            pkey: 0xffff,
        };
        let ours = pair.a.connect(pair.now, to, &params(0x100, b"hello"), Psn::new(1)).unwrap();
        let larger = |mtu: &Mtu| *mtu > port && *mtu <= asked;
        for _ in Mtu::ALL.iter().filter(|mtu| larger(mtu)) {
            pair.deliver_to_b();
            let refusals = Out::of(&mut pair.b).sent;
            assert_eq!(refusals.len(), 1);
            // The REJ of a retransmitted REQ says nothing new.
            for (_, mad) in refusals.iter().chain(&refusals) {
                pair.a.on_message(pair.now, B, mad.clone(), psn);
            }
        }
        pair.deliver_to_b();
        let out = pair.deliver_to_a();
        let theirs = out.requests[0];
        pair.b.accept(pair.now, theirs, &params(0x200, b"")).unwrap();
        pair.deliver_to_a();
        for (machine, id) in [(&pair.a, ours), (&pair.b, theirs)] {
            let attr = machine.connection(id).unwrap().qp_attr(QpState::Rtr).unwrap();
            assert_eq!(attr.path_mtu, Some(port.min(asked)), "{port:?} {asked:?}");
        }
    }
}

#[test]
fn peer_that_refuses_every_path_mtu_is_asked_five_times() {
    let mut pair = Pair::new();
    let ours = pair.connect(0x100);
    for asked in (0..Mtu::ALL.len()).rev() {
        let out = Out::of(&mut pair.a);
        let [(_, Mad { transaction, message: Message::Req(req) })] = &out.sent[..] else {
            panic!("{out:?}")
        };
        assert_eq!(req.mtu, Mtu::ALL[asked]);
        let rej = Rej {
            local_id: 0,
            remote_id: ours,
            about: About::Req,
            reason: RejectReason::INVALID_MTU,
            private_data: Private::empty(),
        };
        let message = Message::Rej(Box::new(rej));
        pair.a.on_message(pair.now, B, Mad { transaction: *transaction, message }, psn);
    }
    let events = Out::of(&mut pair.a).events;
    assert!(
        matches!(&events[..], [(id, Event::Rejected(RejectReason::INVALID_MTU, _))] if *id == ours),
        "{events:?}"
    );
    assert_eq!(pair.a.sizes()[0], 0);
}

#[test]
fn passive_side_uses_traffic_fields_of_the_req() {
    let mut pair = Pair::new();
    pair.connect(0x100);
    let mut mad = Out::of(&mut pair.a).sent.remove(0).1;
    let Message::Req(request) = &mut mad.message else { panic!() };
    request.path = PathFields {
        flow_label: 0x5_4321,
        traffic_class: 0xb8,
        service_level: 3,
        hop_limit: 1,
        rate: 3,
        subnet_local: true,
    };
    pair.b.on_message(pair.now, A, mad, psn);
    let theirs = Out::of(&mut pair.b).requests[0];
    let address =
        pair.b.connection(theirs).unwrap().qp_attr(QpState::Rtr).unwrap().address.unwrap();
    assert_eq!(
        (address.flow_label, address.traffic_class, address.service_level),
        (0x5_4321, 0xb8, 3)
    );
    assert_eq!((address.dgid, address.hop_limit), (A, 64));
}

#[test]
fn retransmitted_rep_counts_towards_the_answer_limit() {
    let mut pair = Pair::new();
    pair.connect(0x100);
    pair.deliver_to_b();
    let theirs = pair.deliver_to_a().requests[0];
    pair.b.accept(pair.now, theirs, &params(0x200, b"")).unwrap();
    assert_eq!(Out::of(&mut pair.b).kinds(), ["REP"]);
    let now = pair.b.deadline().unwrap();
    while pair.b.answers.take(now, A) {}
    pair.b.on_timer(now);
    assert!(Out::of(&mut pair.b).sent.is_empty(), "the retransmission counts");
    let later = pair.b.deadline().unwrap();
    pair.b.on_timer(later);
    assert_eq!(Out::of(&mut pair.b).kinds(), ["REP"]);
}

/// Checks that a peer cannot derive ids from its own connections' ids.
// Shows S4.
#[test]
fn connection_ids_do_not_predict_the_next_one() {
    let mut pair = Pair::new();
    let seen: Vec<CommId> = (0..1_000).map(|number| pair.connect(0x100 + number)).collect();
    let next = pair.connect(0x900);
    let last = seen[seen.len() - 1];
    // With a masked counter, consecutive ids would differ as a counter does.
    let mut guesses: Vec<CommId> = (1..=32).map(|bits| last ^ (u32::MAX >> (32 - bits))).collect();
    guesses.extend(
        (1..1_000).flat_map(|near| [last.wrapping_add(near), last.wrapping_sub(near), last ^ near]),
    );
    guesses.extend(seen.windows(2).flat_map(|two| {
        [
            last ^ two[0] ^ two[1],
            last.wrapping_add(two[1].wrapping_sub(two[0])),
            last.wrapping_mul(two[1]),
        ]
    }));
    assert!(!guesses.contains(&next), "found with {} guesses of 2^32", guesses.len());
    for bit in 0..32 {
        let changes = seen.windows(2).filter(|two| (two[0] ^ two[1]) >> bit & 1 == 1).count();
        // Half of 999, plus or minus six standard deviations of 15.8.
        assert!((405..=594).contains(&changes), "bit {bit} changes {changes} times");
    }
    // Transaction ids do not start with the seed, either.
    let transactions: Vec<u64> =
        Out::of(&mut pair.a).sent.iter().map(|(_, mad)| mad.transaction).collect();
    assert!(
        transactions.len() == 1_001
            && transactions.iter().all(|transaction| transaction >> 32 != 0x1111_2222)
    );
}
