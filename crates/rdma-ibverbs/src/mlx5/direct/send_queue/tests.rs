//! The ring of a send queue against a model, over all sequences of operations of bounded length;
//! the hand-over between poster and poller.

use std::collections::{HashMap, VecDeque};

use rdma_provider::types::{Access, Lkey, RemoteAddr, Rkey, WindowBind};

use super::super::doorbell::from_device;
use super::super::heap::{Limits, Panics, SendMemory};
use super::super::layout::BLOCK;
use super::*;

const QPN: u32 = 0x1234;
/// Segments of a WRITE before its list.
const BEFORE_LIST: u32 = 2;
/// The longest list of the model: four blocks.
const MAX_SGE: u32 = 4 * SEGMENTS_OF_BLOCK - BEFORE_LIST;
/// The number of buffers that stands for a malformed request.
const BAD: u32 = 0;

/// A queue with its memory, which is declared last so that it is dropped last.
struct Bench {
    queue: SendQueue,
    /// Bytes of a half of the register.
    half: usize,
    /// Doorbells so far. Never taken back: the register alternates between its halves.
    doorbells: usize,
    memory: SendMemory,
}

/// A request in flight, as the model knows it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Request {
    index: u32,
    wr_id: u64,
    /// The bytes of its WQE in the ring.
    bytes: Vec<u8>,
}

/// The reference: what a send queue is.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Model {
    next: u32,
    posted: u32,
    in_flight: VecDeque<Request>,
    record: u32,
    /// The queue takes plain requests.
    is_open: bool,
}

/// The queue's fields and memory, to return to.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct State {
    producer: (u32, u32, u32, u8, bool),
    consumed: u32,
    posted: Vec<(u64, u64)>,
    ring: Vec<u8>,
    record: Vec<u8>,
}

#[derive(Debug, Clone, Copy)]
enum Op {
    /// Plain requests, by their number.
    Plain(u32),
    Open,
    /// A list of requests by their numbers of buffers.
    List(&'static [u32]),
    /// Completes the request at this place among those in flight.
    Complete(usize),
    Reset,
}

/// Full and partly used WQEs of one to four blocks.
const LISTS: [&[u32]; 9] =
    [&[1], &[2], &[3], &[6], &[10], &[MAX_SGE], &[1, 6, 2], &[BAD], &[1, BAD, 1]];

impl Bench {
    fn new(blocks: u32, max_wr: u32, half: u32) -> Self {
        let memory = SendMemory::new(blocks, half);
        let limits = Limits { transport: Transport::Rc, max_wr, max_sge: MAX_SGE, max_inline: 16 };
        // SAFETY: S3: the memory is dropped after the queue.
        let queue = unsafe { memory.queue(QPN, limits) };
        Self { queue, half: half as usize, doorbells: 0, memory }
    }

    /// Makes the queue one that has posted `posted` requests up to block `next`, all completed.
    fn age(&self, next: u32, posted: u32) -> Model {
        let blocks = self.queue.ring().blocks();
        for before in 1..=blocks {
            let index = next.wrapping_sub(before);
            let number = u64::from(posted.wrapping_sub(1));
            let stale = &self.queue.request(index).position;
            stale.store(number | u64::from(index & 0xffff) << 32, Ordering::Relaxed);
        }
        self.queue.consumed.store(posted, Ordering::Relaxed);
        *self.queue.producer.lock() = Producer { next, posted, limit: posted, fence: 0 };
        self.queue.open();
        Model { next, posted, in_flight: VecDeque::new(), record: 0, is_open: true }
    }

    fn save(&self) -> State {
        let Producer { next, posted, limit, fence } = *self.queue.producer.lock();
        let is_open = self.queue.is_open.load(Ordering::Relaxed);
        let load = |at: &super::Request| {
            (at.wr_id.load(Ordering::Relaxed), at.position.load(Ordering::Relaxed))
        };
        State {
            producer: (next, posted, limit, fence, is_open),
            consumed: self.queue.consumed.load(Ordering::Relaxed),
            posted: self.queue.requests.iter().map(load).collect(),
            ring: self.memory.ring.read_all(),
            record: self.memory.record.read_all(),
        }
    }

    fn restore(&self, state: &State) {
        let (next, posted, limit, fence, is_open) = state.producer;
        *self.queue.producer.lock() = Producer { next, posted, limit, fence };
        self.queue.is_open.store(is_open, Ordering::Relaxed);
        self.queue.consumed.store(state.consumed, Ordering::Relaxed);
        for (at, (wr_id, position)) in self.queue.requests.iter().zip(&state.posted) {
            at.wr_id.store(*wr_id, Ordering::Relaxed);
            at.position.store(*position, Ordering::Relaxed);
        }
        self.memory.ring.write(0, &state.ring);
        self.memory.record.write(0, &state.record);
    }

    /// Returns the bytes of `len` in the ring from block `index` on.
    fn ring_bytes(&self, index: u32, len: usize) -> Vec<u8> {
        let ring = self.memory.ring.read_all();
        let from = index as usize * BLOCK;
        (0..len).map(|at| ring[from.wrapping_add(at) % ring.len()]).collect()
    }

    fn apply(&mut self, op: Op, model: &mut Model) {
        match op {
            Op::Plain(count) => {
                let free = self.queue.setup.max_wr - model.in_flight.len() as u32;
                let accepted = model.is_open && count <= free;
                let lengths = vec![1; if accepted { count as usize } else { 0 }];
                self.post(&lengths, model, |queue, list| {
                    let refused = vec![request(0, &[]); count as usize];
                    let plain = if accepted { list } else { &refused }.iter().map(plain);
                    // SAFETY: S3: one thread.
                    assert_eq!(unsafe { queue.post_plain(plain) }, accepted, "{count}");
                    Ok(())
                });
            }
            Op::Open => {
                self.queue.open();
                model.is_open = true;
            }
            Op::List(lengths) => {
                // SAFETY: S1: no adapter accesses the buffers.
                let post = |queue: &SendQueue, list: &[SendWr<'_>]| unsafe {
                    queue.post_list(list.iter())
                };
                self.post(lengths, model, post);
            }
            Op::Complete(place) => {
                let request = &model.in_flight[place];
                let found = self.queue.find(request.index as u16);
                let found = found.unwrap_or_else(|| panic!("{request:?} was not found"));
                assert_eq!(found.wr_id, WrId(request.wr_id));
                self.queue.free(found);
                model.in_flight.drain(..=place);
            }
            Op::Reset => {
                self.queue.reset();
                let in_flight = VecDeque::new();
                *model = Model { next: 0, posted: 0, in_flight, record: 0, is_open: false };
            }
        }
    }

    fn post(
        &mut self,
        lengths: &[u32],
        model: &mut Model,
        post: impl FnOnce(&SendQueue, &[SendWr<'_>]) -> Result<(), PostError>,
    ) {
        let numbers = |at| model.posted.wrapping_add(at as u32);
        let lists: Vec<_> =
            lengths.iter().enumerate().map(|(at, &len)| buffers(len, numbers(at))).collect();
        let requests: Vec<_> =
            lists.iter().enumerate().map(|(at, list)| request(numbers(at), list)).collect();
        let register = self.memory.register.read_all();
        let ring = self.memory.ring.read_all();
        let result = post(&self.queue, &requests);

        let Setup { max_wr, .. } = self.queue.setup;
        let blocks = self.queue.ring().blocks();
        let mut expected = Ok(());
        let mut written = Vec::new();
        for (posted, &length) in lengths.iter().enumerate() {
            let length_in_blocks = (BEFORE_LIST + length).div_ceil(SEGMENTS_OF_BLOCK);
            let malformed = length == BAD || length_in_blocks * max_wr > blocks;
            if malformed || model.in_flight.len() == max_wr as usize {
                expected =
                    Err(PostError { posted, error: if malformed { MALFORMED } else { FULL } });
                break;
            }
            let bytes = wqe(length, model.posted, model.next);
            assert_eq!(self.ring_bytes(model.next, bytes.len()), bytes, "WQE {}", model.next);
            let wr_id = wr_id(model.posted);
            model.in_flight.push_back(Request { index: model.next, wr_id, bytes });
            written.push(model.next);
            model.next = model.next.wrapping_add(length_in_blocks);
            model.posted = model.posted.wrapping_add(1);
        }
        assert_eq!(result, expected, "{lengths:?}");
        let mut rung = register;
        if let Some(&last) = written.last() {
            model.record = model.next & 0xffff;
            let length = model.next.wrapping_sub(last) as usize;
            let whole = written.len() == 1 && length * BLOCK <= self.half;
            let from = self.half * (self.doorbells % 2);
            let bytes = self.ring_bytes(last, if whole { length * BLOCK } else { 8 });
            rung[from..from + bytes.len()].copy_from_slice(&bytes);
            self.doorbells += 1;
        } else {
            assert_eq!(self.memory.ring.read_all(), ring, "a refused request was written");
        }
        assert_eq!(self.memory.register.read_all(), rung, "register");
    }

    /// Checks all that the model says about the queue.
    fn check(&self, model: &Model) {
        let Producer { next, posted, .. } = *self.queue.producer.lock();
        assert_eq!((next, posted), (model.next, model.posted));
        assert_eq!(self.memory.record.be32(0), model.record);
        for request in &model.in_flight {
            let bytes = self.ring_bytes(request.index, request.bytes.len());
            assert_eq!(bytes, request.bytes, "the WQE of a request in flight was overwritten");
        }
        let blocks = self.queue.ring().blocks();
        for distance in 0..=4 * blocks {
            let counter = model.next.wrapping_add(2 * blocks).wrapping_sub(distance) as u16;
            let of = model.in_flight.iter().find(|request| request.index as u16 == counter);
            let found = self.queue.find(counter).map(|found| found.wr_id.0);
            assert_eq!(found, of.map(|request| request.wr_id), "counter {counter:#x}");
        }
    }

    /// Runs all sequences of `depth` operations from here on. `seen` has the states already left,
    /// by the length of the sequences run from them.
    fn explore(&mut self, model: &Model, depth: u32, seen: &mut HashMap<(State, Model), u32>) {
        let state = self.save();
        let key = (state.clone(), model.clone());
        if depth == 0 || seen.get(&key).is_some_and(|&run| run >= depth) {
            return;
        }
        seen.insert(key, depth);
        let completions = (0..model.in_flight.len()).map(Op::Complete);
        let lists = LISTS.into_iter().map(Op::List);
        let others = if model.is_open { Op::Reset } else { Op::Open };
        let plain = [Op::Plain(1), Op::Plain(3)].into_iter();
        for op in plain.chain([others]).chain(lists).chain(completions) {
            let mut after = model.clone();
            self.apply(op, &mut after);
            self.check(&after);
            self.explore(&after, depth - 1, seen);
            self.restore(&state);
        }
    }
}

fn wr_id(number: u32) -> u64 {
    0xab_0000_0000 | u64::from(number)
}

fn buffers(length: u32, number: u32) -> Vec<Sge> {
    let buffer = |at| Sge {
        addr: u64::from(number) << 8 | u64::from(at),
        length: at + 1,
        lkey: Lkey(number ^ 0x55),
    };
    (0..length).map(buffer).collect()
}

/// Returns a WRITE from `list`; without buffers, one with more inline bytes than allowed.
fn request(number: u32, list: &[Sge]) -> SendWr<'_> {
    const TOO_LONG: [u8; 17] = [0; 17];
    let remote = RemoteAddr { addr: 0x7000_0000 + u64::from(number), rkey: Rkey(!number) };
    SendWr {
        wr_id: WrId(wr_id(number)),
        op: SendOp::Write(remote),
        flags: SendFlags::SIGNALED,
        data: if list.is_empty() { Data::Inline(&TOO_LONG) } else { Data::Sges(list) },
        target: None,
    }
}

/// Returns the plain form of a WRITE.
fn plain(wr: &SendWr<'_>) -> PlainWr {
    let SendWr { wr_id, op, flags, data, .. } = *wr;
    let buffer = if let Data::Sges(&[buffer]) = data { buffer } else { Sge::default() };
    PlainWr { wr_id, op: PlainOp::of(op).unwrap(), flags, buffer }
}

/// Encodes request `number`, independently of the product.
fn wqe(length: u32, number: u32, index: u32) -> Vec<u8> {
    let list = buffers(length, number);
    let mut out = Vec::new();
    out.extend(((index & 0xffff) << 8 | 0x08).to_be_bytes());
    out.extend((QPN << 8 | (BEFORE_LIST + list.len() as u32)).to_be_bytes());
    out.extend([0, 0, 0, 8, 0, 0, 0, 0]);
    out.extend((0x7000_0000 + u64::from(number)).to_be_bytes());
    out.extend((!number).to_be_bytes());
    out.extend([0; 4]);
    for buffer in list {
        out.extend(buffer.length.to_be_bytes());
        out.extend(buffer.lkey.0.to_be_bytes());
        out.extend(buffer.addr.to_be_bytes());
    }
    out
}

/// Indices and numbers of requests to start from: new, before the wrap of 16 bits, of 32 bits.
const STARTS: [(u32, u32); 3] = [(0, 0), (0x1_fffd, 0x7fff_fffe), (u32::MAX - 2, u32::MAX - 1)];

#[test]
fn plain_requests_are_refused_while_the_next_entry_needs_a_fence() {
    let bench = Bench::new(16, 2, 64);
    let queue = &bench.queue;
    let post = |number| {
        let list = buffers(1, number);
        // SAFETY: S3: one thread.
        unsafe { queue.post_plain([plain(&request(number, &list))].into_iter()) }
    };
    let invalidate =
        SendWr { op: SendOp::LocalInvalidate(Rkey(1)), data: Data::Sges(&[]), ..request(1, &[]) };
    assert!(!post(0), "the queue pair is not ready to send");
    queue.open();
    assert!(post(0));
    // SAFETY: S1: it names no memory.
    unsafe { queue.post_list([invalidate].iter()) }.unwrap();
    assert!(!post(2), "the queue is full");
    queue.free(queue.find(1).unwrap());
    assert!(!post(2), "no fence was posted");
    let list = buffers(1, 2);
    // SAFETY: S1: no adapter accesses the buffers.
    unsafe { queue.post_list([request(2, &list)].iter()) }.unwrap();
    assert!(post(3));
    assert_eq!(queue.find(4).map(|found| found.wr_id), Some(WrId(wr_id(3))));
}

// RTS may follow RTS while posts go on. Under Miri, an access that the poster does not exclude is a
// data race.
#[test]
fn queue_pair_may_become_ready_while_plain_requests_are_posted() {
    let bench = Bench::new(4, 4, 0);
    let queue = &bench.queue;
    queue.open();
    std::thread::scope(|scope| {
        scope.spawn(|| queue.open());
        for number in 0..4 {
            let list = buffers(1, number);
            // SAFETY: S3: the other thread neither posts nor resets.
            assert!(unsafe { queue.post_plain([plain(&request(number, &list))].into_iter()) });
        }
    });
    assert_eq!(queue.find(3).map(|found| found.wr_id), Some(WrId(wr_id(3))));
}

#[test]
fn every_short_sequence_of_posts_completions_and_resets_matches_the_model() {
    // A small ring holds few requests, so longer sequences are few.
    let rings: &[(u32, u32)] =
        if cfg!(miri) { &[(2, 2)] } else { &[(1, 7), (2, 7), (4, 5), (8, 5)] };
    for &(blocks, depth) in rings {
        for max_wr in [1, 2, 3, 4, 8].into_iter().filter(|&max_wr| max_wr <= blocks) {
            for (next, posted) in STARTS {
                let mut bench = Bench::new(blocks, max_wr, [0, 64, 256][next as usize % 3]);
                let model = bench.age(next, posted);
                bench.check(&model);
                bench.explore(&model, depth, &mut HashMap::new());
            }
        }
    }
}

#[test]
fn long_random_sequences_match_the_model_across_every_wrap() {
    let steps = if cfg!(miri) { 50 } else { 20_000 };
    for (seed, (next, posted)) in STARTS.into_iter().enumerate() {
        // Reaches the wrap after half of the steps.
        let back = if seed == 0 { 0 } else { steps / 2 };
        let mut bench = Bench::new(8, 4, 128);
        let mut model = bench.age(next.wrapping_sub(back), posted.wrapping_sub(back / 2));
        let mut random = seed as u64 + 1;
        for _ in 0..steps {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let choice = (random >> 33) as usize;
            let op = match choice % 4 {
                0 => Op::Plain(1 + choice as u32 / 4 % 3),
                1 => Op::List(LISTS[choice / 4 % LISTS.len()]),
                _ if model.in_flight.is_empty() => continue,
                _ => Op::Complete(choice / 4 % model.in_flight.len()),
            };
            bench.apply(op, &mut model);
            bench.check(&model);
        }
    }
}

#[test]
fn queue_that_never_posted_finds_nothing() {
    let mut bench = Bench::new(4, 4, 0);
    let mut counters = (0..=u16::MAX).step_by(if cfg!(miri) { 1023 } else { 1 });
    assert!(counters.clone().all(|counter| bench.queue.find(counter).is_none()));
    let mut model = bench.age(0, 0);
    bench.apply(Op::List(&[1]), &mut model);
    bench.apply(Op::Reset, &mut model);
    assert!(counters.all(|counter| bench.queue.find(counter).is_none()));
}

#[test]
fn request_of_long_ago_is_not_found() {
    let bench = Bench::new(4, 2, 0);
    let _model = bench.age(2, 0x8000_0010);
    // The last WQE that began at this block.
    bench.queue.request(1).set(WrId(7), 5, 1, WcOpcode(0));
    assert!(bench.queue.find(1).is_none());
}

// The adapter completes requests in two completion queues at once, so that fewer are completed than
// before.
#[test]
fn requests_completed_in_two_queues_at_once_overwrite_none_in_flight() {
    for plainly in [false, true] {
        let bench = Bench::new(4, 4, 0);
        let queue = &bench.queue;
        queue.open();
        let post = |number| {
            let list = buffers(1, number);
            let wr = request(number, &list);
            if plainly {
                // SAFETY: S3: one thread.
                return unsafe { queue.post_plain([plain(&wr)].into_iter()) };
            }
            // SAFETY: S1: nothing executes the work.
            unsafe { queue.post_list([wr].iter()) }.is_ok()
        };
        assert!((0..4).all(post));
        let [first, third] = [0, 2].map(|counter| queue.find(counter).unwrap());
        queue.free(third);
        assert!((4..7).all(post));
        queue.free(first);
        assert!(!post(7) && !post(8), "requests 3 to 6 fill the ring");
    }
}

#[test]
fn request_after_a_umr_waits_for_it_once() {
    let bench = Bench::new(16, 4, 0);
    let bind = WindowBind {
        window: 0,
        region: 0,
        lkey: Lkey(7),
        current: Rkey(0x100),
        rkey: Rkey(0x101),
        addr: 0x4000,
        len: 4096,
        access: Access::REMOTE_READ,
    };
    let list = buffers(1, 0);
    let local = |op, data| SendWr { op, data, flags: SendFlags::empty(), ..request(0, &[]) };
    let write = |flags| SendWr { flags, ..request(0, &list) };
    let flags = |index| bench.ring_bytes(index, 12)[11];
    // SAFETY: S1: no adapter accesses the buffers.
    let post = |wr: SendWr<'_>| unsafe { bench.queue.post_list([wr].iter()) }.unwrap();

    post(local(SendOp::BindWindow, Data::Window(&bind)));
    post(write(SendFlags::empty()));
    post(write(SendFlags::SIGNALED));
    assert_eq!([flags(0), flags(3), flags(4)], [0, control::SMALL_FENCE, control::SIGNALED]);
    assert_eq!(bench.queue.find(0).unwrap().local_opcode(), WcOpcode::BIND_MW);
    assert_eq!(bench.queue.find(3).unwrap().local_opcode(), WcOpcode(0));
    bench.queue.free(bench.queue.find(4).unwrap());

    post(local(SendOp::LocalInvalidate(Rkey(0x101)), Data::Sges(&[])));
    // A fence of the request covers the UMR.
    post(write(SendFlags::FENCE | SendFlags::SOLICITED));
    post(write(SendFlags::empty()));
    assert_eq!(bench.queue.find(5).unwrap().local_opcode(), WcOpcode::LOCAL_INV);
    assert_eq!([flags(7), flags(8)], [control::FENCE | control::SOLICITED, 0]);
}

// A poster and a poller race for the blocks of a ring: the poller reads a WQE until it frees it, as
// for data in a CQE, and the poster overwrites it afterwards. Under Miri, a missing Acquire or
// Release is a data race. Only the barriers around an index order poster before poller, as through
// an adapter.
#[test]
fn poster_overwrites_no_request_that_the_poller_still_reads() {
    let requests = if cfg!(miri) { 60 } else { 5000 };
    for (blocks, max_wr) in [(1, 1), (4, 4), (4, 3)] {
        let bench = Bench::new(blocks, max_wr, 0);
        let queue = &bench.queue;
        let panicked = &AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(move || {
                let others = Panics(panicked);
                let mut number = 0;
                while number < requests {
                    let list = buffers(1, number);
                    // SAFETY: S1: no adapter accesses the buffers.
                    match unsafe { queue.post_list([request(number, &list)].iter()) } {
                        Ok(()) => number += 1,
                        Err(refused) => {
                            assert_eq!(refused.error, FULL);
                            others.wait();
                        }
                    }
                }
            });
            let others = Panics(panicked);
            let mut next = 0;
            while next < requests {
                let published = queue.setup.record.load() as u16;
                from_device();
                if published == next as u16 {
                    others.wait();
                    continue;
                }
                // Completes one or all of the published requests: a completion retires all before.
                let behind = u32::from(published.wrapping_sub(next as u16)) - 1;
                next += if next % 3 == 0 { behind } else { 0 };
                let found = queue.find(next as u16).expect("published");
                assert_eq!(found.wr_id, WrId(wr_id(next)));
                let at = queue.ring().block(next);
                // SAFETY: S3: a block of the ring, whose request is in flight.
                let first = unsafe { at.cast::<[u8; 48]>().read() };
                assert_eq!(first[..], wqe(1, next, next)[..]);
                queue.free(found);
                next += 1;
            }
        });
    }
}
