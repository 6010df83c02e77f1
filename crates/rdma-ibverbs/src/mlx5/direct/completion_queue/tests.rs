//! Completion queues against a model: a simulated adapter writes entries for several passes over
//! rings of heap memory.

use std::collections::VecDeque;

use rdma_provider::types::{Data, Lkey, RecvWr, RemoteAddr, Rkey, SendFlags, SendOp, SendWr, Sge};
use rdma_provider::types::{Imm, Transport};

use super::super::heap::{CompletionMemory, Limits, Memory, ReceiveMemory, SendMemory};
use super::super::layout::MINIS;
use super::*;

/// Queue pair A has its own receive queue, B a shared one. Their places in the table collide.
const QPNS: [u32; 2] = [0x1a04, 0x1b04];
const NUMBER: u32 = 0x77;
/// Bytes of data in a receive of A. In the CQE, longer data cover fields of datagrams.
const LENGTH: usize = 17;

/// Declared in the order of dropping: the queues, then their memory.
struct Bench {
    cq: CompletionQueue,
    queues: [Arc<Queues>; 2],
    memory: CompletionMemory,
    /// The buffer of all receives of A.
    buffer: Memory,
    entries: u32,
    entry_size: u32,
    /// Index of the adapter's next entry.
    written: u32,
    /// Index of the next entry to poll.
    consumed: u32,
    /// Completions in the ring, oldest first.
    pending: VecDeque<Pending>,
    /// Next block of each send queue.
    next: [u32; 2],
    /// Free entries of the shared receive queue, and receives posted again after page faults.
    free: VecDeque<u16>,
    again: VecDeque<(u16, u64)>,
    /// Number of the next work request.
    number: u64,
    /// Compressed sessions that are not expanded: index of the title, number of entries.
    sessions: VecDeque<(u32, u32)>,
    _queues_memory: ([SendMemory; 2], [ReceiveMemory; 2]),
}

#[derive(Debug, Clone, Copy)]
struct Pending {
    pair: usize,
    kind: Kind,
    number: u64,
    /// Entry of the shared receive queue.
    shared: Option<u16>,
    /// Immediate data, and the length in the CQE.
    immediate: u32,
    length: u32,
}

/// An entry that the adapter writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Write,
    Send,
    Read,
    Error,
    OwnReceive,
    /// Without data in the CQE, and longer.
    LongReceive,
    SharedReceive,
    PageFault,
}

#[derive(Debug, Clone, Copy)]
enum Op {
    Adapter(Kind),
    /// Writes so many as a compressed session.
    Session(Kind, u32),
    /// Polls up to so many.
    Poll(usize),
    TakeRequest,
    /// Resets a queue pair.
    Remove(usize),
}

/// The first [`PLAIN`] need no compression, the first [`SHORT`] only small rings.
const OPS: [Op; 17] = [
    Op::Adapter(Kind::Write),
    Op::Adapter(Kind::Read),
    Op::Adapter(Kind::Error),
    Op::Adapter(Kind::OwnReceive),
    Op::Adapter(Kind::SharedReceive),
    Op::Adapter(Kind::PageFault),
    Op::Poll(1),
    Op::Poll(16),
    Op::TakeRequest,
    Op::Remove(0),
    Op::Remove(1),
    Op::Session(Kind::Write, 2),
    Op::Session(Kind::Read, 3),
    Op::Session(Kind::LongReceive, 2),
    Op::Session(Kind::SharedReceive, 2),
    Op::Session(Kind::Write, 20),
    Op::Session(Kind::SharedReceive, 11),
];
const PLAIN: usize = 11;
const SHORT: usize = 15;

impl Bench {
    fn new(entries: u32, entry_size: u32, start: u32) -> Self {
        let mut memory = CompletionMemory::new(entries, entry_size);
        memory.compressed = true;
        memory.records.write(0, &(start & INDEX).to_be_bytes());
        let sends = [0, 1].map(|_| SendMemory::new(entries, 0));
        // The last entry of a shared receive queue is never posted; two are for page faults.
        let receives = [ReceiveMemory::new(entries, 2), ReceiveMemory::new(entries + 3, 2)];
        let limits =
            Limits { transport: Transport::Rc, max_wr: entries, max_sge: 1, max_inline: 0 };
        // SAFETY: S3: the memory is dropped after the queues.
        let (cq, queues) = unsafe {
            let send = |pair: usize| Some(Arc::new(sends[pair].queue(QPNS[pair], limits)));
            let own = Queues { send: send(0), receive: Receives::Own(Arc::new(receives[0].own())) };
            let shared = Receives::Shared(Arc::new(receives[1].shared()));
            let queues = [own, Queues { send: send(1), receive: shared }].map(Arc::new);
            (memory.queue(NUMBER), queues)
        };
        for (qpn, queues) in QPNS.into_iter().zip(&queues) {
            cq.lock().attach(qpn, queues.clone());
        }
        cq.state.lock().consumer = start;
        Self {
            cq,
            queues,
            memory,
            buffer: Memory::new(LENGTH, 0),
            entries,
            entry_size,
            written: start,
            consumed: start,
            pending: VecDeque::new(),
            next: [0; 2],
            free: (0..entries as u16 + 3).collect(),
            again: VecDeque::new(),
            number: 1,
            sessions: VecDeque::new(),
            _queues_memory: (sends, receives),
        }
    }

    fn send(&self, pair: usize) -> &super::super::send_queue::SendQueue {
        self.queues[pair].send.as_ref().unwrap()
    }

    /// Posts a request and returns the index of its WQE.
    fn post_send(&mut self, pair: usize, op: SendOp) -> u16 {
        let buffer = Sge { addr: self.buffer.address(0), length: LENGTH as u32, lkey: Lkey(1) };
        let wr = SendWr {
            wr_id: WrId(self.number),
            op,
            flags: SendFlags::SIGNALED,
            data: Data::Sges(&[buffer]),
            target: None,
        };
        // SAFETY: S1: the buffer outlives the queue.
        unsafe { self.send(pair).post_list([wr].iter()) }.unwrap();
        self.next[pair] += 1;
        (self.next[pair] - 1) as u16
    }

    /// Returns the number of free entries.
    fn free_entries(&self) -> u32 {
        self.entries - (self.written.wrapping_sub(self.memory.records.be32(0)) & INDEX)
    }

    /// Posts work and writes its completion. Returns false if the adapter has no free entry.
    fn write(&mut self, kind: Kind) -> bool {
        if self.free_entries() == 0 {
            return false;
        }
        let (entry, pending) = self.complete(kind);
        if kind == Kind::OwnReceive && self.entry_size == 128 {
            self.memory.ring.write(self.at(self.written) - 64, &data(pending.number));
        }
        self.put(self.written, entry);
        self.written = self.written.wrapping_add(1);
        self.pending.push_back(pending);
        true
    }

    /// Posts work and writes its completions as a session. Returns false if the adapter has not
    /// enough free entries, or the entries of the shared receive queue do not follow each other.
    fn write_session(&mut self, kind: Kind, count: u32) -> bool {
        let mut shared = self.free.iter().zip(self.free.iter().skip(1)).take(count as usize - 1);
        let follow = self.free.len() > count as usize && shared.all(|(a, b)| a + 1 == *b);
        let is_shared = kind == Kind::SharedReceive;
        if self.free_entries() < count || is_shared && !(follow && self.again.is_empty()) {
            return false;
        }
        let all: Vec<_> = (0..count).map(|at| self.complete(kind_of(kind, at))).collect();
        for (first, group) in (0..).step_by(MINIS).zip(all.chunks(MINIS)) {
            // Unused mini-CQEs look like entries of either pass, depending on the group.
            let mut array = [0x20 | (first as u8 / 8 % 2); 64];
            for (mini, (entry, pending)) in array.chunks_exact_mut(8).zip(group) {
                // The hash of a receive.
                mini[..4].copy_from_slice(&[0xd1, 0xd2, 0xd3, 0xd4]);
                if is_request(pending.kind) {
                    mini[..4].copy_from_slice(&[entry[60], entry[61], entry[56], 0]);
                }
                mini[4..].copy_from_slice(&entry[44..48]);
            }
            let at = self.at(self.written.wrapping_add(first.max(1)));
            self.memory.ring.write(at, &array);
        }
        let (mut title, Pending { immediate, .. }) = all[0];
        title[44..48].copy_from_slice(&count.to_be_bytes());
        title[63] |= cqe::COMPRESSED;
        self.put(self.written, title);
        self.sessions.push_back((self.written, count));
        self.written = self.written.wrapping_add(count);
        self.pending.extend(all.iter().map(|&(_, pending)| Pending { immediate, ..pending }));
        true
    }

    /// Writes the CQE at `index`, with its owner bit.
    fn put(&self, index: u32, mut entry: [u8; 64]) {
        entry[63] |= self.owner(index);
        self.memory.ring.write(self.at(index), &entry);
    }

    /// Posts work and returns its CQE without owner bit.
    fn complete(&mut self, kind: Kind) -> ([u8; 64], Pending) {
        let at = RemoteAddr { addr: 0, rkey: Rkey(0) };
        let mut entry = [0x5a; 64];
        let mut number = self.number;
        let mut shared = None;
        let (pair, counter, opcode, op_own) = match kind {
            Kind::Write => (0, self.post_send(0, SendOp::Write(at)), 0x08, 0),
            Kind::Read => (1, self.post_send(1, SendOp::Read(at)), 0x10, 0),
            Kind::Send => (0, self.post_send(0, SendOp::Send), 0x0a, 0),
            Kind::Error => (0, self.post_send(0, SendOp::Send), 0x0a, cqe::REQUEST_ERROR << 4),
            Kind::OwnReceive | Kind::LongReceive => {
                let address = self.buffer.address(0);
                let buffer = Sge { addr: address, length: LENGTH as u32, lkey: Lkey(1) };
                let wr = RecvWr { wr_id: WrId(number), sges: &[buffer] };
                let Receives::Own(queue) = &self.queues[0].receive else { unreachable!() };
                // SAFETY: S1: the buffer outlives the queue.
                unsafe { queue.post(&[wr]) }.unwrap();
                let inline = if kind == Kind::LongReceive {
                    0
                } else if self.entry_size == 128 {
                    cqe::INLINE_64
                } else {
                    entry[..LENGTH].copy_from_slice(&data(number));
                    cqe::INLINE_32
                };
                (0, 0xeeee, 0, cqe::SEND << 4 | inline)
            }
            Kind::SharedReceive | Kind::PageFault => {
                let Receives::Shared(queue) = &self.queues[1].receive else { unreachable!() };
                let index = if let Some((index, posted)) = self.again.pop_front() {
                    number = posted;
                    index
                } else {
                    let wr = RecvWr { wr_id: WrId(number), sges: &[] };
                    // SAFETY: S1: it names no memory.
                    unsafe { queue.post(&[wr]) }.unwrap();
                    self.free.pop_front().unwrap()
                };
                shared = Some(index);
                let fault = kind == Kind::PageFault;
                let kind = if fault { cqe::RECEIVE_ERROR } else { cqe::SEND_WITH_IMM };
                (1, index, 0, kind << 4)
            }
        };
        self.number += 1;
        entry[24..28].copy_from_slice(&0x3500_00fa_u32.to_be_bytes());
        let (mut length, immediate) = (LENGTH as u32, number as u32);
        if matches!(kind, Kind::LongReceive | Kind::Read) {
            length += 1 + immediate % 8;
        }
        entry[36..40].copy_from_slice(&immediate.to_be_bytes());
        entry[44..48].copy_from_slice(&length.to_be_bytes());
        entry[54..56].copy_from_slice(if kind == Kind::PageFault {
            &[0x93, 0x22]
        } else {
            &[9, 0x15]
        });
        entry[56..60].copy_from_slice(&(opcode << 24 | QPNS[pair]).to_be_bytes());
        entry[60..62].copy_from_slice(&counter.to_be_bytes());
        entry[63] = op_own;
        (entry, Pending { pair, kind, number, shared, immediate, length })
    }

    /// Returns the offset of the CQE at `index`.
    fn at(&self, index: u32) -> usize {
        ((index % self.entries + 1) * self.entry_size) as usize - 64
    }

    fn owner(&self, index: u32) -> u8 {
        (index / self.entries % 2) as u8
    }

    /// Removes the oldest entry from the model. Returns its completion, `None` for a page fault.
    fn deliver(&mut self) -> Option<WorkCompletion> {
        let pending = self.pending.pop_front().unwrap();
        let Pending { pair, kind, number, shared, immediate, length } = pending;
        if self.sessions.front().is_some_and(|&(start, _)| start == self.consumed) {
            self.sessions.pop_front();
        }
        self.consumed = self.consumed.wrapping_add(1);
        let wc =
            WorkCompletion { wr_id: WrId(number), qpn: Qpn(QPNS[pair]), ..WorkCompletion::EMPTY };
        let receive = WorkCompletion {
            opcode: WcOpcode::RECV,
            byte_len: length,
            src_qpn: Qpn(0xfa),
            service_level: 5,
            src_lid: 0x5a5a,
            dest_path_bits: 0x5a,
            pkey_index: immediate as u16,
            flags: WcFlags::GRH,
            ..wc
        };
        Some(match kind {
            Kind::Send => WorkCompletion { opcode: WcOpcode::SEND, ..wc },
            Kind::Write => WorkCompletion { opcode: WcOpcode::RDMA_WRITE, ..wc },
            Kind::Read => WorkCompletion { opcode: WcOpcode::RDMA_READ, byte_len: length, ..wc },
            Kind::Error => {
                WorkCompletion { status: WcStatus::RETRY_EXC_ERR, vendor_error: 9, ..wc }
            }
            Kind::OwnReceive | Kind::LongReceive => receive,
            Kind::SharedReceive => {
                self.free.extend(shared);
                WorkCompletion {
                    imm_or_rkey: immediate.to_be(),
                    flags: WcFlags::GRH | WcFlags::WITH_IMM,
                    ..receive
                }
            }
            Kind::PageFault => {
                self.free.extend(shared);
                let entry = self.free.pop_front().unwrap();
                self.again.push_back((entry, number));
                return None;
            }
        })
    }

    /// Runs an operation. Returns false if it is not possible now.
    fn apply(&mut self, op: Op) -> bool {
        match op {
            Op::Adapter(kind) => return self.write(kind),
            Op::Session(kind, count) => return self.write_session(kind, count),
            Op::Poll(limit) => {
                let mut polled = [WorkCompletion::EMPTY; 16];
                let found = self.cq.poll(&mut polled[..limit]).unwrap();
                let mut expected = Vec::new();
                while expected.len() < limit && !self.pending.is_empty() {
                    expected.extend(self.deliver());
                }
                assert_eq!(polled[..found], expected);
                if let Some(last) = expected.iter().rfind(|wc| is_own_receive(wc)) {
                    assert_eq!(self.buffer.read_all(), data(last.wr_id.0));
                }
            }
            Op::TakeRequest => {
                let Some(&Pending { kind, number, .. }) = self.pending.front() else {
                    assert_eq!(self.cq.take_request(WrId(self.number - 1)), None);
                    return true;
                };
                let taken = self.cq.take_request(WrId(number));
                // Titles are left to `drain`.
                let is_title =
                    self.sessions.front().is_some_and(|&(start, _)| start == self.consumed);
                let is_taken = is_request(kind) && !is_title;
                let expected = is_taken.then(|| self.deliver());
                assert_eq!(taken, expected.flatten());
            }
            Op::Remove(pair) => {
                self.cq.lock().remove_completions(QPNS[pair]);
                self.send(pair).reset();
                if let Receives::Own(queue) = &self.queues[pair].receive {
                    queue.reset();
                }
                self.next[pair] = 0;
                let removed: Vec<_> = self.pending.iter().filter(|at| at.pair == pair).collect();
                self.consumed = self.consumed.wrapping_add(removed.len() as u32);
                self.free.extend(removed.iter().rev().filter_map(|at| at.shared));
                self.sessions.clear();
                self.pending.retain(|at| at.pair != pair);
            }
        }
        true
    }

    fn check(&self) {
        assert_eq!(self.cq.state.lock().consumer, self.consumed);
        assert_eq!(self.memory.records.be32(0), self.consumed & INDEX);
        assert_eq!(self.written.wrapping_sub(self.consumed) as usize, self.pending.len());
        for distance in 0..self.entries {
            let index = self.consumed.wrapping_add(distance);
            // Arrays and holes are anything.
            let within =
                |&(start, count): &(u32, u32)| (1..count).contains(&index.wrapping_sub(start));
            if self.sessions.iter().any(within) {
                continue;
            }
            let op_own = self.memory.ring.read(self.at(index) + 63, 1)[0];
            let is_written = op_own >> 4 != cqe::INVALID && op_own & 1 == self.owner(index);
            let pending = (distance as usize) < self.pending.len();
            assert_eq!(is_written, pending, "owner of entry {index:#x}: {op_own:#x}");
        }
        assert_eq!(self.cq.take_request(WrId(u64::MAX)), None);
        for (solicited_only, sequence) in [(false, 5), (true, 6)] {
            self.cq.arm(solicited_only, sequence);
            let request = (sequence & 3) << 28 | u32::from(solicited_only) << 24;
            assert_eq!(self.memory.records.be32(4), request | self.consumed & INDEX);
            assert_eq!(self.memory.page.be32(0x20), request | self.consumed & INDEX);
            assert_eq!(self.memory.page.be32(0x24), NUMBER);
        }
    }

    /// Checks that exactly the pending completions are left.
    fn finish(&mut self) {
        for _ in 0..=self.entries / 16 {
            self.apply(Op::Poll(16));
            self.check();
        }
        assert!(self.pending.is_empty());
        assert_eq!(self.cq.poll(&mut [WorkCompletion::EMPTY]), Ok(0));
    }
}

/// Returns the bytes that receive `number` of A gets.
fn data(number: u64) -> [u8; LENGTH] {
    std::array::from_fn(|at| number as u8 ^ at as u8)
}

/// Returns the kind of CQE `at` of a session: SENDs are among WRITEs.
fn kind_of(session: Kind, at: u32) -> Kind {
    if session == Kind::Write && at % 3 == 1 { Kind::Send } else { session }
}

fn is_request(kind: Kind) -> bool {
    matches!(kind, Kind::Write | Kind::Send | Kind::Read)
}

fn is_own_receive(wc: &WorkCompletion) -> bool {
    wc.opcode == WcOpcode::RECV && wc.qpn == Qpn(QPNS[0]) && wc.byte_len == LENGTH as u32
}

#[test]
fn every_short_sequence_delivers_each_completion_once_and_in_order() {
    // New, before the wrap of 24 bits, of 32 bits.
    let rings =
        [(2, 64, 0, 5), (4, 128, 0xff_fffe, 5), (1, 64, u32::MAX - 1, 4), (2, 128, u32::MAX, 4)];
    for (entries, entry_size, start, depth) in rings {
        for (ops, depth) in [(&OPS[..PLAIN], depth), (&OPS[..SHORT], 4)] {
            let depth = if cfg!(miri) { 1 } else { depth };
            for sequence in 0..ops.len().pow(depth) {
                let mut bench = Bench::new(entries, entry_size, start);
                for step in 0..depth {
                    if !bench.apply(ops[sequence / ops.len().pow(step) % ops.len()]) {
                        break;
                    }
                    bench.check();
                }
                bench.finish();
            }
        }
    }
}

#[test]
fn long_random_sequences_deliver_each_completion_once_and_in_order() {
    let steps = if cfg!(miri) { 100 } else { 20_000 };
    for (entries, entry_size) in [(8, 64), (8, 128), (1, 128), (32, 64), (64, 128)] {
        let mut bench = Bench::new(entries, entry_size, u32::MAX - steps / 6);
        let mut random = u64::from(entries);
        for _ in 0..steps {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            // Resets are rare, so that rings fill.
            let op = OPS[(random >> 33) as usize % OPS.len()];
            if random >> 60 == 0 || !matches!(op, Op::Remove(_)) {
                bench.apply(op);
            }
            bench.check();
        }
        bench.finish();
    }
}

/// Writes an entry as it is.
fn write_raw(bench: &mut Bench, opcode_qpn: u32, counter: u16, length: u32, op_own: u8) {
    let mut entry = [0; 64];
    entry[44..48].copy_from_slice(&length.to_be_bytes());
    entry[56..60].copy_from_slice(&opcode_qpn.to_be_bytes());
    entry[60..62].copy_from_slice(&counter.to_be_bytes());
    entry[63] = op_own | bench.owner(bench.written);
    bench.memory.ring.write(bench.at(bench.written), &entry);
    bench.written += 1;
}

// Each case follows a good completion and precedes another.
#[test]
fn entry_that_makes_no_sense_fails_the_queue_after_the_completions_before_it() {
    let (a, b) = (QPNS[0], QPNS[1]);
    let read = 0x10 << 24;
    let cases = [
        ((a, 0, 0, 5 << 4), BadEntry::Kind { op_own: 5 << 4 }),
        ((a, 0, 0, cqe::COMPRESSED), BadEntry::Session { entries: 0 }),
        ((a, 0, 1, cqe::SEND << 4 | cqe::COMPRESSED), BadEntry::Session { entries: 1 }),
        ((a, 0, 5, cqe::COMPRESSED), BadEntry::Session { entries: 5 }),
        ((a, 0, u32::MAX, cqe::COMPRESSED), BadEntry::Session { entries: u32::MAX }),
        ((a, 0, 2, 5 << 4 | cqe::COMPRESSED), BadEntry::Kind { op_own: 5 << 4 | cqe::COMPRESSED }),
        // The array is in the next entry, whose first bytes are zeros.
        ((a, 1, 3, cqe::COMPRESSED), BadEntry::Counter { qpn: a, counter: 0 }),
        ((0x1c04, 0, 4, cqe::COMPRESSED), BadEntry::QueuePair { qpn: 0x1c04 }),
        ((a, 0, 2, cqe::SEND << 4 | cqe::COMPRESSED), BadEntry::Counter { qpn: a, counter: 0 }),
        ((b, 3, 2, cqe::SEND << 4 | cqe::COMPRESSED), BadEntry::Counter { qpn: b, counter: 3 }),
        ((a, 0, 0, cqe::INLINE_64), BadEntry::Kind { op_own: cqe::INLINE_64 }),
        ((0x33 << 24 | a, 1, 0, 0), BadEntry::Opcode { opcode: 0x33 }),
        // The WQE is a WRITE, which has no buffers for data.
        ((read | a, 1, 4, cqe::INLINE_32), BadEntry::Opcode { opcode: 0x10 }),
        ((0x1c04, 0, 0, 0), BadEntry::QueuePair { qpn: 0x1c04 }),
        ((read | a, 0, 0, 0), BadEntry::Counter { qpn: a, counter: 0 }),
        ((read | a, 9, 0, 0), BadEntry::Counter { qpn: a, counter: 9 }),
        ((a, 0, 0, cqe::SEND << 4), BadEntry::Counter { qpn: a, counter: 0 }),
        ((b, 3, 0, cqe::SEND << 4), BadEntry::Counter { qpn: b, counter: 3 }),
        ((b, 900, 0, cqe::RECEIVE_ERROR << 4), BadEntry::Counter { qpn: b, counter: 900 }),
        ((read | a, 1, 33, cqe::INLINE_32), BadEntry::Length { qpn: a, length: 33 }),
    ];
    for ((opcode_qpn, counter, length, op_own), expected) in cases {
        let mut bench = Bench::new(4, 64, 0);
        bench.write(Kind::Write);
        let index =
            bench.post_send(0, SendOp::WriteWithImm(RemoteAddr { addr: 0, rkey: Rkey(0) }, Imm(1)));
        assert_eq!(index, 1);
        write_raw(&mut bench, opcode_qpn, counter, length, op_own);
        write_raw(&mut bench, 0x08 << 24 | a, 1, 0, 0);
        let mut polled = [WorkCompletion::EMPTY; 4];
        assert_eq!(bench.cq.poll(&mut polled), Ok(1), "{expected:?}");
        for _ in 0..2 {
            assert_eq!(bench.cq.poll(&mut polled), Err(expected.verb_error()), "{expected:?}");
        }
        assert_eq!(bench.cq.state.lock().failed, Some(expected));
        assert_eq!(bench.memory.records.be32(0), 1);
        assert_eq!(bench.buffer.read_all(), [0; LENGTH], "{expected:?}");
        // Its work can be removed.
        bench.cq.lock().detach(a);
    }
}

#[test]
fn session_in_a_queue_without_compression_fails_the_queue() {
    let mut bench = Bench::new(4, 64, 0);
    bench.cq.setup.compressed = false;
    assert!(bench.write_session(Kind::Write, 3));
    let expected = BadEntry::Kind { op_own: cqe::COMPRESSED };
    assert_eq!(bench.cq.poll(&mut [WorkCompletion::EMPTY]), Err(expected.verb_error()));
    assert_eq!(bench.cq.state.lock().failed, Some(expected));
}

/// Checks that removal leaves a session beyond software's entries to polling.
#[test]
fn removal_ends_at_a_session_that_makes_no_sense() {
    let (a, b) = (QPNS[0], QPNS[1]);
    for entries in [1, 4, 9] {
        let mut bench = Bench::new(4, 64, 0);
        bench.write(Kind::Read);
        write_raw(&mut bench, a, 0, entries, cqe::COMPRESSED);
        let before = bench.memory.ring.read_all();
        bench.cq.lock().remove_completions(a);
        assert_eq!(bench.memory.ring.read_all(), before, "session of {entries}");
        bench.cq.lock().remove_completions(b);
        assert_eq!(bench.cq.state.lock().consumer, 1);
        let found = bench.cq.poll(&mut [WorkCompletion::EMPTY; 4]);
        assert!(found.is_err(), "session of {entries}: {found:?}");
    }
}

/// Polls with limits that end in the middle of the session.
#[test]
fn long_session_is_polled_in_parts_and_around_the_end_of_the_ring() {
    let large = if cfg!(miri) { 32 } else { 128 };
    for (entries, entry_size, start) in [(16, 64, u32::MAX - 10), (large, 128, 0xff_fff0)] {
        for (kind, limit) in
            [(Kind::Write, 1), (Kind::Read, 7), (Kind::LongReceive, 16), (Kind::SharedReceive, 5)]
        {
            let mut bench = Bench::new(entries, entry_size, start);
            bench.write(Kind::Error);
            assert!(bench.write_session(kind, entries - 2));
            bench.write(Kind::PageFault);
            assert!(!bench.write(Kind::Write), "the ring is full");
            for _ in 0..entries {
                bench.apply(Op::Poll(limit));
                bench.check();
            }
            bench.finish();
        }
    }
}

#[test]
fn failed_queue_delivers_nothing_even_if_the_entry_makes_sense_later() {
    let mut bench = Bench::new(4, 64, 0);
    write_raw(&mut bench, 0x08 << 24 | QPNS[0], 0, 0, 0);
    let error = BadEntry::Counter { qpn: QPNS[0], counter: 0 }.verb_error();
    assert_eq!(bench.cq.poll(&mut [WorkCompletion::EMPTY]), Err(error));
    let number = bench.number;
    bench.post_send(0, SendOp::Write(RemoteAddr { addr: 0, rkey: Rkey(0) }));
    assert_eq!(bench.cq.take_request(WrId(number)), None);
    assert_eq!(bench.cq.poll(&mut [WorkCompletion::EMPTY]), Err(error));
}

/// Decodes an entry of `kind` with `mask` applied to byte `at`: in both ways, or without the path
/// of common entries. Returns the result and what the receive's buffer has.
fn decode(
    kind: Kind,
    at: usize,
    mask: u8,
    general: bool,
) -> (Result<Option<WorkCompletion>, VerbError>, Vec<u8>, bool) {
    let mut bench = Bench::new(4, 64, 0);
    let (mut entry, _) = bench.complete(kind);
    entry[at] ^= mask;
    bench.put(0, entry);
    let decoded = if general {
        bench.cq.next(&mut bench.cq.state.lock()).map_err(|bad| bad.verb_error())
    } else {
        let mut decoded = None;
        bench.cq.drain(1, |completion| decoded = Some(*completion)).map(|_| decoded)
    };
    let is_open = bench.cq.poll(&mut [WorkCompletion::EMPTY]).is_ok();
    (decoded, bench.buffer.read_all(), is_open)
}

#[test]
fn common_entries_decode_as_all_others_do() {
    use Kind::{LongReceive, OwnReceive, Read, Send, SharedReceive, Write};
    let mut decoded = 0;
    for kind in [Write, Send, Read, OwnReceive, LongReceive, SharedReceive] {
        for at in if cfg!(miri) { 63..64 } else { 0..64 } {
            for mask in [0, 1, 2, 4, 8, 0x10, 0x40, 0xff] {
                let [common, general] = [false, true].map(|way| decode(kind, at, mask, way));
                assert_eq!(common, general, "{kind:?}, byte {at} changed by {mask:#x}");
                decoded += usize::from(matches!(common.0, Ok(Some(_))));
            }
        }
    }
    assert!(decoded > if cfg!(miri) { 10 } else { 1000 }, "{decoded}");
}
