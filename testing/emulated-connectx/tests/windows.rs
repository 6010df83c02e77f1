//! Memory windows of type 2, through the real libmlx5, and window entries written by hand.

mod common;

use std::sync::Arc;
use std::sync::{Mutex, MutexGuard, PoisonError};

use common::*;
use emulated_connectx::{EmulatedConnectX, Problem};
use rdma_ibverbs::ffi::*;

const MW_BIND: u32 = 16;
const REMOTE_WRITE: u32 = 2;
const REMOTE_READ: u32 = 4;
const REMOTE_ATOMIC: u32 = 8;

/// Returns the device to one test at a time: findings are of the process.
fn device() -> (EmulatedConnectX, MutexGuard<'static, ()>) {
    static ALONE: Mutex<()> = Mutex::new(());
    let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let device = start(|_| {});
    device.take_findings();
    (device, alone)
}

struct Window(*mut ibv_mw, #[allow(dead_code)] Arc<Pd>);

impl Window {
    fn new(pd: &Arc<Pd>) -> Self {
        // SAFETY: a live protection domain.
        let raw = unsafe { ibv_alloc_mw(pd.0, ibv_mw_type::IBV_MW_TYPE_2) };
        assert!(!raw.is_null(), "{}", std::io::Error::last_os_error());
        Self(raw, pd.clone())
    }

    fn key(&self) -> u32 {
        // SAFETY: a live window.
        unsafe { (*self.0).rkey }
    }

    /// Returns the key after `key`, as `ibv_inc_rkey` of libibverbs computes it.
    fn next(key: u32) -> u32 {
        key & !0xff | (key + 1) & 0xff
    }

    /// Binds and waits; returns the new key.
    fn bind(&self, qp: &Qp, region: &Mr, from: u64, len: u64, access: u32) -> u32 {
        let key = Self::next(self.key());
        self.post_bind(qp, key, region, (region.address() + from, len), access);
        assert_eq!(qp.queues.send.ok(70).opcode, ibv_wc_opcode::IBV_WC_BIND_MW);
        // SAFETY: a live window; `ibv_post_send(3)` leaves this to the program.
        unsafe { (*self.0).rkey = key };
        key
    }

    fn post_bind(&self, qp: &Qp, key: u32, region: &Mr, range: (u64, u64), access: u32) {
        let mut wr: ibv_send_wr = zeroed();
        wr.wr_id = 70;
        wr.opcode = ibv_wr_opcode::IBV_WR_BIND_MW;
        wr.send_flags = SIGNALED;
        wr.bind_mw_tso_union.bind_mw = bind_mw_t {
            mw: self.0,
            rkey: key,
            bind_info: ibv_mw_bind_info {
                mr: region.0,
                addr: range.0,
                length: range.1,
                mw_access_flags: access,
            },
        };
        // SAFETY: all objects are alive.
        let posted = unsafe { ibv_post_send(qp.raw, &mut wr, &mut std::ptr::null_mut()) };
        assert_eq!(posted, 0);
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        // SAFETY: a live window.
        assert_eq!(unsafe { ibv_dealloc_mw(self.0) }, 0);
    }
}

fn with_key(id: u64, opcode: ibv_wr_opcode::Type, key: u32, flags: u32) -> Work {
    // The key is in the place of the immediate data, in host order.
    Work::new(id, opcode, vec![]).immediate(key.to_be()).flags(flags)
}

fn invalidation(id: u64, key: u32) -> Work {
    with_key(id, ibv_wr_opcode::IBV_WR_LOCAL_INV, key, SIGNALED)
}

fn invalidating_send(id: u64, key: u32) -> Work {
    with_key(id, ibv_wr_opcode::IBV_WR_SEND_WITH_INV, key, SIGNALED)
}

/// A pair whose `b` has memory that only windows open.
struct Closed {
    pair: Pair,
    memory: Mr,
}

impl Closed {
    fn new() -> Self {
        let pair = Pair::with(RC, None, |attr| (attr.timeout, attr.retry_cnt) = (1, 1));
        let memory = Mr::new(&pair.pd, 4096, LOCAL | MW_BIND);
        Self { pair, memory }
    }

    fn write(&self, id: u64, len: usize, address: u64, key: u32) {
        let work = Work::write(id, vec![self.pair.source.sge(0, len)], &self.memory, 0);
        self.pair.a.post(work.at(address, key));
    }

    fn denied(&self, address: u64, key: u32) {
        self.write(90, 8, address, key);
        self.pair.a.queues.send.fails_with(90, ibv_wc_status::IBV_WC_REM_ACCESS_ERR);
    }
}

#[test]
fn device_reports_windows_of_type_2b() {
    let (device, _alone) = device();
    let context = Context::open(0);
    let mut attr: ibv_device_attr = zeroed();
    // SAFETY: a live context.
    assert_eq!(unsafe { ibv_query_device(context.0, &mut attr) }, 0);
    assert!(attr.max_mw > 0);
    assert_eq!(attr.device_cap_flags >> 21 & 0b1001, 0b1001, "MEM_MGT_EXTENSIONS, type 2B");
    let pd = Pd::new(&context);
    let (first, second) = (Window::new(&pd), Window::new(&pd));
    assert_ne!(first.key() >> 8, second.key() >> 8);
    // SAFETY: a live protection domain.
    assert!(unsafe { ibv_alloc_mw(pd.0, ibv_mw_type::IBV_MW_TYPE_1) }.is_null());
    // SAFETY: a live protection domain, which the windows use.
    assert_eq!(unsafe { ibv_dealloc_pd(pd.0) }, libc::EBUSY);
    device.assert_clean();
}

#[test]
fn window_opens_its_range_until_invalidated() {
    let (device, _alone) = device();
    let closed = Closed::new();
    let (pair, memory) = (&closed.pair, &closed.memory);
    let window = Window::new(&pair.pd);
    let all = REMOTE_WRITE | REMOTE_READ | REMOTE_ATOMIC;
    // More rounds than keys, and than the send queue has blocks: entries wrap around its end.
    for round in 0..300_u64 {
        let from = round % 16 * 8;
        let key = window.bind(&pair.b, memory, from, 1000, all);
        closed.write(1, 1000, memory.address() + from, key);
        pair.a.queues.send.ok(1);
        let read = Work::read(2, vec![pair.source.sge(4096, 8)], memory, from + 992);
        pair.a.post(read.at(memory.address() + from + 992, key));
        pair.a.queues.send.ok(2);
        assert_eq!(pair.source.bytes()[4096..4104], pair.source.bytes()[992..1000]);
        pair.b.post(invalidation(71, key));
        assert_eq!(pair.b.queues.send.ok(71).opcode, ibv_wc_opcode::IBV_WC_LOCAL_INV);
    }
    closed.denied(memory.address(), window.key());
    device.assert_clean();
}

#[test]
fn access_beyond_a_binding_is_denied() {
    let (device, _alone) = device();
    let addresses: [(&str, i64, u32); 4] =
        [("before", -1, 0), ("behind", 57, 0), ("another key", 0, 1), ("another window", 0, 0x100)];
    for (what, offset, key_change) in addresses {
        let closed = Closed::new();
        let window = Window::new(&closed.pair.pd);
        let key = window.bind(&closed.pair.b, &closed.memory, 64, 64, REMOTE_WRITE);
        closed.denied((closed.memory.address() + 64).wrapping_add_signed(offset), key ^ key_change);
        assert_eq!(closed.memory.bytes(), vec![0; 4096], "{what}");
    }
    // A right that the window does not grant.
    let closed = Closed::new();
    let window = Window::new(&closed.pair.pd);
    let key = window.bind(&closed.pair.b, &closed.memory, 0, 64, REMOTE_READ);
    closed.denied(closed.memory.address(), key);
    // The window of another queue pair of the same domain.
    let closed = Closed::new();
    let other = Window::new(&closed.pair.pd);
    let key = other.bind(&closed.pair.a, &closed.memory, 0, 64, REMOTE_WRITE);
    closed.denied(closed.memory.address(), key);
    device.assert_clean();
}

#[test]
fn zero_based_window_is_addressed_from_zero() {
    const ZERO_BASED: u32 = 32;
    let (device, _alone) = device();
    let closed = Closed::new();
    let window = Window::new(&closed.pair.pd);
    let key = window.bind(&closed.pair.b, &closed.memory, 128, 64, REMOTE_WRITE | ZERO_BASED);
    closed.write(1, 8, 56, key);
    closed.pair.a.queues.send.ok(1);
    assert_eq!(closed.memory.bytes()[184..192], closed.pair.source.bytes()[..8]);
    device.assert_clean();
}

#[test]
fn window_key_is_no_local_key() {
    let (device, _alone) = device();
    let closed = Closed::new();
    let window = Window::new(&closed.pair.pd);
    let key = window.bind(&closed.pair.b, &closed.memory, 0, 64, REMOTE_READ);
    let sge = ibv_sge { addr: closed.memory.address(), length: 8, lkey: key };
    closed.pair.b.post(Work::send(1, vec![sge]));
    closed.pair.b.queues.send.fails_with(1, ibv_wc_status::IBV_WC_LOC_PROT_ERR);
    device.assert_clean();
}

#[test]
fn emulated_bad_bindings_fail() {
    type Case = fn(&Closed, &Window);
    let cases: [(&str, Case); 8] = [
        ("past the end", |closed, window| {
            let range = (closed.memory.address() + 4090, 8);
            let key = Window::next(window.key());
            window.post_bind(&closed.pair.b, key, &closed.memory, range, REMOTE_READ);
        }),
        ("empty", |closed, window| {
            let range = (closed.memory.address(), 0);
            let key = Window::next(window.key());
            window.post_bind(&closed.pair.b, key, &closed.memory, range, REMOTE_READ);
        }),
        ("the same key", |closed, window| {
            let range = (closed.memory.address(), 8);
            window.post_bind(&closed.pair.b, window.key(), &closed.memory, range, REMOTE_READ);
        }),
        ("a region without MW_BIND", |closed, window| {
            let region = &closed.pair.target;
            let key = Window::next(window.key());
            window.post_bind(&closed.pair.b, key, region, (region.address(), 8), REMOTE_READ);
        }),
        ("remote write to a region without local write", |closed, window| {
            let region = Mr::new(&closed.pair.pd, 64, MW_BIND);
            let key = Window::next(window.key());
            window.post_bind(&closed.pair.b, key, &region, (region.address(), 8), REMOTE_WRITE);
            closed.pair.b.queues.send.fails_with(70, ibv_wc_status::IBV_WC_MW_BIND_ERR);
            // Reported once more, flushed, for the check that all cases share.
            window.post_bind(&closed.pair.b, key, &region, (region.address(), 8), REMOTE_READ);
            closed.pair.b.queues.send.fails_with(70, ibv_wc_status::IBV_WC_WR_FLUSH_ERR);
        }),
        ("a region of another domain", |closed, window| {
            let region = Mr::new(&Pd::new(&closed.pair.context), 64, MW_BIND);
            let key = Window::next(window.key());
            window.post_bind(&closed.pair.b, key, &region, (region.address(), 8), REMOTE_READ);
            closed.pair.b.queues.send.fails_with(70, ibv_wc_status::IBV_WC_MW_BIND_ERR);
        }),
        ("a window of another domain", |closed, _| {
            let window = Window::new(&Pd::new(&closed.pair.context));
            let range = (closed.memory.address(), 8);
            let key = Window::next(window.key());
            window.post_bind(&closed.pair.b, key, &closed.memory, range, REMOTE_READ);
            closed.pair.b.queues.send.fails_with(70, ibv_wc_status::IBV_WC_MW_BIND_ERR);
        }),
        ("a bound window", |closed, window| {
            window.bind(&closed.pair.b, &closed.memory, 0, 8, REMOTE_READ);
            let range = (closed.memory.address(), 8);
            let key = Window::next(window.key());
            window.post_bind(&closed.pair.b, key, &closed.memory, range, REMOTE_READ);
        }),
    ];
    let (device, _alone) = device();
    for (number, (what, case)) in cases.into_iter().enumerate() {
        let closed = Closed::new();
        let window = Window::new(&closed.pair.pd);
        case(&closed, &window);
        if !(4..=6).contains(&number) {
            closed.pair.b.queues.send.fails_with(70, ibv_wc_status::IBV_WC_MW_BIND_ERR);
        }
        assert_eq!(closed.pair.b.state(), ibv_qp_state::IBV_QPS_ERR, "{what}");
    }
    device.assert_clean();
}

#[test]
fn emulated_bad_invalidations_fail() {
    let (device, _alone) = device();
    for case in ["another low byte", "no window", "never bound", "twice", "of another queue pair"] {
        let closed = Closed::new();
        let window = Window::new(&closed.pair.pd);
        let owner = if case.starts_with("of") { &closed.pair.a } else { &closed.pair.b };
        let key = window.bind(owner, &closed.memory, 0, 8, REMOTE_READ);
        let idle = Window::new(&closed.pair.pd);
        let key = match case {
            "another low byte" => key ^ 0x40,
            "no window" => key ^ 0x40_0000,
            "never bound" => idle.key(),
            "twice" => {
                closed.pair.b.post(invalidation(1, key));
                closed.pair.b.queues.send.ok(1);
                key
            }
            _ => key,
        };
        // Failures complete without a signal too.
        closed.pair.b.post(invalidation(2, key).flags(0));
        closed.pair.b.queues.send.fails_with(2, ibv_wc_status::IBV_WC_LOC_QP_OP_ERR);
        assert_eq!(closed.pair.b.state(), ibv_qp_state::IBV_QPS_ERR, "{case}");
    }
    device.assert_clean();
}

#[test]
fn send_with_invalidate_closes_the_window_and_names_its_key() {
    let (device, _alone) = device();
    let closed = Closed::new();
    let (pair, memory) = (&closed.pair, &closed.memory);
    let window = Window::new(&pair.pd);
    for round in 0..3 {
        let key = window.bind(&pair.b, memory, 0, 64, REMOTE_WRITE);
        pair.b.post_recv(round, vec![pair.target.sge(0, 64)]);
        closed.write(1, 8, memory.address(), key);
        let mut send = invalidating_send(2, key);
        send.list = vec![pair.source.sge(7, 20)];
        pair.a.post(send);
        pair.succeed(1..3);
        let wc = pair.b.queues.recv.ok(round);
        assert_eq!((wc.opcode, wc.byte_len), (ibv_wc_opcode::IBV_WC_RECV, 20));
        assert_eq!(wc.wc_flags, ibv_wc_flags::IBV_WC_WITH_INV.0);
        // SAFETY: the flag above selects the field.
        let invalidated = unsafe { wc.imm_data_invalidated_rkey_union.invalidated_rkey };
        assert_eq!(invalidated, key);
        assert_eq!(pair.target.bytes()[..20], pair.source.bytes()[7..27]);
    }
    closed.denied(memory.address(), window.key());
    device.assert_clean();
}

#[test]
fn emulated_bad_invalidating_send_fails_the_receiver_without_an_answer() {
    let (device, _alone) = device();
    for case in ["unbound", "of another queue pair", "a region"] {
        let closed = Closed::new();
        let window = Window::new(&closed.pair.pd);
        let key = match case {
            "unbound" => window.key(),
            "of another queue pair" => {
                window.bind(&closed.pair.a, &closed.memory, 0, 8, REMOTE_WRITE)
            }
            _ => closed.pair.target.key(),
        };
        closed.pair.b.post_recv(1, vec![]);
        closed.pair.a.post(invalidating_send(2, key));
        closed.pair.b.queues.recv.fails_with(1, ibv_wc_status::IBV_WC_REM_INV_REQ_ERR);
        closed.pair.a.queues.send.fails_with(2, ibv_wc_status::IBV_WC_RETRY_EXC_ERR);
        assert_eq!(closed.pair.b.state(), ibv_qp_state::IBV_QPS_ERR, "{case}");
    }
    device.assert_clean();
}

#[test]
fn region_under_a_bound_window_stays_registered() {
    let (device, _alone) = device();
    let closed = Closed::new();
    let window = Window::new(&closed.pair.pd);
    let key = window.bind(&closed.pair.b, &closed.memory, 0, 8, REMOTE_WRITE);
    // SAFETY: a live region.
    assert_eq!(unsafe { ibv_dereg_mr(closed.memory.0) }, libc::EBUSY);
    closed.write(1, 8, closed.memory.address(), key);
    closed.pair.a.queues.send.ok(1);
    // A window may be deallocated while bound.
    drop(window);
    closed.denied(closed.memory.address(), key);
    device.assert_clean();
}

#[test]
fn window_entries_are_checked() {
    let (device, _alone) = device();
    type Spoil = fn(&mut [u8]);
    let wrong: [(&str, Spoil); 8] = [
        ("none", |_| {}),
        ("list not inline", |entry| entry[16] &= 0x7f),
        ("no check that the window is free", |entry| entry[16] &= !(1 << 5)),
        ("length of the list", |entry| entry[21] = 8),
        ("mask without the length", |entry| entry[31] &= !1),
        ("another queue pair", |entry| entry[64 + 5] ^= 1),
        ("lengths differ", |entry| entry[128 + 3] ^= 1),
        ("one block too few", |entry| entry[7] = 8),
    ];
    for (what, spoil) in wrong {
        let closed = Closed::new();
        let window = Window::new(&closed.pair.pd);
        device.set_manual_stepping(true);
        let key = Window::next(window.key());
        let range = (closed.memory.address(), 8);
        window.post_bind(&closed.pair.b, key, &closed.memory, range, REMOTE_READ);
        // libmlx5's entry, changed before the device reads it.
        let mut qp: mlx5dv_qp = zeroed();
        let mut object: mlx5dv_obj = zeroed();
        (object.qp.in_, object.qp.out) = (closed.pair.b.raw, &mut qp);
        init_obj(&mut object, 1);
        // SAFETY: the first three blocks of the send queue, which only this thread uses.
        spoil(unsafe { std::slice::from_raw_parts_mut(qp.sq.buf.cast::<u8>(), 192) });
        device.set_manual_stepping(false);
        let findings: Vec<_> = match what {
            "none" => {
                closed.pair.b.queues.send.ok(70);
                device.take_findings()
            }
            _ => {
                closed.pair.b.queues.send.fails_with(70, ibv_wc_status::IBV_WC_LOC_QP_OP_ERR);
                device.take_findings()
            }
        };
        let problems: Vec<_> = findings.iter().map(|finding| finding.problem).collect();
        // The doorbell of an entry with a wrong length may be a finding too.
        let malformed = problems.contains(&Problem::MalformedWqe);
        assert_eq!(malformed, what != "none", "{what}: {findings:?}");
    }
}
