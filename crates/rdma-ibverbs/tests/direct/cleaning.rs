//! Equality of completion queues after the reset or destruction of a queue pair.

use rdma_ibverbs::Srq;
use rdma_ibverbs::contract::{Cq as _, Pd as _, Qp as _, Srq as _};
use rdma_ibverbs::types::{QpCaps, Qpn, RecvWr, SendOp, SrqCaps, Transport, WorkCompletion, WrId};

use crate::completions::{ARRIVED, RECEIVE_ERROR, REQUEST, same};
use crate::direct::Direct;
use crate::library::{Library, LibrarySrq, Way};
use crate::memory::{CompletionRing, Cqe, SharedRing};
use crate::requests::{Payload, REMOTE, Request, sge};
use crate::world::{Random, World};

const CAPS: QpCaps =
    QpCaps { max_send_wr: 64, max_recv_wr: 1, max_send_sge: 1, max_recv_sge: 1, max_inline: 0 };
const QUEUE_PAIRS: usize = 3;

/// Queue pairs with a common completion queue and a common shared receive queue.
#[derive(Debug)]
struct Rig {
    /// The last ones are destroyed first.
    ours: Vec<Direct>,
    /// The first one owns the completion queue.
    theirs: Vec<Library>,
    entries: (CompletionRing, CompletionRing),
    srq: Srq,
    their_srq: LibrarySrq,
    shared: (SharedRing, SharedRing),
    /// Index of each queue pair's next request.
    next: [u16; QUEUE_PAIRS],
    /// The queue pair of each entry that is neither polled nor removed, and whether it is a shared
    /// receive.
    waiting: Vec<usize>,
    id: u64,
    removed: usize,
    world: World,
}

impl Rig {
    fn new() -> Self {
        let world = World::new();
        let srq = world.pd.create_srq(SrqCaps { max_wr: 60, max_sge: 1 }).unwrap();
        let their_srq = LibrarySrq::new(&world, 60, 1);
        let first = Direct::new(&world, Transport::Rc, CAPS, Some(&srq));
        let cq = first.cq.clone();
        let mut ours = vec![first];
        let first = Library::new(&world, Transport::Rc, Way::Chain, CAPS, Some(their_srq.srq));
        let mut theirs = vec![first];
        while ours.len() < QUEUE_PAIRS {
            ours.push(Direct::on(&cq, &world, Transport::Rc, CAPS, Some(&srq)));
            let beside = theirs.last().unwrap().beside(&world, CAPS);
            theirs.push(beside);
        }
        let (ring, raw) = (SharedRing::of(srq.as_raw().as_ptr()), cq.as_raw().as_ptr());
        let shared = (ring, SharedRing::of(their_srq.srq));
        let mut entries =
            (CompletionRing::taken(raw), CompletionRing::of(theirs.first().unwrap().cq));
        entries.1.next = theirs.last().unwrap().entries.next;
        let mut rig = Self {
            ours,
            theirs,
            entries,
            srq,
            their_srq,
            shared,
            next: [0; QUEUE_PAIRS],
            waiting: Vec::new(),
            id: 1,
            removed: 0,
            world,
        };
        // The completions of libmlx5's queue so far have no counterpart.
        while rig.entries.0.next < rig.entries.1.next {
            let number = rig.ours[0].qp.qpn().0;
            rig.ours[0].post(&[Request::filler(Transport::Rc)]).unwrap();
            assert_eq!(rig.theirs[0].post(&[Request::filler(Transport::Rc)]), 0);
            let cqe = Cqe::new(REQUEST).operation(0x0a).counter(rig.next[0]);
            rig.entries.0.put(&cqe.of(number, 0));
            rig.next[0] += 1;
            assert!(rig.ours[0].poll().unwrap().is_some());
        }
        for _ in 0..rig.entries.0.count {
            rig.request(0, &mut Random(1));
            rig.poll();
        }
        rig.compare();
        rig
    }

    /// Gives the same CQE of a queue pair to both sides.
    fn put(&mut self, pair: usize, cqe: Cqe) {
        let (ours, theirs) = (&self.ours[pair], &self.theirs[pair]);
        self.entries.0.put(&cqe.of(ours.qp.qpn().0, 0));
        self.entries.1.put(&cqe.of(theirs.number(), theirs.user_index));
        self.waiting.push(pair);
    }

    fn noise(random: &mut Random, kind: u8) -> Cqe {
        let mut cqe = Cqe::new(0);
        cqe.bytes.iter_mut().for_each(|byte| *byte = random.below(256) as u8);
        cqe.set(63, &[kind << 4]).set(40, &[0])
    }

    /// Posts a request and completes it.
    fn request(&mut self, pair: usize, random: &mut Random) {
        let request = Request::new(SendOp::Write(REMOTE), Payload::List(vec![sge(1, 8)]));
        let request = Request { id: self.id, ..request };
        self.id += 1;
        self.ours[pair].post(std::slice::from_ref(&request)).unwrap();
        assert_eq!(self.theirs[pair].post(&[request]), 0);
        let cqe = Self::noise(random, REQUEST).operation(8).counter(self.next[pair]);
        self.next[pair] = self.next[pair].wrapping_add(1);
        self.put(pair, cqe);
    }

    /// Posts a shared receive and completes it.
    fn receive(&mut self, pair: usize, random: &mut Random) {
        let head = SharedRing::of(self.their_srq.srq).head;
        let sges = [sge(2, 100)];
        let wr = RecvWr { wr_id: WrId(self.id), sges: &sges };
        self.id += 1;
        // SAFETY: the device does not execute anything.
        unsafe { self.srq.post_recv(&[wr]) }.unwrap();
        self.theirs[pair].post_recv(&[wr]).unwrap();
        let kind = [ARRIVED, RECEIVE_ERROR][random.below(2) as usize];
        let cqe = Self::noise(random, kind).counter(head as u16).failed(5, 0xf9);
        self.put(pair, cqe);
    }

    #[track_caller]
    fn poll(&mut self) {
        let pair = self.waiting.remove(0);
        let mut out = [WorkCompletion::EMPTY];
        assert_eq!(self.ours[0].cq.poll(&mut out), Ok(1));
        let theirs = self.theirs[0].poll().expect("libmlx5 finds it too");
        let kind = if out[0].opcode.0 >= 128 { ARRIVED } else { REQUEST };
        assert_eq!(out[0].qpn, self.ours[pair].qp.qpn());
        out[0].qpn = Qpn(self.theirs[pair].number());
        same(&"after cleaning", kind, &out[0], &theirs);
    }

    /// Asserts that rings, consumer indices and shared receives are the same.
    #[track_caller]
    fn compare(&self) {
        let (ours, theirs) = &self.entries;
        assert_eq!(ours.next, theirs.next);
        assert_eq!(ours.consumer(), theirs.consumer(), "consumer index");
        let mut numbers: Vec<_> =
            self.ours.iter().map(|direct| (direct.qp.qpn().0, usize::MAX)).collect();
        numbers.iter_mut().enumerate().for_each(|(at, (_, pair))| *pair = at);
        // Without the numbers of queue pairs: consumed entries keep the numbers of destroyed ones.
        let plain = |ring: &CompletionRing, index: u32| {
            let mut bytes = ring.at(index).read();
            let first = bytes.len() - 64;
            bytes[first + 32..first + 36].fill(0);
            bytes[first + 57..first + 60].fill(0);
            bytes
        };
        for index in 0..ours.count {
            assert_eq!(plain(ours, index), plain(theirs, index), "entry {index}");
        }
        for entry in (0..self.shared.0.entries.len).step_by(self.shared.0.stride) {
            let links = [&self.shared.0, &self.shared.1].map(|ring| ring.entries.part(entry, 16));
            assert_eq!(links[0].read(), links[1].read(), "link at byte {entry}");
        }
    }

    /// Resets a queue pair; its completions disappear.
    #[track_caller]
    fn reset(&mut self, pair: usize) {
        self.ours[pair].reset();
        self.theirs[pair].reset();
        self.gone(pair);
        assert_eq!(self.ours[pair].rings.send_record(), 0);
        assert_eq!(self.theirs[pair].rings.send_record(), 0);
        self.ours[pair].ready(&self.world);
        self.theirs[pair].ready(&self.world);
        self.next[pair] = 0;
    }

    /// Returns how many entries may be added so that libmlx5 examines all of them, see
    /// `full_queue_is_cleaned_though_libmlx5_leaves_its_newest_entry`.
    fn free(&self) -> u32 {
        self.entries.0.count - 1 - self.waiting.len() as u32
    }

    fn gone(&mut self, pair: usize) {
        let before = self.waiting.len();
        self.waiting.retain(|&waiting| waiting != pair);
        self.removed += before - self.waiting.len();
    }

    fn fill(&mut self, count: u32, random: &mut Random, pairs: u32) {
        for _ in 0..count {
            let pair = random.below(pairs) as usize;
            if random.below(3) == 0 {
                self.receive(pair, random);
            } else {
                self.request(pair, random);
            }
        }
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        self.ours.clear();
        // Queue pairs before the completion queue, which the first of them destroys.
        while self.theirs.pop().is_some() {}
    }
}

#[test]
fn reset_removes_the_completions_that_libmlx5_removes() {
    let mut rig = Rig::new();
    let mut random = Random(29);
    for round in 0..1500 {
        let free = rig.free();
        // Often the queue is almost full.
        let count = if round % 5 == 0 { free } else { random.below(free + 1) };
        rig.fill(count, &mut random, QUEUE_PAIRS as u32);
        for _ in 0..random.below(rig.waiting.len() as u32 + 1) {
            rig.poll();
        }
        rig.reset(random.below(QUEUE_PAIRS as u32) as usize);
        rig.compare();
    }
    while !rig.waiting.is_empty() {
        rig.poll();
    }
    assert_eq!(rig.ours[0].poll().unwrap(), None);
    assert!(rig.theirs[0].poll().is_none());
    rig.compare();
    assert!(rig.removed > 1500, "{} completions removed", rig.removed);
}

#[test]
fn reset_of_the_only_user_empties_the_queue_as_in_libmlx5() {
    let mut rig = Rig::new();
    let mut random = Random(31);
    for count in 0..rig.entries.0.count {
        rig.fill(count, &mut random, 1);
        rig.reset(0);
        rig.compare();
        assert_eq!(rig.ours[0].poll().unwrap(), None);
        assert!(rig.theirs[0].poll().is_none());
        rig.request(1, &mut random);
        rig.poll();
    }
    assert_eq!(rig.removed as u32, rig.entries.0.count * (rig.entries.0.count - 1) / 2);
}

// A difference: in a full queue, libmlx5 stops its search for the newest entry one too early, and
// leaves that entry, whatever queue pair it belongs to.
#[test]
fn full_queue_is_cleaned_though_libmlx5_leaves_its_newest_entry() {
    let mut rig = Rig::new();
    let mut random = Random(37);
    rig.fill(rig.entries.0.count, &mut random, 1);
    rig.reset(0);
    assert_eq!(rig.entries.0.consumer(), rig.entries.0.next);
    assert_eq!(rig.ours[0].poll().unwrap(), None);
    assert_eq!(rig.entries.1.consumer(), rig.entries.1.next - 1);
    // With entries of other queue pairs, their order remains.
    let mut rig = Rig::new();
    rig.fill(rig.entries.0.count, &mut random, QUEUE_PAIRS as u32);
    let removed = 1;
    let others: Vec<_> = rig.waiting.iter().copied().filter(|&pair| pair != removed).collect();
    rig.reset(removed);
    for pair in others {
        let found = rig.ours[0].poll().unwrap().unwrap();
        assert_eq!(found.qpn, rig.ours[pair].qp.qpn());
    }
    assert_eq!(rig.ours[0].poll().unwrap(), None);
}

// Shows S3.
#[test]
fn destruction_removes_the_completions_that_libmlx5_removes() {
    for seed in 0..20 {
        let mut rig = Rig::new();
        let mut random = Random(seed);
        let mut left = QUEUE_PAIRS;
        while left > 1 {
            let free = rig.free();
            let count = if seed % 2 == 0 { free } else { random.below(free + 1) };
            rig.fill(count, &mut random, left as u32);
            for _ in 0..random.below(rig.waiting.len() as u32 / 2 + 1) {
                rig.poll();
            }
            left -= 1;
            drop(rig.ours.pop());
            drop(rig.theirs.pop());
            rig.gone(left);
            rig.compare();
        }
        while !rig.waiting.is_empty() {
            rig.poll();
        }
        // The entries are free again.
        rig.fill(rig.entries.0.count, &mut random, 1);
        while !rig.waiting.is_empty() {
            rig.poll();
        }
        rig.compare();
    }
}
