//! Type 2 memory windows: the access that a binding grants, and how it ends.
//!
//! Shows S4.

use tokio_rdma::memory::MemoryWindow;
use tokio_rdma::types::{
    Data, Imm, QpState, RemoteAddr, Rkey, SendFlags, SendOp, SendWr, Sge, Transport, WcFlags,
    WcOpcode, WcStatus, WindowBind, WrId,
};
use tokio_rdma::{Access, ProtectionDomain, SetupError, VerbError};

use crate::common::raw::{End, Options, connect, connected, outcome, request};
use crate::common::{Memory, Setup, eventually, pattern, rxe, skip};

/// Returns two ends in RTS if their device has windows. The second end binds.
fn ends(test: &str, options: &Options) -> Option<(End, End, Setup)> {
    let (a, b, setup) = connected(options);
    if b.device.attr().max_mw == 0 {
        skip(test, "no memory windows");
        return None;
    }
    Some((a, b, setup))
}

fn closed(end: &End, len: usize) -> Memory {
    Memory::with(&end.pd, len, Access::MW_BIND)
}

fn post(end: &End, wr_id: u64, bind: &WindowBind) {
    end.send_with(wr_id, SendOp::BindWindow, SendFlags::SIGNALED, Data::Window(bind)).unwrap();
}

/// Returns a bound window and the address of its first byte.
fn bound(
    end: &End,
    memory: &Memory,
    range: std::ops::Range<usize>,
    access: Access,
) -> (MemoryWindow, RemoteAddr) {
    let window = MemoryWindow::new(&end.pd).unwrap();
    let remote = bind(end, &window, memory, range, access);
    (window, remote)
}

fn bind(
    end: &End,
    window: &MemoryWindow,
    memory: &Memory,
    range: std::ops::Range<usize>,
    access: Access,
) -> RemoteAddr {
    let bind = window.prepare(&memory.0, range, access).unwrap();
    post(end, 70, &bind);
    let done = end.sent(1);
    assert_eq!(outcome(&done), [(70, WcStatus::SUCCESS)]);
    assert_eq!((done[0].opcode, done[0].qpn), (WcOpcode::BIND_MW, end.qp.qpn()));
    RemoteAddr { addr: bind.addr, rkey: bind.rkey }
}

fn invalidate(end: &End, rkey: Rkey) {
    end.send(71, SendOp::LocalInvalidate(rkey), &[]).unwrap();
    let done = end.sent(1);
    assert_eq!(
        (outcome(&done), done[0].opcode),
        (vec![(71, WcStatus::SUCCESS)], WcOpcode::LOCAL_INV)
    );
}

fn at(remote: RemoteAddr, offset: i64) -> RemoteAddr {
    RemoteAddr { addr: remote.addr.wrapping_add_signed(offset), ..remote }
}

fn assert_denied(a: &End, b: &End, op: SendOp, sges: &[Sge]) {
    a.send(1, op, sges).unwrap();
    assert_eq!(outcome(&a.sent(1)), [(1, WcStatus::REM_ACCESS_ERR)], "{op:?}");
    assert_eq!((a.state(), b.state()), (QpState::Err, QpState::Err));
}

#[test]
fn bound_window_allows_writes_reads_and_atomics() {
    let Some((a, b, _setup)) = ends("bound_window", &Options::default()) else { return };
    let (from, memory) = (Memory::patterned(&a.pd, 6000, 3), closed(&b, 8192));
    let (_window, remote) = bound(&b, &memory, 1024..7168, Access::REMOTE_ALL);
    a.send(1, SendOp::Write(remote), &[from.sge(0, 6000)]).unwrap();
    a.send(2, SendOp::Write(at(remote, 6136)), &[from.sge(0, 8)]).unwrap();
    assert_eq!(outcome(&a.sent(2)), [(1, WcStatus::SUCCESS), (2, WcStatus::SUCCESS)]);
    assert_eq!(memory.bytes(0, 1024), [0; 1024]);
    assert_eq!(memory.bytes(1024, 6000), from.all());
    assert_eq!(memory.bytes(7160, 8), from.bytes(0, 8));
    assert_eq!(memory.bytes(7168, 1024), [0; 1024]);

    let back = a.memory(6000);
    a.send(3, SendOp::Read(remote), &[back.sge(0, 6000)]).unwrap();
    assert_eq!(outcome(&a.sent(1)), [(3, WcStatus::SUCCESS)]);
    assert_eq!(back.all(), from.all());

    let word = memory.0.load(1024).unwrap();
    a.send(4, SendOp::FetchAdd { remote, add: 5 }, &[back.sge(0, 8)]).unwrap();
    a.send(5, SendOp::CompareSwap { remote, compare: word + 5, swap: 9 }, &[back.sge(8, 8)])
        .unwrap();
    assert_eq!(outcome(&a.sent(2)), [(4, WcStatus::SUCCESS), (5, WcStatus::SUCCESS)]);
    assert_eq!((back.0.load(0).unwrap(), back.0.load(8).unwrap()), (word, word + 5));
    assert_eq!(memory.0.load(1024).unwrap(), 9);

    b.recv(6, &[]).unwrap();
    a.send(7, SendOp::WriteWithImm(at(remote, 8), Imm(4)), &[from.sge(0, 100)]).unwrap();
    assert_eq!(outcome(&a.sent(1)), [(7, WcStatus::SUCCESS)]);
    assert_eq!(b.received(1)[0].imm(), Some(Imm(4)));
    assert_eq!(memory.bytes(1032, 100), from.bytes(0, 100));
}

#[test]
fn access_that_a_window_does_not_grant_is_a_remote_access_error() {
    type Case = fn(RemoteAddr, &Memory) -> SendOp;
    let outside: [Case; 9] = [
        |remote, _| SendOp::Write(at(remote, -1)),
        |remote, _| SendOp::Write(at(remote, 57)),
        |remote, _| SendOp::Read(at(remote, 64)),
        |remote, _| SendOp::FetchAdd { remote: at(remote, 64), add: 1 },
        |remote, _| SendOp::CompareSwap { remote: at(remote, -8), compare: 0, swap: 1 },
        // A key that was never bound; the window's key before the binding.
        |remote, _| SendOp::Write(RemoteAddr { rkey: Rkey(remote.rkey.0 ^ 0x80), ..remote }),
        |remote, _| {
            SendOp::Write(RemoteAddr {
                rkey: Rkey(remote.rkey.0 & !0xff | (remote.rkey.0 - 1) & 0xff),
                ..remote
            })
        },
        // The region's key grants no remote access.
        |_, memory| SendOp::Write(memory.remote(64)),
        |_, memory| SendOp::Read(memory.remote(64)),
    ];
    let rights: [(Access, Case); 3] = [
        (Access::REMOTE_READ | Access::REMOTE_ATOMIC, |remote, _| SendOp::Write(remote)),
        (Access::REMOTE_WRITE | Access::REMOTE_ATOMIC, |remote, _| SendOp::Read(remote)),
        (Access::REMOTE_WRITE | Access::REMOTE_READ, |remote, _| SendOp::FetchAdd {
            remote,
            add: 1,
        }),
    ];
    let cases = outside.map(|case| (Access::REMOTE_ALL, case)).into_iter().chain(rights);
    for (number, (access, case)) in cases.enumerate() {
        let Some((a, b, _setup)) = ends("access_that_a_window_does_not_grant", &Options::default())
        else {
            return;
        };
        // The first five addresses are outside the window but inside the region.
        if number < 5 && rxe::known(&b.device, &rxe::WINDOW_AS_WIDE_AS_ITS_REGION) {
            continue;
        }
        let (from, memory) = (Memory::patterned(&a.pd, 8, 3), closed(&b, 256));
        let (_window, remote) = bound(&b, &memory, 64..128, access);
        assert_denied(&a, &b, case(remote, &memory), &[from.sge(0, 8)]);
        assert_eq!(memory.all(), [0; 256]);
    }
}

#[test]
fn window_is_accessible_only_through_its_connection() {
    let options = Options::default();
    let Some((a, b, setup)) = ends("window_is_accessible", &options) else { return };
    let (other, beside) = (End::new(&setup.a, &options), End::beside(&b, &options));
    connect(&other, &beside, &options);
    let (from, memory) = (Memory::patterned(&a.pd, 8, 3), closed(&b, 64));
    let (_window, remote) = bound(&b, &memory, 0..64, Access::REMOTE_ALL);
    let theirs = other.memory(8);
    assert_denied(&other, &beside, SendOp::Write(remote), &[theirs.sge(0, 8)]);
    a.send(1, SendOp::Write(remote), &[from.sge(0, 8)]).unwrap();
    assert_eq!(outcome(&a.sent(1)), [(1, WcStatus::SUCCESS)]);
    assert_eq!(memory.bytes(0, 8), from.all());
}

#[test]
fn window_key_is_not_a_local_key() {
    let Some((_a, b, _setup)) = ends("window_key_is_not_a_local_key", &Options::default()) else {
        return;
    };
    let memory = closed(&b, 64);
    let (_window, remote) = bound(&b, &memory, 0..64, Access::REMOTE_ALL);
    let sge = Sge { addr: remote.addr, length: 8, lkey: tokio_rdma::types::Lkey(remote.rkey.0) };
    b.send(1, SendOp::Send, &[sge]).unwrap();
    let status = b.sent(1)[0].status;
    // SoftRoCE checks the key at a different step.
    assert!(matches!(status, WcStatus::LOC_PROT_ERR | WcStatus::LOC_QP_OP_ERR), "{status}");
}

#[test]
fn invalidated_window_denies_access_and_rebinds_under_another_key() {
    for rebinds in [false, true] {
        let Some((a, b, _setup)) = ends("invalidated_window", &Options::default()) else {
            return;
        };
        let (from, memory) = (Memory::patterned(&a.pd, 8, 3), closed(&b, 64));
        let (window, first) = bound(&b, &memory, 0..32, Access::REMOTE_ALL);
        invalidate(&b, first.rkey);
        if rebinds {
            let second = bind(&b, &window, &memory, 32..64, Access::REMOTE_WRITE);
            assert_eq!((second.rkey, second.addr), (first.rkey.next(), first.addr + 32));
            a.send(5, SendOp::Write(second), &[from.sge(0, 8)]).unwrap();
            assert_eq!(outcome(&a.sent(1)), [(5, WcStatus::SUCCESS)]);
            assert_eq!(memory.bytes(32, 8), from.all());
        }
        assert_denied(&a, &b, SendOp::Write(first), &[from.sge(0, 8)]);
        assert_eq!(memory.bytes(0, 32), [0; 32]);
    }
}

#[test]
fn window_rebinds_after_its_keys_wrap() {
    let Some((a, b, _setup)) = ends("window_rebinds", &Options::default()) else {
        return;
    };
    let (from, memory) = (Memory::patterned(&a.pd, 8, 3), closed(&b, 600 * 8));
    let window = MemoryWindow::new(&b.pd).unwrap();
    for round in 0..600 {
        let remote = bind(&b, &window, &memory, round * 8..round * 8 + 8, Access::REMOTE_WRITE);
        a.send(1, SendOp::Write(remote), &[from.sge(0, 8)]).unwrap();
        assert_eq!(outcome(&a.sent(1)), [(1, WcStatus::SUCCESS)], "round {round}");
        invalidate(&b, remote.rkey);
    }
    assert_eq!(memory.all(), from.all().repeat(600));
}

#[test]
fn invalidation_waits_for_preceding_work() {
    let Some((a, b, _setup)) = ends("invalidation_waits", &Options::default()) else { return };
    let (from, memory) = (Memory::patterned(&a.pd, 8, 3), closed(&b, 64));
    let (_window, remote) = bound(&b, &memory, 0..64, Access::REMOTE_ALL);
    b.send(1, SendOp::Send, &[]).unwrap();
    b.send(2, SendOp::LocalInvalidate(remote.rkey), &[]).unwrap();
    b.send(3, SendOp::Send, &[]).unwrap();
    a.send(4, SendOp::Write(remote), &[from.sge(0, 8)]).unwrap();
    assert_eq!(outcome(&a.sent(1)), [(4, WcStatus::SUCCESS)]);
    assert_eq!(memory.bytes(0, 8), from.all());
    a.recv(5, &[]).unwrap();
    a.recv(6, &[]).unwrap();
    let done = [(1, WcStatus::SUCCESS), (2, WcStatus::SUCCESS), (3, WcStatus::SUCCESS)];
    assert_eq!(outcome(&b.sent(3)), done);
    assert_eq!(outcome(&a.received(2)), [(5, WcStatus::SUCCESS), (6, WcStatus::SUCCESS)]);
    assert_denied(&a, &b, SendOp::Write(remote), &[from.sge(0, 8)]);
}

#[test]
fn binding_completes_before_a_message_posted_with_it() {
    let Some((a, b, _setup)) = ends("binding_completes", &Options::default()) else {
        return;
    };
    let (from, memory) = (Memory::patterned(&a.pd, 8, 3), closed(&b, 64));
    let window = MemoryWindow::new(&b.pd).unwrap();
    for round in 0..20 {
        a.recv(1, &[]).unwrap();
        let bind = window.prepare(&memory.0, 0..64, Access::REMOTE_WRITE).unwrap();
        let none = SendFlags::empty();
        b.post(&[
            request(2, SendOp::BindWindow, none, Data::Window(&bind)),
            request(3, SendOp::Send, SendFlags::SIGNALED, Data::Sges(&[])),
        ])
        .unwrap();
        assert_eq!(outcome(&a.received(1)), [(1, WcStatus::SUCCESS)]);
        let remote = RemoteAddr { addr: bind.addr, rkey: bind.rkey };
        a.send(4, SendOp::Write(remote), &[from.sge(0, 8)]).unwrap();
        assert_eq!(outcome(&a.sent(1)), [(4, WcStatus::SUCCESS)], "round {round}");
        assert_eq!(outcome(&b.sent(1)), [(3, WcStatus::SUCCESS)]);
        invalidate(&b, bind.rkey);
    }
}

#[test]
fn send_with_invalidate_closes_and_reports_the_window() {
    for len in [0, 8, 5000] {
        let Some((a, b, _setup)) = ends("send_with_invalidate", &Options::default()) else {
            return;
        };
        let (from, memory, to) =
            (Memory::patterned(&a.pd, 5000, 3), closed(&b, 64), b.memory(5000));
        let (window, first) = bound(&b, &memory, 0..64, Access::REMOTE_ALL);
        for round in 0..3 {
            let remote = if round == 0 {
                first
            } else {
                bind(&b, &window, &memory, 0..64, Access::REMOTE_ALL)
            };
            b.recv(1, &[to.sge(0, 5000)]).unwrap();
            a.send(2, SendOp::Write(remote), &[from.sge(0, 8)]).unwrap();
            a.send(3, SendOp::SendWithInvalidate(remote.rkey), &[from.sge(0, len)]).unwrap();
            assert_eq!(outcome(&a.sent(2)), [(2, WcStatus::SUCCESS), (3, WcStatus::SUCCESS)]);
            let received = b.received(1);
            assert_eq!(outcome(&received), [(1, WcStatus::SUCCESS)]);
            assert_eq!((received[0].byte_len, received[0].opcode), (len as u32, WcOpcode::RECV));
            assert!(received[0].imm().is_none());
            if !rxe::known(&b.device, &rxe::INVALIDATION_NOT_REPORTED) {
                assert!(received[0].flags.contains(WcFlags::WITH_INV));
                assert_eq!(received[0].invalidated(), Some(remote.rkey));
            }
            assert_eq!(to.bytes(0, len), from.bytes(0, len));
        }
        assert_eq!(memory.bytes(0, 8), from.bytes(0, 8));
        memory.0.write(0, &[9; 64]).unwrap();
        assert_denied(
            &a,
            &b,
            SendOp::Write(RemoteAddr { rkey: window.rkey(), ..first }),
            &[from.sge(0, 8)],
        );
        assert_eq!(memory.all(), [9; 64]);
    }
}

#[test]
fn invalidating_send_of_an_unbound_key_fails_the_receive() {
    type Case = fn(RemoteAddr, &MemoryWindow) -> Rkey;
    let cases: [Case; 3] = [
        |remote, _| Rkey(remote.rkey.0 ^ 0x40),
        |remote, _| Rkey(remote.rkey.0 ^ 0x4000),
        |_, idle| idle.rkey(),
    ];
    for (number, case) in cases.into_iter().enumerate() {
        let options = Options { retry_count: 1, timeout: 4, ..Options::default() };
        let Some((a, b, _setup)) = ends("invalidating_send", &options) else { return };
        if number == 2 && rxe::known(&b.device, &rxe::INVALID_TWICE) {
            continue;
        }
        let (from, memory) = (Memory::patterned(&a.pd, 8, 3), closed(&b, 64));
        let (_window, remote) = bound(&b, &memory, 0..64, Access::REMOTE_ALL);
        let idle = MemoryWindow::new(&b.pd).unwrap();
        b.recv(1, &[memory.sge(0, 64)]).unwrap();
        a.send(2, SendOp::SendWithInvalidate(case(remote, &idle)), &[from.sge(0, 8)]).unwrap();
        assert_eq!(outcome(&b.received(1)), [(1, WcStatus::REM_INV_REQ_ERR)]);
        assert_eq!(b.state(), QpState::Err);
        // A class J error has no negative acknowledgement.
        assert_eq!(outcome(&a.sent(1)), [(2, rxe::INVALIDATION_HERE.on(&a.device))]);
    }
}

#[test]
fn send_over_another_connection_does_not_invalidate() {
    let options = Options { retry_count: 1, timeout: 14, ..Options::default() };
    let Some((a, b, setup)) = ends("send_over_another_connection", &options) else { return };
    if rxe::known(&b.device, &rxe::OTHER_QUEUE_PAIR_INVALIDATES) {
        return;
    }
    let (other, beside) = (End::new(&setup.a, &options), End::beside(&b, &options));
    connect(&other, &beside, &options);
    let (from, memory) = (Memory::patterned(&a.pd, 8, 3), closed(&b, 64));
    let (_window, remote) = bound(&b, &memory, 0..64, Access::REMOTE_ALL);
    beside.recv(1, &[]).unwrap();
    other.send(2, SendOp::SendWithInvalidate(remote.rkey), &[]).unwrap();
    assert_eq!(outcome(&beside.received(1)), [(1, WcStatus::REM_INV_REQ_ERR)]);
    a.send(3, SendOp::Write(remote), &[from.sge(0, 8)]).unwrap();
    assert_eq!(outcome(&a.sent(1)), [(3, WcStatus::SUCCESS)]);
}

/// Vendor number of ConnectX adapters.
const MELLANOX: u32 = 0x2c9;

#[test]
fn invalid_binding_fails_the_connection() {
    type Case = fn(WindowBind, &End) -> (WindowBind, Option<(MemoryWindow, Memory)>);
    let cases: [(&str, Case); 10] = [
        ("past the end", |bind, _| (WindowBind { len: 65, ..bind }, None)),
        ("before the start", |bind, _| (WindowBind { addr: bind.addr - 1, ..bind }, None)),
        ("wraps around", |bind, _| (WindowBind { addr: u64::MAX - 7, ..bind }, None)),
        ("whole address space", |bind, _| (WindowBind { len: u64::MAX, ..bind }, None)),
        ("empty", |bind, _| (WindowBind { len: 0, ..bind }, None)),
        ("same key", |bind, _| (WindowBind { rkey: bind.current, ..bind }, None)),
        ("region without MW_BIND", |bind, b| with_region(bind, &b.pd, Access::REMOTE_ALL)),
        ("region of another domain", |bind, b| {
            with_region(bind, &b.device.protection_domain().unwrap(), Access::MW_BIND)
        }),
        ("window of another domain", |bind, b| {
            let pd = b.device.protection_domain().unwrap();
            let (window, memory) =
                (MemoryWindow::new(&pd).unwrap(), Memory::with(&pd, 64, Access::MW_BIND));
            let WindowBind { window: number, current, rkey, .. } =
                window.prepare(&memory.0, 0..64, Access::REMOTE_READ).unwrap();
            (WindowBind { window: number, current, rkey, ..bind }, Some((window, memory)))
        }),
        ("bound already", |bind, b| {
            post(b, 0, &bind);
            assert_eq!(outcome(&b.sent(1)), [(0, WcStatus::SUCCESS)]);
            (WindowBind { current: bind.rkey, rkey: bind.rkey.next(), ..bind }, None)
        }),
    ];
    fn with_region(
        bind: WindowBind,
        pd: &ProtectionDomain,
        access: Access,
    ) -> (WindowBind, Option<(MemoryWindow, Memory)>) {
        // A window of the region's domain supplies the device's number of the region.
        let (window, memory) = (MemoryWindow::new(pd).unwrap(), Memory::with(pd, 64, access));
        let WindowBind { region, lkey, addr, .. } =
            window.prepare(&memory.0, 0..64, Access::REMOTE_READ).unwrap();
        (WindowBind { region, lkey, addr, ..bind }, Some((window, memory)))
    }
    for (what, case) in cases {
        let Some((_a, b, _setup)) = ends("invalid_binding", &Options::default()) else {
            return;
        };
        let unchecked =
            ["wraps around", "whole address space", "same key", "region of another domain"]
                .contains(&what);
        if unchecked && rxe::known(&b.device, &rxe::INVALID_BINDINGS_ACCEPTED) {
            continue;
        }
        let memory = closed(&b, 64);
        let window = MemoryWindow::new(&b.pd).unwrap();
        let good = window.prepare(&memory.0, 0..64, Access::REMOTE_ALL).unwrap();
        let (bad, _kept) = case(good, &b);
        // An unsignalled binding reports its failure too.
        let posted = b.send_with(1, SendOp::BindWindow, SendFlags::empty(), Data::Window(&bad));
        // Work queue entries of ConnectX have 32 bits for the length.
        if what == "whole address space" && b.device.attr().vendor_id == MELLANOX {
            assert_eq!(posted.unwrap_err().error.errno, VerbError::EOPNOTSUPP);
            continue;
        }
        posted.unwrap();
        b.send(2, SendOp::Send, &[]).unwrap();
        let failed = [(1, WcStatus::MW_BIND_ERR), (2, WcStatus::WR_FLUSH_ERR)];
        assert_eq!(outcome(&b.sent(2)), failed, "{what}");
        assert_eq!(b.state(), QpState::Err, "{what}");
    }
}

#[test]
fn invalidation_of_an_unbound_key_fails_the_connection() {
    type Case = fn(&MemoryWindow, RemoteAddr, &End) -> Rkey;
    let cases: [Case; 4] = [
        |_, remote, _| Rkey(remote.rkey.0 ^ 0x40),
        |_, remote, _| Rkey(remote.rkey.0 ^ 0x4000),
        |_, remote, b| {
            invalidate(b, remote.rkey);
            remote.rkey
        },
        |idle, _, _| idle.rkey(),
    ];
    for (number, case) in cases.into_iter().enumerate() {
        let Some((_a, b, _setup)) = ends("invalidation_of_an_unbound_key", &Options::default())
        else {
            return;
        };
        if number >= 2 && rxe::known(&b.device, &rxe::INVALID_TWICE) {
            continue;
        }
        let memory = closed(&b, 64);
        let (_window, remote) = bound(&b, &memory, 0..64, Access::REMOTE_ALL);
        let idle = MemoryWindow::new(&b.pd).unwrap();
        let rkey = case(&idle, remote, &b);
        b.send_with(1, SendOp::LocalInvalidate(rkey), SendFlags::empty(), Data::Sges(&[])).unwrap();
        b.send(2, SendOp::Send, &[]).unwrap();
        let done = b.sent(2);
        // Devices report a memory management operation error as either status.
        assert!(
            matches!(done[0].status, WcStatus::LOC_QP_OP_ERR | WcStatus::MW_BIND_ERR),
            "{}",
            done[0].status
        );
        assert_eq!(
            (done[0].wr_id, outcome(&done[1..])),
            (WrId(1), vec![(2, WcStatus::WR_FLUSH_ERR)])
        );
        assert_eq!(b.state(), QpState::Err);
    }
}

#[test]
fn dropped_window_denies_access() {
    let Some((a, b, _setup)) = ends("dropped_window", &Options::default()) else { return };
    let (from, memory) = (Memory::patterned(&a.pd, 8, 3), closed(&b, 64));
    let (window, remote) = bound(&b, &memory, 0..64, Access::REMOTE_ALL);
    drop(window);
    let storage = memory
        .0
        .into_storage::<tokio_rdma::memory::HostMemory>()
        .map_err(|_| "still in use")
        .unwrap();
    assert_denied(&a, &b, SendOp::Write(remote), &[from.sge(0, 8)]);
    drop(storage);
}

#[test]
fn window_keeps_its_region_registered() {
    let Some((a, b, _setup)) = ends("window_keeps_its_region", &Options::default()) else { return };
    let memory =
        Memory(tokio_rdma::ExposedRegion::new(&b.pd, pattern(64, 7), Access::MW_BIND).unwrap());
    let (window, remote) = bound(&b, &memory, 0..64, Access::REMOTE_READ);
    drop(memory);
    let back = a.memory(64);
    a.send(1, SendOp::Read(remote), &[back.sge(0, 64)]).unwrap();
    assert_eq!(outcome(&a.sent(1)), [(1, WcStatus::SUCCESS)]);
    assert_eq!(back.all(), pattern(64, 7));
    drop(window);
}

#[test]
fn window_operation_with_wrong_data_is_refused() {
    let Some((_a, b, _setup)) = ends("window_operation_with_wrong_data", &Options::default())
    else {
        return;
    };
    let memory = closed(&b, 64);
    let window = MemoryWindow::new(&b.pd).unwrap();
    let bind = window.prepare(&memory.0, 0..64, Access::REMOTE_READ).unwrap();
    let sges = [memory.sge(0, 8)];
    let cases = [
        (SendOp::BindWindow, Data::Sges(&sges)),
        (SendOp::BindWindow, Data::Sges(&[])),
        (SendOp::BindWindow, Data::Inline(&[])),
        (SendOp::LocalInvalidate(bind.rkey), Data::Sges(&sges)),
        (SendOp::LocalInvalidate(bind.rkey), Data::Inline(&[1])),
        (SendOp::LocalInvalidate(bind.rkey), Data::Window(&bind)),
        (SendOp::Send, Data::Window(&bind)),
        (SendOp::Write(memory.remote(0)), Data::Window(&bind)),
    ];
    for (op, data) in cases {
        let refused = b.send_with(1, op, SendFlags::SIGNALED, data).unwrap_err();
        assert_eq!((refused.posted, refused.error.errno), (0, 22), "{op:?} {data:?}");
    }
    post(&b, 2, &bind);
    assert_eq!(outcome(&b.sent(1)), [(2, WcStatus::SUCCESS)]);
    assert!(matches!(
        window.prepare(&memory.0, 0..65, Access::REMOTE_READ),
        Err(SetupError::Limit(_))
    ));
    let foreign = MemoryWindow::new(&b.device.protection_domain().unwrap()).unwrap();
    let refused = foreign.prepare(&memory.0, 0..64, Access::REMOTE_READ);
    assert!(matches!(refused, Err(SetupError::Foreign { .. })), "{refused:?}");
}

#[test]
fn unreliable_connections_support_windows_and_datagrams_do_not() {
    let Some((a, b, setup)) =
        ends("unreliable_connections_support_windows", &Options::of(Transport::Uc))
    else {
        return;
    };
    let (from, memory) = (Memory::patterned(&a.pd, 64, 3), closed(&b, 64));
    let (_window, remote) = bound(&b, &memory, 0..32, Access::REMOTE_WRITE);
    for to in [remote, at(remote, 32)] {
        a.send(1, SendOp::Write(to), &[from.sge(0, 32)]).unwrap();
        assert_eq!(outcome(&a.sent(1)), [(1, WcStatus::SUCCESS)]);
    }
    crate::common::raw::settle(&a.device, &b.device);
    // Loopback packets sent on different processors may be reordered on a busy machine.
    eventually("the written bytes", || (memory.bytes(0, 32) == from.bytes(0, 32)).then_some(()));
    if !rxe::known(&b.device, &rxe::WINDOW_AS_WIDE_AS_ITS_REGION) {
        assert_eq!(memory.bytes(32, 32), [0; 32]);
    }
    if !rxe::known(&b.device, &rxe::NO_INVALIDATION_ON_UC) {
        invalidate(&b, remote.rkey);
    }
    drop((a, b, setup));

    let Some((_a, b, _setup)) =
        ends("datagrams_do_not_support_windows", &Options::of(Transport::Ud))
    else {
        return;
    };
    let (window, memory) = (MemoryWindow::new(&b.pd).unwrap(), closed(&b, 64));
    let bind = window.prepare(&memory.0, 0..64, Access::REMOTE_READ).unwrap();
    let target = b.pd.address_handle(&b.address()).unwrap();
    for (op, data) in [
        (SendOp::BindWindow, Data::Window(&bind)),
        (SendOp::LocalInvalidate(bind.rkey), Data::Sges(&[])),
    ] {
        let target = Some(target.target(b.qp.qpn(), crate::common::raw::QKEY).into());
        let refused =
            b.post(&[SendWr { wr_id: WrId(1), op, flags: SendFlags::SIGNALED, data, target }]);
        assert_eq!(refused.unwrap_err().error.errno, 22, "{op:?}");
    }
}
