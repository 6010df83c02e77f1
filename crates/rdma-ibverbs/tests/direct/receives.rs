//! Equality of receives: entries, links and records of receive queues and shared receive queues.

use rdma_ibverbs::contract::{Pd as _, PostError, Srq as _};
use rdma_ibverbs::types::{QpCaps, RecvWr, Sge, SrqCaps, Transport, WrId};

use crate::direct::Direct;
use crate::library::{Library, LibrarySrq, Way};
use crate::memory::{Cqe, SharedRing};
use crate::requests::{self, sge};
use crate::world::{Random, World};

const STALE: u8 = 0xa5;
/// The kind of a CQE of a SEND that arrived.
const ARRIVED: u8 = 2;
/// The kind of a CQE of a failed receive.
const FAILED: u8 = 14;
const FLUSHED: u8 = 5;

fn caps(max_recv_wr: u32, max_recv_sge: u32) -> QpCaps {
    QpCaps { max_send_wr: 1, max_recv_wr, max_send_sge: 1, max_recv_sge, max_inline: 0 }
}

fn works<'a>(lists: &'a [Vec<Sge>], first: u64) -> Vec<RecvWr<'a>> {
    let work = |(at, sges): (usize, &'a Vec<Sge>)| RecvWr { wr_id: WrId(first + at as u64), sges };
    lists.iter().enumerate().map(work).collect()
}

/// Asserts that both sides accepted or refused the same, and returns how many were posted.
#[track_caller]
fn posted(
    wrs: &[RecvWr<'_>],
    ours: Result<(), PostError>,
    theirs: Result<(), (i32, usize)>,
) -> usize {
    let ours = ours.map_err(|refused| (refused.error.errno, refused.posted));
    assert_eq!(ours, theirs, "{wrs:?}");
    theirs.map_or_else(|(_, posted)| posted, |()| wrs.len())
}

/// A receive queue on both sides.
#[derive(Debug)]
struct Rig {
    ours: Direct,
    theirs: Library,
    next: u64,
    /// Identifiers of the receives in flight.
    flying: Vec<u64>,
    compared: usize,
    _world: World,
}

impl Rig {
    fn new(transport: Transport, caps: QpCaps) -> Self {
        let world = World::new();
        let ours = Direct::new(&world, transport, caps, None);
        let theirs = Library::new(&world, transport, Way::Chain, caps, None);
        let rings = (&ours.rings, &theirs.rings);
        assert_eq!(rings.0.receive.len, rings.1.receive.len);
        assert_eq!(rings.0.stride, rings.1.stride);
        Self { ours, theirs, next: 1, flying: Vec::new(), compared: 0, _world: world }
    }

    #[track_caller]
    fn post(&mut self, lists: &[Vec<Sge>]) -> usize {
        let wrs = works(lists, self.next);
        self.next += lists.len() as u64;
        for rings in [&self.ours.rings, &self.theirs.rings] {
            rings.receive.fill(STALE);
        }
        let count = posted(&wrs, self.ours.post_recv(&wrs), self.theirs.post_recv(&wrs));
        let (ours, theirs) = (&self.ours.rings, &self.theirs.rings);
        assert!(ours.receive.read() == theirs.receive.read(), "entries of {wrs:x?}");
        assert_eq!(ours.receive_record(), theirs.receive_record(), "record of {wrs:?}");
        self.flying.extend(wrs[..count].iter().map(|wr| wr.wr_id.0));
        self.compared += count;
        count
    }

    /// Completes the oldest receive, with any counter: receives complete in order.
    #[track_caller]
    fn complete(&mut self, failed: bool) {
        let cqe = Cqe::new(ARRIVED).number(44, 77);
        let cqe = if failed { Cqe::new(FAILED).failed(FLUSHED, 0xf9) } else { cqe };
        let id = self.flying.remove(0);
        self.ours.put(&cqe);
        self.theirs.put(&cqe);
        let (ours, theirs) = (self.ours.poll().unwrap().unwrap(), self.theirs.poll().unwrap());
        assert_eq!((ours.wr_id.0, ours.status.0), (id, theirs.status));
        assert_eq!(theirs.wr_id, id);
    }
}

#[test]
fn receives_of_all_lists_equal_those_of_libmlx5() {
    for transport in [Transport::Rc, Transport::Uc, Transport::Ud] {
        for (requests, max) in [(1, 1), (4, 1), (5, 3), (8, 4), (32, 16), (2, 30)] {
            let mut rig = Rig::new(transport, caps(requests, max));
            let mut lists = requests::lists(max as usize);
            lists.retain(|list| list.len() <= max as usize);
            for list in &lists {
                rig.post(std::slice::from_ref(list));
                rig.complete(rig.compared.is_multiple_of(2));
            }
            assert_eq!(rig.compared, lists.len());
        }
    }
}

#[test]
fn many_receives_equal_those_of_libmlx5_beyond_16_bits() {
    let mut rig = Rig::new(Transport::Rc, caps(8, 2));
    let mut random = Random(3);
    while rig.compared < 70_000 {
        let lists: Vec<_> = (0..random.below(10))
            .map(|at| (0..random.below(3)).map(|to| sge(at, 1 + to)).collect())
            .collect();
        rig.post(&lists);
        for _ in 0..random.below(rig.flying.len() as u32 + 1) {
            rig.complete(random.below(5) == 0);
        }
    }
}

#[test]
fn refused_receives_leave_the_same_as_in_libmlx5() {
    let mut rig = Rig::new(Transport::Rc, caps(4, 2));
    let (fits, long) = (vec![sge(1, 5)], vec![sge(1, 5); 40]);
    let list = |count| vec![fits.clone(); count];
    assert_eq!(rig.post(&[list(2), vec![long.clone()], list(1)].concat()), 2);
    assert_eq!(rig.post(&[long]), 0);
    assert_eq!(rig.post(&list(7)), 2, "the queue is full");
    assert_eq!(rig.post(&list(1)), 0, "the queue is full");
    rig.complete(false);
    assert_eq!(rig.post(&list(2)), 1);
}

/// A shared receive queue on both sides.
#[derive(Debug)]
struct SharedRig {
    ours: Direct,
    theirs: Library,
    srq: rdma_ibverbs::Srq,
    _theirs: LibrarySrq,
    rings: (SharedRing, SharedRing),
    next: u64,
    /// Entry and identifier of the receives in flight.
    flying: Vec<(u16, u64)>,
    compared: usize,
    head: u16,
    _world: World,
}

impl SharedRig {
    fn new(max_wr: u32, max_sge: u32) -> Self {
        let world = World::new();
        let srq = world.pd.create_srq(SrqCaps { max_wr, max_sge }).unwrap();
        let library = LibrarySrq::new(&world, max_wr, max_sge);
        let ring = SharedRing::of(srq.as_raw().as_ptr());
        let rings = (ring, SharedRing::of(library.srq));
        assert_eq!((rings.0.head, rings.0.tail), (rings.1.head, rings.1.tail));
        assert_eq!(rings.0.stride, rings.1.stride);
        let mut caps = caps(0, 0);
        caps.max_recv_wr = 1;
        let ours = Direct::new(&world, Transport::Rc, caps, Some(&srq));
        let theirs = Library::new(&world, Transport::Rc, Way::Chain, caps, Some(library.srq));
        Self {
            ours,
            theirs,
            srq,
            _theirs: library,
            rings,
            next: 1,
            flying: Vec::new(),
            compared: 0,
            head: rings.0.head as u16,
            _world: world,
        }
    }

    /// Returns the entry after `index` in the list.
    fn link(&self, index: u16) -> u16 {
        let ring = &self.rings.1;
        let link = ring.entries.part(usize::from(index) * ring.stride + 2, 2).read();
        u16::from_be_bytes([link[0], link[1]])
    }

    /// Overwrites all buffers, but not the links.
    fn erase(&self) {
        for ring in [&self.rings.0, &self.rings.1] {
            for entry in (0..ring.entries.len).step_by(ring.stride) {
                ring.entries.part(entry + 16, ring.stride - 16).fill(STALE);
            }
        }
    }

    #[track_caller]
    fn post(&mut self, lists: &[Vec<Sge>]) -> usize {
        self.erase();
        let wrs = works(lists, self.next);
        self.next += lists.len() as u64;
        // SAFETY: the device does not execute anything.
        let ours = unsafe { self.srq.post_recv(&wrs) };
        let count = posted(&wrs, ours, self.theirs.post_recv(&wrs));
        for wr in &wrs[..count] {
            self.flying.push((self.head, wr.wr_id.0));
            self.head = self.link(self.head);
        }
        self.compare(&wrs[..count]);
        count
    }

    /// Asserts that both rings are equal after a post of `wrs`.
    #[track_caller]
    fn compare(&mut self, wrs: &[RecvWr<'_>]) {
        let (ours, theirs) = self.rings;
        assert_eq!(ours.record(), theirs.record(), "record of {wrs:?}");
        let (mut entries, mut expected) = (ours.entries.read(), theirs.entries.read());
        let flying = &self.flying[self.flying.len() - wrs.len()..];
        for (wr, &(entry, _)) in wrs.iter().zip(flying) {
            if wr.sges.iter().all(|sge| sge.length > 0) {
                continue;
            }
            // libmlx5 writes the empty buffers of shared receives, though not of others. The
            // device may take length 0 for 2^31, so the direct path leaves them out.
            let place =
                usize::from(entry) * ours.stride + 16..(usize::from(entry) + 1) * ours.stride;
            let used: Vec<_> = wr.sges.iter().filter(|sge| sge.length > 0).copied().collect();
            assert_eq!(entries[place.clone()], segments(&used, place.len()), "ours of {wr:?}");
            assert_eq!(expected[place.clone()], segments(wr.sges, place.len()), "theirs of {wr:?}");
            entries[place.clone()].fill(0);
            expected[place].fill(0);
        }
        assert!(entries == expected, "entries of {wrs:x?}");
        self.compared += wrs.len();
    }

    /// Completes the receive at `place` of those in flight.
    #[track_caller]
    fn complete(&mut self, place: usize, failed: bool) {
        let (entry, id) = self.flying.remove(place);
        let cqe = Cqe::new(ARRIVED).number(44, 77);
        let cqe = if failed { Cqe::new(FAILED).failed(FLUSHED, 0xf9) } else { cqe };
        let cqe = cqe.counter(entry);
        self.ours.put(&cqe);
        self.theirs.put(&cqe);
        let (ours, theirs) = (self.ours.poll().unwrap().unwrap(), self.theirs.poll().unwrap());
        assert_eq!((ours.wr_id.0, ours.status.0), (id, theirs.status));
        assert_eq!(theirs.wr_id, id);
        let (ours, theirs) = self.rings;
        let places = (0..ours.entries.len).step_by(ours.stride);
        for entry in places {
            let links = (ours.entries.part(entry, 16), theirs.entries.part(entry, 16));
            assert_eq!(links.0.read(), links.1.read(), "link of the entry at byte {entry}");
        }
    }
}

/// Returns the list of a receive in an entry, which contained [`STALE`].
fn segments(list: &[Sge], length: usize) -> Vec<u8> {
    let mut bytes = Vec::new();
    for sge in list {
        bytes.extend(sge.length.to_be_bytes());
        bytes.extend(sge.lkey.0.to_be_bytes());
        bytes.extend(sge.addr.to_be_bytes());
    }
    if bytes.len() < length {
        bytes.extend([0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    }
    bytes.resize(length, STALE);
    bytes
}

#[test]
fn shared_receives_of_all_lists_equal_those_of_libmlx5() {
    for (requests, max) in [(1, 1), (4, 1), (5, 3), (8, 7), (2, 31)] {
        let mut rig = SharedRig::new(requests, max);
        let mut lists = requests::lists(max as usize);
        lists.retain(|list| list.len() <= max as usize);
        for list in &lists {
            rig.post(std::slice::from_ref(list));
            rig.complete(0, rig.compared.is_multiple_of(2));
        }
        assert_eq!(rig.compared, lists.len());
    }
}

#[test]
fn shared_receives_completed_in_any_order_are_linked_as_by_libmlx5() {
    let mut rig = SharedRig::new(12, 2);
    let mut random = Random(5);
    let mut reordered = 0;
    while rig.compared < 70_000 {
        let lists: Vec<_> = (0..random.below(14))
            .map(|at| (0..random.below(3)).map(|to| sge(at, random.below(2) * (1 + to))).collect())
            .collect();
        rig.post(&lists);
        for _ in 0..random.below(rig.flying.len() as u32 + 1) {
            let place = random.below(rig.flying.len() as u32) as usize;
            reordered += usize::from(place > 0);
            rig.complete(place, random.below(5) == 0);
        }
    }
    assert!(reordered > 10_000, "{reordered} receives completed out of order");
}

#[test]
fn refused_shared_receives_leave_the_same_as_in_libmlx5() {
    let mut rig = SharedRig::new(4, 2);
    let (fits, long) = (vec![sge(1, 5)], vec![sge(1, 5); 40]);
    let list = |count| vec![fits.clone(); count];
    assert_eq!(rig.post(&[list(2), vec![long.clone()], list(1)].concat()), 2);
    assert_eq!(rig.post(&[long]), 0);
    let free = rig.rings.0.tail as usize - 2;
    assert_eq!(rig.post(&list(20)), free, "the queue is full");
    assert_eq!(rig.post(&list(1)), 0, "the queue is full");
    rig.complete(3, false);
    assert_eq!(rig.post(&list(2)), 1);
}
