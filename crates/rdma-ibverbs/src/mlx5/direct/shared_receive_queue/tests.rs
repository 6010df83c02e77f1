//! The list of a shared receive queue against a model, over all sequences of operations of bounded
//! length.

use std::collections::{BTreeMap, HashSet, VecDeque};

use rdma_provider::types::{Lkey, Sge};

use super::super::heap::ReceiveMemory;
use super::super::layout::SEGMENT;
use super::*;

const QPN: u32 = 0x1a04;

/// Segments of an entry: the link and two buffers.
const SEGMENTS: u32 = 3;

struct Bench {
    queue: SharedReceiveQueue,
    /// Declared last, so that it is dropped last.
    memory: ReceiveMemory,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Model {
    /// Free entries in the order of the list; the last is never posted.
    free: VecDeque<u16>,
    /// Posted entries in the order of posting that the adapter has not taken yet.
    pending: VecDeque<u16>,
    /// The receive in each entry that is posted and not completed.
    receives: BTreeMap<u16, u64>,
    /// Receives posted, modulo 2^16.
    counter: u16,
    /// Number of the next receive.
    next: u64,
}

/// The queue's fields and memory, to return to.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Saved {
    head: u16,
    tail: u16,
    counter: u16,
    posted: Vec<Option<u64>>,
    entries: Vec<u8>,
    record: Vec<u8>,
}

#[derive(Debug, Clone, Copy)]
enum Op {
    /// Posts receives with so many buffers each; more than two are refused.
    Post(&'static [u32]),
    Retire(u16),
    PostAgain(u16),
}

fn buffers(length: u32, number: u64) -> Vec<Sge> {
    let buffer = |at| Sge {
        addr: number << 8 | u64::from(at),
        length: (number % 7) as u32 + at + 1,
        lkey: Lkey(!number as u32),
    };
    (0..length).map(buffer).collect()
}

/// Returns the number of buffers of a receive, one or two.
fn length(number: u64) -> u32 {
    (number % 2) as u32 + 1
}

/// Encodes the list of a receive, independently of the product.
fn list(number: u64) -> Vec<u8> {
    let mut out = Vec::new();
    for buffer in buffers(length(number), number) {
        out.extend(buffer.length.to_be_bytes());
        out.extend(buffer.lkey.0.to_be_bytes());
        out.extend(buffer.addr.to_be_bytes());
    }
    if length(number) == 1 {
        out.extend([0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    }
    out
}

impl Bench {
    fn new(count: u32, counter: u16) -> (Self, Model) {
        let memory = ReceiveMemory::new(count, SEGMENTS);
        // SAFETY: S3: the memory is dropped after the queue.
        let queue = unsafe { memory.shared() };
        queue.state.lock().counter = counter;
        memory.record.write(0, &u32::from(counter).to_be_bytes());
        let model = Model {
            free: (0..count as u16).collect(),
            pending: VecDeque::new(),
            receives: BTreeMap::new(),
            counter,
            next: 0,
        };
        (Self { queue, memory }, model)
    }

    fn save(&self) -> Saved {
        let State { head, tail, counter, ref posted } = *self.queue.state.lock();
        Saved {
            head,
            tail,
            counter,
            posted: posted.iter().map(|id| id.map(|id| id.0)).collect(),
            entries: self.memory.entries.read_all(),
            record: self.memory.record.read_all(),
        }
    }

    fn restore(&self, saved: &Saved) {
        let Saved { head, tail, counter, .. } = *saved;
        let posted = saved.posted.iter().map(|id| id.map(WrId)).collect();
        *self.queue.state.lock() = State { head, tail, counter, posted };
        self.memory.entries.write(0, &saved.entries);
        self.memory.record.write(0, &saved.record);
    }

    fn apply(&self, op: Op, model: &mut Model) {
        match op {
            Op::Post(kinds) => {
                // 0 stands for a list that is too long.
                let lists: Vec<_> = kinds
                    .iter()
                    .zip(model.next..)
                    .map(|(&kind, number)| {
                        buffers(if kind == 0 { SEGMENTS } else { length(number) }, number)
                    })
                    .collect();
                let wrs: Vec<_> = lists
                    .iter()
                    .zip(model.next..)
                    .map(|(sges, number)| RecvWr { wr_id: WrId(number), sges })
                    .collect();
                // SAFETY: S1: no adapter accesses the buffers.
                let result = unsafe { self.queue.post(&wrs) };
                let mut expected = Ok(());
                for (posted, &kind) in kinds.iter().enumerate() {
                    let full = model.free.len() == 1;
                    if full || kind == 0 {
                        let errno = if full { VerbError::ENOMEM } else { VerbError::EINVAL };
                        let error = VerbError::new("ibv_post_srq_recv", errno);
                        expected = Err(PostError { posted, error });
                        break;
                    }
                    let number = model.next;
                    model.next += 1;
                    model.post_first_free(number);
                }
                assert_eq!(result, expected);
            }
            Op::Retire(index) => {
                let receive = model.take(index);
                let retired = self.queue.retire(index, || self.list(index));
                assert_eq!(retired, receive.map(|number| (WrId(number), list(number))));
                model.free.extend(receive.map(|_| index));
            }
            Op::PostAgain(index) => {
                let receive = model.take(index);
                let unknown = BadEntry::Counter { qpn: QPN, counter: index };
                let expected = receive.map(|_| ()).ok_or(unknown);
                assert_eq!(self.queue.post_again(QPN, index), expected);
                if let Some(number) = receive {
                    model.free.push_back(index);
                    model.post_first_free(number);
                }
            }
        }
    }

    fn check(&self, model: &Model) {
        let state = self.queue.state.lock();
        assert_eq!(state.counter, model.counter);
        assert_eq!(self.memory.record.be32(0), model.counter.into());
        assert_eq!((state.head, state.tail), (model.free[0], *model.free.back().unwrap()));
        // Follows the links as the adapter does: through the receives that it has not taken, then
        // through the free entries. Each entry is there once.
        let order: Vec<_> = model.pending.iter().chain(&model.free).copied().collect();
        let mut at = order[0];
        for &expected in &order[1..] {
            at = self.link(at);
            assert_eq!(at, expected, "link in {model:?}");
        }
        for (at, id) in state.posted.iter().enumerate() {
            let receive = model.receives.get(&(at as u16)).copied();
            assert_eq!(id.map(|id| id.0), receive, "entry {at}");
            if let Some(number) = receive {
                assert_eq!(self.list(at as u16), list(number), "posted receive was overwritten");
            }
        }
    }

    fn link(&self, index: u16) -> u16 {
        let at = usize::from(index) * SEGMENTS as usize * SEGMENT + 2;
        self.memory
            .entries
            .read(at, 2)
            .into_iter()
            .fold(0, |link, byte| link << 8 | u16::from(byte))
    }

    fn list(&self, index: u16) -> Vec<u8> {
        let stride = SEGMENTS as usize * SEGMENT;
        self.memory.entries.read(usize::from(index) * stride + SEGMENT, stride - SEGMENT)
    }

    fn explore(&self, model: &Model, depth: u32, seen: &mut HashSet<(Saved, Model, u32)>) {
        let saved = self.save();
        if depth == 0 || !seen.insert((saved.clone(), model.clone(), depth)) {
            return;
        }
        // One beyond the queue, too.
        let entries = 0..=self.queue.entries.count as u16;
        let posts = [&[1][..], &[0], &[1, 0, 1], &[1, 1, 1]].map(Op::Post);
        let retired = entries.clone().map(Op::Retire);
        for op in posts.into_iter().chain(retired).chain(entries.map(Op::PostAgain)) {
            let mut after = model.clone();
            self.apply(op, &mut after);
            self.check(&after);
            self.explore(&after, depth - 1, seen);
            self.restore(&saved);
        }
    }
}

impl Model {
    fn post_first_free(&mut self, number: u64) {
        let entry = self.free.pop_front().unwrap();
        self.pending.push_back(entry);
        self.receives.insert(entry, number);
        self.counter = self.counter.wrapping_add(1);
    }

    /// Completes the receive in an entry, if there is one. The adapter takes receives in the order
    /// of posting.
    fn take(&mut self, index: u16) -> Option<u64> {
        let receive = self.receives.remove(&index)?;
        if let Some(at) = self.pending.iter().position(|&entry| entry == index) {
            self.pending.drain(..=at);
        }
        Some(receive)
    }
}

#[test]
fn every_short_sequence_of_posts_and_completions_in_any_order_matches_the_model() {
    let runs: &[(u32, u32)] = if cfg!(miri) { &[(3, 2)] } else { &[(2, 7), (4, 6), (8, 5)] };
    for &(count, depth) in runs {
        for counter in [0, u16::MAX - 1] {
            let (bench, model) = Bench::new(count, counter);
            bench.check(&model);
            bench.explore(&model, depth, &mut HashSet::new());
        }
    }
}

#[test]
fn link_outside_the_queue_fails_posts_and_completions_with_an_error() {
    const COUNT: u32 = 4;
    for bad in [COUNT as u16, 0x8000, u16::MAX] {
        let (bench, mut model) = Bench::new(COUNT, 0);
        bench.apply(Op::Post(&[1]), &mut model);
        bench.memory.entries.write((SEGMENTS as usize * SEGMENT) + 2, &bad.to_be_bytes());
        let sges = buffers(1, 7);
        let wrs = [1, 2].map(|number| RecvWr { wr_id: WrId(number), sges: &sges });
        let error = VerbError::new(
            "ibv_post_srq_recv (entries of the queue were overwritten)",
            VerbError::EIO,
        );
        // SAFETY: S1: no adapter accesses the buffers.
        let post = |wrs: &[RecvWr<'_>]| unsafe { bench.queue.post(wrs) };
        // The entry with the bad link is posted, the next one cannot be found.
        assert_eq!(post(&wrs), Err(PostError { posted: 1, error }), "{bad}");
        assert_eq!(post(&wrs), Err(PostError { posted: 0, error }), "the error stays");
        assert_eq!((bench.queue.state.lock().counter, bench.memory.record.be32(0)), (2, 2));
        let link = BadEntry::Link { qpn: QPN, entry: bad };
        assert_eq!(bench.queue.post_again(QPN, 0), Err(link));
        let unknown = |counter| Err(BadEntry::Counter { qpn: QPN, counter });
        assert_eq!(bench.queue.post_again(QPN, 2), unknown(2));
        assert_eq!(bench.queue.post_again(QPN, bad), unknown(bad));
        // Receives that were posted still complete, in any order.
        assert_eq!(bench.queue.retire(1, || ()), Some((WrId(1), ())));
        assert_eq!(bench.queue.retire(0, || ()), Some((WrId(0), ())));
        assert_eq!(post(&wrs), Err(PostError { posted: 0, error }), "also with free entries");
    }
}

#[test]
fn long_random_sequences_lose_and_double_no_entry() {
    let (bench, mut model) = Bench::new(16, 0xff00);
    let mut random = 1_u64;
    for _ in 0..if cfg!(miri) { 100 } else { 50_000 } {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let choice = (random >> 40) as u16;
        let op = match choice % 4 {
            0 => Op::Post(&[1]),
            1 => Op::Post(&[1, 1, 0]),
            2 => Op::Retire(choice / 4 % 16),
            _ => Op::PostAgain(choice / 4 % 16),
        };
        bench.apply(op, &mut model);
        bench.check(&model);
    }
}
