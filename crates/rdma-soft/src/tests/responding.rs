//! Tests of the responder state machine, packet by packet.

use super::machines::{Log, MTU, PD, PSN, memory};
use super::*;
use rdma_provider::types::{Gid, Imm, WcStatus, WindowBind};

use super::super::memory::dma::{Gather, Payload};
use super::super::memory::keys::Keys;
use super::super::roce::ip_fields::Origin;
use super::super::roce::packet::{Aeth, AtomicOp, Body, Nak, Packet, Part, Reth, Syndrome, Tail};
use super::super::roce::responder::{ReceiveConfig, Responder};

struct Responding {
    machine: Responder,
    keys: Keys,
    base: u64,
    key: u32,
    log: Log,
}

impl Responding {
    fn new(max_dest_rd_atomic: u8) -> Self {
        let (keys, base, key) = memory();
        let machine = Responder::new(ReceiveConfig {
            transport: Transport::Rc,
            qpn: Qpn(2),
            gid: Gid::default(),
            pd: PD,
            shared: false,
            receive_pd: PD,
            access: Access::REMOTE_ALL,
            mtu: Mtu::Mtu256,
            peer: Qpn(3),
            peer_gid: Gid::default(),
            qkey: Qkey(0),
            pkey: DEFAULT_PKEY,
            min_rnr_timer: RnrTimer::from_code(9),
            max_dest_rd_atomic,
        });
        let mut it = Self { machine, keys, base, key, log: Log::default() };
        it.restart();
        it
    }

    /// Starts a new connection over the same memory.
    fn restart(&mut self) {
        self.log = Log::default();
        self.machine.set_state(QpState::Reset, &mut self.log);
        self.machine.start(PSN);
        self.machine.set_state(QpState::Rts, &mut self.log);
    }

    fn recv(&mut self, wr_id: u64, len: u32) {
        let sges = [Sge { addr: self.base, length: len, lkey: Lkey(self.key) }];
        self.machine.post(&RecvWr { wr_id: WrId(wr_id), sges: &sges }, &mut self.log);
    }

    fn bind(&self, current: Rkey, rkey: Rkey) {
        let (window, region) = (current.0 as usize, self.key as usize);
        let (addr, len, access) = (self.base, 8192, Access::REMOTE_WRITE);
        let bind =
            WindowBind { window, region, current, rkey, lkey: Lkey(self.key), addr, len, access };
        self.keys.bind_window(Qpn(2), PD, &bind).unwrap();
    }

    /// Passes a request `steps` after the first.
    fn request(&mut self, steps: u32, body: Body, payload: &[u8]) {
        let packet = Packet {
            transport: Transport::Rc,
            pkey: DEFAULT_PKEY,
            dest: Qpn(2),
            psn: PSN.add(steps),
            solicited: false,
            ack_request: true,
            body,
        };
        let payload = Payload::Bytes(payload);
        self.machine.on_request(&packet, Origin::default(), &payload, &self.keys, &mut self.log);
    }

    fn replies(&mut self) -> Vec<(i32, Body, Vec<u8>)> {
        let mut gather = Gather::new();
        let mut all = Vec::new();
        while let Some(reply) = self.machine.next_reply(&self.keys, &mut gather, &mut self.log) {
            let mut bytes = Vec::new();
            Payload::Segments(&gather).append_to(&mut bytes);
            gather.clear();
            all.push((reply.psn.distance_from(PSN), reply.body, bytes));
        }
        all
    }

    fn syndromes(&mut self) -> Vec<(i32, Syndrome)> {
        self.replies()
            .into_iter()
            .map(|(step, body, _)| match body {
                Body::Acknowledge(aeth) => (step, aeth.syndrome),
                other => panic!("not an acknowledgement: {other:?}"),
            })
            .collect()
    }

    fn remote(&self, offset: u64) -> RemoteAddr {
        RemoteAddr { addr: self.base + offset, rkey: Rkey(self.key) }
    }
}

fn send(part: Part) -> Body {
    Body::Send { part, tail: Tail::None }
}

#[test]
fn acknowledgements_coalesce_and_the_sequence_wraps() {
    let mut it = Responding::new(1);
    for step in 0..5 {
        it.recv(step.into(), 8);
        it.request(step, send(Part::Only), &[1; 8]);
    }
    assert_eq!(it.syndromes(), [(4, Syndrome::ACK)]);
    assert_eq!(it.log.completions.len(), 5);
}

#[test]
fn gap_is_reported_once_until_it_is_closed() {
    let mut it = Responding::new(1);
    for wr_id in 0..4 {
        it.recv(wr_id, 8);
    }
    it.request(1, send(Part::Only), &[]);
    it.request(2, send(Part::Only), &[]);
    assert_eq!(it.syndromes(), [(0, Syndrome::Nak(Nak::Sequence))]);
    it.request(0, send(Part::Only), &[]);
    assert_eq!(it.syndromes(), [(0, Syndrome::ACK)]);
    it.request(3, send(Part::Only), &[]);
    assert_eq!(it.syndromes(), [(1, Syndrome::Nak(Nak::Sequence))]);
}

#[test]
fn duplicates_are_acknowledged_and_not_executed() {
    let mut it = Responding::new(1);
    it.recv(1, 8);
    it.recv(2, 8);
    it.request(0, send(Part::Only), &[1]);
    it.request(0, send(Part::Only), &[2]);
    assert_eq!(it.syndromes(), [(0, Syndrome::ACK)]);
    assert_eq!(it.log.completions, [(1, WcStatus::SUCCESS)]);
    assert_eq!(it.machine.counters.duplicates, 1);
}

#[test]
fn closed_gap_is_acknowledged_and_not_reported() {
    let mut it = Responding::new(1);
    for wr_id in 0..2 {
        it.recv(wr_id, 8);
    }
    it.request(1, send(Part::Only), &[]);
    it.request(0, send(Part::Only), &[]);
    assert_eq!(it.syndromes(), [(0, Syndrome::ACK)], "the NAK was not sent yet");
}

// Shows S4.
#[test]
fn duplicate_reads_do_not_block_a_new_request() {
    let mut it = Responding::new(2);
    let read =
        |it: &Responding, at: u64| Body::ReadRequest(Reth { remote: it.remote(at), length: 8 });
    let steps = |it: &mut Responding| it.replies().iter().map(|reply| reply.0).collect::<Vec<_>>();
    let add = Body::Atomic { remote: it.remote(0), op: AtomicOp::FetchAdd { add: 1 } };
    it.request(0, read(&it, 0), &[]);
    it.request(1, add, &[]);
    assert_eq!(steps(&mut it), [0, 1]);
    // Duplicates of both, reversed and twice, then a READ sent after both were answered.
    for _ in 0..2 {
        it.request(1, add, &[]);
        it.request(0, read(&it, 0), &[]);
    }
    it.request(2, read(&it, 8), &[]);
    assert_eq!(steps(&mut it), [1, 2], "in order, without the superseded one");
    for step in 3..6 {
        it.request(step, read(&it, 0), &[]);
    }
    let last = it.replies().pop().unwrap().1;
    assert_eq!(
        last,
        Body::Acknowledge(Aeth { syndrome: Syndrome::Nak(Nak::InvalidRequest), msn: 5 })
    );
}

#[test]
fn acknowledgements_between_repeated_responses_do_not_accumulate() {
    let mut it = Responding::new(2);
    let read = Body::ReadRequest(Reth { remote: it.remote(0), length: 8 });
    it.recv(1, 8);
    it.recv(2, 8);
    it.request(0, send(Part::Only), &[]);
    it.request(1, read, &[]);
    it.request(2, send(Part::Only), &[]);
    // Duplicates arrive while the response is queued.
    for _ in 0..100 {
        for step in [0, 2] {
            it.request(step, send(Part::Only), &[]);
            it.request(1, read, &[]);
        }
    }
    let replies = it.replies();
    assert_eq!(replies.iter().map(|reply| reply.0).collect::<Vec<_>>(), [1, 2], "{replies:?}");
}

#[test]
fn duplicate_read_of_removed_memory_does_not_fail_the_connection() {
    let mut it = Responding::new(2);
    it.recv(1, 8);
    let read = Body::ReadRequest(Reth { remote: it.remote(0), length: 600 });
    it.request(0, read, &[]);
    assert_eq!(it.replies().len(), 3);
    it.keys.remove(it.key);
    it.request(0, read, &[]);
    it.request(3, send(Part::Only), &[]);
    assert_eq!(
        it.syndromes(),
        [(3, Syndrome::ACK)],
        "SoftRoCE would attribute a NAK to its outstanding request"
    );
    // A second duplicate means that the peer waits for the response.
    it.request(0, read, &[]);
    assert_eq!(it.syndromes(), [(0, Syndrome::Nak(Nak::RemoteAccess))]);
    assert!(it.log.events.is_empty() && !it.log.failed);
    // The first response to a READ must fail, however often the READ arrived.
    for times in 1..4 {
        let mut it = Responding::new(2);
        for _ in 0..times {
            it.request(0, Body::ReadRequest(Reth { remote: it.remote(0), length: 600 }), &[]);
        }
        it.keys.remove(it.key);
        assert_eq!(it.syndromes(), [(0, Syndrome::Nak(Nak::RemoteAccess))]);
        assert!(it.log.failed);
    }
}

#[test]
fn rnr_nak_contains_the_timer_and_drops_later_requests() {
    let mut it = Responding::new(1);
    it.request(0, send(Part::Only), &[1]);
    it.request(1, send(Part::Only), &[1]);
    assert_eq!(it.syndromes(), [(0, Syndrome::RnrNak(9))]);
    it.recv(1, 8);
    it.request(0, send(Part::Only), &[1]);
    assert_eq!(it.syndromes(), [(0, Syndrome::ACK)]);
}

#[test]
fn atomics_are_replayed_from_as_many_resources_as_granted() {
    let mut it = Responding::new(2);
    let add =
        |it: &Responding| Body::Atomic { remote: it.remote(0), op: AtomicOp::FetchAdd { add: 1 } };
    let original = |body| {
        if let Body::AtomicAcknowledge { original, .. } = body { original } else { u64::MAX }
    };
    for step in 0..3 {
        it.request(step, add(&it), &[]);
        assert_eq!(original(it.replies()[0].1), u64::from(step));
    }
    // The saved response is replayed. The first is no longer saved: its duplicate is dropped.
    it.request(2, add(&it), &[]);
    it.request(1, add(&it), &[]);
    it.request(0, add(&it), &[]);
    let answers: Vec<_> =
        it.replies().into_iter().map(|(step, body, _)| (step, original(body))).collect();
    assert_eq!(answers, [(1, 1), (2, 2)]);
    it.request(3, add(&it), &[]);
    assert_eq!(original(it.replies()[0].1), 3);
}

#[test]
fn more_reads_than_granted_are_an_invalid_request() {
    let mut it = Responding::new(1);
    let read = Body::ReadRequest(Reth { remote: it.remote(0), length: 8 });
    it.request(0, read, &[]);
    it.request(1, read, &[]);
    let answers = it.replies();
    assert!(matches!(
        answers[..],
        [
            (0, Body::ReadResponse { part: Part::Only, .. }, _),
            (1, Body::Acknowledge(Aeth { syndrome: Syndrome::Nak(Nak::InvalidRequest), .. }), _)
        ]
    ));
    assert_eq!((it.log.failed, it.machine.state()), (true, QpState::Err));
}

#[test]
fn reads_before_a_refused_request_are_answered_if_their_memory_exists() {
    for gone in [false, true] {
        let mut it = Responding::new(1);
        it.request(0, Body::ReadRequest(Reth { remote: it.remote(0), length: 1000 }), &[]);
        let wrong = RemoteAddr { addr: it.base, rkey: Rkey(it.key ^ 0x100) };
        let reth = Reth { remote: wrong, length: 8 };
        it.request(4, Body::Write { part: Part::Only, reth, imm: None }, &[1; 8]);
        assert_eq!((it.log.failed, it.machine.state()), (true, QpState::Err));
        if gone {
            it.keys.remove(it.key);
        }
        let answers = it.replies();
        let refused = |(step, body, _): &(i32, Body, Vec<u8>)| match body {
            Body::Acknowledge(Aeth { syndrome: Syndrome::Nak(Nak::RemoteAccess), .. }) => {
                Some(*step)
            }
            _ => None,
        };
        let steps: Vec<_> = answers.iter().map(|answer| answer.0).collect();
        assert_eq!(steps, if gone { vec![0] } else { vec![0, 1, 2, 3, 4] });
        assert_eq!(
            answers.iter().filter_map(refused).collect::<Vec<_>>(),
            if gone { vec![0] } else { vec![4] }
        );
        assert_eq!(it.log.events.len(), 1, "{:?}", it.log.events);
    }
}

#[test]
fn read_retry_from_the_middle_is_answered() {
    let mut it = Responding::new(1);
    it.request(0, Body::ReadRequest(Reth { remote: it.remote(0), length: 1000 }), &[]);
    let first = it.replies();
    let parts = first.iter().map(|(step, body, bytes)| {
        let Body::ReadResponse { part, .. } = body else { panic!("{body:?}") };
        (*step, *part, bytes.len())
    });
    let parts: Vec<_> = parts.into_iter().collect();
    assert_eq!(
        parts,
        [
            (0, Part::First, 256),
            (1, Part::Middle, 256),
            (2, Part::Middle, 256),
            (3, Part::Last, 232)
        ]
    );
    // From the third packet on, and only with the matching address and length.
    it.request(2, Body::ReadRequest(Reth { remote: it.remote(512), length: 488 }), &[]);
    let steps: Vec<_> = it.replies().iter().map(|(step, ..)| *step).collect();
    assert_eq!(steps, [2, 3]);
    for (offset, length) in [(511, 488), (512, 489), (0, 1000)] {
        it.request(2, Body::ReadRequest(Reth { remote: it.remote(offset), length }), &[]);
        assert_eq!(it.replies(), []);
    }
    // The next request follows the READ's sequence numbers.
    it.recv(1, 8);
    it.request(4, send(Part::Only), &[]);
    assert_eq!(it.syndromes(), [(4, Syndrome::ACK)]);
}

#[test]
fn parts_out_of_order_or_of_wrong_length_are_refused() {
    let cases: [&[(Body, usize)]; 8] = [
        &[(send(Part::Middle), MTU)],
        &[(send(Part::Last), 1)],
        &[(send(Part::First), MTU - 1)],
        &[(send(Part::Only), MTU + 1)],
        &[(send(Part::First), MTU), (send(Part::Only), 1)],
        &[(send(Part::First), MTU), (send(Part::Last), 0)],
        &[
            (send(Part::First), MTU),
            (Body::Write { part: Part::Last, reth: Reth::default(), imm: None }, 1),
        ],
        &[
            (send(Part::First), MTU),
            (
                Body::ReadRequest(Reth {
                    remote: RemoteAddr { addr: 0, rkey: Rkey(0) },
                    length: 0,
                }),
                0,
            ),
        ],
    ];
    for case in cases {
        let mut it = Responding::new(1);
        it.recv(1, 4096);
        for (step, (body, len)) in case.iter().enumerate() {
            it.request(step as u32, *body, &vec![0; *len]);
        }
        let refused = (case.len() as i32 - 1, Syndrome::Nak(Nak::InvalidRequest));
        assert_eq!(it.syndromes(), [refused], "{case:?}");
        assert_eq!(it.machine.state(), QpState::Err);
    }
}

#[test]
fn write_of_wrong_length_is_refused() {
    for (length, parts) in [
        (MTU + 1, &[(Part::First, MTU), (Part::Last, 2)][..]),
        (MTU * 2, &[(Part::First, MTU), (Part::Last, MTU - 1)]),
        (MTU, &[(Part::First, MTU)]),
        (MTU * 2, &[(Part::First, MTU), (Part::Middle, MTU)]),
        (7, &[(Part::Only, 8)]),
    ] {
        let mut it = Responding::new(1);
        let reth = Reth { remote: it.remote(0), length: length as u32 };
        for (step, (part, len)) in parts.iter().enumerate() {
            it.request(step as u32, Body::Write { part: *part, reth, imm: None }, &vec![0; *len]);
        }
        let refused = (parts.len() as i32 - 1, Syndrome::Nak(Nak::InvalidRequest));
        assert_eq!(it.syndromes(), [refused]);
        assert_eq!(it.log.events, [AsyncEvent::QpRequestError(Qpn(2))]);
    }
}

#[test]
fn random_requests_do_not_panic() {
    let mut random = fastrand::Rng::with_seed(5);
    let requests = match () {
        () if cfg!(miri) => 10,
        () if cfg!(debug_assertions) => 4_000,
        () => 20_000,
    };
    for _ in 0..requests {
        let mut it = Responding::new(2);
        it.recv(1, 600);
        it.recv(2, 0);
        let window = Rkey(it.keys.add_window(PD, 7).unwrap());
        it.bind(window, window.next());
        let mut step = 0;
        for _ in 0..6 {
            let part = Part::of(random.u32(..3), random.u32(1..4));
            let edge = [0, 1, 8, it.base, it.base + 8184, u64::MAX, u64::MAX - 7];
            let addr = edge[random.usize(..edge.len())];
            let rkey =
                [Rkey(it.key), window, window.next(), Rkey(random.u32(..))][random.usize(..4)];
            let remote = RemoteAddr { addr, rkey };
            let lengths = [0, 1, 255, 256, 257, 8192, u32::MAX, 1 << 31];
            let reth = Reth { remote, length: lengths[random.usize(..lengths.len())] };
            let imm = random.bool().then_some(Imm(1));
            let body = match random.u8(..6) {
                0 => Body::Send { part, tail: Tail::None },
                1 => Body::Send { part, tail: Tail::Invalidate(rkey) },
                2 => Body::Write { part, reth, imm },
                3 => Body::ReadRequest(reth),
                4 => Body::Atomic { remote, op: AtomicOp::CompareSwap { compare: 0, swap: 1 } },
                _ => Body::Acknowledge(Aeth { syndrome: Syndrome::ACK, msn: 0 }),
            };
            let len = [0, 1, 256, 257][random.usize(..4)];
            it.request(step, body, &vec![0; len]);
            // READs of 2^31 bytes fail, so the replies end.
            it.replies();
            step += random.u32(..2);
        }
    }
}

#[test]
fn duplicate_invalidation_does_not_end_a_later_binding() {
    let mut it = Responding::new(1);
    let sge = Sge { addr: it.base, length: 8192, lkey: Lkey(it.key) };
    let window = Rkey(it.keys.add_window(PD, 7).unwrap());
    let key = window.next();
    it.bind(window, key);
    it.machine.post(&RecvWr { wr_id: WrId(1), sges: &[sge] }, &mut it.log);
    let invalidation = Body::Send { part: Part::Only, tail: Tail::Invalidate(key) };
    let packet = |steps, body| Packet {
        transport: Transport::Rc,
        pkey: DEFAULT_PKEY,
        dest: Qpn(2),
        psn: PSN.add(steps),
        solicited: false,
        ack_request: true,
        body,
    };
    let payload = Payload::Bytes(&[1; 8]);
    it.machine.on_request(
        &packet(0, invalidation),
        Origin::default(),
        &payload,
        &it.keys,
        &mut it.log,
    );
    assert_eq!(it.log.completions, [(1, WcStatus::SUCCESS)]);
    // Through all tags, back to the same key.
    it.bind(key, key.next());
    it.keys.invalidate(key.next(), Qpn(2)).unwrap();
    it.bind(key.next(), key);
    it.machine.on_request(
        &packet(0, invalidation),
        Origin::default(),
        &payload,
        &it.keys,
        &mut it.log,
    );
    assert_eq!(it.machine.counters.duplicates, 1);
    let remote = RemoteAddr { addr: sge.addr, rkey: key };
    let write = Body::Write { part: Part::Only, reth: Reth { remote, length: 8 }, imm: None };
    it.machine.on_request(&packet(1, write), Origin::default(), &payload, &it.keys, &mut it.log);
    assert_eq!(it.syndromes(), [(1, Syndrome::ACK)]);
}

/// Requests whose duplicates [`Order`] checks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Send,
    Write,
    Read,
    Atomic,
}

impl Kind {
    const ALL: [Self; 4] = [Self::Send, Self::Write, Self::Read, Self::Atomic];

    const fn packets(self) -> u32 {
        if matches!(self, Self::Read) { 2 } else { 1 }
    }

    const fn reads_back(self) -> bool {
        matches!(self, Self::Read | Self::Atomic)
    }
}

#[derive(Debug, Clone, Copy)]
enum Next {
    Executed,
    Gap,
    NotReady,
    Refused,
}

/// Checks that responses of READs and atomics precede later acknowledgements.
struct Order {
    it: Responding,
    case: u32,
    kinds: Vec<Kind>,
    /// Its response to a duplicate is not sent yet.
    owed: Vec<bool>,
    /// The peer lacks its response because an earlier request is retransmitted.
    behind: Vec<bool>,
    waiting: Option<u32>,
}

impl Order {
    fn new() -> Self {
        let (kinds, owed, behind) = (Vec::new(), Vec::new(), Vec::new());
        Self { it: Responding::new(4), case: 0, kinds, owed, behind, waiting: None }
    }

    fn restart(&mut self, case: u32) {
        self.it.restart();
        self.case = case;
        self.kinds.clear();
        self.owed.clear();
        self.behind.clear();
        self.waiting = None;
    }

    fn step(&self, index: usize) -> u32 {
        self.kinds[..index].iter().map(|kind| kind.packets()).sum()
    }

    fn fresh(&mut self, kind: Kind) {
        self.kinds.push(kind);
        self.owed.push(kind.reads_back());
        self.behind.push(false);
        if kind == Kind::Send {
            self.it.recv(1, 8);
        }
        self.hand_in(self.kinds.len() - 1);
    }

    fn duplicate(&mut self, index: usize) {
        self.owed[index] |= self.kinds[index].reads_back();
        for later in index + 1..self.kinds.len() {
            let sent = self.waiting.is_none_or(|waiting| waiting < self.step(later));
            self.behind[later] |= self.kinds[later].reads_back() && sent;
        }
        self.hand_in(index);
    }

    fn hand_in(&mut self, index: usize) {
        // A peer that goes back retransmits everything, so earlier requests will be retransmitted,
        // too.
        self.behind[..index].fill(false);
        if !self.kinds[index].reads_back() {
            self.waiting = self.waiting.max(Some(self.step(index)));
        }
        let remote = self.it.remote(0);
        let (body, payload): (_, &[u8]) = match self.kinds[index] {
            Kind::Send => (send(Part::Only), &[1; 8]),
            Kind::Write => (
                Body::Write { part: Part::Only, reth: Reth { remote, length: 8 }, imm: None },
                &[1; 8],
            ),
            Kind::Read => (Body::ReadRequest(Reth { remote, length: 300 }), &[]),
            Kind::Atomic => (Body::Atomic { remote, op: AtomicOp::FetchAdd { add: 1 } }, &[]),
        };
        self.it.request(self.step(index), body, payload);
    }

    fn next(&mut self, next: Next) {
        let end = self.step(self.kinds.len());
        self.behind.fill(false);
        match next {
            Next::Executed => self.fresh(Kind::Send),
            Next::Gap => self.it.request(end + 1, send(Part::Only), &[]),
            Next::NotReady => self.it.request(end, send(Part::Only), &[]),
            Next::Refused => self.it.request(end, send(Part::Middle), &[]),
        }
    }

    /// Takes all replies. An acknowledgement or NAK covers everything before it.
    fn take(&mut self) {
        let count = self.kinds.len();
        self.waiting = None;
        for (step, body, _) in self.it.replies() {
            let context = format!("case {} of {:?}: {body:?} at {step}", self.case, self.kinds);
            let index = (0..count).rfind(|&index| self.step(index) as i32 <= step);
            let own = index
                .filter(|&index| step < (self.step(index) + self.kinds[index].packets()) as i32);
            let reads_back = own.is_some_and(|index| self.kinds[index].reads_back());
            let Body::Acknowledge(Aeth { syndrome, msn }) = body else {
                let index = own.filter(|_| reads_back).expect(&context);
                if step + 1 == (self.step(index) + self.kinds[index].packets()) as i32 {
                    (self.owed[index], self.behind[index]) = (false, false);
                }
                continue;
            };
            let covered = if syndrome == Syndrome::ACK { step + 1 } else { step };
            assert!(!reads_back, "a READ or atomic is acknowledged: {context}");
            let covered = (0..count).filter(|&index| (self.step(index) as i32) < covered);
            assert_eq!(covered.clone().count(), msn as usize, "requests completed: {context}");
            for index in covered {
                assert!(
                    !self.owed[index] && !self.behind[index],
                    "{index} is acknowledged unanswered: {context}"
                );
            }
        }
    }
}

#[test]
fn no_acknowledgement_overtakes_the_response_of_a_read_or_atomic() {
    let nexts = [Next::Executed, Next::Gap, Next::NotReady, Next::Refused];
    let mut order = Order::new();
    // Three requests of every kind, then duplicates of any two. The upper five bits of a case
    // select when replies are taken.
    for case in 0..32 * 4 * 9 * 64 {
        let (kinds, duplicates, next, taken) =
            (case % 64, case / 64 % 9, case / 64 / 9 % 4, case / 64 / 9 / 4);
        order.restart(case);
        for number in 0..3 {
            order.fresh(Kind::ALL[(kinds >> (2 * number)) as usize % 4]);
            if taken & 1 << number != 0 {
                order.take();
            }
        }
        for (number, index) in [duplicates % 3, duplicates / 3].into_iter().enumerate() {
            order.duplicate(index as usize);
            if taken & 8 << number != 0 {
                order.take();
            }
        }
        order.next(nexts[next as usize]);
        order.take();
    }
}

#[test]
fn failed_queue_pair_acknowledges_nothing_after_an_unanswered_read() {
    let mut it = Responding::new(2);
    let add = Body::Atomic { remote: it.remote(0), op: AtomicOp::FetchAdd { add: 1 } };
    for (behind, answers) in [(add, vec![(0, Syndrome::ACK)]), (send(Part::Only), Vec::new())] {
        it.restart();
        it.recv(1, 8);
        it.recv(2, 8);
        it.request(0, send(Part::Only), &[]);
        it.request(1, Body::ReadRequest(Reth { remote: it.remote(0), length: 8 }), &[]);
        it.request(2, behind, &[]);
        it.machine.set_state(QpState::Err, &mut it.log);
        assert_eq!(it.syndromes(), answers, "{behind:?}");
    }
}

#[test]
fn duplicate_is_acknowledged_despite_reads_of_an_earlier_wrap() {
    // A READ whose sequence number recurs after a wrap is no longer outstanding.
    let mut it = Responding::new(1);
    it.request(0, Body::ReadRequest(Reth { remote: it.remote(0), length: 8 }), &[]);
    assert_eq!(it.replies().len(), 1);
    let nothing = Body::Write { part: Part::Only, reth: Reth::default(), imm: None };
    let steps = (1 << 23) + 200;
    it.machine.start(PSN.add(steps));
    it.request(steps - 100, nothing, &[]);
    let answers = it.replies();
    let [(step, Body::Acknowledge(Aeth { syndrome: Syndrome::Ack(_), .. }), _)] = answers[..]
    else {
        panic!("{answers:?}")
    };
    assert_eq!(PSN.add(step as u32), PSN.add(steps - 1));
}

/// Covers duplicates and gaps at the edges of both halves, and the wrap.
#[test]
fn requests_outside_the_sequence_window_are_not_executed() {
    const HALF: u32 = 1 << 23;
    for behind in [1, 2, 5, 1 << 22, HALF - 1, HALF] {
        let mut it = Responding::new(1);
        it.recv(0, 8);
        it.recv(1, 8);
        it.request(0, send(Part::Only), &[1; 8]);
        assert_eq!(it.syndromes(), [(0, Syndrome::ACK)]);
        it.request((2 * HALF + 1) - behind, send(Part::Only), &[2; 8]);
        assert_eq!(it.log.completions, [(0, WcStatus::SUCCESS)], "{behind} behind");
        assert_eq!(it.syndromes(), [(0, Syndrome::ACK)], "{behind} behind: acknowledged again");
        it.request(1, send(Part::Only), &[3; 8]);
        assert_eq!(it.log.completions.len(), 2, "{behind} behind: the next one is taken");
        assert_eq!(it.machine.counters.out_of_sequence, 0);
    }
    for ahead in [1, 2, 1 << 22, HALF - 1] {
        let mut it = Responding::new(1);
        it.recv(0, 8);
        it.recv(1, 8);
        it.request(ahead, send(Part::Only), &[1; 8]);
        assert_eq!(it.log.completions, [], "{ahead} ahead");
        assert_eq!(
            it.syndromes(),
            [(0, Syndrome::Nak(Nak::Sequence))],
            "{ahead} ahead: what is missing is named"
        );
        assert_eq!(it.machine.counters.out_of_sequence, 1);
        it.request(0, send(Part::Only), &[2; 8]);
        assert_eq!(it.log.completions, [(0, WcStatus::SUCCESS)]);
    }
}

#[test]
fn duplicate_is_acknowledged_though_an_old_read_appears_to_be_ahead() {
    let mut it = Responding::new(1);
    let remote = it.remote(0);
    it.request(0, Body::ReadRequest(Reth { remote, length: 8 * 256 }), &[]);
    assert_eq!(it.replies().len(), 8);
    // 2^24 packets later the READ's sequence number recurs.
    it.machine.start(PSN.add(4));
    it.recv(1, 8);
    it.request(4, send(Part::Only), &[1; 8]);
    assert_eq!(it.syndromes(), [(4, Syndrome::ACK)]);
    it.request(4, send(Part::Only), &[1; 8]);
    assert_eq!(it.syndromes(), [(4, Syndrome::ACK)], "or the peer exhausts its retries");
}
