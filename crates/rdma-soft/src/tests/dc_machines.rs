//! Tests of the DC initiator and target state machines, packet by packet.

mod forgetful;

use std::collections::VecDeque;

use super::machines::{ALL, PD, memory};
use super::*;
use rdma_provider::types::{DcKey, DctTarget, Gid, WcStatus};

use super::super::dc::{Environment, Header, Outcome, SessionNumber, Target};
use super::super::memory::dma::{Gather, Payload};
use super::super::memory::keys::Keys;
use super::super::roce::packet::{Aeth, AtomicOp, Body, Nak, Packet, Part, Reth, Syndrome, Tail};
use super::super::roce::requester::{Flow, Outgoing, Requester, SendCompletions, SendConfig};
use super::super::roce::responder::{ReceiveConfig, ReceiveWqe, Receiver};

const KEY: DcKey = DcKey(77);
const NUMBER: Qpn = Qpn(0x100);
const SECOND: u64 = 1_000_000_000;
const FIRST: Psn = Psn::new(0xff_ffff);

#[derive(Default)]
struct Side {
    receives: VecDeque<ReceiveWqe>,
    completions: Vec<(u64, WcStatus)>,
    now: u64,
    drawn: u64,
}

impl Receiver for Side {
    fn take_shared(&mut self, into: &mut ReceiveWqe) -> bool {
        self.receives.pop_front().map(|receive| *into = receive).is_some()
    }

    fn complete(&mut self, _: u32, completion: &WorkCompletion, _: bool) {
        assert_eq!(completion.qpn, NUMBER);
        self.completions.push((completion.wr_id.0, completion.status));
    }

    fn event(&mut self, _: AsyncEvent) {}

    fn count_bad_pkey(&mut self) {}

    fn failed(&mut self) {}
}

impl Environment for Side {
    fn return_receive(&mut self, receive: &mut ReceiveWqe) {
        self.receives.push_back(std::mem::take(receive));
    }

    fn now(&mut self) -> u64 {
        self.now
    }

    fn random(&mut self) -> Option<u64> {
        self.drawn += 1;
        Some(self.drawn)
    }
}

impl SendCompletions for Side {
    fn complete(&mut self, _: u32, completion: &WorkCompletion) {
        self.completions.push((completion.wr_id.0, completion.status));
    }

    fn now(&mut self) -> u64 {
        self.now
    }

    fn random(&mut self) -> Option<u64> {
        self.drawn += 1;
        Some(self.drawn)
    }

    fn count_bad_pkey(&mut self) {}
}

struct TargetEnd {
    machine: Target,
    keys: Keys,
    base: u64,
    key: u32,
    side: Side,
}

#[derive(Clone, Copy)]
struct KnownSession {
    source: u32,
    session: SessionNumber,
    cookie: u32,
}

impl KnownSession {
    fn new(source: u32, count: u32) -> Self {
        Self { source, session: SessionNumber { incarnation: 9, count }, cookie: 0 }
    }
}

impl TargetEnd {
    fn new() -> Self {
        let (keys, base, key) = memory();
        let config = ReceiveConfig {
            transport: Transport::Rc,
            qpn: NUMBER,
            gid: Gid::default(),
            pd: PD,
            shared: true,
            receive_pd: PD,
            access: ALL,
            mtu: Mtu::Mtu256,
            peer: Qpn(0),
            peer_gid: Gid::default(),
            qkey: Qkey(0),
            pkey: DEFAULT_PKEY,
            min_rnr_timer: RnrTimer::from_code(9),
            max_dest_rd_atomic: 2,
        };
        let (mut machine, mut side) = (Target::new(config, KEY, 4), Side::default());
        machine.set_state(QpState::Rtr, &mut side);
        Self { machine, keys, base, key, side }
    }

    /// Passes a packet `steps` after OPEN. Returns the bodies of all answers and the last cookie.
    fn request(
        &mut self,
        from: KnownSession,
        steps: u32,
        body: Body,
        payload: &[u8],
    ) -> (Vec<Body>, u32) {
        let packet = Packet {
            ack_request: true,
            ..Packet::dc_control(DEFAULT_PKEY, NUMBER, FIRST.add(steps), body)
        };
        let header =
            Header { source: Qpn(from.source), session: from.session, cookie: from.cookie };
        let payload = Payload::Bytes(payload);
        let outcome = self.machine.on_request(
            (&packet, &header),
            Gid::default(),
            &payload,
            &self.keys,
            &mut self.side,
        );
        let mut answers = Vec::new();
        let mut cookie = 0;
        let mut gather = Gather::new();
        match outcome {
            Outcome::Nothing => {}
            Outcome::Answer((packet, header)) => {
                assert_eq!(
                    (packet.dest, header.source, header.session),
                    (Qpn(from.source), NUMBER, from.session)
                );
                cookie = header.cookie;
                answers.push(packet.body);
            }
            Outcome::Session(key) => {
                while let Some((packet, header)) =
                    self.machine.next_reply(&key, &self.keys, &mut gather, &mut self.side)
                {
                    assert_eq!(
                        (packet.dest, header.source, header.session),
                        (Qpn(from.source), NUMBER, from.session)
                    );
                    cookie = header.cookie;
                    gather.clear();
                    answers.push(packet.body);
                }
            }
        }
        (answers, cookie)
    }

    fn open(&mut self, from: KnownSession) -> (Vec<Body>, u32) {
        self.request(from, 0, Body::Open { key: KEY, mtu: Mtu::Mtu256 }, &[])
    }

    fn opened(&mut self, source: u32, count: u32) -> KnownSession {
        let it = KnownSession::new(source, count);
        let (answers, cookie) = self.open(it);
        assert_eq!(answers, [Body::Accept]);
        KnownSession { cookie, ..it }
    }

    fn add(&self) -> Body {
        Body::Atomic { remote: self.remote(0), op: AtomicOp::FetchAdd { add: 1 } }
    }

    fn remote(&self, offset: u64) -> RemoteAddr {
        RemoteAddr { addr: self.base + offset, rkey: Rkey(self.key) }
    }

    fn word(&self) -> u64 {
        // SAFETY: the buffer is leaked; no other thread accesses it.
        unsafe { (self.base as *const u64).read_volatile() }
    }

    fn recv(&mut self, wr_id: u64, len: u32) {
        let sges = [Sge { addr: self.base + 1024, length: len, lkey: Lkey(self.key) }];
        let mut receive = ReceiveWqe::default();
        receive.assign(&RecvWr { wr_id: WrId(wr_id), sges: &sges }, 0);
        self.side.receives.push_back(receive);
    }
}

fn original(answers: &[Body]) -> u64 {
    match answers {
        [Body::AtomicAcknowledge { original, .. }] => *original,
        other => panic!("not an atomic response: {other:?}"),
    }
}

const fn nak(syndrome: Syndrome) -> Body {
    Body::Acknowledge(Aeth { syndrome, msn: 0 })
}

#[test]
fn packets_of_a_closed_session_are_not_executed() {
    let mut it = TargetEnd::new();
    let session = it.opened(5, 1);
    let add = it.add();
    assert_eq!(original(&it.request(session, 1, add, &[]).0), 0);
    assert_eq!(original(&it.request(session, 1, add, &[]).0), 0, "replayed, not executed");
    assert_eq!(it.request(session, 2, Body::Close, &[]).0, []);
    assert_eq!(it.machine.counters().open, 0);
    assert_eq!(it.request(session, 1, add, &[]).0, [Body::Gone]);
    // A delayed OPEN creates a session, but the old cookie is not valid in it.
    let again = it.opened(5, 1);
    assert_ne!(again.cookie, session.cookie);
    assert_eq!(it.request(session, 1, add, &[]).0, [Body::Gone]);
    assert_eq!(it.word(), 1);
    // A delayed CLOSE does not end the new session.
    assert_eq!(it.request(session, 2, Body::Close, &[]).0, []);
    assert_eq!(it.machine.counters().open, 1);
}

#[test]
fn newer_session_replaces_an_older_one_only() {
    let mut it = TargetEnd::new();
    let old = it.opened(5, 1);
    let add = it.add();
    it.request(old, 1, add, &[]);
    let new = it.opened(5, 2);
    assert_eq!(it.machine.counters().open, 1);
    assert_eq!(it.open(KnownSession::new(5, 1)).0, []);
    assert_eq!(it.request(old, 2, add, &[]).0, []);
    assert_eq!(original(&it.request(new, 1, add, &[]).0), 1);
    // A duplicate OPEN changes nothing.
    assert_eq!(it.open(KnownSession::new(5, 2)), (vec![Body::Accept], new.cookie));
    assert_eq!(original(&it.request(new, 2, add, &[]).0), 2);
    // The incarnation distinguishes another initiator with the same number.
    let other = KnownSession {
        session: SessionNumber { incarnation: 10, count: 0 },
        ..KnownSession::new(5, 0)
    };
    assert_eq!(it.open(other).0, [Body::Accept]);
    assert_eq!(original(&it.request(new, 3, add, &[]).0), 3);
    assert_eq!(it.machine.counters().open, 2);
}

#[test]
fn packets_without_matching_cookie_or_key_are_refused() {
    let mut it = TargetEnd::new();
    let session = it.opened(5, 1);
    let add = it.add();
    for cookie in [session.cookie ^ 1, 0, u32::MAX] {
        assert_eq!(it.request(KnownSession { cookie, ..session }, 1, add, &[]).0, [Body::Gone]);
    }
    assert_eq!(it.request(KnownSession { source: 6, ..session }, 1, add, &[]).0, [Body::Gone]);
    let refused = it.request(
        KnownSession::new(7, 1),
        0,
        Body::Open { key: DcKey(76), mtu: Mtu::Mtu256 },
        &[],
    );
    assert_eq!(refused, (vec![nak(Syndrome::Nak(Nak::RemoteAccess))], 0));
    let refused =
        it.request(KnownSession::new(7, 1), 0, Body::Open { key: KEY, mtu: Mtu::Mtu512 }, &[]);
    assert_eq!(refused, (vec![nak(Syndrome::Nak(Nak::InvalidRequest))], 0));
    assert_eq!((it.word(), it.machine.counters().open), (0, 1));
    for state in [QpState::Init, QpState::Err] {
        it.machine.set_state(state, &mut it.side);
        assert_eq!(it.open(KnownSession::new(8, 1)).0, []);
        assert_eq!(it.request(session, 1, add, &[]).0, []);
    }
}

#[test]
fn full_table_evicts_only_silent_sessions() {
    let mut it = TargetEnd::new();
    let sessions: Vec<_> = (0..4).map(|source| it.opened(source, 1)).collect();
    let add = it.add();
    let busy = nak(Syndrome::RnrNak(9));
    assert_eq!(it.open(KnownSession::new(9, 1)).0, [busy]);
    it.side.now = 5 * SECOND;
    for &session in &sessions[1..] {
        it.request(session, 1, add, &[]);
    }
    it.side.now = 10 * SECOND - 1;
    assert_eq!(it.open(KnownSession::new(9, 1)).0, [busy]);
    it.side.now = 10 * SECOND;
    let new = it.opened(9, 1);
    assert_eq!(it.open(KnownSession::new(10, 1)).0, [busy], "the others were active recently");
    assert_eq!(it.request(sessions[0], 1, add, &[]).0, [Body::Gone]);
    assert_eq!(original(&it.request(new, 1, add, &[]).0), 3);
    for &session in &sessions[1..] {
        it.request(session, 2, add, &[]);
    }
    assert_eq!(it.word(), 7);
    let counters = it.machine.counters();
    assert_eq!((counters.open, counters.evicted, counters.full, counters.gone), (4, 1, 3, 1));
    // An initiator's new session replaces its old one.
    assert_eq!(it.open(KnownSession::new(9, 2)).0, [Body::Accept]);
    for source in 0..10_000 {
        it.side.now += SECOND / 100;
        it.open(KnownSession::new(source, source));
    }
    assert_eq!(it.machine.counters().open, 4);
}

#[test]
fn session_error_ends_only_its_session_and_loses_no_receive() {
    let mut it = TargetEnd::new();
    let (bad, good) = (it.opened(5, 1), it.opened(6, 1));
    let add = it.add();
    let send = |part| Body::Send { part, tail: Tail::None };
    it.recv(1, 1024);
    it.recv(2, 1024);
    // Half a message, then an unexpected packet: the receive fails.
    assert_eq!(it.request(bad, 1, send(Part::First), &[1; 256]).0, [nak(Syndrome::ACK)]);
    let answers = it.request(bad, 2, send(Part::Only), &[1]).0;
    assert_eq!(answers, [nak(Syndrome::Nak(Nak::InvalidRequest))]);
    assert_eq!(it.side.completions, [(1, WcStatus::REM_INV_REQ_ERR)]);
    assert_eq!(it.request(bad, 3, add, &[]).0, []);
    assert_eq!(original(&it.request(good, 1, add, &[]).0), 0);
    // Half a message, then CLOSE: the receive is available again.
    assert_eq!(it.request(good, 2, send(Part::First), &[1; 256]).0.len(), 1);
    assert_eq!(it.side.receives.len(), 0);
    assert_eq!(it.request(good, 3, Body::Close, &[]).0, []);
    assert_eq!(it.side.receives.len(), 1);
    let next = it.opened(6, 2);
    assert_eq!(it.request(next, 1, send(Part::Only), &[1; 8]).0.len(), 1);
    assert_eq!(it.side.completions[1..], [(2, WcStatus::SUCCESS)]);
    // A target in ERR has returned its receives.
    it.recv(3, 1024);
    it.request(next, 2, send(Part::First), &[1; 256]);
    it.machine.set_state(QpState::Err, &mut it.side);
    assert_eq!((it.side.receives.len(), it.side.completions.len()), (1, 2));
}

#[test]
fn removed_sessions_have_no_queued_replies() {
    let mut it = TargetEnd::new();
    let read = Body::ReadRequest(Reth { remote: it.remote(0), length: 512 });
    let ask = |it: &mut TargetEnd, session: KnownSession| {
        let packet = Packet {
            ack_request: true,
            ..Packet::dc_control(DEFAULT_PKEY, NUMBER, FIRST.add(1), read)
        };
        let header = Header {
            source: Qpn(session.source),
            session: session.session,
            cookie: session.cookie,
        };
        let framed = (&packet, &header);
        match it.machine.on_request(
            framed,
            Gid::default(),
            &Payload::Bytes(&[]),
            &it.keys,
            &mut it.side,
        ) {
            Outcome::Session(key) => it.machine.put_due(key),
            other => panic!("{other:?}"),
        }
    };
    for count in 1..1000 {
        let session = it.opened(5, count);
        ask(&mut it, session);
        if count % 2 == 0 {
            it.request(session, 3, Body::Close, &[]);
        }
    }
    let mut due = 0;
    while it.machine.take_due().is_some() {
        due += 1;
    }
    assert_eq!(due, 1);
}

struct InitiatorEnd {
    machine: Requester,
    keys: Keys,
    base: u64,
    key: u32,
    side: Side,
    deadline: Option<u64>,
}

impl InitiatorEnd {
    fn new() -> Self {
        let (keys, base, key) = memory();
        let config = SendConfig {
            transport: Transport::Rc,
            qpn: Qpn(3),
            pd: PD,
            dest: Qpn(0),
            mtu: Mtu::Mtu256,
            timeout: AckTimeout::from_code(1),
            retry_count: 2,
            rnr_retry: 1,
            max_rd_atomic: 2,
            qkey: Qkey(0),
            pkey: DEFAULT_PKEY,
            flow: Flow::MEMORY,
        };
        let (mut machine, mut side) = (Requester::initiator(config, 9), Side::default());
        machine.reset_retries();
        machine.set_state(QpState::Rts, &mut side);
        Self { machine, keys, base, key, side, deadline: None }
    }

    fn post(&mut self, wr_id: u64, to: u32, len: u32) {
        let sges = [Sge { addr: self.base, length: len, lkey: Lkey(self.key) }];
        let address = AddressVector::new(PortNum(1), 0, Gid::default());
        let target = DctTarget { address: &address, handle: 0, number: Qpn(to), key: KEY };
        let (flags, data) = (SendFlags::SIGNALED, Data::Sges(&sges));
        let wr = SendWr {
            wr_id: WrId(wr_id),
            op: SendOp::Send,
            flags,
            data,
            target: Some(target.into()),
        };
        self.machine.post(&wr, len, &mut self.side);
    }

    fn packets(&mut self) -> Vec<(Packet, Header)> {
        let mut gather = Gather::new();
        let mut all = Vec::new();
        while let Some(Outgoing { packet, to, .. }) =
            self.machine.next_packet(&self.keys, &mut gather, &mut self.side)
        {
            gather.clear();
            assert_eq!(packet.dest, to.qpn);
            all.push((packet, self.machine.header().unwrap()));
        }
        let now = self.side.now;
        self.deadline = self.machine.settle(|| now);
        all
    }

    fn packet(&mut self) -> (Packet, Header) {
        match self.packets()[..] {
            [only] => only,
            ref other => panic!("not one packet: {other:?}"),
        }
    }

    /// Delivers the target's answer to `packet`.
    fn answer(&mut self, (packet, header): (Packet, Header), cookie: u32, body: Body) {
        let answer = Packet { dest: Qpn(3), body, ..packet };
        let header = Header { source: packet.dest, session: header.session, cookie };
        let payload = Payload::Bytes(&[]);
        self.machine.on_answer(
            (&answer, &header),
            Gid::default(),
            &payload,
            &self.keys,
            &mut self.side,
        );
    }

    fn expire(&mut self) {
        self.side.now = self.deadline.expect("a deadline is set");
        self.machine.on_timer(self.side.now, &mut self.side);
    }
}

fn kinds(packets: &[(Packet, Header)]) -> Vec<&'static str> {
    let kind = |(packet, _): &(Packet, Header)| match packet.body {
        Body::Open { .. } => "open",
        Body::Close => "close",
        _ => "request",
    };
    packets.iter().map(kind).collect()
}

const ACK: Body = nak(Syndrome::ACK);

#[test]
fn initiator_changes_target_when_all_is_acknowledged() {
    let mut it = InitiatorEnd::new();
    it.post(0, 20, 300);
    it.post(1, 20, 8);
    it.post(2, 21, 8);
    let open = it.packet();
    assert_eq!(open.0.body, Body::Open { key: KEY, mtu: Mtu::Mtu256 });
    assert_eq!((open.0.dest, open.1.cookie), (Qpn(20), 0));
    it.answer(open, 0xabc, Body::Accept);
    let sent = it.packets();
    assert_eq!(kinds(&sent), ["request"; 3], "no packet for the other target");
    assert_eq!(sent[0].0.psn, open.0.psn.add(1));
    assert!(
        sent.iter().all(|(_, header)| header.cookie == 0xabc && header.session == open.1.session)
    );
    it.answer(sent[1], 0xabc, ACK);
    assert_eq!(it.packets(), []);
    it.answer(sent[2], 0xabc, ACK);
    let switch = it.packets();
    assert_eq!(kinds(&switch), ["close", "open"]);
    assert_eq!((switch[0].0.dest, switch[0].1), (Qpn(20), sent[2].1));
    assert_eq!((switch[1].0.dest, switch[1].1.cookie), (Qpn(21), 0));
    assert_eq!(switch[1].1.session.count, open.1.session.count + 1);
    // Late answers are ignored.
    it.answer(open, 0xabc, Body::Accept);
    it.answer(sent[2], 0xabc, Body::Gone);
    it.answer(sent[2], 0xabc, nak(Syndrome::Nak(Nak::RemoteAccess)));
    assert_eq!((it.packets(), it.machine.counters.stale), (vec![], 3));
    it.answer(switch[1], 1, Body::Accept);
    let last = it.packet();
    it.answer(last, 1, ACK);
    assert_eq!(
        it.side.completions,
        [(0, WcStatus::SUCCESS), (1, WcStatus::SUCCESS), (2, WcStatus::SUCCESS)]
    );
    assert_eq!((it.machine.counters.sessions, it.machine.settle(|| 0)), (2, None));
}

#[test]
fn open_is_retransmitted_delayed_and_refused_like_a_request() {
    let mut it = InitiatorEnd::new();
    it.post(0, 20, 8);
    let open = it.packet();
    it.expire();
    assert_eq!(it.packet(), open, "the same session");
    it.answer(open, 0, nak(Syndrome::RnrNak(3)));
    assert_eq!(it.packets(), []);
    assert_eq!(it.deadline, Some(it.side.now + RnrTimer::from_code(3).nanoseconds()));
    it.expire();
    assert_eq!(it.packet(), open);
    it.answer(open, 0, nak(Syndrome::RnrNak(3)));
    assert_eq!(it.side.completions, [(0, WcStatus::RNR_RETRY_EXC_ERR)]);

    let mut it = InitiatorEnd::new();
    it.post(0, 20, 8);
    it.post(1, 20, 8);
    for _ in 0..3 {
        it.packet();
        it.expire();
    }
    assert_eq!(it.side.completions, [(0, WcStatus::RETRY_EXC_ERR), (1, WcStatus::WR_FLUSH_ERR)]);
    assert_eq!((it.machine.state(), it.machine.settle(|| 0)), (QpState::Err, None));

    for (refusal, status) in [
        (Nak::RemoteAccess, WcStatus::REM_ACCESS_ERR),
        (Nak::InvalidRequest, WcStatus::REM_INV_REQ_ERR),
    ] {
        let mut it = InitiatorEnd::new();
        it.post(0, 20, 8);
        let open = it.packet();
        it.answer(open, 0, nak(Syndrome::Nak(refusal)));
        assert_eq!(it.side.completions, [(0, status)]);
        // A late ACCEPT changes nothing.
        it.answer(open, 5, Body::Accept);
        assert_eq!(it.machine.state(), QpState::Err);
    }
}

#[test]
fn gone_session_fails_the_initiator_with_work_in_flight() {
    let mut it = InitiatorEnd::new();
    it.post(0, 20, 8);
    it.post(1, 20, 8);
    let open = it.packet();
    it.answer(open, 5, Body::Accept);
    let sent = it.packets();
    it.answer(sent[1], 6, Body::Gone);
    it.answer(sent[1], 6, ACK);
    assert_eq!(it.side.completions, []);
    // Refers to the second packet: the result of the first is unknown.
    it.answer(sent[1], 5, Body::Gone);
    assert_eq!(it.side.completions, [(0, WcStatus::REM_OP_ERR), (1, WcStatus::WR_FLUSH_ERR)]);

    // GONE for an acknowledged packet only ends the session.
    let mut it = InitiatorEnd::new();
    it.post(0, 20, 8);
    let open = it.packet();
    it.answer(open, 5, Body::Accept);
    let sent = it.packet();
    it.answer(sent, 5, ACK);
    it.answer(sent, 5, Body::Gone);
    it.post(1, 20, 8);
    let again = it.packet();
    assert!(matches!(again.0.body, Body::Open { .. }));
    assert_ne!(again.1.session, open.1.session);
}

#[test]
fn late_accept_starts_requests_at_once() {
    let mut it = InitiatorEnd::new();
    it.post(0, 20, 8);
    assert!(it.machine.window_request().is_some());
    let open = it.packet();
    it.side.now += 5_000_000_000;
    it.answer(open, 1, Body::Accept);
    assert_eq!(it.machine.window_request(), None, "its window was granted already");
    let sent = it.packet();
    assert_eq!((kinds(&[sent])[0], sent.1.session), ("request", open.1.session));
    it.answer(sent, 1, ACK);
    it.post(1, 20, 8);
    assert!(it.machine.window_request().is_some());
}

#[test]
fn pause_or_reset_renews_the_session() {
    let mut it = InitiatorEnd::new();
    let mut sessions = Vec::new();
    for (wait, expected) in
        [(0, &["open"][..]), (SECOND - 1, &[]), (SECOND, &["close", "open"]), (1, &[])]
    {
        it.side.now += wait;
        it.post(0, 20, 8);
        let mut sent = it.packets();
        if !expected.is_empty() {
            assert_eq!(kinds(&sent), expected);
            it.answer(sent[expected.len() - 1], 5, Body::Accept);
            sent = it.packets();
        }
        assert_eq!(kinds(&sent), ["request"]);
        sessions.push(sent[0].1.session.count);
        it.answer(sent[0], 5, ACK);
    }
    assert_eq!(sessions, [1, 1, 2, 2]);
    it.machine.set_state(QpState::Reset, &mut it.side);
    it.machine.reset_retries();
    it.machine.set_state(QpState::Rts, &mut it.side);
    it.post(0, 20, 8);
    let open = it.packet();
    assert_eq!((kinds(&[open])[0], open.1.session.count), ("open", 3), "session numbers continue");
}

#[test]
fn random_target_answers_complete_each_request_once() {
    let mut random = fastrand::Rng::with_seed(8);
    for _ in 0..5000 {
        let mut it = InitiatorEnd::new();
        for wr_id in 0..4 {
            it.post(wr_id, random.u32(20..22), random.u32(0..600));
        }
        let mut sent = it.packets();
        for _ in 0..20 {
            let Some(&about) = sent.get(random.usize(..sent.len().max(1))) else { break };
            let syndrome = [
                Syndrome::ACK,
                Syndrome::RnrNak(random.u8(..32)),
                Syndrome::Nak(Nak::Sequence),
                Syndrome::Nak(Nak::RemoteAccess),
                Syndrome::Reserved(0x40),
            ][random.usize(..5)];
            let body = match random.u8(..8) {
                0 | 1 => Body::Accept,
                2 => Body::Gone,
                3..6 => nak(syndrome),
                6 => Body::AtomicAcknowledge { aeth: Aeth { syndrome, msn: 0 }, original: 1 },
                _ => Body::ReadResponse { part: Part::Only, aeth: Aeth { syndrome, msn: 0 } },
            };
            it.answer(about, random.u32(5..7), body);
            sent.extend(it.packets());
            if random.u8(..4) == 0 && it.deadline.is_some() {
                it.expire();
            }
        }
        it.machine.set_state(QpState::Err, &mut it.side);
        let order: Vec<_> = it.side.completions.iter().map(|&(wr_id, _)| wr_id).collect();
        assert_eq!(order, [0, 1, 2, 3]);
        assert_eq!(it.machine.settle(|| 0), None);
    }
}
