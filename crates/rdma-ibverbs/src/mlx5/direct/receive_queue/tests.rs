//! The entries of a receive queue against a model, over all sequences of operations of bounded
//! length.

use std::collections::{HashSet, VecDeque};
use std::sync::atomic::AtomicBool;

use rdma_provider::types::{Lkey, Sge};

use super::super::heap::{Panics, ReceiveMemory};
use super::*;

const SEGMENTS: u32 = 2;

struct Bench {
    queue: ReceiveQueue,
    /// Declared last, so that it is dropped last.
    memory: ReceiveMemory,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Model {
    posted: u32,
    consumed: u32,
    /// Numbers and lengths of the posted receives.
    receives: VecDeque<(u32, u32)>,
}

/// The queue's fields and memory, to return to.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct State {
    posted: u32,
    consumed: u32,
    wr_ids: Vec<u64>,
    entries: Vec<u8>,
    record: Vec<u8>,
}

#[derive(Debug, Clone, Copy)]
enum Op {
    /// Posts receives with so many buffers each; more than [`SEGMENTS`] are refused.
    Post(&'static [u32]),
    Retire,
    Reset,
}

const OPS: [Op; 8] = [
    Op::Post(&[0]),
    Op::Post(&[1]),
    Op::Post(&[2]),
    Op::Post(&[1, 2, 0]),
    Op::Post(&[3]),
    Op::Post(&[2, 3, 1]),
    Op::Retire,
    Op::Reset,
];

fn buffers(length: u32, number: u32) -> Vec<Sge> {
    let buffer = |at| Sge {
        addr: u64::from(number) << 8 | u64::from(at),
        length: number % 7 + at + 1,
        lkey: Lkey(!number),
    };
    (0..length).map(buffer).collect()
}

/// Encodes the list of a receive, independently of the product. What follows the end is unused.
fn entry(length: u32, number: u32) -> Vec<u8> {
    let mut out = Vec::new();
    for buffer in buffers(length, number) {
        out.extend(buffer.length.to_be_bytes());
        out.extend(buffer.lkey.0.to_be_bytes());
        out.extend(buffer.addr.to_be_bytes());
    }
    if length < SEGMENTS {
        out.extend([0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    }
    out
}

impl Bench {
    fn new(count: u32, start: u32) -> (Self, Model) {
        let memory = ReceiveMemory::new(count, SEGMENTS);
        // SAFETY: S3: the memory is dropped after the queue.
        let queue = unsafe { memory.own() };
        queue.posted.store(start, Ordering::Relaxed);
        queue.consumed.store(start, Ordering::Relaxed);
        memory.record.write(0, &(start & 0xffff).to_be_bytes());
        let model = Model { posted: start, consumed: start, receives: VecDeque::new() };
        (Self { queue, memory }, model)
    }

    fn save(&self) -> State {
        State {
            posted: self.queue.posted.load(Ordering::Relaxed),
            consumed: self.queue.consumed.load(Ordering::Relaxed),
            wr_ids: self.queue.wr_ids.iter().map(|at| at.load(Ordering::Relaxed)).collect(),
            entries: self.memory.entries.read_all(),
            record: self.memory.record.read_all(),
        }
    }

    fn restore(&self, state: &State) {
        self.queue.posted.store(state.posted, Ordering::Relaxed);
        self.queue.consumed.store(state.consumed, Ordering::Relaxed);
        for (at, &wr_id) in self.queue.wr_ids.iter().zip(&state.wr_ids) {
            at.store(wr_id, Ordering::Relaxed);
        }
        self.memory.entries.write(0, &state.entries);
        self.memory.record.write(0, &state.record);
    }

    fn apply(&self, op: Op, model: &mut Model) {
        let count = self.queue.entries.count;
        match op {
            Op::Post(lengths) => {
                let number = |at| model.posted.wrapping_add(at as u32);
                let lists: Vec<_> =
                    lengths.iter().enumerate().map(|(at, &len)| buffers(len, number(at))).collect();
                let wrs: Vec<_> = lists
                    .iter()
                    .enumerate()
                    .map(|(at, sges)| RecvWr { wr_id: WrId(number(at).into()), sges })
                    .collect();
                // SAFETY: S1: no adapter accesses the buffers.
                let result = unsafe { self.queue.post(&wrs) };
                let mut expected = Ok(());
                for (posted, &length) in lengths.iter().enumerate() {
                    let full = model.receives.len() == count as usize;
                    if full || length > SEGMENTS {
                        let errno = if full { VerbError::ENOMEM } else { VerbError::EINVAL };
                        let error = VerbError::new("ibv_post_recv", errno);
                        expected = Err(PostError { posted, error });
                        break;
                    }
                    model.receives.push_back((model.posted, length));
                    model.posted = model.posted.wrapping_add(1);
                }
                assert_eq!(result, expected);
            }
            Op::Retire => {
                let retired = self.queue.oldest().map(|oldest| {
                    assert_eq!(oldest.place, model.consumed % count);
                    let list = self.queue.save_list(oldest.place);
                    self.queue.retire(&oldest);
                    (oldest.wr_id, list)
                });
                let oldest = model.receives.pop_front();
                assert_eq!(retired.as_ref().map(|(id, _)| id.0), oldest.map(|(n, _)| n.into()));
                if let (Some((_, list)), Some((number, length))) = (retired, oldest) {
                    assert!(list.starts_with(&entry(length, number)));
                    model.consumed = model.consumed.wrapping_add(1);
                }
            }
            Op::Reset => {
                self.queue.reset();
                *model = Model { posted: 0, consumed: 0, receives: VecDeque::new() };
            }
        }
    }

    fn check(&self, model: &Model) {
        assert_eq!(self.queue.posted.load(Ordering::Relaxed), model.posted);
        assert_eq!(self.queue.consumed.load(Ordering::Relaxed), model.consumed);
        assert_eq!(self.memory.record.be32(0), model.posted & 0xffff);
        for &(number, length) in &model.receives {
            let list = self.queue.save_list(number % self.queue.entries.count);
            assert!(list.starts_with(&entry(length, number)), "posted receive was overwritten");
        }
    }

    fn explore(&self, model: &Model, depth: u32, seen: &mut HashSet<(State, Model, u32)>) {
        let state = self.save();
        if depth == 0 || !seen.insert((state.clone(), model.clone(), depth)) {
            return;
        }
        for op in OPS {
            let mut after = model.clone();
            self.apply(op, &mut after);
            self.check(&after);
            self.explore(&after, depth - 1, seen);
            self.restore(&state);
        }
    }
}

impl ReceiveQueue {
    fn save_list(&self, index: u32) -> Vec<u8> {
        (0..self.entries.segments())
            .flat_map(|segment| {
                // SAFETY: S3: a segment of the queue.
                unsafe { self.entries.segment::<[u8; SEGMENT]>(index, segment).read() }
            })
            .collect()
    }
}

#[test]
fn every_short_sequence_of_posts_and_completions_matches_the_model() {
    let (counts, depth): (&[u32], _) = if cfg!(miri) { (&[2], 2) } else { (&[1, 2, 4, 8], 5) };
    for &count in counts {
        // New, before the wrap of 16 bits, of 32 bits.
        for start in [0, 0x1_fffe, u32::MAX - 1] {
            let (bench, model) = Bench::new(count, start);
            bench.check(&model);
            bench.explore(&model, depth, &mut HashSet::new());
        }
    }
}

#[test]
fn buffers_of_length_zero_are_left_out() {
    let (bench, _) = Bench::new(1, 0);
    let list = [Sge { length: 0, ..buffers(1, 5)[0] }, buffers(1, 9)[0]];
    // SAFETY: S1: no adapter accesses the buffers.
    unsafe { bench.queue.post(&[RecvWr { wr_id: WrId(1), sges: &list }]) }.unwrap();
    assert_eq!(bench.queue.save_list(0), entry(1, 9));
}

#[test]
#[should_panic(expected = "outside the queue")]
fn segment_beyond_an_entry_is_refused() {
    let (bench, _) = Bench::new(2, 0);
    bench.queue.entries.segment::<DataSegment>(0, SEGMENTS as usize);
}

#[test]
#[should_panic(expected = "outside the queue")]
fn entry_beyond_the_queue_is_refused() {
    let (bench, _) = Bench::new(2, 0);
    bench.queue.entries.segment::<DataSegment>(2, 0);
}

// As in the test of send queues, the poller reads a list until the receive is retired.
#[test]
fn poster_overwrites_no_receive_that_the_poller_still_reads() {
    let receives = if cfg!(miri) { 60 } else { 5000 };
    for count in [1, 4] {
        let (bench, _) = Bench::new(count, 0);
        let queue = &bench.queue;
        let panicked = &AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(move || {
                let others = Panics(panicked);
                let mut number = 0;
                while number < receives {
                    let list = buffers(2, number);
                    let wr = RecvWr { wr_id: WrId(number.into()), sges: &list };
                    // SAFETY: S1: no adapter accesses the buffers.
                    match unsafe { queue.post(&[wr]) } {
                        Ok(()) => number += 1,
                        Err(_full) => others.wait(),
                    }
                }
            });
            let others = Panics(panicked);
            let mut next = 0;
            while next < receives {
                match queue.oldest() {
                    Some(oldest) => {
                        assert_eq!(oldest.wr_id, WrId(next.into()));
                        assert_eq!(queue.save_list(oldest.place), entry(2, next));
                        queue.retire(&oldest);
                        next += 1;
                    }
                    None => others.wait(),
                }
            }
        });
    }
}
