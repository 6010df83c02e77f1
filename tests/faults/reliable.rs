//! Reliable connections of the verbs layer: work is executed once in order, or fails with all later
//! work.

#![allow(unsafe_code)]

use std::collections::VecDeque;
use std::time::Duration;

use fastrand::Rng;
use tokio_rdma::Imm;
use tokio_rdma::software::{LinkCounters, Network};
use tokio_rdma::types::{
    AsyncEvent, Data, Mtu, QpState, RecvWr, SendFlags, SendOp, SendWr, Sge, SrqCaps, Transport,
    WcOpcode, WcStatus, WorkCompletion, WrId,
};
use tokio_rdma::verbs::{Qp, Srq};

use super::campaign::{Trace, seeds};
use super::chance::{LARGEST, Mix, noise, size};
use super::memory::Memory;
use super::model::Model;
use super::setup::{Side, Terms, connect, fail, is, number};

const TARGET: usize = LARGEST + 4096;
/// The number of bytes after each buffer that must not change.
const GUARD: usize = 16;
const RECEIVE: u64 = 1 << 63;
// Words of a side: counter, contended word, one word for each queue pair.
const COUNTER: usize = 0;
const CONTENDED: usize = 8;
const CHAINS: usize = 16;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Send,
    SendImm,
    Write,
    WriteImm,
    Read,
    Add,
    /// A compare-and-swap of the queue pair's own word; `true` if it must not match.
    Chain(bool),
    Contend,
}

impl Kind {
    fn consumes_receive(self) -> bool {
        matches!(self, Self::Send | Self::SendImm | Self::WriteImm)
    }

    fn is_atomic(self) -> bool {
        matches!(self, Self::Add | Self::Chain(_) | Self::Contend)
    }
}

#[derive(Debug)]
struct Step {
    kind: Kind,
    len: usize,
    /// The offset of the data in the noise, or of the result in `results`.
    local: usize,
    remote: usize,
    fence: bool,
    signaled: bool,
    solicited: bool,
    inline: bool,
    pieces: usize,
    /// The expected value of the own word, or the compared value of the shared word.
    compare: u64,
    swap: u64,
    /// READ: the contents of the target when posted.
    snapshot: Vec<u8>,
    /// READ: the first fenced step after it; WRITEs from there cannot overtake it.
    fenced_by: Option<usize>,
    result: Option<Vec<u8>>,
}

struct End {
    qp: Qp,
    side: usize,
    terms: Terms,
    queue: usize,
    results: Memory,
    target: Memory,
    /// A model of the peer's `target`, which this end writes.
    model: Model,
    plan: Vec<Step>,
    next: usize,
    done: usize,
    failed: Option<(usize, WcStatus)>,
    /// The posted steps that consume a receive of the peer, in order.
    messages: Vec<usize>,
    delivered: usize,
    newest_receive: u64,
    chain: u64,
    seen: u64,
    /// Moved to the error state by the test.
    ended: bool,
}

struct Queue {
    shared: Option<Srq>,
    end: usize,
    memory: Memory,
    slot: usize,
    depth: usize,
    free: Vec<usize>,
    posted: VecDeque<(u64, usize)>,
    next: u64,
    max: u64,
}

#[derive(Debug, PartialEq, Eq)]
struct Outcome {
    hash: u64,
    now: Duration,
    link: LinkCounters,
    completions: u64,
    ends: usize,
    /// The number of failed ends: with the maximum of retries, and with fewer.
    failed: [usize; 2],
    patient: bool,
    not_ready: bool,
}

struct Run {
    random: Rng,
    network: Network,
    trace: Trace,
    completions: u64,
    last_fault: &'static str,
    ends: Vec<End>,
    queues: Vec<Queue>,
    sides: [Side; 2],
    sources: [Memory; 2],
    words: [Memory; 2],
    sums: [Vec<u64>; 2],
    /// Compare-and-swaps of the shared word of each side: compared, new and previous value.
    contended: [Vec<(u64, u64, u64)>; 2],
}

fn plan(random: &mut Rng, mtu: Mtu, results: &mut usize, count: usize, depth: usize) -> Vec<Step> {
    let weights = [(); 8].map(|()| random.usize(..4) + usize::from(random.bool()));
    let total = weights.iter().sum::<usize>().max(1);
    let mut unsignaled = 0;
    let some_unsignaled = random.bool();
    (0..count)
        .map(|index| {
            let mut ticket = random.usize(..total);
            let number = weights
                .iter()
                .position(|&weight| {
                    ticket < weight || {
                        ticket -= weight;
                        false
                    }
                })
                .unwrap_or(0);
            let kind = match number {
                0 => Kind::Send,
                1 => Kind::SendImm,
                2 => Kind::Write,
                3 => Kind::WriteImm,
                4 => Kind::Read,
                5 => Kind::Add,
                6 => Kind::Chain(random.u8(..4) == 0),
                _ => Kind::Contend,
            };
            let len = if kind.is_atomic() { 8 } else { size(random, mtu, LARGEST) };
            let local = if kind == Kind::Read || kind.is_atomic() {
                let at = results.next_multiple_of(8);
                *results = at + len + GUARD;
                at
            } else {
                random.usize(..2 * LARGEST)
            };
            let signaled = !some_unsignaled
                || unsignaled + 1 >= depth.div_ceil(2)
                || index + 1 == count
                || random.bool();
            unsignaled = if signaled { 0 } else { unsignaled + 1 };
            Step {
                kind,
                len,
                local,
                remote: random.usize(..=TARGET - len),
                fence: random.u8(..5) == 0,
                signaled,
                solicited: random.bool(),
                inline: len <= 128 && !kind.is_atomic() && kind != Kind::Read && random.bool(),
                pieces: if kind.is_atomic() { 1 } else { random.usize(1..=4) },
                compare: 0,
                swap: 0,
                snapshot: Vec::new(),
                fenced_by: None,
                result: None,
            }
        })
        .collect()
}

fn split(memory: &Memory, at: usize, len: usize, pieces: usize) -> Vec<Sge> {
    (0..pieces)
        .map(|piece| {
            let (from, to) = (len * piece / pieces, len * (piece + 1) / pieces);
            memory.sge(at + from, to - from)
        })
        .collect()
}

impl Run {
    fn new(seed: u64, verbose: bool) -> (Self, Mix, bool, u8) {
        let mut random = Rng::with_seed(seed);
        let mix = Mix::draw(&mut random);
        let faults = mix.faults(&mut random);
        let trace = Trace::new(verbose);
        trace.print(|| format!("seed {seed}: {mix:?}, {faults:?}"));
        let network = Network::simulated(seed, faults);
        let sides = [Side::new(&network, "a"), Side::new(&network, "b")];
        let mtu = Mtu::ALL[random.usize(..5)];
        let pairs = random.usize(1..=3);
        let patient = random.u8(..5) > 0;
        let ready = random.u8(..4) > 0;
        let eager = if random.u8(..3) == 0 { random.u8(1..10) } else { random.u8(20..=100) };
        let shared = random.u8(..4) == 0;
        let mut queues = Vec::new();
        let srq_depth = random.u32(1..24);
        let srq = shared.then(|| {
            let srq = Srq::new(&sides[1].pd, SrqCaps { max_wr: srq_depth, max_sge: 4 }).unwrap();
            queues.push(Queue {
                shared: Some(srq.clone()),
                end: 1,
                memory: Memory::new(&sides[1].pd, 8),
                slot: 0,
                depth: srq_depth as usize,
                free: Vec::new(),
                posted: VecDeque::new(),
                next: 0,
                max: 0,
            });
            srq
        });
        let mut ends: Vec<End> = Vec::new();
        for pair in 0..pairs {
            let mut made: Vec<End> = Vec::new();
            for (side, here) in sides.iter().enumerate() {
                let mut terms = Terms::draw(&mut random, mtu);
                if !patient {
                    terms.retry_count = random.u8(..4);
                }
                if !ready {
                    terms.rnr_retry = random.u8(..4);
                }
                let srq = srq.as_ref().filter(|_| side == 1);
                let qp = here.queue_pair(Transport::Rc, srq, terms.caps);
                let count = if random.u8(..8) == 0 { 0 } else { random.usize(1..24) };
                let mut results = 0;
                let plan =
                    plan(&mut random, mtu, &mut results, count, terms.caps.max_send_wr as usize);
                let pd = &here.pd;
                let target = Memory::new(pd, TARGET);
                let initial = &noise()[2 * LARGEST - 7 * pair..][..TARGET];
                target.fill(0, initial);
                let index = 2 * pair + side;
                let queue = if srq.is_some() { 0 } else { queues.len() };
                if srq.is_none() {
                    queues.push(Queue {
                        shared: None,
                        end: index,
                        memory: Memory::new(pd, 8),
                        slot: 0,
                        depth: terms.caps.max_recv_wr as usize,
                        free: Vec::new(),
                        posted: VecDeque::new(),
                        next: 0,
                        max: 0,
                    });
                }
                trace.print(|| format!("end {index}: qpn {} {terms:?}", qp.qpn()));
                made.push(End {
                    qp,
                    side,
                    terms,
                    queue,
                    results: Memory::new(pd, results),
                    target,
                    model: Model::new(initial),
                    plan,
                    next: 0,
                    done: 0,
                    failed: None,
                    messages: Vec::new(),
                    delivered: 0,
                    newest_receive: 0,
                    chain: 0,
                    seen: 0,
                    ended: false,
                });
            }
            connect([
                (&sides[0], &made[0].qp, &made[0].terms),
                (&sides[1], &made[1].qp, &made[1].terms),
            ]);
            ends.append(&mut made);
        }
        for (number, queue) in queues.iter_mut().enumerate() {
            let senders = (0..ends.len()).filter(|&end| {
                ends[end ^ 1].queue == number && ends[end ^ 1].side == ends[queue.end].side
            });
            let steps =
                senders.flat_map(|end| &ends[end].plan).filter(|step| step.kind.consumes_receive());
            let (mut count, mut largest) = (0, 0);
            for step in steps {
                count += 1;
                largest = largest.max(if step.kind == Kind::WriteImm { 0 } else { step.len });
            }
            queue.slot = largest + GUARD;
            // A queue pair that fails in the middle of a message consumes one more.
            queue.max = count + 4;
            queue.depth = queue.depth.min(queue.max as usize);
            queue.free = (0..queue.depth).collect();
            queue.memory = Memory::new(&sides[ends[queue.end].side].pd, queue.slot * queue.depth);
        }
        let sources = [0, 1].map(|side: usize| {
            let memory = Memory::new(&sides[side].pd, noise().len());
            memory.fill(0, noise());
            memory
        });
        let words = [0, 1].map(|side: usize| Memory::new(&sides[side].pd, CHAINS + 8 * ends.len()));
        let run = Self {
            random,
            network,
            trace,
            completions: 0,
            last_fault: "",
            ends,
            queues,
            sides,
            sources,
            words,
            sums: Default::default(),
            contended: Default::default(),
        };
        (run, mix, patient && ready, eager)
    }

    /// Posts up to `max` receives; returns whether it posted any.
    fn receive(&mut self, number: usize, max: usize) -> bool {
        let queue = &mut self.queues[number];
        let mut any = false;
        for _ in 0..max {
            if queue.next >= queue.max
                || (queue.shared.is_none() && self.ends[queue.end].failed.is_some())
            {
                break;
            }
            let Some(slot) = queue.free.pop() else { break };
            let at = slot * queue.slot;
            let len = queue.slot - GUARD;
            queue.memory.fill(at + len, &[0xa5; GUARD]);
            let wr_id = WrId(RECEIVE | (number as u64) << 40 | queue.next);
            let sges = split(&queue.memory, at, len, self.random.usize(1..=3));
            let list = [RecvWr { wr_id, sges: &sges }];
            // SAFETY: the memory outlives the queue pairs and is read only after the completion.
            let posted = unsafe {
                match &queue.shared {
                    Some(srq) => srq.post_recv(&list),
                    None => self.ends[queue.end].qp.post_recv(&list),
                }
            };
            posted.unwrap();
            queue.posted.push_back((queue.next, slot));
            queue.next += 1;
            any = true;
        }
        any
    }

    /// Posts up to `max` steps as one list; returns whether it posted any.
    fn send(&mut self, number: usize, max: usize) -> bool {
        let [this, peer] = self.ends.get_disjoint_mut([number, number ^ 1]).unwrap();
        if this.failed.is_some() {
            return false;
        }
        let (side, there) = (this.side, peer.side);
        let first = this.next;
        let last = this.plan.len().min(first + max);
        let words = &self.words[there];
        let mut sges = Vec::new();
        for (step, index) in this.plan[first..last].iter_mut().zip(first..) {
            match step.kind {
                Kind::Chain(false) => {
                    (step.compare, step.swap) = (this.chain, this.chain + 1);
                    this.chain += 1;
                }
                // `compare` is the expected value; the posted request compares with another one.
                Kind::Chain(true) => (step.compare, step.swap) = (this.chain, 7777),
                Kind::Contend => {
                    step.compare = this.seen;
                    step.swap = (number as u64 + 1) << 32 | index as u64;
                }
                _ => {}
            }
            let memory = if step.kind == Kind::Read || step.kind.is_atomic() {
                &this.results
            } else {
                &self.sources[side]
            };
            sges.push(split(memory, step.local, step.len, step.pieces));
        }
        let list: Vec<_> = this.plan[first..last]
            .iter()
            .zip(&sges)
            .zip(first..)
            .map(|((step, sges), index)| {
                let (remote, imm) =
                    (peer.target.remote(step.remote), Imm(index as u32 ^ 0x5a00_0000));
                let op = match step.kind {
                    Kind::Send => SendOp::Send,
                    Kind::SendImm => SendOp::SendWithImm(imm),
                    Kind::Write => SendOp::Write(remote),
                    Kind::WriteImm => SendOp::WriteWithImm(remote, imm),
                    Kind::Read => SendOp::Read(remote),
                    Kind::Add => SendOp::FetchAdd { remote: words.remote(COUNTER), add: 1 },
                    Kind::Chain(miss) => SendOp::CompareSwap {
                        remote: words.remote(CHAINS + 8 * number),
                        compare: step.compare + if miss { 1000 } else { 0 },
                        swap: step.swap,
                    },
                    Kind::Contend => SendOp::CompareSwap {
                        remote: words.remote(CONTENDED),
                        compare: step.compare,
                        swap: step.swap,
                    },
                };
                let mut flags = SendFlags::empty();
                flags.set(SendFlags::FENCE, step.fence);
                flags.set(SendFlags::SIGNALED, step.signaled);
                flags.set(SendFlags::SOLICITED, step.solicited);
                let inline = &noise()[step.local % (2 * LARGEST)..][..step.len];
                let data = if step.inline { Data::Inline(inline) } else { Data::Sges(sges) };
                SendWr {
                    wr_id: WrId((number as u64) << 32 | index as u64),
                    op,
                    flags,
                    data,
                    target: None,
                }
            })
            .collect();
        // SAFETY: sources are never written, results are read after completion, both outlive `qp`.
        let posted = match unsafe { this.qp.post_send(&list) } {
            Ok(()) => list.len(),
            Err(error) => {
                assert_eq!(
                    error.error.errno, 12,
                    "a post failed although the queue is not full: {error}"
                );
                error.posted
            }
        };
        drop(list);
        // Steps that were not posted are prepared again by the next call.
        for step in &this.plan[first + posted..last] {
            this.chain -= u64::from(step.kind == Kind::Chain(false));
        }
        for index in first..first + posted {
            let (kind, at, len, local, fence) = {
                let step = &this.plan[index];
                (step.kind, step.remote, step.len, step.local, step.fence)
            };
            self.trace.print(|| {
                format!(
                    "end {number} posts {index}: {kind:?} {len} bytes, remote {at}, fence {fence}"
                )
            });
            if fence {
                let open =
                    this.plan[this.done..index].iter_mut().filter(|step| step.kind == Kind::Read);
                open.for_each(|step| _ = step.fenced_by.get_or_insert(index));
            }
            match kind {
                Kind::Write | Kind::WriteImm => {
                    this.model.write(index, at, &noise()[local..local + len])
                }
                Kind::Read => {
                    this.plan[index].snapshot = this.model.newest()[at..at + len].to_vec()
                }
                _ => {}
            }
            if kind.consumes_receive() {
                this.messages.push(index);
            }
        }
        this.next += posted;
        posted > 0
    }

    fn poll(&mut self) -> bool {
        let found: Vec<_> = self.sides.iter().map(Side::poll).collect();
        let now = self.network.now().as_nanos() as u64;
        let mut any = false;
        // Receives first, because acknowledged messages have been delivered.
        for receives in [true, false] {
            for (side, found) in found.iter().enumerate() {
                for done in found.iter().filter(|done| (done.wr_id.0 & RECEIVE != 0) == receives) {
                    any = true;
                    self.completions += 1;
                    let good = if done.status.is_success() { u64::from(done.byte_len) } else { 0 };
                    let values = [
                        now,
                        side as u64,
                        done.wr_id.0,
                        done.status.0.into(),
                        good,
                        number(done.qpn),
                    ];
                    self.trace.add(&values);
                    self.trace.print(|| format!("{now} ns, side {side}: {done:?}"));
                    if receives {
                        self.received(side, done);
                    } else {
                        self.sent(done);
                    }
                }
            }
        }
        any
    }

    fn received(&mut self, side: usize, done: &WorkCompletion) {
        let queue = &mut self.queues[(done.wr_id.0 >> 40 & 0xffff) as usize];
        let id = done.wr_id.0 & 0xff_ffff_ffff;
        let position = queue
            .posted
            .iter()
            .position(|&(posted, _)| posted == id)
            .expect("each receive completes once");
        assert!(position == 0 || queue.shared.is_some(), "receives complete in posting order");
        let (_, slot) = queue.posted.remove(position).unwrap();
        let index =
            self.ends.iter().position(|end| end.side == side && end.qp.qpn() == done.qpn).unwrap();
        let [this, peer] = self.ends.get_disjoint_mut([index, index ^ 1]).unwrap();
        assert!(id + 1 > this.newest_receive, "receives of a queue pair are consumed in order");
        this.newest_receive = id + 1;
        if !done.status.is_success() {
            assert_eq!(
                done.status,
                WcStatus::WR_FLUSH_ERR,
                "a receive fails only with its queue pair"
            );
            assert!(
                this.failed.is_some() || this.ended || is(&this.qp, QpState::Err),
                "a receive was flushed in {:?}",
                this.qp.query()
            );
            return;
        }
        assert!(!this.ended, "a message arrived in the error state");
        let number = this.delivered;
        this.delivered += 1;
        let message = *peer
            .messages
            .get(number)
            .unwrap_or_else(|| panic!("end {index}: message {number} was never sent"));
        let step = &peer.plan[message];
        let opcode =
            if step.kind == Kind::WriteImm { WcOpcode::RECV_RDMA_WITH_IMM } else { WcOpcode::RECV };
        let imm = (step.kind != Kind::Send).then_some(Imm(message as u32 ^ 0x5a00_0000));
        assert_eq!(
            (done.opcode, done.byte_len, done.imm()),
            (opcode, step.len as u32, imm),
            "message {number} is {step:?}"
        );
        let sent = &noise()[step.local..step.local + step.len];
        let at = slot * queue.slot;
        if step.kind == Kind::WriteImm {
            // Later WRITEs may have overwritten some bytes.
            let found = this.target.bytes(step.remote, step.len);
            peer.model.check("WRITE_WITH_IMM", &found, step.remote, sent, message + 1, peer.next);
        } else {
            assert!(
                queue.memory.bytes(at, step.len) == sent,
                "message {number} has wrong contents"
            );
        }
        assert_eq!(
            queue.memory.bytes(at + queue.slot - GUARD, GUARD),
            [0xa5; GUARD],
            "bytes after the receive changed"
        );
        queue.free.push(slot);
    }

    fn sent(&mut self, done: &WorkCompletion) {
        let number = (done.wr_id.0 >> 32) as usize;
        let index = (done.wr_id.0 & 0xffff_ffff) as usize;
        let [this, peer] = self.ends.get_disjoint_mut([number, number ^ 1]).unwrap();
        assert_eq!(done.qpn, this.qp.qpn());
        assert!(
            (this.done..this.next).contains(&index),
            "end {number}: completion {index} of {}..{}",
            this.done,
            this.next
        );
        match this.failed {
            Some(_) => {
                assert_eq!(
                    done.status,
                    WcStatus::WR_FLUSH_ERR,
                    "end {number}: {index} after a failure"
                );
                assert_eq!(index, this.done, "end {number}: work is flushed in order");
                this.done += 1;
                return;
            }
            None => {
                let mut skipped = this.plan[this.done..index].iter();
                assert!(
                    skipped.all(|step| !step.signaled),
                    "end {number}: completion {index} overtook signaled ones"
                );
            }
        }
        if !done.status.is_success() {
            let known =
                matches!(done.status, WcStatus::RETRY_EXC_ERR | WcStatus::RNR_RETRY_EXC_ERR)
                    || (this.ended && done.status == WcStatus::WR_FLUSH_ERR);
            assert!(known, "end {number}: work request {index} fails as {:?}", done.status);
            if done.status == WcStatus::RNR_RETRY_EXC_ERR {
                assert!(this.terms.rnr_retry < 7, "7 RNR retries have no limit");
            }
        }
        let last = if done.status.is_success() { index + 1 } else { index };
        for good in this.done..last {
            let step = &mut this.plan[good];
            match step.kind {
                Kind::Read => {
                    let found = this.results.bytes(step.local, step.len);
                    let end = step.fenced_by.unwrap_or(this.next);
                    let (at, snapshot) = (step.remote, std::mem::take(&mut step.snapshot));
                    this.model.check("READ", &found, at, &snapshot, good + 1, end);
                    this.plan[good].result = Some(found);
                }
                Kind::Add => self.sums[peer.side].push(this.results.word(step.local)),
                Kind::Chain(_) => {
                    assert_eq!(
                        this.results.word(step.local),
                        step.compare,
                        "end {number}: swap {good} is executed once"
                    );
                }
                Kind::Contend => {
                    let old = this.results.word(step.local);
                    this.seen = if old == step.compare { step.swap } else { old };
                    self.contended[peer.side].push((step.compare, step.swap, old));
                }
                _ => {}
            }
        }
        this.done = last;
        let acknowledged = this.messages.iter().filter(|&&message| message < last).count();
        assert!(peer.delivered >= acknowledged, "end {number}: {index} is not delivered");
        if !done.status.is_success() {
            this.failed = Some((index, done.status));
            this.done += 1;
            assert!(is(&this.qp, QpState::Err), "a failure moves the queue pair to ERR");
        }
    }

    fn change_faults(&mut self) {
        if self.random.u8(..4) == 0 {
            // Loss of all packets for a short time, or some loss.
            let loss = if self.random.bool() { 1.0 } else { self.random.f64() * 0.1 };
            self.network.set_loss(loss);
            self.last_fault = "loss";
            if loss == 1.0 {
                for _ in 0..self.random.u8(..6) {
                    self.network.step();
                }
                self.network.set_loss(0.05);
            }
        } else {
            let faults = Mix::Changing.faults(&mut self.random);
            self.network.set_faults(faults);
            self.last_fault = "all";
        }
        self.trace.print(|| format!("{:?}: new faults ({})", self.network.now(), self.last_fault));
    }

    fn is_done(&self) -> bool {
        self.ends.iter().all(|end| match end.failed {
            Some(_) => end.done == end.next,
            None => end.done == end.plan.len(),
        })
    }

    fn drive(&mut self, changing: bool, eager: u8) {
        let mut force = false;
        while !self.is_done() {
            let mut moved = false;
            for queue in 0..self.queues.len() {
                if force || self.random.u8(..100) < eager {
                    let max = self.random.usize(1..=8);
                    moved |= self.receive(queue, max);
                }
            }
            for end in 0..self.ends.len() {
                if force || self.random.u8(..3) > 0 {
                    let max = self.random.usize(1..=5);
                    moved |= self.send(end, max);
                }
            }
            if changing && self.random.u8(..20) == 0 {
                self.change_faults();
            }
            for _ in 0..1 + self.random.u8(..40) {
                moved |= self.network.step();
            }
            if force || self.random.u8(..3) > 0 {
                moved |= self.poll();
            }
            assert!(moved || !force, "hangs: {}", self.state());
            force = !moved;
            assert!(
                self.network.now() < Duration::from_secs(100),
                "the run does not end: {}",
                self.state()
            );
        }
    }

    fn state(&self) -> String {
        let ends = self.ends.iter().map(|end| {
            let (state, _) = end.qp.query().unwrap();
            format!(
                "{state:?} {}/{}/{} {:?} {}",
                end.done,
                end.next,
                end.plan.len(),
                end.failed,
                end.delivered
            )
        });
        format!("{:?} at {:?}", ends.collect::<Vec<_>>(), self.network.now())
    }

    /// Checks the final state after the last completion, and that remaining work is flushed.
    fn finish(mut self, patient: bool) -> Outcome {
        assert!(self.network.run_until_idle(Duration::from_secs(10)), "idle: {}", self.state());
        let before: Vec<_> = self.ends.iter().map(|end| (end.done, end.delivered)).collect();
        self.poll();
        for (index, (end, before)) in self.ends.iter().zip(before).enumerate() {
            // Only packets in flight when their sender failed arrive now.
            let late = end.delivered - before.1;
            assert!(
                end.done == before.0 && (late == 0 || self.ends[index ^ 1].failed.is_some()),
                "work completed after the end"
            );
        }
        for index in 0..self.ends.len() {
            let this = &self.ends[index];
            assert!(is(&this.qp, if this.failed.is_some() { QpState::Err } else { QpState::Rts }));
            let peer = &self.ends[index ^ 1];
            assert!(peer.delivered <= this.messages.len());
            // Late answers must not change results.
            for step in &this.plan[..this.next] {
                if let Some(result) = &step.result {
                    assert!(
                        this.results.bytes(step.local, step.len) == *result,
                        "the result of a READ changed after its completion"
                    );
                }
            }
            let found = peer.target.bytes(0, TARGET);
            let word = self.words[peer.side].word(CHAINS + 8 * index);
            match this.failed {
                None => {
                    assert!(
                        found == this.model.newest(),
                        "the target of end {index} has wrong contents"
                    );
                    assert_eq!(peer.delivered, this.messages.len());
                    assert_eq!(word, this.chain);
                }
                Some((first, _)) => {
                    this.model.check(
                        "WRITE",
                        &found,
                        0,
                        &this.model.before(first),
                        first,
                        this.next,
                    );
                    let swaps = |steps: &[Step]| {
                        steps.iter().filter(|step| step.kind == Kind::Chain(false)).count() as u64
                    };
                    assert!(
                        (swaps(&this.plan[..first])..=swaps(&this.plan[..this.next]))
                            .contains(&word)
                    );
                }
            }
        }
        for queue in self.queues.iter().filter(|queue| queue.shared.is_none()) {
            assert!(
                self.ends[queue.end].failed.is_none() || queue.posted.is_empty(),
                "receives are flushed when sends fail"
            );
        }
        for side in 0..2 {
            self.check_words(side);
        }
        self.flush();
        let ended = |status: Option<WcStatus>| {
            self.ends.iter().filter(|end| end.failed.map(|failed| failed.1) == status).count()
        };
        let failed = self.ends.len() - ended(None) - ended(Some(WcStatus::WR_FLUSH_ERR));
        let not_ready = ended(Some(WcStatus::RNR_RETRY_EXC_ERR)) > 0;
        Outcome {
            hash: self.trace.hash(),
            now: self.network.now(),
            link: self.network.counters(),
            completions: self.completions,
            ends: self.ends.len(),
            failed: if patient { [failed, 0] } else { [0, failed] },
            patient,
            not_ready,
        }
    }

    fn check_words(&self, side: usize) {
        let unsure = |kind| {
            let ends = self.ends.iter().filter(|end| end.side != side);
            ends.flat_map(|end| &end.plan[end.failed.map_or(end.next, |failed| failed.0)..end.next])
                .filter(move |step| step.kind == kind)
        };
        let mut sums = self.sums[side].clone();
        sums.sort_unstable();
        let total = self.words[side].word(COUNTER);
        let sure = sums.len() as u64;
        assert!(
            (sure..=sure + unsure(Kind::Add).count() as u64).contains(&total),
            "each addition is executed once"
        );
        assert!(
            sums.windows(2).all(|two| two[0] < two[1]),
            "two additions returned the same value: {sums:?}"
        );
        assert!(sums.last().is_none_or(|&last| last < total));
        let swaps = &self.contended[side];
        let sure = || swaps.iter().filter(|(compare, _, old)| compare == old);
        let possible = |value: u64| {
            value == 0
                || sure().any(|swap| swap.1 == value)
                || unsure(Kind::Contend).any(|step| step.swap == value)
        };
        let mut won: Vec<_> = sure().map(|swap| swap.0).collect();
        won.sort_unstable();
        assert!(
            won.windows(2).all(|two| two[0] < two[1]),
            "one value was replaced twice: {swaps:?}"
        );
        assert!(
            swaps.iter().all(|swap| possible(swap.2)),
            "a value that was never stored: {swaps:?}"
        );
        assert!(possible(self.words[side].word(CONTENDED)));
        if unsure(Kind::Contend).count() == 0 {
            let mut value = 0;
            for _ in 0..won.len() {
                value = sure().find(|swap| swap.0 == value).expect("the swaps form a chain").1;
            }
            assert_eq!(value, self.words[side].word(CONTENDED));
        }
    }

    /// Moves all queue pairs to ERR; checks that remaining and later work is flushed in order.
    fn flush(&mut self) {
        for index in 0..self.ends.len() {
            let this = &mut self.ends[index];
            fail(&this.qp);
            this.ended = true;
            let rest = this.plan.len() - this.next;
            let failed = this.failed.is_some();
            self.receive(self.ends[index].queue, 1);
            if !failed {
                continue;
            }
            let this = &mut self.ends[index];
            if rest > 0 {
                this.plan[this.next].kind = Kind::Send;
                let wr_id = WrId((index as u64) << 32 | this.next as u64);
                let wr = SendWr {
                    wr_id,
                    op: SendOp::Send,
                    flags: SendFlags::empty(),
                    data: Data::Sges(&[]),
                    target: None,
                };
                // SAFETY: the request names no memory.
                unsafe { this.qp.post_send(&[wr]) }.unwrap();
                this.next += 1;
            }
        }
        self.poll();
        for (index, end) in self.ends.iter().enumerate() {
            assert_eq!(end.done, end.next, "end {index}: all posted work completes");
        }
        for queue in self.queues.iter().filter(|queue| queue.shared.is_none()) {
            assert!(queue.posted.is_empty(), "each receive completes");
        }
        assert!(self.network.run_until_idle(Duration::from_secs(10)));
        assert!(!self.poll());
        for side in &self.sides {
            while let Some(event) = side.device.next_event().unwrap() {
                let expected = matches!(
                    event,
                    AsyncEvent::LastWqeReached(_) | AsyncEvent::CommunicationEstablished(_)
                );
                assert!(expected, "{event:?}");
            }
        }
    }
}

fn run(seed: u64, verbose: bool) -> Outcome {
    let (mut run, mix, patient, eager) = Run::new(seed, verbose);
    for queue in 0..run.queues.len() {
        let max = run.random.usize(..=run.queues[queue].depth);
        run.receive(queue, max);
    }
    run.drive(mix == Mix::Changing, eager);
    run.finish(patient)
}

// Shows C1.
#[test]
fn messages_arrive_once_in_order_or_fail() {
    let test = "reliable::messages_arrive_once_in_order_or_fail";
    let Some(outcomes) = seeds(test, 1.0, |seed, verbose| {
        let outcome = run(seed, verbose);
        if verbose || seed % 8 == 0 {
            assert_eq!(run(seed, false), outcome, "a seed determines the whole run");
        }
        outcome
    }) else {
        return;
    };
    let sum = |of: fn(&Outcome) -> u64| outcomes.iter().map(of).sum::<u64>();
    let ends = sum(|one| if one.patient { one.ends as u64 } else { 0 });
    let failed = sum(|one| one.failed[0] as u64);
    println!(
        "{} completions, {} packets: {} lost, {} duplicated, {} reordered, {} corrupted; {failed} \
         of {ends} patient ends failed, {} others; {} seeds not ready; {:?} simulated",
        sum(|one| one.completions),
        sum(|one| one.link.sent),
        sum(|one| one.link.lost),
        sum(|one| one.link.duplicated),
        sum(|one| one.link.reordered),
        sum(|one| one.link.corrupted),
        sum(|one| one.failed[1] as u64),
        sum(|one| one.not_ready.into()),
        outcomes.iter().map(|one| one.now).sum::<Duration>(),
    );
    if outcomes.len() >= 500 {
        assert!(failed * 500 <= ends, "{failed} of {ends} ends with seven retries failed");
        assert!(
            sum(|one| one.failed[1] as u64) > 0,
            "errors are not covered: every end with few retries succeeded"
        );
        assert!(sum(|one| one.not_ready.into()) > 0, "exceeded RNR retries are not covered");
        assert!(sum(|one| one.link.lost) > 0 && sum(|one| one.link.rejected) > 0);
    }
}
