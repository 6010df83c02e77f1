//! Equality of send WQEs, doorbell records and doorbells.

use std::rc::Rc;

use std::ops::Range;

use rdma_ibverbs::contract::{Ah as _, Context as _, CqInit, Mr as _, Mw as _, Qp as _};
use rdma_ibverbs::types::{
    Access, AddressVector, DirectConfig, Gid, Lkey, QpCaps, Rkey, SendFlags, SendOp, Transport,
    WindowBind,
};
use rdma_ibverbs::{Mr, Mw};

use crate::direct::Direct;
use crate::library::{Library, Way};
use crate::memory::{BLOCK, Cqe, HALF, Rings};
use crate::requests::{self, Payload, REMOTE, Request, Target, sge};
use crate::world::{Handles, World, blue_flame};

/// Contents of a ring before a post.
const STALE: u8 = 0xa5;
/// Contents of a register before a post.
const SILENT: u8 = 0x5a;

/// Bytes in which an entry of the direct path and one of libmlx5 differ.
#[derive(Debug)]
struct Difference {
    reason: &'static str,
    /// The functions of libmlx5 that differ; `None` for all.
    way: Option<Way>,
    applies: fn(&Request) -> bool,
    places: fn(&Request) -> Vec<Range<usize>>,
    ours: Value,
    theirs: Value,
}

#[derive(Debug)]
enum Value {
    /// The earlier contents of the ring.
    Stale,
    Zero,
    /// Big-endian words.
    Words(fn(&Request) -> Vec<u32>),
}

/// Offset of the key's context in a UMR.
const CONTEXT: usize = 64;

/// All differences between entries, besides the queue pair number.
const DIFFERENCES: [Difference; 5] = [
    Difference {
        reason: "libmlx5 does not write the reserved fields of a key's context; the direct path \
                 clears them",
        way: None,
        applies: Request::is_umr,
        places: |_| [1..2, 3..4, 8..16, 32..64].map(|r| CONTEXT + r.start..CONTEXT + r.end).into(),
        ours: Value::Zero,
        theirs: Value::Stale,
    },
    Difference {
        reason: "libmlx5 does not write rights, start and length of a key that it invalidates; \
                 the mask excludes them",
        way: None,
        applies: |request| matches!(request.op, SendOp::LocalInvalidate(_)),
        places: |_| [2..3, 16..32].map(|r| CONTEXT + r.start..CONTEXT + r.end).into(),
        ours: Value::Zero,
        theirs: Value::Stale,
    },
    Difference {
        reason: "libmlx5 does not write the expected value of an addition, which has none",
        way: None,
        applies: |request| matches!(request.op, SendOp::FetchAdd { .. }),
        places: |request| {
            let operands = (request.header() - 1) * 16;
            std::iter::once(operands + 8..operands + 16).collect()
        },
        ours: Value::Zero,
        theirs: Value::Stale,
    },
    Difference {
        reason: "ibv_wr_* do not write the immediate data of operations without it",
        way: Some(Way::Extended),
        applies: |request| {
            !request.is_umr()
                && !matches!(
                    request.op,
                    SendOp::SendWithImm(_)
                        | SendOp::WriteWithImm(..)
                        | SendOp::SendWithInvalidate(_)
                )
        },
        places: |_| std::iter::once(12..16).collect(),
        ours: Value::Zero,
        theirs: Value::Stale,
    },
    Difference {
        reason: "ibv_post_send writes 8 as the length of each buffer of an atomic operation; \
                 the direct path writes the length of the buffer, as ibv_wr_* do",
        way: Some(Way::Chain),
        applies: |request| request.is_atomic() && buffers(request).iter().any(|&len| len != 8),
        places: |request| {
            let first = request.header();
            (first..first + buffers(request).len()).map(|at| at * 16..at * 16 + 4).collect()
        },
        ours: Value::Words(buffers),
        theirs: Value::Words(|request| vec![8; buffers(request).len()]),
    },
];

/// Returns the lengths of the buffers that are not empty.
fn buffers(request: &Request) -> Vec<u32> {
    match &request.data {
        Payload::List(list) => list.iter().map(|sge| sge.length).filter(|&len| len > 0).collect(),
        _ => Vec::new(),
    }
}

/// The memory and registers after a post.
#[derive(Debug)]
struct Posted {
    /// The ring from the first block on, without queue pair numbers.
    ring: Vec<u8>,
    /// Lengths of the entries in segments.
    segments: Vec<usize>,
    record: u32,
    /// The half of the register that was written.
    half: usize,
    /// Bytes written there.
    stored: usize,
}

impl Posted {
    /// Describes what a post of `list` at block `index` has written.
    fn of(rings: &Rings, qpn: u32, index: u32, list: &[Request]) -> Self {
        let mut ring = rings.from(index);
        let register = rings.register.read();
        let (mut at, mut segments, mut last) = (0, Vec::new(), 0);
        for request in list {
            let length = usize::from(ring[at + 7] & 0x3f);
            last = at;
            segments.push(length);
            at += length.div_ceil(4) * BLOCK;
            assert!(at <= ring.len() && length > 0, "{length} segments of {request:?}");
        }
        // The half that was written, and how much of it.
        let silent = |bytes: &[u8]| *bytes == [SILENT; HALF][..bytes.len()];
        let (half, stored) = match (silent(&register[..HALF]), silent(&register[HALF..])) {
            (false, true) => (0, &register[..HALF]),
            (true, false) => (1, &register[HALF..]),
            both => panic!("one half of the register is written, {both:?} are not"),
        };
        let matches = |&length: &usize| {
            let parts = (last..last + length).step_by(8).map(|at| &ring[at % ring.len()..][..8]);
            silent(&stored[length..]) && parts.eq(stored[..length].chunks(8))
        };
        let lengths: Vec<_> = [8, 64, 128, 192, 256].into_iter().filter(matches).collect();
        let [stored] = lengths[..] else {
            panic!("the register does not have the entry: {stored:x?}\n{:x?}", &ring[last..at])
        };
        // Queue pair numbers differ.
        let mut at = 0;
        let number = qpn << 8;
        for (request, length) in list.iter().zip(&segments) {
            let mut erase = |place: usize| {
                let place = &mut ring[at + place..at + place + 3];
                assert_eq!(place, &number.to_be_bytes()[..3], "queue pair number of {request:?}");
                place.fill(0);
            };
            erase(4);
            if matches!(request.op, SendOp::BindWindow) {
                erase(CONTEXT + 4);
            }
            // libmlx5 draws the UDP source port of each address handle without flow label.
            if let Some(Target { address: AddressVector { dlid: 0, flow_label: 0, .. }, .. }) =
                request.target
            {
                let port = &mut ring[at + 30..at + 32];
                assert!(port[0] >= 0xc0, "port {port:x?} of {request:?}");
                port.fill(0);
            }
            at += length.div_ceil(4) * BLOCK;
        }
        Self { ring, segments, record: rings.send_record(), half, stored }
    }
}

/// libmlx5 does not copy a request of one segment to the register, only its doorbell. The direct
/// path copies its block: a case less for its shortest way, and the device takes both.
const COPIES_ONE_SEGMENT: (usize, usize) = (64, 8);

/// How much was compared.
#[derive(Debug, Default)]
struct Tally {
    compared: usize,
    wrapped: usize,
}

impl Tally {
    /// Asserts that two posts of `list` wrote the same.
    #[track_caller]
    fn compare(&mut self, list: &[Request], way: Way, ours: &Posted, theirs: &Posted) {
        self.compared += 1;
        let context = || format!("{way:?}, {list:?}");
        assert_eq!(ours.segments, theirs.segments, "segments of {}", context());
        assert_eq!(ours.record, theirs.record, "record of {}", context());
        let lengths = (ours.stored, theirs.stored);
        if theirs.segments == [1] && blue_flame() {
            assert_eq!(lengths, COPIES_ONE_SEGMENT, "bytes in the registers, of {}", context());
        } else {
            assert_eq!(lengths.0, lengths.1, "bytes in the registers, of {}", context());
        }
        let (mut ring, mut expected) = (ours.ring.clone(), theirs.ring.clone());
        let mut at = 0;
        for (request, length) in list.iter().zip(&ours.segments) {
            let listed = DIFFERENCES.iter().filter(|difference| {
                difference.way.is_none_or(|of| of == way) && (difference.applies)(request)
            });
            for difference in listed {
                let places = (difference.places)(request);
                for (number, place) in places.into_iter().enumerate() {
                    let place = at + place.start..at + place.end;
                    let value = |value: &Value| match value {
                        Value::Stale => vec![STALE; place.len()],
                        Value::Zero => vec![0; place.len()],
                        Value::Words(words) => words(request)[number].to_be_bytes().to_vec(),
                    };
                    let right = ring[place.clone()] == value(&difference.ours)[..]
                        && expected[place.clone()] == value(&difference.theirs)[..];
                    assert!(
                        right,
                        "{}: ours {:x?}, theirs {:x?}, of {}",
                        difference.reason,
                        &ring[place.clone()],
                        &expected[place],
                        context()
                    );
                    ring[place.clone()].fill(0);
                    expected[place].fill(0);
                }
            }
            at += length.div_ceil(4) * BLOCK;
        }
        if ring != expected {
            let first = (0..ring.len()).find(|&at| ring[at] != expected[at]).unwrap();
            let from = first & !15;
            panic!(
                "byte {first}: ours {:x?}, theirs {:x?}, of {}",
                &ring[from..from + 16],
                &expected[from..from + 16],
                context()
            );
        }
        assert!(ring[at..] == vec![STALE; ring.len() - at], "wrote too much: {}", context());
    }
}

/// The same queue pair on both sides, twice each.
#[derive(Debug)]
struct Rig {
    transport: Transport,
    /// Posted to by `post_send`.
    listed: Direct,
    /// Posted to by `post_plain` where the request is plain.
    alone: Direct,
    library: Vec<Library>,
    /// Index of the next block.
    index: u32,
    caps: QpCaps,
    tally: Tally,
    /// The half of its register that each queue pair wrote last.
    halves: [Option<usize>; 4],
    posted: u64,
    /// The last request was a UMR: the next one has a fence.
    fenced: bool,
    target: Option<Target>,
    handles: Vec<Handles>,
    windows: Option<(Mw, Mr)>,
    world: World,
}

fn caps(max_send_wr: u32, max_send_sge: u32, max_inline: u32) -> QpCaps {
    QpCaps { max_send_wr, max_recv_wr: 1, max_send_sge, max_recv_sge: 1, max_inline }
}

impl Rig {
    fn new(transport: Transport, mut caps: QpCaps) -> Self {
        let world = World::new();
        if transport == Transport::Dci {
            (caps.max_recv_wr, caps.max_recv_sge) = (0, 0);
        }
        let listed = Direct::new(&world, transport, caps, None);
        let alone = Direct::new(&world, transport, caps, None);
        let ways: &[Way] = if transport == Transport::Dci {
            &[Way::Extended]
        } else {
            &[Way::Chain, Way::Extended]
        };
        let blocks = listed.rings.blocks;
        let library: Vec<_> = ways
            .iter()
            .map(|&way| Library::new(&world, transport, way, caps, None))
            .inspect(|made| assert_eq!(made.rings.blocks, blocks, "{:?}", made.way))
            .collect();
        let granted = listed.qp.caps().max_inline;
        let mut rig = Self {
            transport,
            listed,
            alone,
            library,
            index: 0,
            caps: QpCaps { max_inline: caps.max_inline.min(granted), ..caps },
            tally: Tally::default(),
            halves: [None; 4],
            posted: 0,
            fenced: false,
            target: None,
            handles: Vec::new(),
            windows: None,
            world,
        };
        if matches!(transport, Transport::Ud | Transport::Dci) {
            let route = rig.world.route();
            rig.target = Some(rig.to(route, 0x12_3456, 0x8182_8384_9192_9394));
        }
        rig
    }

    /// Creates address handles; returns the receiver at `address`.
    fn to(&mut self, address: AddressVector, number: u32, key: u64) -> Target {
        let handles = self.world.address_handles(&address);
        let (ours, theirs) = (handles.ours.handle(), handles.theirs);
        self.handles.push(handles);
        Target { kind: self.transport, address, ours, theirs, number, key }
    }

    /// Returns a binding of a window.
    fn bind(&mut self, memory: &mut [u8], len: u64, access: Access) -> Request {
        if self.windows.is_none() {
            self.windows = Some((self.world.window(), self.world.register(memory)));
        }
        let (window, region) = self.windows.as_ref().unwrap();
        let current = window.rkey();
        let bind = WindowBind {
            window: window.handle(),
            region: region.handle(),
            current,
            rkey: current.next(),
            lkey: Lkey(region.lkey().0),
            addr: 0x0102_0304_0506_0708,
            len,
            access,
        };
        Request::new(SendOp::BindWindow, Payload::Window(bind))
    }

    /// Posts a list everywhere, compares, and completes it.
    #[track_caller]
    fn run(&mut self, list: &[Request]) {
        let mut list = list.to_vec();
        for request in &mut list {
            self.posted += 1;
            request.id = self.posted | 0x1234_0000_0000_0000;
        }
        let mut ours =
            vec![post(&self.listed.rings, &self.listed.qp.qpn().0, self.index, &list, || {
                self.listed.post(&list).unwrap();
            })];
        let rings = self.alone.rings;
        let is_umr = list.last().is_some_and(Request::is_umr);
        let fenced = std::mem::replace(&mut self.fenced, is_umr);
        ours.push(post(&rings, &self.alone.qp.qpn().0, self.index, &list, || {
            let is_plain = match list[..].iter().map(Request::plain).collect::<Vec<_>>()[..] {
                [Some(wr)] => {
                    let accepted = self.alone.post_plain(wr);
                    assert_eq!(accepted, self.transport == Transport::Rc && !fenced, "{wr:?}");
                    accepted
                }
                _ => false,
            };
            if !is_plain {
                self.alone.post(&list).unwrap();
            }
        }));
        let theirs: Vec<_> = self
            .library
            .iter()
            .map(|library| {
                post(&library.rings, &library.number(), self.index, &list, || {
                    assert_eq!(library.post(&list), 0, "{list:?}");
                })
            })
            .collect();
        for ours in &ours {
            for (library, theirs) in self.library.iter().zip(&theirs) {
                self.tally.compare(&list, library.way, ours, theirs);
            }
        }
        for (last, posted) in self.halves.iter_mut().zip(ours.iter().chain(&theirs)) {
            // The halves alternate.
            let other = |last| if blue_flame() { 1 - last } else { last };
            let expected = last.map_or(posted.half, other);
            assert_eq!(posted.half, expected, "half of the register");
            *last = Some(posted.half);
            assert!(blue_flame() || posted.stored == 8, "a copy although BlueFlame is off");
        }
        self.complete(&list, &ours[0].segments);
    }

    /// Completes all requests by the completion of the last.
    fn complete(&mut self, list: &[Request], segments: &[usize]) {
        let blocks: Vec<_> = segments.iter().map(|length| length.div_ceil(4) as u32).collect();
        let total: u32 = blocks.iter().sum();
        let last = self.index + total - blocks.last().unwrap();
        let umr = list.last().unwrap().is_umr();
        let cqe = Cqe::new(0).operation(if umr { 0x25 } else { 0x0a }).counter(last as u16);
        let id = list.last().unwrap().id;
        for direct in [&mut self.listed, &mut self.alone] {
            direct.put(&cqe);
            let found = direct.poll().unwrap().unwrap();
            assert_eq!((found.wr_id.0, found.status.0), (id, 0));
        }
        for library in &mut self.library {
            library.put(&cqe);
            let found = library.poll().unwrap();
            assert_eq!((found.wr_id, found.status), (id, 0));
        }
        let ring = self.listed.rings.blocks;
        let wraps = self.index % ring + total > ring;
        self.tally.wrapped += usize::from(wraps);
        self.index += total;
    }

    /// Posts requests of one block until the next begins at block `place` of the ring.
    #[track_caller]
    fn seek(&mut self, place: u32) {
        let ring = self.listed.rings.blocks;
        loop {
            let missing = (place + ring - self.index % ring) % ring;
            if missing == 0 {
                return;
            }
            let count = missing.min(self.caps.max_send_wr) as usize;
            let filler = Request::new(SendOp::Send, Payload::List(Vec::new())).to(self.target);
            let blocks = 1;
            assert_eq!(filler.header().div_ceil(4), blocks);
            let list = vec![filler; count];
            self.listed.post(&list).unwrap();
            self.alone.post(&list).unwrap();
            for library in &self.library {
                assert_eq!(library.post(&list), 0);
            }
            self.halves.iter_mut().for_each(|half| *half = None);
            self.complete(&list, &vec![1; count]);
        }
    }

    /// Asserts that enough was compared.
    #[track_caller]
    fn finish(&self, at_least: usize) {
        let Tally { compared, wrapped } = self.tally;
        println!("{:?}: {compared} comparisons, {wrapped} lists wrapped", self.transport);
        assert!(compared >= at_least, "{compared} comparisons");
    }
}

/// Posts by `call` at block `index`; returns what it wrote.
#[track_caller]
fn post(rings: &Rings, qpn: &u32, index: u32, list: &[Request], call: impl FnOnce()) -> Posted {
    rings.send.fill(STALE);
    rings.register.fill(SILENT);
    call();
    Posted::of(rings, *qpn, index, list)
}

const ALL: [Transport; 4] = [Transport::Rc, Transport::Uc, Transport::Ud, Transport::Dci];

/// Returns a rig for the longest requests, with a ring for four of them.
fn long(transport: Transport) -> Rig {
    let sges = match transport {
        Transport::Rc | Transport::Uc => 30,
        Transport::Ud | Transport::Dci => 26,
    };
    Rig::new(transport, caps(4, sges, 600))
}

// Shows S3.
#[test]
fn entries_of_all_operations_data_and_flags_equal_those_of_libmlx5() {
    for transport in ALL {
        let mut rig = long(transport);
        let lists = requests::lists(rig.caps.max_send_sge as usize);
        let inline = requests::inline(rig.caps.max_inline as usize);
        let all = requests::with_data(transport, &lists, &inline, rig.target);
        for flags in requests::flags() {
            for request in &all {
                rig.run(&[request.clone().flags(flags)]);
            }
        }
        assert!(rig.tally.wrapped > 10, "{} entries wrapped around", rig.tally.wrapped);
        rig.finish(all.len() * 8);
    }
}

#[test]
fn queue_pair_without_blue_flame_writes_only_its_doorbell() {
    let world = World::new();
    let cq = Rc::new(world.context.create_cq(&CqInit::new(16)).unwrap());
    let request = Request::new(SendOp::Send, Payload::List(Vec::new()));
    for (config, stored) in [
        (DirectConfig::DEFAULT, if blue_flame() { 64 } else { 8 }),
        (DirectConfig::DEFAULT.blue_flame(false), 8),
    ] {
        let made = Direct::configured(&cq, &world, Transport::Rc, caps(4, 1, 0), None, config);
        let list = [request.clone()];
        let posted = post(&made.rings, &made.qp.qpn().0, 0, &list, || made.post(&list).unwrap());
        assert_eq!(posted.stored, stored, "{config:?}");
    }
}

#[test]
fn entries_at_the_ends_of_the_ring_and_beyond_16_bits_equal_those_of_libmlx5() {
    for transport in ALL {
        let mut rig = long(transport);
        let max = rig.caps.max_send_sge as usize;
        let all_lists = requests::lists(max);
        let lists: Vec<_> = all_lists
            .iter()
            .filter(|list| matches!(list.len(), 0 | 2 | 5 | 9) || list.len() == max)
            .filter(|list| list.iter().filter(|sge| sge.length == 0).count() <= 1)
            .cloned()
            .collect();
        let inline = requests::inline(rig.caps.max_inline as usize);
        let mut all = requests::with_data(transport, &lists, &inline, rig.target);
        if matches!(transport, Transport::Rc | Transport::Uc) {
            let mut memory = vec![0; 64];
            all.push(rig.bind(&mut memory, 5, Access::REMOTE_ALL));
            all.push(Request::new(SendOp::LocalInvalidate(Rkey(7)), Payload::List(Vec::new())));
        }
        let ring = rig.listed.rings.blocks;
        assert!(ring >= 64);
        let ends: Vec<_> = [0, 1].into_iter().chain(ring - 16..ring).collect();
        for round in 0..2 {
            for &place in &ends {
                for request in &all {
                    rig.seek(place);
                    rig.run(std::slice::from_ref(request));
                }
            }
            assert!(rig.tally.wrapped > all.len(), "{} entries wrapped", rig.tally.wrapped);
            if round == 0 {
                // Beyond the index that WQEs and records have.
                while rig.index < 1 << 16 {
                    rig.seek(0);
                    rig.seek(ring - 1);
                }
            }
        }
        assert!(rig.index > 1 << 16);
        rig.finish(all.len() * 36);
    }
}

#[test]
fn requests_after_a_binding_or_invalidation_equal_those_of_libmlx5() {
    for transport in [Transport::Rc, Transport::Uc] {
        let mut rig = Rig::new(transport, caps(4, 3, 60));
        let mut memory = vec![0; 64];
        let local = [
            rig.bind(&mut memory, 64, Access::REMOTE_READ),
            Request::new(SendOp::LocalInvalidate(Rkey(0x8192_a3b4)), Payload::List(Vec::new())),
        ];
        let lists = [vec![], vec![sge(1, 8)], vec![sge(1, 8), sge(2, 0), sge(3, 9)]];
        let all = requests::with_data(transport, &lists, &[vec![1, 2, 3]], None);
        for first in &local {
            for flags in requests::flags() {
                for request in all.iter().chain(&local) {
                    let request = request.clone().flags(flags);
                    // In two lists, in one, and a request later.
                    rig.run(&[first.clone().flags(flags)]);
                    rig.run(std::slice::from_ref(&request));
                    rig.run(std::slice::from_ref(&request));
                    rig.run(&[first.clone(), request.clone(), request.clone()]);
                }
            }
        }
        rig.finish(all.len() * 128);
    }
}

#[test]
fn bindings_of_all_rights_and_lengths_equal_those_of_libmlx5() {
    for transport in [Transport::Rc, Transport::Uc] {
        let mut rig = Rig::new(transport, caps(4, 1, 0));
        let mut memory = vec![0; 64];
        for rights in 0..16 {
            let access = Access::from_bits_truncate(rights);
            for len in [1, 7, 4096, 0x7fff_ffff, 1 << 31] {
                let request = rig.bind(&mut memory, len, access);
                rig.run(&[request]);
            }
        }
        for key in [0, 1, 0xff, 0x1234_5678, u32::MAX] {
            rig.run(&[Request::new(SendOp::LocalInvalidate(Rkey(key)), Payload::List(vec![]))]);
        }
        rig.finish(170);
    }
}

#[test]
fn lists_of_requests_equal_those_of_libmlx5_and_ring_once() {
    for transport in ALL {
        let mut rig = long(transport);
        let lists = requests::lists(6);
        let all = requests::with_data(transport, &lists, &requests::inline(200), rig.target);
        let flags = requests::flags();
        for (number, window) in all.windows(4).enumerate() {
            let list: Vec<_> = window
                .iter()
                .enumerate()
                .map(|(at, request)| request.clone().flags(flags[(number + at) % flags.len()]))
                .collect();
            rig.run(&list[..2 + number % 3]);
        }
        rig.finish(all.len() - 3);
    }
}

#[test]
fn small_queues_equal_those_of_libmlx5() {
    for transport in ALL {
        for (requests, sges, inline) in [(1, 1, 0), (3, 1, 12), (17, 2, 28), (128, 4, 100)] {
            let mut rig = Rig::new(transport, caps(requests, sges, inline));
            let lists = requests::lists(sges as usize);
            let inline = requests::inline(inline as usize);
            let all = requests::with_data(transport, &lists, &inline, rig.target);
            for request in all.iter().cycle().take(all.len() * 2 + 70) {
                rig.run(std::slice::from_ref(request));
            }
            rig.finish(all.len() * 2);
        }
    }
}

#[test]
fn receivers_of_all_routes_equal_those_of_libmlx5() {
    for transport in [Transport::Ud, Transport::Dci] {
        let mut rig = Rig::new(transport, caps(4, 1, 16));
        let own = rig.world.route();
        let mut global = own;
        global.dgid = Gid([0x20, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15]);
        let mut routes = vec![own];
        // Ethernet ports resolve addresses.
        let infiniband = own.dlid != 0;
        for base in if infiniband { vec![own, global] } else { vec![own] } {
            routes.push(AddressVector { service_level: 5, ..base });
            routes.push(AddressVector { hop_limit: 255, traffic_class: 0x9c, ..base });
            routes.push(AddressVector { flow_label: 0xf_edcb, ..base });
            routes.push(AddressVector { hop_limit: 1, flow_label: 1, ..base });
            if infiniband {
                routes.push(AddressVector { dlid: 0x8123, ..base });
            }
        }
        for route in routes {
            for (number, key) in [(0, 0), (1, 1), (0xff_ffff, u64::MAX), (0x80_0001, 0x1_8000_0000)]
            {
                let target = Some(rig.to(route, number, key));
                for data in [Payload::List(vec![sge(3, 100)]), Payload::Inline(vec![1; 16])] {
                    rig.run(&[Request::new(SendOp::Send, data).to(target)]);
                }
            }
        }
        rig.finish(40);
    }
}

#[test]
fn full_queue_posts_as_many_requests_as_libmlx5() {
    let mut rig = Rig::new(Transport::Rc, caps(4, 1, 0));
    rig.library.retain(|library| library.way == Way::Chain);
    let data = Payload::List(vec![sge(1, 8)]);
    let list: Vec<_> = (0..7)
        .map(|id| Request { id, ..Request::new(SendOp::Write(REMOTE), data.clone()) })
        .collect();
    let fits = rig.listed.qp.caps().max_send_wr as usize;
    assert_eq!(fits, 4);
    let ours = post(&rig.listed.rings, &rig.listed.qp.qpn().0, 0, &list[..fits], || {
        assert_eq!(rig.listed.post(&list).unwrap_err().posted, fits);
    });
    let library = &rig.library[0];
    let theirs = post(&library.rings, &library.number(), 0, &list[..fits], || {
        assert_eq!(library.post(&list), libc::ENOMEM);
    });
    rig.tally.compare(&list[..fits], Way::Chain, &ours, &theirs);
}

#[test]
fn flags_of_requests_have_the_bits_of_libmlx5() {
    // The comparisons above would pass if both ignored a flag.
    let mut rig = Rig::new(Transport::Rc, caps(4, 1, 0));
    let expected = [
        (SendFlags::empty(), 0),
        (SendFlags::SIGNALED, 8),
        (SendFlags::SOLICITED, 2),
        (SendFlags::FENCE, 0x80),
    ];
    for (flags, bits) in expected {
        let index = rig.index;
        rig.run(&[Request::new(SendOp::Send, Payload::List(vec![sge(1, 1)])).flags(flags)]);
        assert_eq!(rig.listed.rings.from(index)[11], bits, "{flags:?}");
    }
}
