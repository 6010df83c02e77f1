//! Failures of work on a connection: status at the requester, status at the responder, events.
//!
//! Shows S4.

use tokio_rdma::Access;
use tokio_rdma::types::{
    AsyncEvent, Data, Imm, Lkey, QpCaps, QpState, Qpn, RemoteAddr, Rkey, SendFlags, SendOp, Sge,
    Transport, WcStatus,
};

use tokio_rdma::verbs::PostError;

use crate::common::raw::{End, Options, connected, outcome, request, settle};
use crate::common::{Memory, events, pattern, rxe, skip_on_emulated_device};

enum Responder {
    Receive(rxe::Status),
    Event(fn(Qpn) -> AsyncEvent),
}

/// The memory of a case, kept until its check is over.
#[derive(Default)]
struct Kept(Vec<Memory>, Vec<tokio_rdma::ProtectionDomain>);

impl Kept {
    fn memory(&mut self, end: &End, len: usize, access: Access) -> &Memory {
        self.0.push(Memory::with(&end.pd, len, access));
        self.0.last().unwrap()
    }

    fn sge(&mut self, end: &End, len: usize) -> Sge {
        self.memory(end, len.max(1), Access::REMOTE_ALL).sge(0, len)
    }

    fn foreign(&mut self, end: &End, len: usize) -> &Memory {
        let pd = end.device.protection_domain().unwrap();
        self.0.push(Memory::new(&pd, len));
        self.1.push(pd);
        self.0.last().unwrap()
    }
}

/// Runs a case that posts send 1, and receive 100 if needed, and fails both ends. Earlier work is
/// done, later work is flushed in posting order.
fn fails_at_both_ends(
    options: &Options,
    requester: impl Into<rxe::Status>,
    responder: Responder,
    case: impl Fn(&End, &End, &mut Kept),
) {
    let (a, b, setup) = connected(options);
    let mut kept = Kept::default();
    b.recv(99, &[]).unwrap();
    a.send(0, SendOp::Send, &[]).unwrap();
    assert_eq!(outcome(&a.sent(1)), [(0, WcStatus::SUCCESS)]);
    assert_eq!(outcome(&b.received(1)), [(99, WcStatus::SUCCESS)]);
    events(&a.device);
    events(&b.device);

    case(&a, &b, &mut kept);
    let first = a.sent(1);
    assert_eq!(outcome(&first), [(1, requester.into().on(&a.device))]);
    assert_eq!(first[0].qpn, a.qp.qpn());
    assert_eq!((a.state(), b.state()), (QpState::Err, QpState::Err));
    // The error state accepts and flushes work, signalled or not.
    a.send_with(2, SendOp::Send, SendFlags::empty(), Data::Sges(&[])).unwrap();
    a.send(3, SendOp::Send, &[]).unwrap();
    a.recv_late(4, &[]).unwrap();
    assert_eq!(outcome(&a.sent(2)), [(2, WcStatus::WR_FLUSH_ERR), (3, WcStatus::WR_FLUSH_ERR)]);
    assert_eq!(outcome(&a.received(1)), [(4, WcStatus::WR_FLUSH_ERR)]);
    b.recv_late(101, &[]).unwrap();
    b.recv_late(102, &[]).unwrap();
    let flushed = [(101, WcStatus::WR_FLUSH_ERR), (102, WcStatus::WR_FLUSH_ERR)];
    match responder {
        Responder::Receive(status) => {
            let received = b.received(3);
            assert_eq!(outcome(&received), [&[(100, status.on(&b.device))], &flushed[..]].concat());
            assert_eq!(received[0].qpn, b.qp.qpn());
            assert_eq!(events(&b.device), []);
        }
        Responder::Event(event) => {
            assert_eq!(outcome(&b.received(2)), flushed);
            let expected =
                if setup.known(&rxe::FEW_EVENTS) { vec![] } else { vec![event(b.qp.qpn())] };
            assert_eq!(events(&b.device), expected);
        }
    }
    assert_eq!(events(&a.device), []);
}

#[test]
fn send_longer_than_the_receive_fails_both_ends() {
    let responder = || Responder::Receive(rxe::TOO_LONG_THERE);
    // The excess is in a single packet, or in the first or last of several.
    for (capacity, len) in [(16, 17), (0, 1), (16, 5000), (4999, 5000), (1024, 1025)] {
        for op in [SendOp::Send, SendOp::SendWithImm(Imm(1))] {
            fails_at_both_ends(
                &Options::default(),
                rxe::TOO_LONG_HERE,
                responder(),
                |a, b, kept| {
                    b.recv(100, &[kept.sge(b, capacity)]).unwrap();
                    a.send(1, op, &[kept.sge(a, len)]).unwrap();
                },
            );
        }
    }
}

#[test]
fn receive_into_uncovered_memory_is_a_protection_error() {
    let cases: [fn(&End, &mut Kept) -> Vec<Sge>; 6] = [
        |b, kept| vec![Sge { lkey: Lkey(kept.sge(b, 16).lkey.0 ^ 0x10), ..kept.sge(b, 16) }],
        |b, kept| vec![Sge { lkey: Lkey(0), ..kept.sge(b, 16) }],
        // Past the end; before the start.
        |b, kept| vec![kept.memory(b, 16, Access::empty()).sge(1, 16)],
        |b, kept| vec![Sge { addr: kept.sge(b, 16).addr - 1, ..kept.0[0].sge(0, 16) }],
        |b, kept| vec![kept.foreign(b, 16).sge(0, 16)],
        |b, kept| vec![kept.sge(b, 8), kept.foreign(b, 8).sge(0, 8)],
    ];
    for case in cases {
        let responder = Responder::Receive(rxe::RECEIVE_NOT_COVERED);
        fails_at_both_ends(&Options::default(), WcStatus::REM_OP_ERR, responder, |a, b, kept| {
            let sges = case(b, kept);
            b.recv(100, &sges).unwrap();
            a.send(1, SendOp::Send, &[kept.sge(a, 16)]).unwrap();
        });
    }
}

#[test]
fn receive_into_deregistered_memory_is_a_protection_error() {
    let responder = Responder::Receive(rxe::RECEIVE_NOT_COVERED);
    fails_at_both_ends(&Options::default(), WcStatus::REM_OP_ERR, responder, |a, b, kept| {
        let memory = b.memory(16);
        b.recv(100, &[memory.sge(0, 16)]).unwrap();
        drop(memory);
        a.send(1, SendOp::Send, &[kept.sge(a, 16)]).unwrap();
    });
}

/// Remote memory that does not permit the request.
const FORBIDDEN: [fn(&End, &mut Kept, Access) -> RemoteAddr; 10] = [
    // Keys: unknown, zero, of deregistered memory.
    |b, kept, _| RemoteAddr {
        rkey: Rkey(kept.memory(b, 64, Access::REMOTE_ALL).remote(0).rkey.0 ^ 4),
        ..kept.0[0].remote(0)
    },
    |b, kept, _| RemoteAddr { rkey: Rkey(0), ..kept.memory(b, 64, Access::REMOTE_ALL).remote(0) },
    |b, _, _| b.memory(64).remote(0),
    // Ranges: past the end, across it, before the start, wrapping, at zero.
    |b, kept, _| kept.memory(b, 64, Access::REMOTE_ALL).remote(64),
    |b, kept, _| kept.memory(b, 60, Access::REMOTE_ALL).remote(56),
    |b, kept, _| RemoteAddr {
        addr: kept.memory(b, 64, Access::REMOTE_ALL).remote(0).addr - 8,
        ..kept.0[0].remote(0)
    },
    |b, kept, _| RemoteAddr {
        addr: u64::MAX - 7,
        ..kept.memory(b, 64, Access::REMOTE_ALL).remote(0)
    },
    |b, kept, _| RemoteAddr { addr: 0, ..kept.memory(b, 64, Access::REMOTE_ALL).remote(0) },
    |b, kept, needed| kept.memory(b, 64, Access::REMOTE_ALL.difference(needed)).remote(0),
    |b, kept, _| kept.foreign(b, 64).remote(0),
];

#[test]
fn forbidden_write_is_a_remote_access_error() {
    for forbidden in FORBIDDEN {
        let responder = Responder::Event(AsyncEvent::QpAccessError);
        fails_at_both_ends(
            &Options::default(),
            WcStatus::REM_ACCESS_ERR,
            responder,
            |a, b, kept| {
                let remote = forbidden(b, kept, Access::REMOTE_WRITE);
                a.send(1, SendOp::Write(remote), &[kept.sge(a, 8)]).unwrap();
            },
        );
    }
}

#[test]
fn forbidden_read_is_a_remote_access_error() {
    for forbidden in FORBIDDEN {
        let responder = Responder::Event(AsyncEvent::QpAccessError);
        fails_at_both_ends(
            &Options::default(),
            WcStatus::REM_ACCESS_ERR,
            responder,
            |a, b, kept| {
                let remote = forbidden(b, kept, Access::REMOTE_READ);
                a.send(1, SendOp::Read(remote), &[kept.sge(a, 8)]).unwrap();
            },
        );
    }
}

#[test]
fn forbidden_atomic_is_a_remote_access_error() {
    let ops: [fn(RemoteAddr) -> SendOp; 2] = [
        |remote| SendOp::FetchAdd { remote, add: 1 },
        |remote| SendOp::CompareSwap { remote, compare: 0, swap: 1 },
    ];
    for forbidden in FORBIDDEN {
        for op in ops {
            let responder = Responder::Event(AsyncEvent::QpAccessError);
            fails_at_both_ends(
                &Options::default(),
                WcStatus::REM_ACCESS_ERR,
                responder,
                |a, b, kept| {
                    let mut remote = forbidden(b, kept, Access::REMOTE_ATOMIC);
                    remote.addr &= !7;
                    a.send(1, op(remote), &[kept.sge(a, 8)]).unwrap();
                },
            );
        }
    }
}

#[test]
fn forbidden_write_with_imm_fails_its_receive() {
    for forbidden in FORBIDDEN {
        let responder = Responder::Receive(rxe::RECEIVE_OF_FORBIDDEN_WRITE);
        fails_at_both_ends(
            &Options::default(),
            WcStatus::REM_ACCESS_ERR,
            responder,
            |a, b, kept| {
                b.recv(100, &[]).unwrap();
                let remote = forbidden(b, kept, Access::REMOTE_WRITE);
                a.send(1, SendOp::WriteWithImm(remote, Imm(3)), &[kept.sge(a, 8)]).unwrap();
            },
        );
    }
}

#[test]
fn long_write_past_the_region_changes_nothing() {
    let responder = Responder::Event(AsyncEvent::QpAccessError);
    fails_at_both_ends(&Options::default(), WcStatus::REM_ACCESS_ERR, responder, |a, b, kept| {
        kept.0.push(Memory::patterned(&a.pd, 5001, 1));
        let from = kept.0[0].sge(0, 5001);
        let remote = kept.memory(b, 5000, Access::REMOTE_ALL).remote(0);
        a.send(1, SendOp::Write(remote), &[from]).unwrap();
        crate::common::eventually("the failure", || (a.state() == QpState::Err).then_some(()));
        assert!(kept.0[1].all().iter().all(|&byte| byte == 0));
    });
}

#[test]
fn request_without_queue_pair_access_is_invalid() {
    type Op = fn(RemoteAddr) -> SendOp;
    let ops: [(Access, Op); 4] = [
        (Access::REMOTE_WRITE, SendOp::Write),
        (Access::REMOTE_READ, SendOp::Read),
        (Access::REMOTE_ATOMIC, |remote| SendOp::FetchAdd { remote, add: 1 }),
        (Access::REMOTE_ATOMIC, |remote| SendOp::CompareSwap { remote, compare: 0, swap: 0 }),
    ];
    for (lacking, op) in ops {
        let options =
            Options { access: Access::REMOTE_ALL.difference(lacking), ..Options::default() };
        let responder = Responder::Event(AsyncEvent::QpRequestError);
        fails_at_both_ends(&options, WcStatus::REM_INV_REQ_ERR, responder, |a, b, kept| {
            let remote = kept.memory(b, 64, Access::REMOTE_ALL).remote(0);
            a.send(1, op(remote), &[kept.sge(a, 8)]).unwrap();
        });
    }
}

/// Returns whether posting a malformed atomic fails, as on SoftRoCE.
fn is_refused_by_post(case: impl Fn(&End, &End, &mut Kept) -> Result<(), PostError>) -> bool {
    let (a, b, setup) = connected(&Options::default());
    if !setup.known(&rxe::ATOMICS_REFUSED) {
        return false;
    }
    let Err(refused) = case(&a, &b, &mut Kept::default()) else { return false };
    assert_eq!((refused.posted, refused.error.verb, refused.error.errno), (0, "ibv_post_send", 22));
    assert_eq!((a.state(), b.state()), (QpState::Rts, QpState::Rts));
    assert_eq!(outcome(&a.sent(0)), []);
    true
}

#[test]
fn misaligned_atomic_is_an_invalid_request() {
    for offset in [1, 4, 7] {
        for atomic in [
            |remote| SendOp::FetchAdd { remote, add: 1 },
            |remote| SendOp::CompareSwap { remote, compare: 0, swap: 1 },
        ] {
            let post = |a: &End, b: &End, kept: &mut Kept| {
                let remote = kept.memory(b, 64, Access::REMOTE_ALL).remote(offset);
                a.send(1, atomic(remote), &[kept.sge(a, 8)])
            };
            if is_refused_by_post(post) {
                continue;
            }
            let responder = Responder::Event(AsyncEvent::QpRequestError);
            fails_at_both_ends(
                &Options::default(),
                WcStatus::REM_INV_REQ_ERR,
                responder,
                |a, b, kept| {
                    post(a, b, kept).unwrap();
                },
            );
        }
    }
}

#[test]
fn read_at_a_responder_without_read_resources_is_invalid() {
    let options = Options { dest_rd_atomic: 0, ..Options::default() };
    for atomic in [false, true] {
        let responder = Responder::Event(AsyncEvent::QpRequestError);
        fails_at_both_ends(&options, WcStatus::REM_INV_REQ_ERR, responder, |a, b, kept| {
            let remote = kept.memory(b, 64, Access::REMOTE_ALL).remote(0);
            let op =
                if atomic { SendOp::FetchAdd { remote, add: 1 } } else { SendOp::Read(remote) };
            a.send(1, op, &[kept.sge(a, 8)]).unwrap();
        });
    }
}

/// Runs a case that fails before anything is sent, so the responder does not notice.
fn fails_locally(
    options: &Options,
    status: impl Into<rxe::Status>,
    case: impl Fn(&End, &End, &mut Kept),
) {
    let (a, b, _setup) = connected(options);
    let mut kept = Kept::default();
    let good = kept.sge(&a, 8);
    let remote = kept.memory(&b, 8, Access::REMOTE_ALL).remote(0);
    b.recv(100, &[]).unwrap();
    a.recv(50, &[]).unwrap();
    a.send(0, SendOp::Write(remote), &[good]).unwrap();
    case(&a, &b, &mut kept);
    // Posted before or after the device detects the failure.
    a.send(2, SendOp::Write(remote), &[good]).unwrap();
    assert_eq!(
        outcome(&a.sent(3)),
        [(0, WcStatus::SUCCESS), (1, status.into().on(&a.device)), (2, WcStatus::WR_FLUSH_ERR)]
    );
    assert_eq!(outcome(&a.received(1)), [(50, WcStatus::WR_FLUSH_ERR)]);
    assert_eq!((a.state(), b.state()), (QpState::Err, QpState::Rts));
    assert_eq!(outcome(&b.received(0)), []);
    assert_eq!((events(&a.device), events(&b.device)), (vec![], vec![]));
}

#[test]
fn uncovered_local_memory_is_a_protection_error() {
    type Bad = fn(&End, &mut Kept) -> Sge;
    let no_key: [Bad; 4] = [
        |a, kept| Sge { lkey: Lkey(kept.sge(a, 16).lkey.0 ^ 0x10), ..kept.sge(a, 16) },
        |a, kept| Sge { lkey: Lkey(0), ..kept.sge(a, 16) },
        |a, kept| kept.foreign(a, 16).sge(0, 16),
        |a, _| a.memory(16).sge(0, 16),
    ];
    let beyond: [Bad; 2] = [
        |a, kept| Sge { lkey: kept.sge(a, 16).lkey, addr: 0, length: 16 },
        |a, kept| kept.memory(a, 16, Access::empty()).sge(12, 16),
    ];
    let protection = rxe::Status::from(WcStatus::LOC_PROT_ERR);
    let bad = no_key
        .map(|bad| (bad, rxe::SEND_WITHOUT_KEY))
        .into_iter()
        .chain(beyond.map(|bad| (bad, protection)));
    for (bad, sending) in bad {
        let ops: [fn(RemoteAddr) -> SendOp; 7] = [
            |_| SendOp::Send,
            |_| SendOp::SendWithImm(Imm(0)),
            SendOp::Write,
            |remote| SendOp::WriteWithImm(remote, Imm(0)),
            SendOp::Read,
            |remote| SendOp::FetchAdd { remote, add: 1 },
            |remote| SendOp::CompareSwap { remote, compare: 0, swap: 1 },
        ];
        for op in ops {
            let reads_back = op(RemoteAddr::default()).reads_back();
            fails_locally(
                &Options::default(),
                if reads_back { protection } else { sending },
                |a, b, kept| {
                    let op = op(kept.memory(b, 16, Access::REMOTE_ALL).remote(0));
                    let mut sge = bad(a, kept);
                    if matches!(op, SendOp::FetchAdd { .. } | SendOp::CompareSwap { .. }) {
                        sge.length = 8;
                    }
                    a.send(1, op, &[sge]).unwrap();
                    if reads_back && rxe::known(&a.device, &rxe::ATOMIC_FIRST) {
                        return;
                    }
                    assert_eq!(
                        kept.0
                            .iter()
                            .filter(|memory| memory.all().iter().any(|&byte| byte != 0))
                            .count(),
                        0
                    );
                },
            );
        }
    }
}

#[test]
fn short_atomic_result_is_a_length_error() {
    for len in [0, 4, 7] {
        let post = |a: &End, b: &End, kept: &mut Kept| {
            let remote = kept.memory(b, 16, Access::REMOTE_ALL).remote(0);
            a.send(1, SendOp::FetchAdd { remote, add: 1 }, &[Sge { length: len, ..kept.sge(a, 8) }])
        };
        if !is_refused_by_post(post) {
            fails_locally(&Options::default(), rxe::SHORT_ATOMIC_RESULT, |a, b, kept| {
                post(a, b, kept).unwrap()
            });
        }
    }
}

#[test]
fn message_over_the_size_limit_is_a_length_error() {
    if skip_on_emulated_device(
        "message_over_the_size_limit_is_a_length_error",
        "libmlx5 treats an element of 2^31 bytes as empty",
    ) {
        return;
    }
    fails_locally(&Options::default(), rxe::BEYOND_LARGEST, |a, _, kept| {
        let sge = Sge { length: 1 << 31, ..kept.sge(a, 8) };
        a.send(1, SendOp::Send, &[sge, sge, sge]).unwrap();
    });
}

#[test]
fn read_without_requester_read_resources_fails_locally() {
    let options = Options { rd_atomic: 0, ..Options::default() };
    let (a, b, setup) = connected(&options);
    if setup.known(&rxe::READS_WAIT) {
        let (from, to) = (b.memory(16), a.memory(16));
        a.send(1, SendOp::Read(from.remote(0)), &[to.sge(0, 16)]).unwrap();
        a.send(2, SendOp::Write(from.remote(0)), &[to.sge(0, 16)]).unwrap();
        settle(&setup.a, &setup.b);
        assert_eq!((outcome(&a.sent(0)), a.state()), (vec![], QpState::Rts));
        a.to(QpState::Err);
        assert_eq!(outcome(&a.sent(2)), [(1, WcStatus::WR_FLUSH_ERR), (2, WcStatus::WR_FLUSH_ERR)]);
        return;
    }
    fails_locally(&options, WcStatus::LOC_QP_OP_ERR, |a, b, kept| {
        let remote = kept.memory(b, 16, Access::REMOTE_ALL).remote(0);
        a.send(1, SendOp::Read(remote), &[kept.sge(a, 16)]).unwrap();
    });
}

#[test]
fn missing_receive_fails_only_the_requester() {
    for rnr_retry in [0, 1, 6] {
        for with_imm in [false, true] {
            let (a, b, setup) = connected(&Options { rnr_retry, ..Options::default() });
            let (from, to) = (a.memory(8), b.memory(8));
            from.0.store(0, u64::MAX).unwrap();
            let op =
                if with_imm { SendOp::WriteWithImm(to.remote(0), Imm(1)) } else { SendOp::Send };
            a.send(1, op, &[from.sge(0, 8)]).unwrap();
            a.send(2, op, &[from.sge(0, 8)]).unwrap();
            assert_eq!(
                outcome(&a.sent(2)),
                [(1, WcStatus::RNR_RETRY_EXC_ERR), (2, WcStatus::WR_FLUSH_ERR)]
            );
            assert_eq!((a.state(), b.state()), (QpState::Err, QpState::Rts));
            assert_eq!(to.all(), [0; 8], "nothing is written without a receive");
            b.recv(5, &[to.sge(0, 8)]).unwrap();
            assert_eq!(outcome(&b.received(0)), []);
            assert_eq!((events(&setup.a), events(&setup.b)), (vec![], vec![]));
        }
    }
}

#[test]
fn seven_rnr_retries_wait_without_limit() {
    let (a, b, _setup) = connected(&Options { rnr_retry: 7, ..Options::default() });
    let (from, to) = (Memory::patterned(&a.pd, 5000, 3), b.memory(5000));
    a.send(1, SendOp::Send, &[from.sge(0, 5000)]).unwrap();
    a.send(2, SendOp::WriteWithImm(to.remote(0), Imm(7)), &[from.sge(0, 8)]).unwrap();
    // Time for far more than seven retries of 0.01 ms.
    let start = std::time::Instant::now();
    while start.elapsed() < std::time::Duration::from_millis(5) {
        assert_eq!(outcome(&a.sent(0)), []);
    }
    b.recv(8, &[to.sge(0, 5000)]).unwrap();
    b.recv(9, &[]).unwrap();
    assert_eq!(outcome(&a.sent(2)), [(1, WcStatus::SUCCESS), (2, WcStatus::SUCCESS)]);
    let received = b.received(2);
    assert_eq!(outcome(&received), [(8, WcStatus::SUCCESS), (9, WcStatus::SUCCESS)]);
    assert_eq!(
        (received[0].byte_len, received[1].byte_len, received[1].imm()),
        (5000, 8, Some(Imm(7)))
    );
    assert_eq!(to.all(), from.all());
}

#[test]
fn destroyed_peer_exceeds_the_retries() {
    let options = Options { retry_count: 2, timeout: 4, ..Options::default() };
    let ops: [fn(RemoteAddr) -> SendOp; 4] = [
        |_| SendOp::Send,
        SendOp::Write,
        SendOp::Read,
        |remote| SendOp::FetchAdd { remote, add: 1 },
    ];
    for op in ops {
        let (a, b, _setup) = connected(&options);
        let (from, to) = (a.memory(8), b.memory(8));
        let remote = to.remote(0);
        drop(b.qp);
        a.recv(9, &[]).unwrap();
        a.send(1, op(remote), &[from.sge(0, 8)]).unwrap();
        a.send(2, SendOp::Send, &[]).unwrap();
        assert_eq!(
            outcome(&a.sent(2)),
            [(1, WcStatus::RETRY_EXC_ERR), (2, WcStatus::WR_FLUSH_ERR)]
        );
        assert_eq!(outcome(&a.received(1)), [(9, WcStatus::WR_FLUSH_ERR)]);
        assert_eq!(a.state(), QpState::Err);
    }
}

#[test]
fn peer_in_reset_or_error_exceeds_the_retries() {
    let options = Options { retry_count: 1, timeout: 4, ..Options::default() };
    for state in [QpState::Reset, QpState::Err] {
        let (a, b, _setup) = connected(&options);
        b.to(state);
        a.send(1, SendOp::Send, &[]).unwrap();
        assert_eq!(outcome(&a.sent(1)), [(1, WcStatus::RETRY_EXC_ERR)]);
        assert_eq!(b.state(), state);
    }
}

#[test]
fn invalidation_of_a_region_key_fails_the_receive() {
    let (a, b, _setup) = connected(&Options { retry_count: 1, timeout: 4, ..Options::default() });
    let to = b.memory(8);
    b.recv(5, &[to.sge(0, 8)]).unwrap();
    b.recv(6, &[to.sge(0, 8)]).unwrap();
    // Peers may invalidate windows, but not regions.
    a.send(1, SendOp::SendWithInvalidate(to.remote(0).rkey), &[]).unwrap();
    assert_eq!(
        outcome(&b.received(2)),
        [(5, WcStatus::REM_INV_REQ_ERR), (6, WcStatus::WR_FLUSH_ERR)]
    );
    assert_eq!(b.state(), QpState::Err);
    // A class J error has no negative acknowledgement.
    assert_eq!(outcome(&a.sent(1)), [(1, rxe::INVALIDATION_HERE.on(&a.device))]);
}

#[test]
fn unsignalled_work_completes_only_if_it_fails() {
    let (a, b, _setup) = connected(&Options::default());
    let (from, to) = (a.memory(8), b.memory(8));
    let sges = [from.sge(0, 8)];
    let wr = |wr_id, op, flags| request(wr_id, op, flags, Data::Sges(&sges));
    let good = SendOp::Write(to.remote(0));
    let bad = SendOp::Write(RemoteAddr { addr: to.remote(0).addr, rkey: Rkey(0) });
    let none = SendFlags::empty();
    b.recv(9, &[]).unwrap();
    let list = [
        wr(1, good, SendFlags::SIGNALED),
        wr(2, good, none),
        wr(3, bad, none),
        wr(4, good, none),
        wr(5, good, SendFlags::SIGNALED),
    ];
    a.post(&list).unwrap();
    let expected = [
        (1, WcStatus::SUCCESS),
        (3, WcStatus::REM_ACCESS_ERR),
        (4, WcStatus::WR_FLUSH_ERR),
        (5, WcStatus::WR_FLUSH_ERR),
    ];
    assert_eq!(outcome(&a.sent(4)), expected);
    assert_eq!(outcome(&b.received(1)), [(9, WcStatus::WR_FLUSH_ERR)]);
}

#[test]
fn malformed_work_request_stops_its_list() {
    let (a, b, setup) = connected(&Options::default());
    let (from, to) = (a.memory(4096), b.memory(4096));
    let caps = a.qp.caps();
    let elements = vec![from.sge(0, 1); caps.max_send_sge as usize + 1];
    let long = vec![1; caps.max_inline as usize + 1];
    let good = [from.sge(0, 8)];
    let wr = |wr_id, op, data| request(wr_id, op, SendFlags::SIGNALED, data);
    let write = SendOp::Write(to.remote(0));
    let bad = [
        wr(2, SendOp::Send, Data::Sges(&elements)),
        wr(2, SendOp::Send, Data::Inline(&long)),
        wr(2, write, Data::Inline(&long)),
        wr(2, SendOp::Read(to.remote(0)), Data::Inline(&[1])),
    ];
    for (at, bad) in bad.into_iter().enumerate() {
        let refused = a
            .post(&[wr(1, write, Data::Sges(&good)), bad, wr(3, write, Data::Sges(&good))])
            .unwrap_err();
        // `ibv_wr_complete(3)` accepts a whole list or nothing, and returns other errnos.
        let all_or_nothing = !setup.is_software() && refused.error.verb == "ibv_wr_complete";
        let posted = usize::from(!all_or_nothing);
        if !all_or_nothing {
            assert_eq!(
                (refused.error.verb, refused.error.errno),
                ("ibv_post_send", 22),
                "case {at}"
            );
        }
        assert_eq!(refused.posted, posted, "case {at}");
        // Work before the malformed request is posted, work after it is not.
        assert_eq!(outcome(&a.sent(posted)), vec![(1, WcStatus::SUCCESS); posted]);
        assert_eq!(a.state(), QpState::Rts);
    }
    let refused =
        b.recv(1, &vec![to.sge(0, 1); b.qp.caps().max_recv_sge as usize + 1]).unwrap_err();
    assert_eq!((refused.posted, refused.error.verb, refused.error.errno), (0, "ibv_post_recv", 22));
    b.recv(2, &vec![to.sge(0, 8); b.qp.caps().max_recv_sge as usize]).unwrap();
    a.send_with(4, SendOp::Send, SendFlags::SIGNALED, Data::Inline(&long[1..])).unwrap();
    if long.len() - 1 <= 8 * b.qp.caps().max_recv_sge as usize {
        assert_eq!(outcome(&a.sent(1)), [(4, WcStatus::SUCCESS)]);
    } else {
        assert_eq!(outcome(&a.sent(1)), [(4, rxe::TOO_LONG_HERE.on(&a.device))]);
    }
}

#[test]
fn unreliable_connection_drops_invalid_requests_silently() {
    let (a, b, _setup) = connected(&Options::of(Transport::Uc));
    let (from, to) = (Memory::patterned(&a.pd, 5000, 2), b.memory(5000));
    let bad = RemoteAddr { addr: to.remote(0).addr, rkey: Rkey(0) };
    a.send(1, SendOp::Send, &[from.sge(0, 8)]).unwrap();
    a.send(2, SendOp::Write(bad), &[from.sge(0, 8)]).unwrap();
    a.send(3, SendOp::Write(bad), &[from.sge(0, 5000)]).unwrap();
    a.send(4, SendOp::WriteWithImm(to.remote(0), Imm(1)), &[from.sge(0, 8)]).unwrap();
    let sent = [
        (1, WcStatus::SUCCESS),
        (2, WcStatus::SUCCESS),
        (3, WcStatus::SUCCESS),
        (4, WcStatus::SUCCESS),
    ];
    assert_eq!(outcome(&a.sent(4)), sent);
    settle(&a.device, &b.device);
    assert_eq!(to.all(), vec![0; 5000]);
    b.recv(7, &[to.sge(0, 5000)]).unwrap();
    a.send(5, SendOp::Send, &[from.sge(0, 5000)]).unwrap();
    assert_eq!(outcome(&a.sent(1)), [(5, WcStatus::SUCCESS)]);
    let received = b.received(1);
    assert_eq!((outcome(&received), received[0].byte_len), (vec![(7, WcStatus::SUCCESS)], 5000));
    assert_eq!(to.all(), from.all());
    assert_eq!((a.state(), b.state()), (QpState::Rts, QpState::Rts));
    for op in [
        SendOp::Read(to.remote(0)),
        SendOp::FetchAdd { remote: to.remote(0), add: 1 },
        SendOp::CompareSwap { remote: to.remote(0), compare: 0, swap: 0 },
        SendOp::SendWithInvalidate(Rkey(1)),
    ] {
        assert_eq!(a.send(6, op, &[from.sge(0, 8)]).unwrap_err().error.errno, 22, "{op:?}");
    }
}

#[test]
fn zero_capacity_queue_pair_refuses_posts() {
    let caps =
        QpCaps { max_send_wr: 0, max_recv_wr: 0, max_send_sge: 0, max_recv_sge: 0, max_inline: 0 };
    let (a, _b, setup) = connected(&Options { caps, ..Options::default() });
    if setup.is_software() {
        assert_eq!(a.qp.caps(), caps);
        assert_eq!(a.send(1, SendOp::Send, &[]).unwrap_err().error.errno, 12);
        assert_eq!(a.recv(1, &[]).unwrap_err().error.errno, 12);
    }
}

/// Sends that need no receive and no window, each with the bytes of its list.
fn one_sided(remote: RemoteAddr) -> [(SendOp, usize); 4] {
    [
        (SendOp::Write(remote), 24),
        (SendOp::Read(remote), 24),
        (SendOp::FetchAdd { remote, add: 1 }, 8),
        (SendOp::CompareSwap { remote, compare: 0, swap: 1 }, 8),
    ]
}

#[test]
fn unsignalled_work_of_each_kind_is_done_and_raises_no_completion() {
    let (a, b, _setup) = connected(&Options::default());
    let (from, to, marker) = (Memory::patterned(&a.pd, 24, 4), b.memory(64), b.memory(8));
    let (none, signaled) = (SendFlags::empty(), SendFlags::SIGNALED);
    let mut ops = one_sided(to.remote(0)).to_vec();
    ops.push((SendOp::WriteWithImm(to.remote(0), Imm(5)), 24));
    ops.push((SendOp::Send, 24));
    ops.push((SendOp::SendWithImm(Imm(6)), 24));
    for (op, len) in ops {
        let receives =
            matches!(op, SendOp::Send | SendOp::SendWithImm(_) | SendOp::WriteWithImm(..));
        to.0.write(0, &[0; 64]).unwrap();
        if receives {
            b.recv(3, &[to.sge(32, 24)]).unwrap();
        }
        a.send_with(1, op, none, Data::Sges(&[from.sge(0, len)])).unwrap();
        let end = SendOp::Write(marker.remote(0));
        a.send_with(2, end, signaled, Data::Sges(&[from.sge(0, 8)])).unwrap();
        assert_eq!(outcome(&a.sent(1)), [(2, WcStatus::SUCCESS)], "{op:?}");
        let received = vec![(3, WcStatus::SUCCESS); usize::from(receives)];
        assert_eq!(outcome(&b.received(received.len())), received, "{op:?}");
        assert_eq!(outcome(&a.sent(0)), [], "{op:?}");
        match op {
            SendOp::Write(_) | SendOp::WriteWithImm(..) => {
                assert_eq!(to.bytes(0, 24), from.all(), "{op:?}");
            }
            SendOp::Send | SendOp::SendWithImm(_) => {
                assert_eq!(to.bytes(32, 24), from.all(), "{op:?}");
            }
            // The result is in the memory of the requester.
            SendOp::Read(_) => assert_eq!(from.all(), [0; 24]),
            _ => assert_eq!((to.0.load(0), from.0.load(0)), (Ok(1), Ok(0)), "{op:?}"),
        }
        from.0.write(0, &pattern(24, 4)).unwrap();
    }
}

#[test]
fn unsignalled_work_of_each_kind_reports_its_failure() {
    let nowhere = RemoteAddr { addr: 8, rkey: Rkey(0) };
    for (op, len) in one_sided(nowhere) {
        let (a, _b, _setup) = connected(&Options::default());
        let from = a.memory(24);
        a.send_with(1, op, SendFlags::empty(), Data::Sges(&[from.sge(0, len)])).unwrap();
        assert_eq!(outcome(&a.sent(1)), [(1, WcStatus::REM_ACCESS_ERR)], "{op:?}");
    }
    for op in [SendOp::Send, SendOp::SendWithImm(Imm(1))] {
        let (a, b, _setup) = connected(&Options::default());
        let (from, to) = (a.memory(24), b.memory(8));
        b.recv(2, &[to.sge(0, 8)]).unwrap();
        a.send_with(1, op, SendFlags::empty(), Data::Sges(&[from.sge(0, 24)])).unwrap();
        assert_eq!(outcome(&a.sent(1)), [(1, rxe::TOO_LONG_HERE.on(&a.device))], "{op:?}");
    }
}

#[test]
fn earlier_of_a_local_and_a_remote_error_is_reported() {
    let nowhere = RemoteAddr { addr: 8, rkey: Rkey(0) };
    let uncovered = [Sge { addr: 8, length: 8, lkey: Lkey(0) }];
    for remote_first in [true, false] {
        let (a, b, _setup) = connected(&Options::default());
        let (from, to) = (a.memory(8), b.memory(8));
        let covered = [from.sge(0, 8)];
        let write = |id, remote, sges| {
            request(id, SendOp::Write(remote), SendFlags::SIGNALED, Data::Sges(sges))
        };
        let far = |id| write(id, nowhere, &covered);
        let near = |id| write(id, to.remote(0), &uncovered);
        let (list, first) = if remote_first {
            ([far(1), near(2)], WcStatus::REM_ACCESS_ERR)
        } else {
            ([near(1), far(2)], rxe::SEND_WITHOUT_KEY.on(&a.device))
        };
        a.post(&list).unwrap();
        assert_eq!(outcome(&a.sent(2)), [(1, first), (2, WcStatus::WR_FLUSH_ERR)]);
        assert_eq!(to.all(), [0; 8]);
    }
}

#[test]
fn result_of_an_atomic_is_scattered_over_its_list() {
    let (a, b, _setup) = connected(&Options::default());
    let (result, to) = (a.memory(32), b.memory(8));
    to.0.store(0, u64::from_ne_bytes(*b"abcdefgh")).unwrap();
    let sges = [result.sge(1, 3), result.sge(16, 4), result.sge(9, 1)];
    a.send(1, SendOp::FetchAdd { remote: to.remote(0), add: 0 }, &sges).unwrap();
    assert_eq!(outcome(&a.sent(1)), [(1, WcStatus::SUCCESS)]);
    assert_eq!([result.bytes(1, 3), result.bytes(16, 4), result.bytes(9, 1)].concat(), b"abcdefgh");
    assert_eq!((result.bytes(4, 5), result.bytes(20, 12)), (vec![0; 5], vec![0; 12]));
}
