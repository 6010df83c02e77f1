//! Compressed sessions of CQEs, decoded by hand from the ring, as Linux's `en_rx.c` and DPDK's
//! `mlx5_rx.c` decode them.

mod common;

use std::sync::atomic::{AtomicU8, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use common::*;
use emulated_connectx::{EmulatedConnectX, Problem, Release};
use rdma_ibverbs::ffi::*;

const MAX_SESSION: u32 = 24;
const OWNER: u8 = 1;
const INVALID: u8 = 15 << 4;
const COMPRESSED: u8 = 3 << 2;
const WRITE: u8 = 0x08;
const READ: u8 = 0x10;

/// Returns the device to one test at a time: stepping and findings concern all of it.
fn device() -> (EmulatedConnectX, MutexGuard<'static, ()>) {
    static ALONE: Mutex<()> = Mutex::new(());
    let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let device = start(|options| {
        options.manual_stepping = true;
        options.compressed_session = MAX_SESSION;
    });
    device.take_findings();
    (device, alone)
}

/// Creates a completion queue with compression in `format`. The binding lacks the function.
fn create(
    context: &Arc<Context>,
    entries: u32,
    entry_size: u16,
    format: u8,
    channel: Option<&Arc<Channel>>,
) -> *mut ibv_cq {
    type Create = unsafe extern "C" fn(
        *mut ibv_context,
        *mut ibv_cq_init_attr_ex,
        *mut mlx5dv_cq_init_attr,
    ) -> *mut ibv_cq_ex;
    const COMPRESSED_CQE: u64 = 1;
    const CQE_SIZE: u64 = 1 << 2;
    let mut attr: ibv_cq_init_attr_ex = zeroed();
    attr.cqe = entries - 1;
    attr.channel = channel.map_or(std::ptr::null_mut(), |channel| channel.0);
    let mut mlx5: mlx5dv_cq_init_attr = zeroed();
    mlx5.comp_mask = COMPRESSED_CQE | CQE_SIZE;
    (mlx5.cqe_comp_res_format, mlx5.cqe_size) = (format, entry_size);
    // SAFETY: libmlx5 has this function, with this signature; the context is open.
    unsafe {
        let library = libc::dlopen(c"libmlx5.so.1".as_ptr(), libc::RTLD_NOW);
        assert!(!library.is_null());
        let symbol = libc::dlsym(library, c"mlx5dv_create_cq".as_ptr());
        assert!(!symbol.is_null());
        let create: Create = std::mem::transmute(symbol);
        create(context.0, &raw mut attr, &raw mut mlx5).cast()
    }
}

/// The fields of a CQE that tests check: kind, operation, queue pair, counter, length.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Entry {
    kind: u8,
    operation: u8,
    qpn: u32,
    counter: u16,
    length: u32,
}

/// A completion queue read by hand.
struct Ring {
    raw: mlx5dv_cq,
    cq: Arc<Cq>,
    index: u32,
    /// Lengths of the sessions taken.
    sessions: Vec<u32>,
    /// Whether the entries of a session get their owner bit, as they must.
    marks: bool,
}

impl Ring {
    fn new(context: &Arc<Context>, entries: u32, entry_size: u16) -> Self {
        Self::with(context, entries, entry_size, None)
    }

    fn with(
        context: &Arc<Context>,
        entries: u32,
        entry_size: u16,
        channel: Option<&Arc<Channel>>,
    ) -> Self {
        let cq = create(context, entries, entry_size, 1, channel);
        assert!(!cq.is_null(), "{}", std::io::Error::last_os_error());
        let mut raw: mlx5dv_cq = zeroed();
        let mut object: mlx5dv_obj = zeroed();
        (object.cq.in_, object.cq.out) = (cq, &mut raw);
        init_obj(&mut object, 2);
        assert_eq!((raw.cqe_cnt, raw.cqe_size), (entries, entry_size.into()));
        let cq = Cq::from_raw(cq, context);
        Self { raw, cq, index: 0, sessions: Vec::new(), marks: true }
    }

    /// Returns the address of the CQE at `index`.
    fn at(&self, index: u32) -> *mut u8 {
        let offset = (index % self.raw.cqe_cnt + 1) * self.raw.cqe_size - 64;
        // SAFETY: within the ring.
        unsafe { self.raw.buf.cast::<u8>().add(offset as usize) }
    }

    fn last(&self, index: u32) -> &AtomicU8 {
        // SAFETY: within the ring, which the queue keeps; the device may write the byte.
        unsafe { AtomicU8::from_ptr(self.at(index).add(63)) }
    }

    fn bytes(&self, index: u32) -> [u8; 64] {
        // SAFETY: an entry of the ring, which the device does not write now.
        unsafe { self.at(index).cast::<[u8; 64]>().read_volatile() }
    }

    fn owner(&self, index: u32) -> u8 {
        (index / self.raw.cqe_cnt % 2) as u8
    }

    /// Takes the next CQE or session, and returns it to the device.
    fn take(&mut self) -> Vec<Entry> {
        let last = self.last(self.index).load(Ordering::Acquire);
        if last & INVALID == INVALID || last & OWNER != self.owner(self.index) {
            return Vec::new();
        }
        let title = self.bytes(self.index);
        let be32 =
            |bytes: &[u8], at: usize| u32::from_be_bytes(bytes[at..at + 4].try_into().unwrap());
        let be16 = |bytes: &[u8], at: usize| u16::from_be_bytes([bytes[at], bytes[at + 1]]);
        let first = Entry {
            kind: last >> 4,
            operation: title[56],
            qpn: be32(&title, 56) & 0xff_ffff,
            counter: be16(&title, 60),
            length: be32(&title, 44),
        };
        let mut entries = vec![first];
        if last & COMPRESSED == COMPRESSED {
            entries.clear();
            let mut array = self.bytes(self.index + 1);
            for at in 0..first.length {
                if at > 0 && at % 8 == 0 {
                    array = self.bytes(self.index + at);
                }
                let mini = &array[at as usize % 8 * 8..][..8];
                let (counter, operation) = if first.kind == 0 {
                    assert_eq!(mini[3], 0);
                    (be16(mini, 0), mini[2])
                } else {
                    (first.counter.wrapping_add(at as u16), first.operation)
                };
                entries.push(Entry { counter, operation, length: be32(mini, 4), ..first });
            }
            self.sessions.push(first.length);
            for at in (0..first.length).filter(|_| self.marks) {
                let index = self.index + at;
                self.last(index).store(self.owner(index), Ordering::Relaxed);
            }
        }
        self.index += entries.len() as u32;
        // SAFETY: the record of the consumer index.
        let record = unsafe { AtomicU32::from_ptr(self.raw.dbrec) };
        record.store((self.index & 0xff_ffff).to_be(), Ordering::Release);
        entries
    }

    fn take_all(&mut self) -> Vec<Entry> {
        let mut all = Vec::new();
        for _ in 0..=self.raw.cqe_cnt {
            let taken = self.take();
            if taken.is_empty() {
                return all;
            }
            all.extend(taken);
        }
        panic!("more CQEs than the ring has");
    }
}

/// A connected pair whose completions go to a compressed queue each.
struct Bench {
    a: Qp,
    b: Qp,
    source: Mr,
    target: Mr,
    send: Ring,
    recv: Ring,
    context: Arc<Context>,
    pd: Arc<Pd>,
}

impl Bench {
    fn new(entries: u32, entry_size: u16) -> Self {
        let context = Context::open(0);
        let pd = Pd::new(&context);
        let [send, recv] = [0; 2].map(|_| Ring::new(&context, entries, entry_size));
        let queues = || Queues { send: send.cq.clone(), recv: recv.cq.clone(), srq: None };
        let [a, b] = [0; 2].map(|_| Qp::new(&pd, RC, queues()));
        a.connect(b.number(), context.route(), |_| {});
        b.connect(a.number(), context.route(), |_| {});
        let [source, target] = [0; 2].map(|_| Mr::new(&pd, 4096, ALL));
        Self { a, b, source, target, send, recv, context, pd }
    }

    /// Posts a WRITE or READ of this length.
    fn request(&self, qp: &Qp, operation: u8, length: u32) {
        let list = vec![self.source.sge(0, length as usize)];
        qp.post(match operation {
            WRITE => Work::write(0, list, &self.target, 0),
            _ => Work::read(0, list, &self.target, 0),
        });
    }

    fn expected(&self, qp: &Qp, operation: u8, counter: u16, length: u32) -> Entry {
        let length = if operation == READ { length } else { 0 };
        Entry { kind: 0, operation, qpn: qp.number(), counter, length }
    }
}

#[test]
fn requests_that_differ_in_operation_counter_and_length_share_a_session() {
    for entry_size in [64, 128] {
        let (device, _alone) = device();
        let before = device.counters();
        let mut bench = Bench::new(64, entry_size);
        let requests: Vec<_> =
            (0..20).map(|at| (if at % 3 == 0 { READ } else { WRITE }, 100 + at)).collect();
        for &(operation, length) in &requests {
            bench.request(&bench.a, operation, length);
        }
        device.run_until_idle(100);
        // Arrays in the second entry and each eighth; all others keep their bytes.
        let last = |at| bench.send.last(at).load(Ordering::Acquire);
        assert_eq!(last(0), COMPRESSED);
        for at in (1..64).filter(|at| ![1, 8, 16].contains(at)) {
            assert_eq!(last(at) & INVALID, INVALID, "entry {at}");
        }
        assert_eq!(bench.send.bytes(16)[32..], [0xee; 32], "unused mini-CQEs");
        let taken = bench.send.take_all();
        let expected: Vec<_> = (0..)
            .zip(&requests)
            .map(|(at, &(operation, length))| bench.expected(&bench.a, operation, at, length))
            .collect();
        assert_eq!(taken, expected);
        assert_eq!(bench.send.sessions, [20]);
        let counters = device.counters();
        assert_eq!(counters.compressed_sessions, before.compressed_sessions + 1);
        assert_eq!(counters.completions, before.completions + 20);
        device.assert_clean();
    }
}

#[test]
fn receives_in_order_share_sessions_up_to_the_maximum() {
    let (device, _alone) = device();
    let mut bench = Bench::new(64, 64);
    let lengths: Vec<u32> = (0..30).map(|at| 200 + at).collect();
    for &length in &lengths {
        bench.b.post_recv(0, vec![bench.target.sge(0, 300)]);
        let list = vec![bench.source.sge(0, length as usize)];
        bench.a.post(Work::send(0, list));
    }
    device.run_until_idle(100);
    let taken = bench.recv.take_all();
    let expected: Vec<_> = (0..)
        .zip(&lengths)
        .map(|(counter, &length)| Entry {
            kind: 2,
            operation: 0,
            qpn: bench.b.number(),
            counter,
            length,
        })
        .collect();
    assert_eq!(taken, expected);
    assert_eq!(bench.recv.sessions, [MAX_SESSION, 30 - MAX_SESSION]);
    assert_eq!(bench.send.take_all().len(), 30);
    device.assert_clean();
}

#[test]
fn another_queue_pair_kind_immediate_or_data_in_the_entry_ends_a_session() {
    let (device, _alone) = device();
    let mut bench = Bench::new(64, 64);
    let send = |qp: &Qp, work: Work| qp.post(work);
    let list = |length| vec![bench.source.sge(0, length)];
    let with_imm = |immediate| {
        Work::new(0, ibv_wr_opcode::IBV_WR_SEND_WITH_IMM, list(100)).immediate(immediate)
    };
    for qp in [&bench.a, &bench.b] {
        (0..16).for_each(|_| qp.post_recv(0, vec![bench.target.sge(0, 200)]));
    }
    (0..3).for_each(|_| send(&bench.a, Work::send(0, list(100))));
    (0..2).for_each(|_| send(&bench.a, with_imm(1)));
    send(&bench.a, with_imm(2));
    // Short enough for the entry of the receive.
    send(&bench.a, Work::send(0, list(20)));
    (0..2).for_each(|_| send(&bench.a, Work::send(0, list(100)).flags(SIGNALED | SOLICITED)));
    (0..2).for_each(|_| send(&bench.a, Work::send(0, list(100))));
    device.run_until_idle(100);
    // From here on each queue pair in turn.
    (0..2).for_each(|_| {
        send(&bench.a, Work::send(0, list(100)));
        send(&bench.b, Work::send(0, list(100)));
    });
    device.run_until_idle(100);
    let lengths: Vec<_> = bench.recv.take_all().iter().map(|entry| entry.length).collect();
    assert_eq!(lengths, [100, 100, 100, 100, 100, 100, 20, 100, 100, 100, 100, 100, 100, 100, 100]);
    assert_eq!(bench.recv.sessions, [3, 2, 2, 2]);
    assert_eq!(bench.send.take_all().len(), 15);
    device.assert_clean();
}

#[test]
fn failed_request_ends_a_session_and_flushed_ones_are_not_compressed() {
    let (device, _alone) = device();
    let mut bench = Bench::new(64, 64);
    (0..6).for_each(|_| bench.request(&bench.a, WRITE, 8));
    device.fail_request(Some(bench.a.number()), 3, emulated_connectx::Status::RemoteAborted);
    device.run_until_idle(100);
    let kinds: Vec<_> = bench.send.take_all().iter().map(|entry| entry.kind).collect();
    assert_eq!(kinds, [0, 0, 0, 13, 13, 13]);
    assert_eq!(bench.send.sessions, [3]);
    device.assert_clean();
}

/// Sessions of all lengths cross the end of the ring, with both owner bits.
#[test]
fn sessions_wrap_around_the_ring() {
    for entry_size in [64, 128] {
        let (device, _alone) = device();
        let mut bench = Bench::new(16, entry_size);
        let mut counters = [0_u16; 2];
        for round in 0..20_u16 {
            // Two queue pairs in turn: their send queues have 32 entries in total.
            let (qp, counter) = match round % 2 {
                0 => (&bench.a, &mut counters[0]),
                _ => (&bench.b, &mut counters[1]),
            };
            let length = u32::from(round % 3) + 1;
            if *counter + length as u16 > 32 {
                break;
            }
            (0..length).for_each(|at| bench.request(qp, READ, 50 + at));
            device.run_until_idle(100);
            let expected: Vec<_> = (0..length)
                .map(|at| bench.expected(qp, READ, *counter + at as u16, 50 + at))
                .collect();
            *counter += length as u16;
            assert_eq!(bench.send.take_all(), expected);
        }
        assert!(bench.send.index > 32, "three passes: {}", bench.send.index);
        // A whole ring, which begins in its middle.
        let mut bench = Bench::new(16, entry_size);
        (0..5).for_each(|_| bench.request(&bench.a, WRITE, 8));
        device.run_until_idle(100);
        assert_eq!(bench.send.take_all().len(), 5);
        (0..16).for_each(|_| bench.request(&bench.a, WRITE, 8));
        device.run_until_idle(100);
        assert_eq!(bench.send.take_all().len(), 16);
        assert_eq!(bench.send.sessions, [5, 16]);
        device.assert_clean();
    }
}

#[test]
fn session_is_an_overrun_only_beyond_the_free_entries() {
    let (device, _alone) = device();
    let mut bench = Bench::new(8, 64);
    (0..9).for_each(|_| bench.request(&bench.a, WRITE, 8));
    device.run_until_idle(100);
    assert_eq!(bench.send.take_all().len(), 8);
    assert_eq!(bench.send.sessions, [8]);
    let findings = device.take_findings();
    let problems: Vec<_> = findings.iter().map(|finding| finding.problem).collect();
    assert_eq!(problems, [Problem::CompletionOverrun], "{findings:?}");
}

#[test]
fn held_completions_are_released_as_a_session_with_one_event() {
    let (device, _alone) = device();
    let mut bench = Bench::new(64, 64);
    let channel = Channel::new(&bench.context);
    let mut ring = Ring::with(&bench.context, 64, 64, Some(&channel));
    let qps = [0; 2].map(|_| Qp::new(&bench.pd, RC, Queues::one(&ring.cq)));
    qps[0].connect(qps[1].number(), bench.context.route(), |_| {});
    qps[1].connect(qps[0].number(), bench.context.route(), |_| {});
    ring.cq.arm(false);
    device.hold_completions(Some(qps[0].number()));
    (0..4).for_each(|_| bench.request(&qps[0], WRITE, 8));
    device.run_until_idle(100);
    assert!(ring.take_all().is_empty());
    assert!(!channel.is_readable(Duration::ZERO));
    device.release_completions(Release::InOrder);
    assert!(channel.is_readable(PATIENCE));
    assert_eq!(channel.take(), Some(ring.cq.0));
    assert_eq!(channel.take(), None);
    assert_eq!(ring.take_all().len(), 4);
    assert_eq!(ring.sessions, [4]);
    assert!(bench.send.take_all().is_empty());
    device.assert_clean();
}

#[test]
fn entries_of_a_session_left_without_owner_bit_are_reported() {
    let (device, _alone) = device();
    let mut bench = Bench::new(16, 64);
    bench.send.marks = false;
    // The last byte of an array is the low byte of a length, here 1.
    (0..16).for_each(|_| bench.request(&bench.a, READ, 1));
    device.run_until_idle(100);
    assert_eq!(bench.send.take_all().len(), 16);
    until("an audit", || !device.findings().is_empty());
    let findings = device.take_findings();
    assert!(findings.iter().all(|finding| finding.problem == Problem::WrongOwner), "{findings:?}");
}

#[test]
fn other_formats_are_refused() {
    let (_device, _alone) = device();
    let context = Context::open(0);
    let mut attr: mlx5dv_context = zeroed();
    attr.comp_mask = 1;
    // SAFETY: the context is open, the attributes local.
    assert_eq!(unsafe { mlx5dv_query_device(context.0, &mut attr) }, 0);
    assert_eq!((attr.cqe_comp_caps.max_num, attr.cqe_comp_caps.supported_format), (MAX_SESSION, 1));
    assert_ne!(attr.flags & 1 << 4, 0, "128-byte CQEs, too");
    for format in [0, 2, 4] {
        assert!(create(&context, 8, 64, format, None).is_null(), "format {format}");
    }
}
