//! A table of every message in every state: next state, answer and event.

use rdma_provider::types::{Psn, Qpn, RejectReason};

use super::super::connection::State;
use super::super::message::{
    About, CmTimeout, CommId, Drep, Dreq, Mad, Message, Mra, Private, Rej, Rep, Req, Rtu,
};
use super::*;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Active,
    Passive,
}
use End::{Active, Passive};

#[derive(Debug)]
pub(super) struct Row {
    end: End,
    pub(super) state: State,
    /// The next state, answer and event for each of [`MESSAGES`]; `None` if the message has no
    /// effect.
    then: [Option<(Option<State>, &'static str, &'static str)>; 8],
}

/// A REJ or MRA refers to the awaited message, or to REQ if none is awaited.
const MESSAGES: [&str; 8] = ["REQ", "MRA", "REJ", "REP", "RTU", "DREQ", "DREP", "stale DREQ"];

const GONE: Option<State> = None;
const fn to(state: State) -> Option<State> {
    Some(state)
}

/// Columns as in [`MESSAGES`]. A stale DREQ names another queue pair.
#[rustfmt::skip]
pub(super) const ROWS: [Row; 10] = {
    use State::*;
    [
        Row { end: Active, state: ReqSent, then: [
            None, Some((to(ReqSent), "", "")), Some((GONE, "", "rejected")),
            Some((to(RepRcvd), "", "response")),
            // The peer's id is not known yet, so the DREQ names no connection.
            None, Some((to(ReqSent), "DREP", "")), None, Some((to(ReqSent), "DREP", "")) ] },
        Row { end: Active, state: RepRcvd, then: [
            None, None, Some((GONE, "", "rejected")), Some((to(RepRcvd), "MRA", "")),
            None, Some((to(TimeWait), "DREP", "disconnected")), None, None ] },
        Row { end: Active, state: Established, then: [
            None, None, Some((to(TimeWait), "", "rejected")), Some((to(Established), "RTU", "")),
            None, Some((to(TimeWait), "DREP", "disconnected")), None, None ] },
        Row { end: Passive, state: ReqRcvd, then: [
            Some((to(ReqRcvd), "MRA", "")), None, Some((to(Withdrawn), "", "rejected")), None,
            None, None, None, None ] },
        Row { end: Passive, state: RepSent, then: [
            Some((to(RepSent), "REP", "")), Some((to(RepSent), "", "")),
            Some((GONE, "", "rejected")), None, Some((to(Established), "", "established")),
            Some((to(TimeWait), "DREP", "established disconnected")), None, None ] },
        Row { end: Passive, state: Established, then: [
            None, None, Some((to(TimeWait), "", "disconnected")), None,
            None, Some((to(TimeWait), "DREP", "disconnected")), None, None ] },
        Row { end: Active, state: DreqSent, then: [
            None, None, Some((to(TimeWait), "", "disconnected")), None,
            None, Some((to(TimeWait), "DREP", "disconnected")),
            Some((to(TimeWait), "", "disconnected")), None ] },
        Row { end: Active, state: TimeWait, then: [
            None, None, None, None,
            None, Some((to(TimeWait), "DREP", "")), None, None ] },
        Row { end: Passive, state: Refused, then: [
            Some((to(Refused), "REJ", "")), None, None, None,
            None, None, None, None ] },
        Row { end: Passive, state: Withdrawn, then: [
            None, None, None, None,
            None, None, None, None ] },
    ]
};

const OURS: u32 = 0x100;
const THEIRS: u32 = 0x200;

struct Subject {
    machine: Machine,
    id: CommId,
    /// The id at the other end.
    remote: CommId,
    peer: Gid,
    now: u64,
    request: Message,
}

fn subject(end: End, state: State) -> Subject {
    let mut pair = Pair::new();
    let ours = pair.connect(OURS);
    let request = pair.deliver_to_b().sent[0].1.message.clone();
    let theirs = pair.deliver_to_a().requests[0];
    if state == State::Refused {
        pair.b.reject(pair.now, theirs, b"no").unwrap();
    } else if state == State::Withdrawn {
        pair.a.release(pair.now, ours);
        pair.deliver_to_b();
    } else if !matches!(state, State::ReqSent | State::ReqRcvd) {
        pair.b.accept(pair.now, theirs, &params(THEIRS, b"")).unwrap();
        if state != State::RepSent {
            pair.deliver_to_a();
        }
        if !matches!(state, State::RepRcvd | State::RepSent) {
            pair.a.establish(ours).unwrap();
            pair.deliver_to_b();
        }
        if matches!(state, State::DreqSent | State::TimeWait) {
            pair.a.disconnect(pair.now, ours).unwrap();
        }
        if state == State::TimeWait {
            pair.deliver_to_b();
            pair.deliver_to_a();
        }
    }
    let Pair { now, mut a, mut b } = pair;
    Out::of(&mut a);
    Out::of(&mut b);
    let subject = match end {
        Active => Subject { machine: a, id: ours, remote: theirs, peer: B, now, request },
        Passive => Subject { machine: b, id: theirs, remote: ours, peer: A, now, request },
    };
    assert_eq!(super::state(&subject.machine, subject.id), Some(state), "{end:?}");
    subject
}

fn message(
    which: &str,
    end: End,
    state: State,
    id: CommId,
    remote: CommId,
    request: &Message,
) -> Message {
    let about = match state {
        State::RepSent => About::Rep,
        State::Established | State::DreqSent => About::Other,
        _ => About::Req,
    };
    match which {
        "REQ" => {
            let Message::Req(request) = request else { panic!("{request:?}") };
            Message::Req(Box::new(Req { local_id: remote, ..(**request).clone() }))
        }
        "MRA" => Message::Mra(Mra {
            local_id: remote,
            remote_id: id,
            about,
            service_timeout: CmTimeout(18),
        }),
        "REJ" => Message::Rej(Box::new(Rej {
            local_id: remote,
            remote_id: id,
            about,
            reason: RejectReason::CONSUMER,
            private_data: Private::empty(),
        })),
        "REP" => Message::Rep(Box::new(Rep {
            local_id: remote,
            remote_id: id,
            qpn: Qpn(THEIRS),
            starting_psn: Psn::new(7),
            responder_resources: 1,
            initiator_depth: 1,
            rnr_retry: 7,
            srq: false,
            guid: 9,
            ack_delay: CmTimeout(15),
            private_data: Private::empty(),
        })),
        "RTU" => Message::Rtu(Rtu { local_id: remote, remote_id: id }),
        "DREQ" => {
            let own = if end == Active { OURS } else { THEIRS };
            Message::Dreq(Dreq { local_id: remote, remote_id: id, remote_qpn: Qpn(own) })
        }
        "stale DREQ" => {
            Message::Dreq(Dreq { local_id: remote, remote_id: id, remote_qpn: Qpn(0x999) })
        }
        "DREP" => Message::Drep(Drep { local_id: remote, remote_id: id }),
        _ => panic!("{which}"),
    }
}

fn mad(message: Message) -> Mad {
    Mad { transaction: 1, message }
}

// Shows S4.
#[test]
fn each_message_in_each_state_matches_the_table() {
    for row in &ROWS {
        for (which, then) in MESSAGES.iter().zip(row.then) {
            // A REQ at the active side belongs to another connection.
            if *which == "REQ" && row.end == Active {
                continue;
            }
            let mut subject = subject(row.end, row.state);
            let Subject { id, remote, peer, now, .. } = subject;
            let message = message(which, row.end, row.state, id, remote, &subject.request);
            let before = subject.machine.sizes();
            subject.machine.on_message(now, peer, mad(message), psn);
            let out = Out::of(&mut subject.machine);
            let (state, answer, event) = then.unwrap_or((Some(row.state), "", ""));
            let found =
                (super::state(&subject.machine, id), out.kinds().join(" "), out.names().join(" "));
            assert_eq!(found, (state, answer.to_owned(), event.to_owned()), "{which} in {row:?}");
            assert!(out.requests.is_empty());
            if then.is_none() {
                assert_eq!(subject.machine.sizes(), before, "{which} in {row:?}");
            }
            assert!(out.sent.iter().all(|(to, _)| *to == peer));
        }
    }
}

// Shows S4.
#[test]
fn messages_with_wrong_ids_or_gid_change_no_connection() {
    let stranger = Gid([0xc; 16]);
    for row in &ROWS {
        for which in MESSAGES.iter().filter(|which| **which != "REQ") {
            let Subject { id, remote, peer, .. } = subject(row.end, row.state);
            let other = remote.wrapping_add(5).max(1);
            let unknown = id.wrapping_add(5).max(1);
            // A REQ may be answered under any id.
            let open = row.state == State::ReqSent;
            let mut tries =
                vec![(stranger, id, remote), (peer, unknown, remote), (stranger, unknown, 0)];
            if !open {
                tries.extend([(peer, id, other), (peer, id, 0)]);
            }
            for (from, id_named, remote_named) in tries {
                let mut subject = subject(row.end, row.state);
                let message =
                    message(which, row.end, row.state, id_named, remote_named, &subject.request);
                let before = subject.machine.sizes();
                subject.machine.on_message(subject.now, from, mad(message), psn);
                let out = Out::of(&mut subject.machine);
                let context =
                    format!("{which} from {from} for {id_named:#x}, {remote_named:#x} in {row:?}");
                assert_eq!(
                    super::state(&subject.machine, subject.id),
                    Some(row.state),
                    "{context}"
                );
                assert_eq!(subject.machine.sizes(), before, "{context}");
                assert!(out.events.is_empty() && out.requests.is_empty(), "{context}");
                // At most one answer, and only to the sender: no amplification or reflection.
                assert!(
                    out.sent.len() <= 1 && out.sent.iter().all(|(to, _)| *to == from),
                    "{context}: {out:?}"
                );
            }
        }
    }
}

#[test]
fn calls_in_wrong_state_fail_and_change_nothing() {
    for row in &ROWS {
        let mut subject = subject(row.end, row.state);
        let Subject { id, now, .. } = subject;
        let before = subject.machine.sizes();
        let machine = &mut subject.machine;
        if row.state != State::ReqRcvd {
            assert!(machine.accept(now, id, &params(5, b"")).is_err(), "{row:?}");
            assert!(machine.reject(now, id, b"").is_err(), "{row:?}");
        } else {
            assert!(machine.accept(now, id, &params(5, &[0; 197])).is_err(), "{row:?}");
            assert!(machine.reject(now, id, &[0; 149]).is_err(), "{row:?}");
        }
        if row.state != State::RepRcvd {
            assert!(machine.establish(id).is_err(), "{row:?}");
        }
        let ends = matches!(row.state, State::DreqSent | State::TimeWait);
        if row.state != State::Established {
            assert_eq!(machine.disconnect(now, id).is_ok(), ends, "{row:?}");
        }
        let out = Out::of(machine);
        assert!(out.sent.is_empty() && out.events.is_empty(), "{row:?}: {out:?}");
        assert_eq!(
            (super::state(machine, id), machine.sizes()),
            (Some(row.state), before),
            "{row:?}"
        );
    }
}

#[test]
fn dropped_id_notifies_peer_and_is_forgotten() {
    for row in &ROWS {
        let mut subject = subject(row.end, row.state);
        subject.machine.release(subject.now, subject.id);
        let out = Out::of(&mut subject.machine);
        let notified: &[&str] = match row.state {
            State::ReqSent | State::RepRcvd | State::ReqRcvd | State::RepSent => &["REJ"],
            State::Established => &["DREQ"],
            State::DreqSent | State::TimeWait | State::Refused | State::Withdrawn => &[],
        };
        assert_eq!(out.kinds(), notified, "{row:?}");
        let mut steps = 0;
        while let Some(at) = subject.machine.deadline() {
            subject.machine.on_timer(at);
            let out = Out::of(&mut subject.machine);
            assert!(out.events.is_empty(), "{row:?}: {out:?}");
            steps += 1;
            assert!(steps < 40, "{row:?}");
        }
        assert_eq!(subject.machine.sizes(), [0; 4], "{row:?}");
    }
}

#[test]
fn malformed_requests_are_ignored_and_unacceptable_ones_rejected() {
    let Subject { request: Message::Req(request), .. } = subject(Active, State::ReqSent) else {
        panic!()
    };
    let answer = |change: &dyn Fn(&mut Req)| {
        let mut pair = Pair::new();
        let mut request = request.clone();
        change(&mut request);
        pair.b.on_message(1, A, mad(Message::Req(request)), psn);
        let out = Out::of(&mut pair.b);
        assert_eq!(pair.b.sizes()[0], out.requests.len());
        out.sent.first().map(|(_, mad)| match &mad.message {
            Message::Rej(rej) => rej.reason,
            other => panic!("{other:?}"),
        })
    };
    assert_eq!(answer(&|_| ()), None);
    assert_eq!(answer(&|request| request.local_id = 0), None);
    assert_eq!(answer(&|request| request.qpn = Qpn(1)), None);
    assert_eq!(answer(&|request| request.qpn = Qpn(1 << 24)), None);
    assert_eq!(answer(&|request| request.local_gid = B), None);
    assert_eq!(answer(&|request| request.remote_gid = A), Some(RejectReason::INVALID_GID));
    assert_eq!(answer(&|request| request.service_port = 1), Some(RejectReason::INVALID_SERVICE_ID));
    assert_eq!(
        answer(&|request| request.destination = [10, 0, 0, 3].into()),
        Some(RejectReason::INVALID_SERVICE_ID)
    );
    assert_eq!(answer(&|request| request.mtu = Mtu::Mtu256), None);
}
