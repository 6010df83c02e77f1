//! Equality of completions: the same completion queue entries, read by both sides.

use rdma_ibverbs::contract::{Cq as _, Mr as _, Mw as _, Pd as _, Qp as _, Srq as _};
use rdma_ibverbs::ffi::*;
use rdma_ibverbs::mlx5::direct::BadEntry;
use rdma_ibverbs::types::{
    Access, Lkey, QpCaps, RecvWr, Rkey, SendOp, Sge, SrqCaps, Transport, WcFlags, WindowBind,
    WorkCompletion, WrId,
};
use rdma_ibverbs::{Mr, Mw, Srq, VerbError};

use crate::direct::Direct;
use crate::library::{Library, LibrarySrq, Way};
use crate::memory::{Cqe, Memory, SharedRing, address};
use crate::requests::{Payload, REMOTE, Request, operations, sge};
use crate::world::{Random, World, device};

// Kinds of CQEs, `MLX5_CQE_*`.
pub const REQUEST: u8 = 0;
const WRITE_WITH_IMM: u8 = 1;
pub const ARRIVED: u8 = 2;
const ARRIVED_WITH_INVALIDATE: u8 = 4;
const REQUEST_ERROR: u8 = 13;
pub const RECEIVE_ERROR: u8 = 14;
const INVALID: u8 = 15;
/// The first 32 bytes are data.
const INLINE_32: u8 = 4;
/// The 64 bytes before are data.
const INLINE_64: u8 = 8;
/// Offset of the last byte.
const LAST: usize = 63;
/// Syndrome and vendor code of a page fault.
const PAGE_FAULT: (u8, u8) = (0x22, 0x93);

/// The operation codes of WQEs, `MLX5_OPCODE_*`.
const OPERATIONS: [u8; 10] = [0x00, 0x01, 0x08, 0x09, 0x0a, 0x0b, 0x10, 0x11, 0x12, 0x25];

/// Asserts that two completions of a CQE of `kind` agree in all fields that `ibv_poll_cq(3)`
/// defines.
#[track_caller]
pub fn same(what: &dyn std::fmt::Debug, kind: u8, ours: &WorkCompletion, theirs: &ibv_wc) {
    let pair = || format!("{what:x?}: ours {ours:?}, status of libmlx5 {}", theirs.status);
    assert_eq!(ours.wr_id.0, theirs.wr_id, "identifier: {}", pair());
    assert_eq!(ours.status.0, theirs.status, "status: {}", pair());
    assert_eq!(ours.qpn.0, theirs.qp_num, "queue pair number: {}", pair());
    if !ours.status.is_success() {
        if matches!(kind, REQUEST_ERROR | RECEIVE_ERROR) {
            assert_eq!(ours.vendor_error, theirs.vendor_err, "vendor code: {}", pair());
        }
        return;
    }
    assert_eq!(ours.opcode.0, theirs.opcode, "operation: {}", pair());
    assert_eq!(ours.flags.bits(), theirs.wc_flags, "flags: {}", pair());
    if kind == REQUEST {
        // READ, compare-and-swap, fetch-and-add.
        if (2..=4).contains(&ours.opcode.0) {
            assert_eq!(ours.byte_len, theirs.byte_len, "length: {}", pair());
        }
        return;
    }
    assert_eq!(ours.byte_len, theirs.byte_len, "length: {}", pair());
    if ours.flags.intersects(WcFlags::WITH_IMM | WcFlags::WITH_INV) {
        // SAFETY: both fields of the union are a word.
        let theirs = unsafe { theirs.imm_data_invalidated_rkey_union.imm_data };
        assert_eq!(ours.imm_or_rkey, theirs, "immediate data or key: {}", pair());
    }
    assert_eq!(ours.src_qpn.0, theirs.src_qp, "source queue pair: {}", pair());
    assert_eq!(ours.pkey_index, theirs.pkey_index, "partition key index: {}", pair());
    assert_eq!(ours.src_lid, theirs.slid, "source LID: {}", pair());
    assert_eq!(ours.service_level, theirs.sl, "service level: {}", pair());
    assert_eq!(ours.dest_path_bits, theirs.dlid_path_bits, "path bits: {}", pair());
}

const CAPS: QpCaps =
    QpCaps { max_send_wr: 4, max_recv_wr: 4, max_send_sge: 4, max_recv_sge: 4, max_inline: 0 };

/// A queue pair on both sides, with buffers and a window.
#[derive(Debug)]
struct Rig {
    ours: Direct,
    /// Its completions are taken by `take_request`.
    taker: Direct,
    theirs: Library,
    /// Index of the next send block, the same on all sides.
    index: u32,
    next: u64,
    shared: Option<Shared>,
    window: (Mw, Mr, Vec<u8>),
    compared: usize,
    taken: usize,
    _world: World,
}

#[derive(Debug)]
struct Shared {
    ours: [Srq; 2],
    theirs: LibrarySrq,
}

impl Rig {
    fn new(transport: Transport, shared: bool) -> Self {
        let world = World::new();
        let shared = shared.then(|| Shared {
            ours: [(); 2].map(|()| world.pd.create_srq(SrqCaps { max_wr: 4, max_sge: 3 }).unwrap()),
            theirs: LibrarySrq::new(&world, 4, 3),
        });
        let srq = |number: usize| shared.as_ref().map(|shared| &shared.ours[number]);
        let ours = Direct::new(&world, transport, CAPS, srq(0));
        let taker = Direct::new(&world, transport, CAPS, srq(1));
        let theirs = shared.as_ref().map(|shared| shared.theirs.srq);
        let theirs = Library::new(&world, transport, Way::Chain, CAPS, theirs);
        let mut memory = vec![0; 64];
        let window = (world.window(), world.register(&mut memory), memory);
        Self {
            ours,
            taker,
            theirs,
            index: 0,
            next: 1,
            shared,
            window,
            compared: 0,
            taken: 0,
            _world: world,
        }
    }

    fn bind(&self) -> Request {
        let (window, region, _) = &self.window;
        let bind = WindowBind {
            window: window.handle(),
            region: region.handle(),
            current: window.rkey(),
            rkey: window.rkey().next(),
            lkey: region.lkey(),
            addr: 4096,
            len: 64,
            access: Access::REMOTE_READ,
        };
        Request::new(SendOp::BindWindow, Payload::Window(bind))
    }

    /// Posts a request everywhere; `theirs` is its form for libmlx5. Returns its index.
    #[track_caller]
    fn post_each(&mut self, mut ours: Request, mut theirs: Request) -> u16 {
        (ours.id, theirs.id) = (self.next, self.next);
        self.next += 1;
        self.ours.post(&[ours.clone()]).unwrap();
        self.taker.post(&[ours.clone()]).unwrap();
        assert_eq!(self.theirs.post(&[theirs]), 0);
        let index = self.index as u16;
        self.index = self.ours.rings.send_record() | self.index & !0xffff;
        if (self.index as u16) < index {
            self.index += 1 << 16;
        }
        index
    }

    #[track_caller]
    fn post(&mut self, request: &Request) -> u16 {
        self.post_each(request.clone(), request.clone())
    }

    /// Posts a receive everywhere, with the same buffers or one for each side; returns the shared
    /// entry.
    #[track_caller]
    fn receive(&mut self, ours: &[Sge], theirs: &[Sge]) -> u16 {
        let id = WrId(self.next);
        self.next += 1;
        let (mine, other) = (RecvWr { wr_id: id, sges: ours }, RecvWr { wr_id: id, sges: theirs });
        let Some(shared) = &self.shared else {
            self.ours.post_recv(&[mine]).unwrap();
            self.taker.post_recv(&[mine]).unwrap();
            self.theirs.post_recv(&[other]).unwrap();
            return 0x5aa5;
        };
        let head = SharedRing::of(shared.theirs.srq).head;
        for srq in &shared.ours {
            // SAFETY: the device does not execute anything.
            unsafe { srq.post_recv(&[mine]) }.unwrap();
        }
        self.theirs.post_recv(&[other]).unwrap();
        head as u16
    }

    /// Gives the same CQE to all sides and compares what they make of it.
    #[track_caller]
    fn compare(&mut self, cqe: &Cqe) -> (WorkCompletion, ibv_wc) {
        self.ours.put(cqe);
        self.theirs.put(cqe);
        self.taker.put(cqe);
        let theirs = self.theirs.poll().expect("libmlx5 finds the entry");
        let ours = self.ours.poll().unwrap().expect("the direct path finds the entry");
        let what = &cqe.bytes[64..];
        // Queue pair numbers differ.
        let renamed = |ours: &WorkCompletion, direct: &Direct, library: &Library| {
            assert_eq!(ours.qpn, direct.qp.qpn(), "{what:x?}");
            WorkCompletion { qpn: rdma_ibverbs::types::Qpn(library.number()), ..*ours }
        };
        let kind = cqe.bytes[127] >> 4;
        same(&what, kind, &renamed(&ours, &self.ours, &self.theirs), &theirs);
        let queue = self.taker.cq.direct().unwrap().clone();
        assert_eq!(queue.take_request(WrId(ours.wr_id.0 ^ 1)), None, "not this request");
        let taken = match queue.take_request(ours.wr_id) {
            Some(taken) => {
                self.taken += 1;
                taken
            }
            // Only the most common completions are taken this way.
            None => {
                let mut drained = None;
                queue.drain(1, |completion| drained = Some(*completion)).unwrap();
                drained.expect("drained")
            }
        };
        assert_eq!(
            renamed(&taken, &self.taker, &self.theirs),
            renamed(&ours, &self.ours, &self.theirs),
            "{what:x?}"
        );
        self.empty();
        self.compared += 1;
        (ours, theirs)
    }

    /// Asserts that no side finds a completion, and that all have consumed what they found.
    #[track_caller]
    fn empty(&self) {
        assert_eq!(self.ours.poll().unwrap(), None);
        assert_eq!(self.taker.poll().unwrap(), None);
        assert!(self.theirs.poll().is_none());
        for entries in [&self.ours.entries, &self.taker.entries, &self.theirs.entries] {
            assert_eq!(entries.consumer(), entries.next & 0xff_ffff, "consumer index");
        }
    }
}

/// Returns a request of `op` with a buffer.
fn request(op: SendOp) -> Request {
    Request::new(op, Payload::List(vec![sge(1, 8)]))
}

/// Returns a CQE whose fields are random, except queue pair, counter and kind.
fn noise(random: &mut Random, kind: u8) -> Cqe {
    let mut cqe = Cqe::new(0);
    cqe.bytes.iter_mut().for_each(|byte| *byte = random.below(256) as u8);
    let solicited = (random.below(2) as u8) << 1;
    // `app` of 1 means tag matching.
    cqe.set(LAST, &[kind << 4 | solicited]).set(40, &[0])
}

#[test]
fn completions_of_requests_equal_those_of_libmlx5() {
    let mut random = Random(7);
    for transport in [Transport::Rc, Transport::Uc] {
        let mut rig = Rig::new(transport, false);
        let local = Request::new(SendOp::LocalInvalidate(Rkey(3)), Payload::List(vec![]));
        let mut requests: Vec<_> = operations(transport).into_iter().map(request).collect();
        requests.extend([rig.bind(), local]);
        for round in 0..6 {
            for request in &requests {
                for code in OPERATIONS {
                    let counter = rig.post(request);
                    let cqe = match round {
                        0 => Cqe::new(REQUEST),
                        1 => Cqe::new(REQUEST).number(44, u32::MAX),
                        _ => noise(&mut random, REQUEST),
                    };
                    rig.compare(&cqe.operation(code).counter(counter));
                }
            }
        }
        let plain = [0x08, 0x0a, 0x10].len() * requests.len();
        assert!(rig.taken >= plain * 2, "{} of {} taken", rig.taken, rig.compared);
        assert!(rig.compared == requests.len() * 60 && rig.taken < rig.compared);
    }
}

#[test]
fn completions_of_receives_equal_those_of_libmlx5() {
    let mut random = Random(11);
    for transport in [Transport::Rc, Transport::Uc, Transport::Ud] {
        for shared in [false, true] {
            let mut rig = Rig::new(transport, shared);
            for round in 0..500 {
                for kind in WRITE_WITH_IMM..=ARRIVED_WITH_INVALIDATE {
                    let entry = rig.receive(&[sge(1, 100)], &[sge(1, 100)]);
                    let cqe = if round == 0 { Cqe::new(kind) } else { noise(&mut random, kind) };
                    rig.compare(&cqe.counter(entry));
                }
            }
            assert_eq!(rig.compared, 2000);
        }
    }
}

#[test]
fn fields_of_receives_are_decoded_one_by_one() {
    // The comparisons above would pass if both ignored a field.
    let mut rig = Rig::new(Transport::Ud, false);
    let mut take = |cqe: Cqe| {
        rig.receive(&[sge(1, 100)], &[sge(1, 100)]);
        rig.compare(&cqe).0
    };
    assert_eq!(take(Cqe::new(2).number(44, 0x0102_0304)).byte_len, 0x0102_0304);
    assert_eq!(take(Cqe::new(2).set(22, &[0x12, 0x34])).src_lid, 0x1234);
    assert_eq!(take(Cqe::new(2).set(17, &[0xff])).dest_path_bits, 0x7f);
    assert_eq!(take(Cqe::new(2).number(24, 0x0f12_3456)).src_qpn.0, 0x12_3456);
    assert_eq!(take(Cqe::new(2).number(24, 0x0f12_3456)).service_level, 15);
    assert_eq!(take(Cqe::new(2).number(36, 0xffff_1234)).pkey_index, 0x1234);
    for (bits, grh) in [(0, false), (1, true), (2, true), (3, true), (4, false), (8, false)] {
        let flags = take(Cqe::new(2).number(24, bits << 28)).flags;
        assert_eq!(flags.contains(WcFlags::GRH), grh, "{bits}");
    }
    assert_eq!(take(Cqe::new(3).number(36, 0x0102_0304)).imm().unwrap().0, 0x0102_0304);
    assert_eq!(take(Cqe::new(1).number(36, 0x0102_0304)).imm().unwrap().0, 0x0102_0304);
    assert_eq!(take(Cqe::new(4).number(36, 0x0102_0304)).invalidated().unwrap().0, 0x0102_0304);
}

#[test]
fn failures_of_all_syndromes_equal_those_of_libmlx5() {
    let mut random = Random(13);
    for shared in [false, true] {
        let mut rig = Rig::new(Transport::Rc, shared);
        for syndrome in 0..=255 {
            for vendor in [0, 0x68, 0x93, 0xf9, 0xff] {
                let counter = rig.post(&request(SendOp::Write(REMOTE)));
                let cqe = noise(&mut random, REQUEST_ERROR).counter(counter);
                rig.compare(&cqe.failed(syndrome, vendor));
                if shared && (syndrome, vendor) == PAGE_FAULT {
                    continue;
                }
                let entry = rig.receive(&[sge(1, 9)], &[sge(1, 9)]);
                let cqe = noise(&mut random, RECEIVE_ERROR).counter(entry);
                rig.compare(&cqe.failed(syndrome, vendor));
            }
        }
        assert_eq!(rig.compared, 256 * 5 * 2 - usize::from(shared));
    }
}

#[test]
fn page_fault_of_a_shared_receive_posts_it_again_as_in_libmlx5() {
    let mut rig = Rig::new(Transport::Rc, true);
    for round in 0..20 {
        let list = [sge(1, 100), sge(2, 200 + round)];
        let theirs = rig.receive(&list, &list);
        let shared = rig.shared.as_ref().unwrap();
        let ring = SharedRing::of(shared.ours[0].as_raw().as_ptr());
        let mut other = SharedRing::of(shared.theirs.srq);
        // Behind the entries, libmlx5 has as many for those that it sets aside.
        other.entries.len = 2 * ring.entries.len;
        // The receive's entry on this side, found by its contents.
        let find = |ring: &SharedRing, except: Option<usize>| {
            let wanted = (200 + round).to_be_bytes();
            (0..ring.entries.len / ring.stride)
                .filter(|&entry| Some(entry) != except)
                .find(|entry| ring.entries.part(entry * ring.stride + 32, 4).read() == wanted)
        };
        let mine = find(&ring, None).unwrap();
        let before = other.record();
        assert_eq!(ring.record(), before);
        // libmlx5 sets the entry aside for a while; the direct path frees it as the last. So the
        // entries differ from here on, not the receives.
        let fault = Cqe::new(RECEIVE_ERROR).failed(PAGE_FAULT.0, PAGE_FAULT.1);
        let (head, mine) = (other.head as u16, mine as u16);
        rig.ours.put(&fault.counter(mine));
        rig.taker.put(&fault.counter(mine));
        rig.theirs.put(&fault.counter(theirs));
        rig.empty();
        assert_eq!((ring.record(), other.record()), (before + 1, before + 1));
        let again = find(&ring, Some(mine.into())).expect("the receive is in another entry") as u16;
        let bytes = |ring: &SharedRing, entry: u16| {
            ring.entries.part(usize::from(entry) * ring.stride + 16, 48).read()
        };
        assert_eq!(bytes(&ring, again), bytes(&other, head), "buffers");
        let arrived = Cqe::new(ARRIVED).number(44, 5);
        rig.ours.put(&arrived.counter(again));
        rig.taker.put(&arrived.counter(again));
        rig.theirs.put(&arrived.counter(head));
        let (ours, theirs) = (rig.ours.poll().unwrap().unwrap(), rig.theirs.poll().unwrap());
        assert_eq!((ours.wr_id.0, ours.byte_len), (theirs.wr_id, theirs.byte_len));
        assert_eq!(rig.taker.poll().unwrap().unwrap().wr_id, ours.wr_id);
        rig.empty();
    }
}

/// Returns memory for received data.
fn buffer() -> Memory {
    let memory: &'static mut [u8] = vec![0_u8; 256].leak();
    Memory::new(memory.as_mut_ptr().cast(), memory.len())
}

/// Returns a list of buffers of these lengths in `memory`, with gaps.
fn places(memory: &Memory, lengths: &[u32]) -> Vec<Sge> {
    let mut at = 3;
    let place = |&length: &u32| {
        let addr = address(memory.part(at, length as usize).start);
        at += length as usize + 5;
        Sge { addr, length, lkey: Lkey(9) }
    };
    lengths.iter().map(place).collect()
}

/// Returns which formats of inline data the entries have: marks, offset and length of the data.
fn formats(rig: &Rig) -> Vec<(u8, usize, usize)> {
    match rig.ours.entries.entry {
        64 => vec![(INLINE_32, 64, 32)],
        _ => vec![(INLINE_32, 64, 32), (INLINE_64, 0, 64)],
    }
}

const LISTS: [&[u32]; 7] =
    [&[64], &[1, 63], &[10, 20, 3, 31], &[32, 32], &[0, 40, 0, 24], &[7, 0, 57], &[16, 16, 16, 16]];

#[test]
fn inline_data_of_requests_is_scattered_as_by_libmlx5() {
    let mut rig = Rig::new(Transport::Rc, false);
    let (ours, theirs) = (buffer(), buffer());
    let mut random = Random(17);
    let formats = formats(&rig);
    let mut scattered = 0;
    for &(mark, from, capacity) in &formats {
        for op in operations(Transport::Rc).into_iter().filter(SendOp::reads_back) {
            let atomic = !matches!(op, SendOp::Read(_));
            let lists: &[&[u32]] = if atomic { &[&[8]] } else { &LISTS };
            for (list, length) in lists
                .iter()
                .flat_map(|list| (0..=capacity as u32).map(move |length| (list, length)))
            {
                let length = if atomic { 8 } else { length };
                ours.fill(0x11);
                theirs.fill(0x11);
                let of = |memory| Request::new(op, Payload::List(places(memory, list)));
                let mut cqe = noise(&mut random, REQUEST).number(44, length);
                // The same data wherever libmlx5 looks for it in a long entry: it takes the data
                // of requests from the start of the entry, unlike receives.
                let data: Vec<_> = (0..capacity).map(|_| random.below(256) as u8).collect();
                if from > 0 {
                    cqe.bytes[from..from + capacity].copy_from_slice(&data);
                    cqe.bytes[..capacity].copy_from_slice(&data);
                    cqe = cqe.number(44, length);
                } else {
                    cqe.bytes[..capacity].copy_from_slice(&data);
                }
                let counter = rig.post_each(of(&ours), of(&theirs));
                let code = match op {
                    SendOp::Read(_) => 0x10,
                    SendOp::CompareSwap { .. } => 0x11,
                    _ => 0x12,
                };
                let solicited = cqe.bytes[127] & 2;
                let cqe = cqe.operation(code).counter(counter).set(LAST, &[mark | solicited]);
                let (completion, _) = rig.compare(&cqe);
                assert_eq!(completion.byte_len, length);
                assert!(completion.status.is_success());
                let expected = scatter(list, &cqe.bytes[from..from + length as usize]);
                assert_eq!(ours.read(), expected, "{length} bytes in {list:?}");
                // libmlx5 takes the 64 bytes of a request from one byte before the entry.
                if mark == INLINE_32 {
                    assert_eq!(theirs.read(), expected, "{length} bytes in {list:?}");
                }
                scattered += 1;
            }
        }
    }
    assert!(scattered > 7 * 33, "{scattered}");
}

/// Returns the memory of `places` after `data` was scattered.
fn scatter(lengths: &[u32], mut data: &[u8]) -> Vec<u8> {
    let (mut memory, mut at) = (vec![0x11; 256], 3);
    for &length in lengths {
        let (now, later) = data.split_at(data.len().min(length as usize));
        memory[at..at + now.len()].copy_from_slice(now);
        at += length as usize + 5;
        data = later;
    }
    memory
}

#[test]
fn inline_data_of_receives_is_scattered_as_by_libmlx5() {
    for shared in [false, true] {
        let mut rig = Rig::new(Transport::Rc, shared);
        let (ours, theirs) = (buffer(), buffer());
        let mut random = Random(19);
        let formats = formats(&rig);
        for &(mark, from, capacity) in &formats {
            for list in LISTS {
                let list = if shared { &list[..list.len().min(3)] } else { list };
                let sum: u32 = list.iter().sum();
                for length in 0..=sum.min(capacity as u32) {
                    ours.fill(0x11);
                    theirs.fill(0x11);
                    let entry = rig.receive(&places(&ours, list), &places(&theirs, list));
                    let kind = WRITE_WITH_IMM + random.below(4) as u8;
                    let cqe = noise(&mut random, kind).number(44, length).counter(entry);
                    let cqe = cqe.set(LAST, &[kind << 4 | mark]);
                    rig.compare(&cqe);
                    let expected = scatter(list, &cqe.bytes[from..from + length as usize]);
                    assert_eq!(ours.read(), expected, "{length} bytes in {list:?}");
                    assert_eq!(theirs.read(), expected, "{length} bytes in {list:?}");
                }
            }
        }
        assert!(rig.compared > 7 * 20);
    }
}

#[test]
fn inline_data_beyond_the_buffers_fails_as_in_libmlx5() {
    let mut rig = Rig::new(Transport::Rc, false);
    let (ours, theirs) = (buffer(), buffer());
    // Full lists: libmlx5 goes on behind the end of a shorter one.
    let list = [3, 4, 5, 6];
    for length in 17..=24 {
        ours.fill(0x11);
        theirs.fill(0x11);
        rig.receive(&places(&ours, &list), &places(&theirs, &list));
        let cqe = Cqe::new(0).set(LAST, &[ARRIVED << 4 | INLINE_32]).set(0, &[0x77; 32]);
        let (completion, _) = rig.compare(&cqe.number(44, length));
        assert_eq!(completion.status.is_success(), length <= 18);
        assert_eq!(ours.read(), theirs.read());
        ours.fill(0x11);
        theirs.fill(0x11);
        let of = |memory| Request::new(SendOp::Read(REMOTE), Payload::List(places(memory, &list)));
        let counter = rig.post_each(of(&ours), of(&theirs));
        let mut cqe = Cqe::new(0).set(LAST, &[INLINE_32]).set(0, &[0x77; 32]);
        cqe.bytes[..32].fill(0x77);
        let (completion, _) = rig.compare(&cqe.number(44, length).operation(0x10).counter(counter));
        assert_eq!(completion.status.is_success(), length <= 18);
        assert_eq!(ours.read(), theirs.read());
    }
    // An operation that returns nothing.
    let counter = rig.post(&request(SendOp::Send));
    let cqe = Cqe::new(0).set(LAST, &[INLINE_32]).operation(0x0a).counter(counter);
    let (completion, _) = rig.compare(&cqe);
    assert!(!completion.status.is_success());
}

#[test]
fn owner_bits_are_read_as_by_libmlx5_in_all_passes() {
    let mut rig = Rig::new(Transport::Rc, false);
    for _ in 0..6 * rig.ours.entries.count {
        let counter = rig.post(&request(SendOp::Send));
        let cqe = Cqe::new(REQUEST).operation(0x0a).counter(counter);
        let invalid = cqe.set(LAST, &[INVALID << 4]);
        for (wrong, flip) in [(cqe, 1), (invalid, 0), (invalid, 1)] {
            let of = |direct: &Direct| wrong.of(direct.qp.qpn().0, 0);
            for direct in [&rig.ours, &rig.taker] {
                let entries = &direct.entries;
                let owner = entries.owner(entries.next) ^ flip;
                entries.put_at(entries.next, &of(direct), owner);
                let queue = direct.cq.direct().unwrap();
                assert_eq!(queue.take_request(WrId(rig.next - 1)), None);
            }
            let entries = &rig.theirs.entries;
            let wrong = wrong.of(rig.theirs.number(), rig.theirs.user_index);
            entries.put_at(entries.next, &wrong, entries.owner(entries.next) ^ flip);
            rig.empty();
        }
        rig.compare(&cqe);
    }
}

#[test]
fn completion_frees_the_requests_that_it_frees_in_libmlx5() {
    let mut rig = Rig::new(Transport::Rc, false);
    let max = CAPS.max_send_wr as usize;
    let mut random = Random(23);
    // Indices in flight.
    let mut flying: Vec<u16> = Vec::new();
    for _ in 0..2000 {
        let list: Vec<_> = (0..random.below(7))
            .map(|_| Request { id: rig.next, ..request(SendOp::Write(REMOTE)) })
            .collect();
        let fits = list.len().min(max - flying.len());
        if !list.is_empty() {
            let ours = rig.ours.post(&list).map_err(|refused| refused.error.errno);
            assert_eq!(ours.err().unwrap_or(0), rig.theirs.post(&list));
            assert_eq!(rig.ours.rings.send_record(), rig.theirs.rings.send_record());
            assert_eq!(ours.is_ok(), fits == list.len());
        }
        for _ in 0..fits {
            flying.push(rig.index as u16);
            rig.index += 1;
        }
        if let Some(last) = flying.len().checked_sub(1) {
            // Completes one request and those before it, successfully or not.
            let place = random.below(last as u32 + 1) as usize;
            let failed = random.below(4) == 0;
            let cqe = Cqe::new(if failed { REQUEST_ERROR } else { REQUEST });
            let cqe = cqe.operation(8).counter(flying[place]);
            let cqe = if failed { cqe.failed(0x15, 1) } else { cqe };
            rig.ours.put(&cqe);
            rig.theirs.put(&cqe);
            let (ours, theirs) = (rig.ours.poll().unwrap().unwrap(), rig.theirs.poll().unwrap());
            assert_eq!((ours.wr_id.0, ours.status.0), (theirs.wr_id, theirs.status));
            flying.drain(..=place);
        }
    }
    assert!(rig.index > 2000);
}

/// Asserts that an entry fails the queue for good.
#[track_caller]
fn fails(rig: &mut Rig, cqe: &Cqe, expected: BadEntry) {
    let error: VerbError = expected.verb_error();
    assert_eq!(error.errno, VerbError::EIO);
    rig.ours.entries.put(cqe);
    let before = rig.ours.entries.consumer();
    for _ in 0..3 {
        assert_eq!(rig.ours.poll(), Err(error), "{expected:?}");
        let queue = rig.ours.cq.direct().unwrap();
        assert_eq!(queue.drain(5, |_| panic!("a completion")), Err(error), "{expected:?}");
    }
    assert_eq!(rig.ours.entries.consumer(), before, "the entry is not consumed");
}

#[test]
fn entries_that_no_queue_produces_fail_the_queue() {
    let long = Rig::new(Transport::Rc, false).ours.entries.entry == 128;
    let good = |rig: &Rig, kind: u8| Cqe::new(kind).operation(0x0a).of(rig.ours.qp.qpn().0, 0);
    let case = |prepare: &dyn Fn(&mut Rig) -> (Cqe, BadEntry), shared: bool| {
        let mut rig = Rig::new(Transport::Rc, shared);
        // A good completion before the bad one is delivered.
        let counter = rig.post(&request(SendOp::Send));
        let (bad, expected) = prepare(&mut rig);
        let first = good(&rig, REQUEST).counter(counter);
        rig.ours.entries.put(&first);
        let index = rig.ours.entries.next;
        rig.ours.entries.put(&bad);
        rig.ours.entries.next = index;
        let mut out = [WorkCompletion::EMPTY; 4];
        assert_eq!(rig.ours.cq.poll(&mut out).unwrap(), 1, "{expected:?}");
        assert_eq!(out[0].status.0, 0);
        fails(&mut rig, &bad, expected);
    };
    for kind in 5..=12 {
        let prepare = |rig: &mut Rig| (good(rig, kind), BadEntry::Kind { op_own: kind << 4 });
        case(&prepare, false);
    }
    let known = |code: u8| OPERATIONS.contains(&code);
    for code in (0..=255).filter(|&code| !known(code)).step_by(13) {
        let prepare = |rig: &mut Rig| {
            let counter = rig.post(&request(SendOp::Send));
            let cqe = good(rig, REQUEST).operation(code).counter(counter);
            (cqe, BadEntry::Opcode { opcode: code })
        };
        case(&prepare, false);
    }
    for kind in [REQUEST, 1, 2, 3, 4, REQUEST_ERROR, RECEIVE_ERROR] {
        for qpn in [0, 0xff_ffff] {
            let prepare = |_: &mut Rig| (Cqe::new(kind).of(qpn, 0), BadEntry::QueuePair { qpn });
            case(&prepare, false);
        }
        // No request or receive is in flight: the entry before was the last.
        for shared in [false, true] {
            let prepare = |rig: &mut Rig| {
                let (qpn, counter) = (rig.ours.qp.qpn().0, 3);
                (good(rig, kind).counter(counter), BadEntry::Counter { qpn, counter })
            };
            case(&prepare, shared);
        }
    }
    // A receive that has completed already, and indices beyond the shared queue.
    for counter in [0, 1, 8, 0x100, 0xffff] {
        let prepare = |rig: &mut Rig| {
            let qpn = rig.ours.qp.qpn().0;
            (good(rig, ARRIVED).counter(counter), BadEntry::Counter { qpn, counter })
        };
        case(&prepare, true);
    }
    // Inline data that exceeds its place in the entry.
    for (mark, length) in [(INLINE_32, 33), (INLINE_32, u32::MAX)] {
        let prepare = |rig: &mut Rig| {
            rig.receive(&[sge(1, 100)], &[sge(1, 100)]);
            let cqe = good(rig, 0).set(LAST, &[ARRIVED << 4 | mark]).number(44, length);
            (cqe, BadEntry::Length { qpn: rig.ours.qp.qpn().0, length })
        };
        case(&prepare, false);
    }
    // Compressed entries, and 64 bytes of data without place for them.
    for (mark, bad) in [(INLINE_32 | INLINE_64, true), (INLINE_64, !long)] {
        for kind in [REQUEST, ARRIVED].into_iter().filter(|_| bad) {
            let prepare = |rig: &mut Rig| {
                rig.receive(&[sge(1, 100)], &[sge(1, 100)]);
                let counter = rig.post(&request(SendOp::Read(REMOTE)));
                let cqe = good(rig, 0).operation(0x10).counter(counter);
                let op_own = kind << 4 | mark;
                (cqe.set(LAST, &[op_own]), BadEntry::Kind { op_own })
            };
            case(&prepare, false);
        }
    }
}

#[test]
fn completions_that_the_device_flushes_equal_those_of_libmlx5() {
    use rdma_ibverbs::types::{QpAttr, QpState};
    let mut rig = Rig::new(Transport::Rc, false);
    for op in [SendOp::Send, SendOp::Write(REMOTE), SendOp::Read(REMOTE)] {
        rig.post(&request(op));
    }
    for length in 1..4 {
        rig.receive(&[sge(1, length)], &[sge(1, length)]);
    }
    rig.ours.qp.modify(&QpAttr::to_state(QpState::Err)).unwrap();
    rig.theirs.fail();
    let device = device();
    let start = std::time::Instant::now();
    for _ in 0..6 {
        let (mut ours, mut theirs) = (None, None);
        while ours.is_none() || theirs.is_none() {
            assert!(start.elapsed().as_secs() < 60, "no flushed completion");
            ours = ours.or_else(|| rig.ours.poll().unwrap());
            theirs = theirs.or_else(|| rig.theirs.poll());
            std::thread::yield_now();
        }
        let (ours, theirs) = (ours.unwrap(), theirs.unwrap());
        let ours = WorkCompletion { qpn: rdma_ibverbs::types::Qpn(rig.theirs.number()), ..ours };
        same(&"flushed", REQUEST_ERROR, &ours, &theirs);
        assert_eq!(theirs.status, ibv_wc_status::IBV_WC_WR_FLUSH_ERR);
    }
    assert_eq!(rig.ours.poll().unwrap(), None);
    let _device = device;
}
