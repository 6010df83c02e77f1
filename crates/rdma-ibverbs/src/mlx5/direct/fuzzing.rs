//! Fuzzing entry point: a completion queue whose entries an adapter wrote wrongly.
//!
//! An input is the format of the queue, then steps. Each step is a byte; see [`Bench::step`].

use std::collections::BTreeMap;
use std::sync::Arc;

use rdma_provider::types::{
    Access, Data, Imm, Lkey, RecvWr, RemoteAddr, Rkey, SendFlags, SendOp, SendWr, Sge, Transport,
    WindowBind, WorkCompletion, WrId,
};

use super::completion_queue::CompletionQueue;
use super::heap::{CompletionMemory, Limits, Memory, ReceiveMemory, SendMemory};
use super::layout::{Cqe, MINIS, MiniCqe, cqe};
use super::queues::{Queues, Receives};
use super::send_queue::SendQueue;

/// Queue pairs A, with its own receive queue; B, with a shared one; C, which has no queues.
const QPNS: [u32; 3] = [1, 2, 3];
const MARK: u8 = 0xa5;
/// Requests whose buffers are distinct. Fewer are in flight.
const SLOTS: usize = 64;
/// Bytes of a slot: two buffers between marked bytes.
const SLOT: usize = 128;
/// Offsets and lengths of the buffers in a slot.
const BUFFERS: [(usize, usize); 2] = [(16, 20), (64, 40)];
/// Longer inputs reach nothing new.
const MAX_STEPS: usize = 200;

/// The queues of a work request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Queue {
    Send(usize),
    Receive(usize),
}

/// A work request in flight.
#[derive(Debug, Clone, Copy)]
struct InFlight {
    queue: Queue,
    /// Buffers that a response or message may fill.
    buffers: usize,
}

/// Declared in the order of dropping: the queues, then their memory.
struct Bench {
    cq: CompletionQueue,
    queues: [Arc<Queues>; 3],
    memory: CompletionMemory,
    entries: u32,
    entry_size: u32,
    /// Index of the next entry to write.
    written: u32,
    buffers: Memory,
    /// The contents of `buffers` after the last step.
    expected: Vec<u8>,
    in_flight: BTreeMap<u64, InFlight>,
    next_id: u64,
    failed: bool,
    _queues_memory: ([SendMemory; 2], [ReceiveMemory; 2]),
}

/// Polls a completion queue with these entries. Each completion belongs to a request in flight; no
/// byte outside the buffers of requests in flight changes; nothing follows a failure.
pub fn completion_entries(bytes: &[u8]) {
    let Some((&format, mut rest)) = bytes.split_first() else { return };
    let entry_size = if format & 1 == 0 { 64 } else { 128 };
    let mut bench = Bench::new(1 << (format >> 1 & 7).min(5), entry_size, format & 16 != 0);
    bench.post();
    for _ in 0..MAX_STEPS {
        let Some(later) = bench.step(rest) else { break };
        bench.check_buffers();
        rest = later;
    }
    bench.finish();
}

impl Bench {
    fn new(entries: u32, entry_size: u32, compressed: bool) -> Self {
        let mut memory = CompletionMemory::new(entries, entry_size);
        memory.compressed = compressed;
        let sends = [0, 64].map(|half| SendMemory::new(16, half));
        let receives = [ReceiveMemory::new(4, 2), ReceiveMemory::new(8, 4)];
        let limits = Limits { transport: Transport::Rc, max_wr: 4, max_sge: 4, max_inline: 60 };
        // SAFETY: S3: the memory is dropped after the queues.
        let (cq, queues) = unsafe {
            let send = |pair: usize| Some(Arc::new(sends[pair].queue(QPNS[pair], limits)));
            let own = Receives::Own(Arc::new(receives[0].own()));
            let shared = Receives::Shared(Arc::new(receives[1].shared()));
            let queues = [
                Queues { send: send(0), receive: own },
                Queues { send: send(1), receive: shared },
                Queues { send: None, receive: Receives::None },
            ];
            (memory.queue(9), queues.map(Arc::new))
        };
        for (qpn, queues) in QPNS.into_iter().zip(&queues) {
            cq.lock().attach(qpn, queues.clone());
        }
        let buffers = Memory::new(SLOTS * SLOT, MARK);
        Self {
            cq,
            queues,
            memory,
            entries,
            entry_size,
            written: 0,
            expected: buffers.read_all(),
            buffers,
            in_flight: BTreeMap::new(),
            next_id: 0,
            failed: false,
            _queues_memory: (sends, receives),
        }
    }

    /// Runs the first step of `bytes`; returns those after it.
    fn step<'b>(&mut self, bytes: &'b [u8]) -> Option<&'b [u8]> {
        let (&step, rest) = bytes.split_first()?;
        let argument = step >> 3;
        match step & 7 {
            // The adapter writes an entry. Its owner bit is relative to the pass.
            0..=2 => {
                let (entry, rest) = rest.split_at_checked(self.entry_size as usize)?;
                self.write(entry, 0);
                self.written = self.written.wrapping_add(1);
                return Some(rest);
            }
            3 => {
                let mut out = [WorkCompletion::EMPTY; 8];
                self.poll(&mut out[..usize::from(argument % 8) + 1]);
            }
            4 => {
                let oldest = self.in_flight.keys().next().copied().unwrap_or(0);
                let wr_id = WrId(oldest + u64::from(argument % 8));
                if let Some(completion) = self.cq.take_request(wr_id) {
                    assert!(!self.failed && completion.wr_id == wr_id);
                    self.complete(&completion);
                }
            }
            5 => {
                let pair = usize::from(argument % 3);
                self.cq.lock().remove_completions(QPNS[pair]);
                let queues = &self.queues[pair];
                queues.send.iter().for_each(|send| send.reset());
                self.in_flight.retain(|_, request| request.queue != Queue::Send(pair));
                if let Receives::Own(queue) = &queues.receive {
                    queue.reset();
                    self.in_flight.retain(|_, request| request.queue != Queue::Receive(pair));
                }
            }
            6 => self.cq.arm(argument & 1 != 0, argument.into()),
            7 if argument < 16 => self.post(),
            // The adapter writes a session of up to 16: its title, then the mini-CQEs.
            _ => {
                let count = u32::from(argument) - 15;
                let (title, rest) = rest.split_at_checked(self.entry_size as usize)?;
                let (minis, rest) = rest.split_at_checked(count as usize * size_of::<MiniCqe>())?;
                for (first, array) in (0..).step_by(MINIS).zip(minis.chunks(size_of::<Cqe>())) {
                    let at = self.at(self.written.wrapping_add(first.max(1)));
                    self.memory.ring.write(at + self.entry_size as usize - size_of::<Cqe>(), array);
                }
                self.write(title, cqe::COMPRESSED);
                let at = self.at(self.written) + self.entry_size as usize;
                self.memory.ring.write(at - 20, &count.to_be_bytes());
                self.written = self.written.wrapping_add(count);
                return Some(rest);
            }
        }
        Some(rest)
    }

    /// Returns the offset of the entry at `index`.
    fn at(&self, index: u32) -> usize {
        (index % self.entries * self.entry_size) as usize
    }

    /// Writes the next entry, with these bits set in its last byte.
    fn write(&self, entry: &[u8], bits: u8) {
        let at = self.at(self.written);
        let owner = (self.written / self.entries) as u8 & cqe::OWNER;
        self.memory.ring.write(at, entry);
        let op_own = entry.last().map(|last| (last | bits) ^ owner);
        self.memory.ring.write(at + self.entry_size as usize - 1, op_own.as_slice());
    }

    /// Posts requests of all shapes and receives until the queues refuse them.
    fn post(&mut self) {
        let remote = RemoteAddr { addr: 0x1000, rkey: Rkey(5) };
        let bind = WindowBind {
            window: 0,
            region: 0,
            current: Rkey(0x100),
            rkey: Rkey(0x101),
            lkey: Lkey(7),
            addr: 0x4000,
            len: 4096,
            access: Access::REMOTE_READ,
        };
        let inline = [0xee; 60];
        for pair in [0, 1] {
            for _ in 0..5 {
                let sges = self.sges();
                let (op, data, buffers) = match self.next_id % 7 {
                    0 => (SendOp::Read(remote), Data::Sges(&sges), 2),
                    1 => (SendOp::Send, Data::Inline(&inline), 0),
                    2 => (SendOp::FetchAdd { remote, add: 1 }, Data::Sges(&sges[..1]), 1),
                    3 => (SendOp::BindWindow, Data::Window(&bind), 0),
                    4 => (SendOp::WriteWithImm(remote, Imm(1)), Data::Sges(&sges), 0),
                    5 => (SendOp::LocalInvalidate(Rkey(0x101)), Data::Sges(&[]), 0),
                    _ => (SendOp::Read(remote), Data::Sges(&sges[1..]), 2),
                };
                let wr_id = WrId(self.next_id);
                let wr = SendWr { wr_id, op, flags: SendFlags::SIGNALED, data, target: None };
                let send = self.queues[pair].send.as_ref();
                // SAFETY: S1: the buffers are kept until the queue is dropped.
                let post = |send: &SendQueue| unsafe { send.post_list([wr].iter()) };
                if send.is_none_or(|send| post(send).is_err()) {
                    break;
                }
                self.remember(Queue::Send(pair), buffers);
            }
            for _ in 0..4 {
                let sges = self.sges();
                let list = [RecvWr { wr_id: WrId(self.next_id), sges: &sges }];
                let posted = match &self.queues[pair].receive {
                    Receives::None => break,
                    // SAFETY: S1: the buffers are kept until the queue is dropped.
                    Receives::Own(queue) => unsafe { queue.post(&list) },
                    // SAFETY: S1: as above.
                    Receives::Shared(queue) => unsafe { queue.post(&list) },
                };
                if posted.is_err() {
                    break;
                }
                self.remember(Queue::Receive(pair), 2);
            }
        }
    }

    /// Returns the buffers of the next request.
    fn sges(&self) -> [Sge; 2] {
        let slot = self.next_id as usize % SLOTS * SLOT;
        BUFFERS.map(|(at, length)| Sge {
            addr: self.buffers.address(slot + at),
            length: length as u32,
            lkey: Lkey(3),
        })
    }

    fn remember(&mut self, queue: Queue, buffers: usize) {
        self.in_flight.insert(self.next_id, InFlight { queue, buffers });
        self.next_id += 1;
    }

    fn poll(&mut self, out: &mut [WorkCompletion]) -> usize {
        match self.cq.poll(out) {
            Ok(found) => {
                assert!(!self.failed || found == 0, "completions after a failure");
                // Written before the request was complete.
                self.check_buffers();
                for completion in &out[..found] {
                    self.complete(completion);
                }
                found
            }
            Err(_) => {
                self.failed = true;
                0
            }
        }
    }

    fn complete(&mut self, completion: &WorkCompletion) {
        let id = completion.wr_id.0;
        let Some(request) = self.in_flight.remove(&id) else {
            panic!("{completion:?} is of no request in flight");
        };
        if let Queue::Send(_) = request.queue {
            // A completion also covers all requests before it.
            self.in_flight.retain(|&other, at| other > id || at.queue != request.queue);
        }
    }

    /// Checks that only buffers of requests in flight have changed.
    fn check_buffers(&mut self) {
        let found = self.buffers.read_all();
        if found == self.expected {
            return;
        }
        let mut writable = vec![false; found.len()];
        for (&id, request) in &self.in_flight {
            let slot = id as usize % SLOTS * SLOT;
            for (at, length) in &BUFFERS[..request.buffers] {
                writable[slot + at..][..*length].fill(true);
            }
        }
        for (at, writable) in writable.into_iter().enumerate() {
            assert!(writable || found[at] == self.expected[at], "byte {at} was overwritten");
        }
        self.expected = found;
    }

    /// Polls until the queue is empty, which it is after two passes at most.
    fn finish(mut self) {
        let mut out = [WorkCompletion::EMPTY; 3];
        for _ in 0..=2 * self.entries {
            let found = self.poll(&mut out);
            if found < out.len() {
                return;
            }
        }
        panic!("the entries of two passes were polled more than once");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a step that writes an entry of 64 bytes.
    fn entry(opcode_qpn: u32, counter: u16, length: u32, op_own: u8) -> Vec<u8> {
        let mut step = vec![0; 65];
        step[45..49].copy_from_slice(&length.to_be_bytes());
        step[57..61].copy_from_slice(&opcode_qpn.to_be_bytes());
        step[61..63].copy_from_slice(&counter.to_be_bytes());
        step[64] = op_own;
        step
    }

    #[test]
    fn well_formed_entries_complete_their_requests() {
        let mut bench = Bench::new(8, 64, false);
        bench.post();
        let before = bench.in_flight.len();
        let steps = [
            // READ with data in the entry, inline SEND, a receive with data, a shared one.
            entry(0x10 << 24 | 1, 0, 32, cqe::INLINE_32),
            entry(0x0a << 24 | 1, 1, 0, 0),
            entry(1, 0, 20, cqe::SEND << 4 | cqe::INLINE_32),
            entry(2, 2, 0, cqe::SEND_WITH_IMM << 4),
            vec![3 | 7 << 3],
        ];
        for step in &steps {
            assert_eq!(bench.step(step), Some(&[][..]));
            bench.check_buffers();
        }
        assert!(!bench.failed);
        assert_eq!(bench.in_flight.len(), before - 4);
        assert_eq!(bench.expected[16..36], [0; 20]);
        assert_eq!(bench.expected[64..76], [0; 12]);
        assert_eq!(bench.expected[76], MARK);
        bench.finish();
    }

    #[test]
    fn well_formed_sessions_complete_their_requests() {
        let mut bench = Bench::new(8, 64, true);
        bench.post();
        let before = bench.in_flight.len();
        let session = |mut title: Vec<u8>, minis: &[(u16, u8, u32)]| {
            title[0] = 7 | (minis.len() as u8 + 15) << 3;
            for (counter, opcode, length) in minis {
                title.extend(counter.to_be_bytes());
                title.extend([*opcode, 0]);
                title.extend(length.to_be_bytes());
            }
            title
        };
        let steps = [
            // The SEND has two blocks.
            session(entry(1, 0, 0, 0), &[(0, 0x10, 60), (1, 0x0a, 0), (3, 0x12, 8)]),
            session(entry(2, 1, 0, cqe::SEND << 4), &[(0, 0, 5), (0, 0, 6)]),
            vec![3 | 7 << 3],
        ];
        for step in &steps {
            assert_eq!(bench.step(step), Some(&[][..]));
            bench.check_buffers();
        }
        assert!(!bench.failed);
        assert_eq!(bench.in_flight.len(), before - 5);
        bench.finish();
    }

    // Random bytes, parts of which are well-formed entries.
    #[test]
    fn random_entries_write_only_buffers_in_flight() {
        let mut random = 3_u64;
        let mut next = || {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (random >> 33) as u32
        };
        for _ in 0..if cfg!(miri) { 5 } else { 3000 } {
            let mut input = vec![next() as u8 & 0x1e];
            for _ in 0..20 {
                let opcodes = [0x10, 0x12, 0x0a, 0x25, 0x08];
                let opcode = opcodes[next() as usize % opcodes.len()];
                let kinds = [0x00, 0x04, 0x20, 0x24, 0x30, 0x44, 0xd0, 0xe0, 0xf0, 0x0c, 0x2c];
                let kind = kinds[next() as usize % kinds.len()];
                let pair = next() % 4 + 1;
                let counter = (next() % 12) as u16;
                input.extend(entry(opcode << 24 | pair, counter, next() % 70, kind));
                input.extend([next() as u8 | 3, next() as u8 | 3]);
            }
            completion_entries(&input);
        }
    }
}
