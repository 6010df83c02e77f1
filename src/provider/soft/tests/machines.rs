//! Requester and responder alone, packet by packet.

use super::*;
use crate::types::{Gid, Imm, WcStatus, WindowBind};

use super::super::dma::{Gather, Memory, Payload};
use super::super::keys::Keys;
use super::super::requester::{Flow, Requester, SendCompletions, SendConfig};
use super::super::responder::{ReceiveConfig, ReceiveWqe, Receiver, Responder};
use super::super::wire::{Aeth, AtomicOp, Body, Nak, Packet, Part, Reth, Syndrome, Tail};

const MTU: usize = 256;
const PSN: Psn = Psn::new(0xff_fffe);
pub(super) const PD: u32 = 1;
pub(super) const ALL: Access = Access::LOCAL_WRITE.union(Access::REMOTE_ALL).union(Access::MW_BIND);

/// Keys over one leaked buffer.
pub(super) fn memory() -> (Keys, u64, u32) {
    let keys = Keys::new(0x1234_5679);
    let buffer = Vec::<u64>::leak(vec![0; 1024]).as_mut_ptr().cast::<u8>();
    // SAFETY: leaked, and touched through the keys only.
    let memory = unsafe { Memory::new(buffer, 8192, buffer as u64) };
    let key = keys.insert(memory, ALL, false, PD, 42).unwrap();
    (keys, buffer as u64, key)
}

/// Collects what a machine says.
#[derive(Default)]
struct Log {
    completions: Vec<(u64, WcStatus)>,
    events: Vec<AsyncEvent>,
    failed: bool,
}

impl SendCompletions for Log {
    fn complete(&mut self, _: u32, completion: &WorkCompletion) {
        self.completions.push((completion.wr_id.0, completion.status));
    }

    fn now(&mut self) -> u64 {
        0
    }

    fn random(&mut self) -> Option<u64> {
        None
    }
}

impl Receiver for Log {
    fn take_shared(&mut self, _: &mut ReceiveWqe) -> bool {
        false
    }

    fn complete(&mut self, _: u32, completion: &WorkCompletion, _: bool) {
        self.completions.push((completion.wr_id.0, completion.status));
    }

    fn event(&mut self, event: AsyncEvent) {
        self.events.push(event);
    }

    fn failed(&mut self) {
        self.failed = true;
    }
}

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
        let mut machine = Responder::new(ReceiveConfig {
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
            min_rnr_timer: RnrTimer::from_code(9),
            max_dest_rd_atomic,
        });
        let mut log = Log::default();
        machine.start(PSN);
        machine.set_state(QpState::Rts, &mut log);
        Self { machine, keys, base, key, log }
    }

    fn recv(&mut self, wr_id: u64, len: u32) {
        let sges = [Sge { addr: self.base, length: len, lkey: Lkey(self.key) }];
        self.machine.post(&RecvWr { wr_id: WrId(wr_id), sges: &sges }, &mut self.log);
    }

    /// Binds a window over everything, for writing.
    fn bind(&self, current: Rkey, rkey: Rkey) {
        let (window, region) = (current.0 as usize, self.key as usize);
        let (addr, len, access) = (self.base, 8192, Access::REMOTE_WRITE);
        let bind = WindowBind { window, region, current, rkey, lkey: Lkey(self.key), addr, len, access };
        self.keys.bind_window(Qpn(2), PD, &bind).unwrap();
    }

    /// Hands in a request `steps` after the first.
    fn request(&mut self, steps: u32, body: Body, payload: &[u8]) {
        let packet = Packet {
            transport: Transport::Rc,
            dest: Qpn(2),
            psn: PSN.add(steps),
            solicited: false,
            ack_request: true,
            body,
        };
        let payload = Payload::Bytes(payload);
        self.machine.on_request(&packet, Gid::default(), &payload, &self.keys, &mut self.log);
    }

    /// Takes all replies: step, body, payload.
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

    /// Takes all replies: step and syndrome of each.
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
    assert_eq!(it.syndromes(), [(0, Syndrome::ACK)], "the report had not left");
}

#[test]
fn answers_that_are_repeated_keep_no_new_request_out() {
    let mut it = Responding::new(2);
    let read = |it: &Responding, at: u64| Body::ReadRequest(Reth { remote: it.remote(at), length: 8 });
    let steps = |it: &mut Responding| it.replies().iter().map(|reply| reply.0).collect::<Vec<_>>();
    let add = Body::Atomic { remote: it.remote(0), op: AtomicOp::FetchAdd { add: 1 } };
    it.request(0, read(&it, 0), &[]);
    it.request(1, add, &[]);
    assert_eq!(steps(&mut it), [0, 1]);
    // Late copies of both, in the wrong order and twice, then what was sent when both had their answer.
    for _ in 0..2 {
        it.request(1, add, &[]);
        it.request(0, read(&it, 0), &[]);
    }
    it.request(2, read(&it, 8), &[]);
    assert_eq!(steps(&mut it), [1, 2], "in order, without the one that can be of no use");
    // A third at once is too many.
    for step in 3..6 {
        it.request(step, read(&it, 0), &[]);
    }
    let last = it.replies().pop().unwrap().1;
    assert_eq!(last, Body::Acknowledge(Aeth { syndrome: Syndrome::Nak(Nak::InvalidRequest), msn: 5 }));
}

#[test]
fn acknowledgements_between_repeated_answers_do_not_pile_up() {
    let mut it = Responding::new(2);
    let read = Body::ReadRequest(Reth { remote: it.remote(0), length: 8 });
    it.request(0, read, &[]);
    // While the answer waits, a peer says the same again and again.
    for _ in 0..100 {
        it.request(0, send(Part::Only), &[]);
        it.request(0, read, &[]);
    }
    let replies = it.replies();
    assert_eq!(replies.len(), 2, "{replies:?}");
}

#[test]
fn late_copy_of_a_read_whose_memory_is_gone_ends_nothing() {
    let mut it = Responding::new(2);
    it.recv(1, 8);
    let read = Body::ReadRequest(Reth { remote: it.remote(0), length: 600 });
    it.request(0, read, &[]);
    assert_eq!(it.replies().len(), 3);
    it.keys.remove(it.key);
    it.request(0, read, &[]);
    it.request(3, send(Part::Only), &[]);
    assert_eq!(it.syndromes(), [(0, Syndrome::Nak(Nak::RemoteAccess)), (3, Syndrome::ACK)]);
    assert!(it.log.events.is_empty() && !it.log.failed);
    // One that is being read for the first time is another matter.
    let mut it = Responding::new(2);
    it.request(0, Body::ReadRequest(Reth { remote: it.remote(0), length: 600 }), &[]);
    it.keys.remove(it.key);
    assert_eq!(it.syndromes(), [(0, Syndrome::Nak(Nak::RemoteAccess))]);
    assert!(it.log.failed);
}

#[test]
fn not_ready_names_the_timer_and_silences_what_follows() {
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
    let add = |it: &Responding| Body::Atomic { remote: it.remote(0), op: AtomicOp::FetchAdd { add: 1 } };
    let original = |body| if let Body::AtomicAcknowledge { original, .. } = body { original } else { u64::MAX };
    for step in 0..3 {
        it.request(step, add(&it), &[]);
        assert_eq!(original(it.replies()[0].1), u64::from(step));
    }
    // Again: the saved answer; the first is forgotten and its repetition dropped.
    it.request(2, add(&it), &[]);
    it.request(1, add(&it), &[]);
    it.request(0, add(&it), &[]);
    let answers: Vec<_> = it.replies().into_iter().map(|(step, body, _)| (step, original(body))).collect();
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
fn reads_before_a_refused_request_are_answered_while_their_memory_is_there() {
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
            Body::Acknowledge(Aeth { syndrome: Syndrome::Nak(Nak::RemoteAccess), .. }) => Some(*step),
            _ => None,
        };
        let steps: Vec<_> = answers.iter().map(|answer| answer.0).collect();
        assert_eq!(steps, if gone { vec![0, 4] } else { vec![0, 1, 2, 3, 4] });
        assert_eq!(answers.iter().filter_map(refused).collect::<Vec<_>>(), if gone { vec![0, 4] } else { vec![4] });
        assert_eq!(it.log.events.len(), 1, "{:?}", it.log.events);
    }
}

#[test]
fn part_of_a_read_is_answered_again() {
    let mut it = Responding::new(1);
    it.request(0, Body::ReadRequest(Reth { remote: it.remote(0), length: 1000 }), &[]);
    let first = it.replies();
    let parts = first.iter().map(|(step, body, bytes)| {
        let Body::ReadResponse { part, .. } = body else { panic!("{body:?}") };
        (*step, *part, bytes.len())
    });
    let parts: Vec<_> = parts.into_iter().collect();
    assert_eq!(parts, [(0, Part::First, 256), (1, Part::Middle, 256), (2, Part::Middle, 256), (3, Part::Last, 232)]);
    // From the third packet on; only with the address and length that belong there.
    it.request(2, Body::ReadRequest(Reth { remote: it.remote(512), length: 488 }), &[]);
    let steps: Vec<_> = it.replies().iter().map(|(step, ..)| *step).collect();
    assert_eq!(steps, [2, 3]);
    for (offset, length) in [(511, 488), (512, 489), (0, 1000)] {
        it.request(2, Body::ReadRequest(Reth { remote: it.remote(offset), length }), &[]);
        assert_eq!(it.replies(), []);
    }
    // The next request is where the READ ended.
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
        &[(send(Part::First), MTU), (Body::Write { part: Part::Last, reth: Reth::default(), imm: None }, 1)],
        &[
            (send(Part::First), MTU),
            (Body::ReadRequest(Reth { remote: RemoteAddr { addr: 0, rkey: Rkey(0) }, length: 0 }), 0),
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
fn write_must_be_as_long_as_announced() {
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
fn whatever_a_peer_sends_is_survived() {
    let mut random = fastrand::Rng::with_seed(5);
    for _ in 0..20_000 {
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
            let rkey = [Rkey(it.key), window, window.next(), Rkey(random.u32(..))][random.usize(..4)];
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
            // READs of 2^31 bytes are not in this memory, so replies end.
            it.replies();
            step += random.u32(..2);
        }
    }
}

#[test]
fn repeated_invalidation_does_not_end_a_later_binding() {
    let mut it = Responding::new(1);
    let sge = Sge { addr: it.base, length: 8192, lkey: Lkey(it.key) };
    let window = Rkey(it.keys.add_window(PD, 7).unwrap());
    let key = window.next();
    it.bind(window, key);
    it.machine.post(&RecvWr { wr_id: WrId(1), sges: &[sge] }, &mut it.log);
    let invalidation = Body::Send { part: Part::Only, tail: Tail::Invalidate(key) };
    let packet = |steps, body| Packet {
        transport: Transport::Rc,
        dest: Qpn(2),
        psn: PSN.add(steps),
        solicited: false,
        ack_request: true,
        body,
    };
    let payload = Payload::Bytes(&[1; 8]);
    it.machine.on_request(&packet(0, invalidation), Gid::default(), &payload, &it.keys, &mut it.log);
    assert_eq!(it.log.completions, [(1, WcStatus::SUCCESS)]);
    // All the way round, to the same key.
    it.bind(key, key.next());
    it.keys.invalidate(key.next(), Qpn(2)).unwrap();
    it.bind(key.next(), key);
    it.machine.on_request(&packet(0, invalidation), Gid::default(), &payload, &it.keys, &mut it.log);
    assert_eq!(it.machine.counters.duplicates, 1);
    let remote = RemoteAddr { addr: sge.addr, rkey: key };
    let write = Body::Write { part: Part::Only, reth: Reth { remote, length: 8 }, imm: None };
    it.machine.on_request(&packet(1, write), Gid::default(), &payload, &it.keys, &mut it.log);
    assert_eq!(it.syndromes(), [(1, Syndrome::ACK)]);
}

struct Requesting {
    machine: Requester,
    keys: Keys,
    base: u64,
    key: u32,
    log: Log,
    now: u64,
    deadline: Option<u64>,
}

impl Requesting {
    fn new() -> Self {
        Self::with(3, 2)
    }

    fn with(retry_count: u8, max_rd_atomic: u8) -> Self {
        let (keys, base, key) = memory();
        let mut machine = Requester::new(SendConfig {
            transport: Transport::Rc,
            qpn: Qpn(3),
            pd: PD,
            dest: Qpn(2),
            mtu: Mtu::Mtu256,
            timeout: AckTimeout::from_code(1),
            retry_count,
            rnr_retry: 1,
            max_rd_atomic,
            qkey: Qkey(0),
            flow: Flow::MEMORY,
        });
        let mut log = Log::default();
        machine.start(PSN);
        machine.set_state(QpState::Rts, &mut log);
        Self { machine, keys, base, key, log, now: 0, deadline: None }
    }

    fn post(&mut self, wr_id: u64, op: SendOp, len: u32, flags: SendFlags) {
        let sges = [Sge { addr: self.base, length: len, lkey: Lkey(self.key) }];
        let flags = flags | SendFlags::SIGNALED;
        let wr = SendWr { wr_id: WrId(wr_id), op, flags, data: Data::Sges(&sges), target: None };
        self.machine.post(&wr, len, &mut self.log);
    }

    /// Takes all packets: step and body of each.
    fn packets(&mut self) -> Vec<(i32, Body)> {
        let mut gather = Gather::new();
        let mut all = Vec::new();
        while let Some(outgoing) = self.machine.next_packet(&self.keys, &mut gather, &mut self.log) {
            gather.clear();
            all.push((outgoing.packet.psn.distance_from(PSN), outgoing.packet.body));
        }
        self.deadline = self.machine.settle(|| self.now);
        all
    }

    fn steps(&mut self) -> Vec<i32> {
        self.packets().into_iter().map(|(step, _)| step).collect()
    }

    fn respond(&mut self, step: u32, body: Body, payload: &[u8]) {
        let packet = Packet {
            transport: Transport::Rc,
            dest: Qpn(3),
            psn: PSN.add(step),
            solicited: false,
            ack_request: false,
            body,
        };
        self.machine.on_response(&packet, &Payload::Bytes(payload), &self.keys, &mut self.log);
    }

    fn ack(&mut self, step: u32, syndrome: Syndrome) {
        self.respond(step, Body::Acknowledge(Aeth { syndrome, msn: 0 }), &[]);
    }

    fn data(&mut self, step: u32, part: Part, len: usize) {
        let aeth = Aeth { syndrome: Syndrome::ACK, msn: 0 };
        self.respond(step, Body::ReadResponse { part, aeth }, &vec![7; len]);
    }

    /// Moves the time to the deadline.
    fn expire(&mut self) {
        self.now = self.deadline.expect("a deadline is set");
        self.machine.on_timer(self.now, &mut self.log);
    }
}

const NONE: SendFlags = SendFlags::empty();
const FAR: RemoteAddr = RemoteAddr { addr: 0x1000, rkey: Rkey(5) };

#[test]
fn acknowledgement_covers_all_before_it() {
    let mut it = Requesting::new();
    for wr_id in 0..3 {
        it.post(wr_id, SendOp::Send, 300, NONE);
    }
    assert_eq!(it.steps(), [0, 1, 2, 3, 4, 5]);
    it.ack(3, Syndrome::ACK);
    assert_eq!(it.log.completions, [(0, WcStatus::SUCCESS), (1, WcStatus::SUCCESS)]);
    // Old, and never sent: nothing happens.
    it.ack(1, Syndrome::ACK);
    it.ack(6, Syndrome::ACK);
    assert_eq!(it.log.completions.len(), 2);
    it.ack(5, Syndrome::ACK);
    assert_eq!(it.log.completions.len(), 3);
    assert!(it.steps().is_empty());
    assert_eq!(it.deadline, None);
}

#[test]
fn sequence_nak_goes_back_and_does_not_repeat_what_arrived() {
    let mut it = Requesting::new();
    it.post(0, SendOp::Send, 300, NONE);
    it.post(1, SendOp::Write(FAR), 600, NONE);
    assert_eq!(it.steps().len(), 5);
    it.ack(3, Syndrome::Nak(Nak::Sequence));
    assert_eq!(it.log.completions, [(0, WcStatus::SUCCESS)]);
    // The same NAK twice is one.
    it.ack(3, Syndrome::Nak(Nak::Sequence));
    assert_eq!(it.machine.counters.sequence_naks, 1);
    let again = it.packets();
    assert_eq!(again.iter().map(|(step, _)| *step).collect::<Vec<_>>(), [3, 4]);
    assert!(matches!(again[0].1, Body::Write { part: Part::Middle, .. }));
    it.ack(4, Syndrome::ACK);
    assert_eq!(it.log.completions.len(), 2);
}

#[test]
fn partial_acknowledgement_while_sending_repeats_nothing() {
    let mut it = Requesting::new();
    it.post(0, SendOp::Send, 8192, NONE);
    it.post(1, SendOp::Send, 8192, NONE);
    it.post(2, SendOp::Send, 8192, NONE);
    assert_eq!(it.steps().len(), 64);
    it.ack(40, Syndrome::ACK);
    assert_eq!(it.steps(), (64..96).collect::<Vec<_>>());
    assert_eq!(it.machine.counters.retransmitted, 0);
}

#[test]
fn silence_is_retried_as_often_as_configured() {
    let mut it = Requesting::new();
    it.post(0, SendOp::Send, 8, NONE);
    it.post(1, SendOp::Send, 8, NONE);
    for _ in 0..3 {
        assert_eq!(it.steps(), [0, 1]);
        it.expire();
    }
    assert_eq!(it.steps(), [0, 1]);
    // Progress refills the count.
    it.ack(0, Syndrome::ACK);
    for _ in 0..4 {
        it.steps();
        it.expire();
    }
    assert_eq!(it.log.completions, [(0, WcStatus::SUCCESS), (1, WcStatus::RETRY_EXC_ERR)]);
    assert_eq!((it.machine.state(), it.machine.settle(|| 0)), (QpState::Err, None));
}

#[test]
fn deadline_counts_from_the_last_progress() {
    let mut it = Requesting::new();
    it.post(0, SendOp::Send, 8, NONE);
    it.post(1, SendOp::Send, 8, NONE);
    it.steps();
    let first = it.deadline.unwrap();
    it.now = 5000;
    it.ack(0, Syndrome::ACK);
    it.steps();
    assert_eq!(it.deadline, Some(first + 5000));
    // Too early: nothing.
    it.machine.on_timer(first, &mut it.log);
    assert_eq!(it.machine.counters.timeouts, 0);
}

#[test]
fn receiver_not_ready_waits_for_exactly_its_timer() {
    let mut it = Requesting::new();
    it.post(0, SendOp::Send, 8, NONE);
    it.post(1, SendOp::Send, 8, NONE);
    it.steps();
    it.ack(0, Syndrome::RnrNak(3));
    assert!(it.steps().is_empty());
    assert_eq!(it.deadline, Some(RnrTimer::from_code(3).nanoseconds()));
    it.expire();
    assert_eq!(it.steps(), [0, 1]);
    it.ack(0, Syndrome::RnrNak(3));
    assert_eq!(it.log.completions, [(0, WcStatus::RNR_RETRY_EXC_ERR), (1, WcStatus::WR_FLUSH_ERR)]);
}

#[test]
fn reads_and_atomics_stall_at_their_limit_and_fences_wait_for_them() {
    let mut it = Requesting::new();
    let add = SendOp::FetchAdd { remote: FAR, add: 1 };
    it.post(0, SendOp::Read(FAR), 300, NONE);
    it.post(1, add, 8, NONE);
    it.post(2, add, 8, NONE);
    it.post(3, SendOp::Send, 8, SendFlags::FENCE);
    // READ takes two numbers; the third request stalls, and all behind it.
    assert_eq!(it.steps(), [0, 2]);
    it.data(0, Part::First, 256);
    it.data(1, Part::Last, 44);
    assert_eq!(it.steps(), [3]);
    let aeth = Aeth { syndrome: Syndrome::ACK, msn: 0 };
    it.respond(2, Body::AtomicAcknowledge { aeth, original: 1 }, &[]);
    assert!(it.steps().is_empty());
    it.respond(3, Body::AtomicAcknowledge { aeth, original: 2 }, &[]);
    assert_eq!(it.steps(), [4]);
    assert_eq!(it.log.completions.len(), 3);
}

#[test]
fn lost_read_response_asks_for_the_rest() {
    let mut it = Requesting::new();
    it.post(0, SendOp::Read(FAR), 1000, NONE);
    it.post(1, SendOp::Send, 8, NONE);
    assert_eq!(it.steps(), [0, 4]);
    it.data(0, Part::First, 256);
    // 1 is lost; the others and the acknowledgement behind say so, once.
    it.data(2, Part::Middle, 256);
    it.data(3, Part::Last, 232);
    it.ack(4, Syndrome::ACK);
    assert_eq!(it.machine.counters.sequence_naks, 1);
    let again = it.packets();
    let rest = Reth { remote: RemoteAddr { addr: FAR.addr + 256, ..FAR }, length: 744 };
    assert_eq!(again[0], (1, Body::ReadRequest(rest)));
    assert_eq!(again[1].0, 4);
    it.data(1, Part::First, 256);
    it.data(2, Part::Middle, 256);
    it.data(3, Part::Last, 232);
    it.ack(4, Syndrome::ACK);
    assert_eq!(it.log.completions, [(0, WcStatus::SUCCESS), (1, WcStatus::SUCCESS)]);
}

#[test]
fn nonsense_from_the_responder_is_a_bad_response() {
    let cases: [fn(&mut Requesting); 4] = [
        |it| it.data(0, Part::First, 255),
        |it| it.data(0, Part::Only, 256),
        |it| it.ack(0, Syndrome::Nak(Nak::Other(17))),
        |it| {
            let aeth = Aeth { syndrome: Syndrome::ACK, msn: 0 };
            it.respond(0, Body::AtomicAcknowledge { aeth, original: 1 }, &[]);
        },
    ];
    for case in cases {
        let mut it = Requesting::new();
        it.post(0, SendOp::Read(FAR), 1000, NONE);
        it.steps();
        case(&mut it);
        assert_eq!(it.log.completions, [(0, WcStatus::BAD_RESP_ERR)]);
    }
}

#[test]
fn bad_memory_waits_for_what_is_before_it() {
    let mut it = Requesting::new();
    it.post(0, SendOp::Send, 8, NONE);
    it.key ^= 8;
    it.post(1, SendOp::Send, 8, NONE);
    assert_eq!(it.steps(), [0]);
    assert_eq!(it.log.completions, []);
    it.ack(0, Syndrome::ACK);
    assert!(it.steps().is_empty());
    assert_eq!(it.log.completions, [(0, WcStatus::SUCCESS), (1, WcStatus::LOC_PROT_ERR)]);
}

#[test]
fn message_that_is_too_long_fails_and_sends_nothing() {
    let mut it = Requesting::new();
    it.post(0, SendOp::Write(FAR), (1 << 30) + 1, NONE);
    assert!(it.steps().is_empty());
    assert_eq!(it.log.completions, [(0, WcStatus::LOC_LEN_ERR)]);
}
