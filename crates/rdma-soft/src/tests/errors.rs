//! Failures of work requests, as seen at both ends.

use super::*;
use rdma_provider::types::{Imm, WcStatus};

type Outcome = Vec<(u64, WcStatus)>;

/// Runs `case` on both kinds of network with further work queued, and checks both ends.
fn check(
    options: Options,
    events: impl Fn(Qpn) -> Vec<AsyncEvent>,
    requester: WcStatus,
    responder: Option<WcStatus>,
    case: impl Fn(&End, &End),
) {
    for network in [Network::new(), Network::simulated(1, Faults::none())] {
        let (a, b) = connected(&network, &options);
        a.events();
        case(&a, &b);
        let spare = b.buffer(8);
        if b.state() != QpState::Err {
            b.recv(101, &[spare.sge(0, 8)]).unwrap();
        }
        network.run_until_idle(Duration::from_secs(1));
        assert_eq!(outcome(&a.poll()), [(1, requester)]);
        assert_eq!((a.state(), b.state()), (QpState::Err, QpState::Err));
        b.recv(102, &[spare.sge(0, 8)]).unwrap();
        a.send(2, SendOp::Send, &[]).unwrap();
        let mut expected: Outcome = responder.iter().map(|status| (100, *status)).collect();
        let received = outcome(&b.poll());
        expected.extend(received.iter().filter(|(id, _)| *id == 101));
        expected.push((102, WcStatus::WR_FLUSH_ERR));
        assert_eq!(received, expected);
        assert!(
            received.iter().all(|(id, status)| *id != 101 || *status == WcStatus::WR_FLUSH_ERR)
        );
        assert_eq!(outcome(&a.poll()), [(2, WcStatus::WR_FLUSH_ERR)]);
        assert_eq!(b.events(), events(b.qp.qpn()));
        assert_eq!(a.events(), []);
    }
}

fn silent(_: Qpn) -> Vec<AsyncEvent> {
    Vec::new()
}

fn access_error(qpn: Qpn) -> Vec<AsyncEvent> {
    vec![AsyncEvent::QpAccessError(qpn)]
}

fn request_error(qpn: Qpn) -> Vec<AsyncEvent> {
    vec![AsyncEvent::QpRequestError(qpn)]
}

/// Allocates a buffer that outlives its work.
fn leaked(end: &End, len: usize, access: Access) -> &'static Buffer {
    Box::leak(Box::new(Buffer::new(&end.pd, len, access)))
}

const ALL: Access = Access::LOCAL_WRITE.union(Access::REMOTE_ALL);

#[test]
fn send_longer_than_its_receive_fails_at_both_ends() {
    let (requester, responder) = (WcStatus::REM_INV_REQ_ERR, Some(WcStatus::LOC_LEN_ERR));
    for len in [17, 3000] {
        check(Options::default(), silent, requester, responder, |a, b| {
            b.recv(100, &[leaked(b, 16, ALL).sge(0, 16)]).unwrap();
            a.send(1, SendOp::Send, &[leaked(a, len, ALL).sge(0, len)]).unwrap();
        });
    }
}

#[test]
fn inaccessible_receive_buffer_fails_the_receive() {
    let cases: [fn(&End) -> Sge; 4] = [
        |b| Sge { lkey: Lkey(leaked(b, 16, ALL).lkey().0 ^ 0x10), ..leaked(b, 16, ALL).sge(0, 16) },
        |b| leaked(b, 16, ALL).sge(1, 16),
        |b| leaked(b, 16, Access::empty()).sge(0, 16),
        |b| Box::leak(Box::new(Buffer::new(&b.context.create_pd().unwrap(), 16, ALL))).sge(0, 16),
    ];
    for case in cases {
        let (requester, responder) = (WcStatus::REM_OP_ERR, Some(WcStatus::LOC_PROT_ERR));
        check(Options::default(), silent, requester, responder, |a, b| {
            b.recv(100, &[case(b)]).unwrap();
            a.send(1, SendOp::Send, &[leaked(a, 16, ALL).sge(0, 16)]).unwrap();
        });
    }
}

/// Returns remote addresses that do not permit `needed`.
fn forbidden(b: &End, needed: Access) -> Vec<RemoteAddr> {
    let good = leaked(b, 64, ALL);
    let stale = {
        let buffer = b.buffer(64);
        buffer.remote(0)
    };
    let other = Box::leak(Box::new(Buffer::new(&b.context.create_pd().unwrap(), 64, ALL)));
    vec![
        RemoteAddr { rkey: Rkey(good.rkey().0 ^ 4), ..good.remote(0) },
        RemoteAddr { rkey: Rkey(0), ..good.remote(0) },
        stale,
        good.remote(64),
        RemoteAddr { addr: good.addr() - 8, rkey: good.rkey() },
        RemoteAddr { addr: u64::MAX - 7, rkey: good.rkey() },
        leaked(b, 64, ALL.difference(needed)).remote(0),
        other.remote(0),
    ]
}

#[test]
fn forbidden_remote_memory_fails_with_access_error() {
    for kind in 0..8 {
        check(Options::default(), access_error, WcStatus::REM_ACCESS_ERR, None, |a, b| {
            let remote = forbidden(b, Access::REMOTE_WRITE)[kind];
            a.send(1, SendOp::Write(remote), &[leaked(a, 8, ALL).sge(0, 8)]).unwrap();
        });
        check(Options::default(), access_error, WcStatus::REM_ACCESS_ERR, None, |a, b| {
            let remote = forbidden(b, Access::REMOTE_READ)[kind];
            a.send(1, SendOp::Read(remote), &[leaked(a, 8, ALL).sge(0, 8)]).unwrap();
        });
        check(Options::default(), access_error, WcStatus::REM_ACCESS_ERR, None, |a, b| {
            let remote = forbidden(b, Access::REMOTE_ATOMIC)[kind];
            a.send(1, SendOp::FetchAdd { remote, add: 1 }, &[leaked(a, 8, ALL).sge(0, 8)]).unwrap();
        });
    }
}

#[test]
fn write_beyond_remote_memory_writes_nothing() {
    check(Options::default(), access_error, WcStatus::REM_ACCESS_ERR, None, |a, b| {
        let target = leaked(b, 4000, ALL);
        let from = leaked(a, 4001, ALL);
        from.fill(std::iter::repeat(1));
        a.send(1, SendOp::Write(target.remote(0)), &[from.sge(0, 4001)]).unwrap();
        a.network.run_until_idle(Duration::from_secs(1));
        assert_eq!(target.bytes(0, 4000), [0; 4000]);
    });
}

#[test]
fn write_with_imm_into_forbidden_memory_fails_its_receive() {
    let (requester, responder) = (WcStatus::REM_ACCESS_ERR, Some(WcStatus::LOC_ACCESS_ERR));
    check(Options::default(), silent, requester, responder, |a, b| {
        b.recv(100, &[]).unwrap();
        let remote = RemoteAddr { addr: 8, rkey: Rkey(1) };
        a.send(1, SendOp::WriteWithImm(remote, Imm(0)), &[leaked(a, 8, ALL).sge(0, 8)]).unwrap();
    });
}

#[test]
fn operation_without_queue_pair_access_is_refused() {
    for kind in 0..3 {
        let lacking = [Access::REMOTE_WRITE, Access::REMOTE_READ, Access::REMOTE_ATOMIC][kind];
        let options =
            Options { access: Access::REMOTE_ALL.difference(lacking), ..Options::default() };
        check(options, request_error, WcStatus::REM_INV_REQ_ERR, None, |a, b| {
            let remote = leaked(b, 64, ALL).remote(0);
            let op =
                [SendOp::Write(remote), SendOp::Read(remote), SendOp::FetchAdd { remote, add: 1 }]
                    [kind];
            a.send(1, op, &[leaked(a, 8, ALL).sge(0, 8)]).unwrap();
        });
    }
}

#[test]
fn unaligned_atomic_is_refused() {
    check(Options::default(), request_error, WcStatus::REM_INV_REQ_ERR, None, |a, b| {
        let remote = leaked(b, 64, ALL).remote(4);
        a.send(1, SendOp::FetchAdd { remote, add: 1 }, &[leaked(a, 8, ALL).sge(0, 8)]).unwrap();
    });
}

#[test]
fn read_at_responder_without_resources_is_refused() {
    let options = Options { dest_rd_atomic: 0, ..Options::default() };
    check(options, request_error, WcStatus::REM_INV_REQ_ERR, None, |a, b| {
        a.send(1, SendOp::Read(leaked(b, 8, ALL).remote(0)), &[leaked(a, 8, ALL).sge(0, 8)])
            .unwrap();
    });
}

/// Checks failures that do not reach the peer.
fn check_local(options: Options, status: WcStatus, case: impl Fn(&End, &End)) {
    for network in [Network::new(), Network::simulated(1, Faults::none())] {
        let (a, b) = connected(&network, &options);
        let good = leaked(&a, 8, ALL);
        a.send(0, SendOp::Write(leaked(&b, 8, ALL).remote(0)), &[good.sge(0, 8)]).unwrap();
        case(&a, &b);
        let _flushed = a.send(2, SendOp::Send, &[good.sge(0, 8)]);
        network.run_until_idle(Duration::from_secs(10));
        let expected = [(0, WcStatus::SUCCESS), (1, status), (2, WcStatus::WR_FLUSH_ERR)];
        assert_eq!(outcome(&a.poll()), expected);
        assert_eq!((a.state(), b.state()), (QpState::Err, QpState::Rts));
        assert_eq!((a.events(), b.events()), (vec![], vec![]));
    }
}

#[test]
fn inaccessible_local_memory_fails_the_request() {
    for kind in 0..3 {
        let bad = move |a: &End| match kind {
            0 => Sge { lkey: Lkey(77), ..leaked(a, 16, ALL).sge(0, 16) },
            1 => leaked(a, 16, ALL).sge(12, 16),
            _ => Box::leak(Box::new(Buffer::new(&a.context.create_pd().unwrap(), 16, ALL)))
                .sge(0, 16),
        };
        check_local(Options::default(), WcStatus::LOC_PROT_ERR, |a, _| {
            a.send(1, SendOp::Send, &[bad(a)]).unwrap();
        });
        check_local(Options::default(), WcStatus::LOC_PROT_ERR, |a, b| {
            a.send(1, SendOp::Read(leaked(b, 16, ALL).remote(0)), &[bad(a)]).unwrap();
        });
        check_local(Options::default(), WcStatus::LOC_PROT_ERR, |a, b| {
            let remote = leaked(b, 16, ALL).remote(0);
            a.send(1, SendOp::FetchAdd { remote, add: 1 }, &[Sge { length: 8, ..bad(a) }]).unwrap();
        });
    }
}

#[test]
fn read_into_unwritable_memory_fails() {
    check_local(Options::default(), WcStatus::LOC_PROT_ERR, |a, b| {
        let from = leaked(b, 16, ALL).remote(0);
        a.send(1, SendOp::Read(from), &[leaked(a, 16, Access::REMOTE_READ).sge(0, 16)]).unwrap();
    });
}

#[test]
fn atomic_with_short_result_buffer_fails() {
    check_local(Options::default(), WcStatus::LOC_LEN_ERR, |a, b| {
        let remote = leaked(b, 16, ALL).remote(0);
        a.send(1, SendOp::FetchAdd { remote, add: 1 }, &[leaked(a, 16, ALL).sge(0, 4)]).unwrap();
    });
}

#[test]
fn read_with_zero_initiator_depth_fails() {
    let options = Options { rd_atomic: 0, ..Options::default() };
    check_local(options, WcStatus::LOC_QP_OP_ERR, |a, b| {
        a.send(1, SendOp::Read(leaked(b, 16, ALL).remote(0)), &[leaked(a, 16, ALL).sge(0, 16)])
            .unwrap();
    });
}

#[test]
fn missing_receive_exhausts_rnr_retries() {
    let options = Options { rnr_retry: 2, ..Options::default() };
    for network in [Network::new(), Network::simulated(1, Faults::none())] {
        let (a, b) = connected(&network, &options);
        a.send(1, SendOp::Send, &[]).unwrap();
        assert_eq!(outcome(&a.wait(1)), [(1, WcStatus::RNR_RETRY_EXC_ERR)]);
        assert_eq!((a.state(), b.state()), (QpState::Err, QpState::Rts));
        assert_eq!(a.qp.counters().0.rnr_naks, 3);
        if network.now() < Duration::from_secs(1) {
            // Two delays of 0.01 ms each; virtual time is exact.
            assert!(network.now() >= Duration::from_micros(20));
        }
    }
}

#[test]
fn sends_wait_for_a_posted_receive() {
    for network in [Network::new(), Network::simulated(1, Faults::none())] {
        let (a, b) = connected(&network, &Options::default());
        let (from, to) = (a.buffer(3000), b.buffer(3000));
        from.fill(std::iter::repeat(5));
        a.send(1, SendOp::Send, &[from.sge(0, 3000)]).unwrap();
        a.send(2, SendOp::WriteWithImm(to.remote(0), Imm(0)), &[from.sge(0, 8)]).unwrap();
        for _ in 0..10 {
            network.step();
        }
        assert_eq!(a.poll(), []);
        assert_eq!(to.bytes(0, 8), [0; 8]);
        b.recv(8, &[to.sge(0, 3000)]).unwrap();
        b.recv(9, &[]).unwrap();
        assert_eq!(outcome(&a.wait(2)), [(1, WcStatus::SUCCESS), (2, WcStatus::SUCCESS)]);
        assert_eq!(outcome(&b.wait(2)), [(8, WcStatus::SUCCESS), (9, WcStatus::SUCCESS)]);
        assert_eq!(to.bytes(0, 3000), [5; 3000]);
    }
}

#[test]
fn unanswered_send_exhausts_retries() {
    let options = Options { retry_count: 3, timeout: 5, ..Options::default() };
    for network in [Network::new(), Network::simulated(1, Faults::none())] {
        let (a, b) = connected(&network, &options);
        drop(b);
        let from = a.buffer(8);
        a.send(1, SendOp::Send, &[from.sge(0, 8)]).unwrap();
        a.send(2, SendOp::Send, &[from.sge(0, 8)]).unwrap();
        assert_eq!(
            outcome(&a.wait(2)),
            [(1, WcStatus::RETRY_EXC_ERR), (2, WcStatus::WR_FLUSH_ERR)]
        );
        assert_eq!(a.qp.counters().0.timeouts, 4);
    }
}

#[test]
fn send_with_invalidate_without_window_fails() {
    for network in [Network::new(), Network::simulated(1, Faults::none())] {
        let (a, b) =
            connected(&network, &Options { retry_count: 1, timeout: 3, ..Options::default() });
        let to = b.buffer(8);
        b.recv(5, &[to.sge(0, 8)]).unwrap();
        b.recv(6, &[to.sge(0, 8)]).unwrap();
        a.send(1, SendOp::SendWithInvalidate(to.rkey()), &[]).unwrap();
        let expected = [(5, WcStatus::REM_INV_REQ_ERR), (6, WcStatus::WR_FLUSH_ERR)];
        assert_eq!(outcome(&b.wait(2)), expected);
        assert_eq!(outcome(&a.wait(1)), [(1, WcStatus::RETRY_EXC_ERR)]);
    }
}

#[test]
fn unsignaled_work_is_silent_before_a_failure_and_flushed_after_it() {
    for network in [Network::new(), Network::simulated(1, Faults::none())] {
        let (a, b) = connected(&network, &Options::default());
        let (from, to) = (a.buffer(8), b.buffer(8));
        let sges = [from.sge(0, 8)];
        let wr = |wr_id, op, flags| SendWr {
            wr_id: WrId(wr_id),
            op,
            flags,
            data: Data::Sges(&sges),
            target: None,
        };
        let good = SendOp::Write(to.remote(0));
        let bad = SendOp::Write(RemoteAddr { addr: 0, rkey: Rkey(9) });
        let none = SendFlags::empty();
        let list = [
            wr(1, good, none),
            wr(2, bad, none),
            wr(3, good, none),
            wr(4, good, SendFlags::SIGNALED),
        ];
        // SAFETY: the buffers outlive the queue pair's work.
        unsafe { a.qp.post_send(list) }.unwrap();
        let expected = [
            (2, WcStatus::REM_ACCESS_ERR),
            (3, WcStatus::WR_FLUSH_ERR),
            (4, WcStatus::WR_FLUSH_ERR),
        ];
        assert_eq!(outcome(&a.wait(3)), expected);
    }
}

#[test]
fn zero_length_needs_no_memory() {
    for network in [Network::new(), Network::simulated(1, Faults::none())] {
        let (a, b) = connected(&network, &Options::default());
        let bogus = RemoteAddr { addr: 3, rkey: Rkey(3) };
        let nothing = Sge { addr: 5, length: 0, lkey: Lkey(5) };
        a.send(1, SendOp::Write(bogus), &[nothing]).unwrap();
        a.send(2, SendOp::Read(bogus), &[]).unwrap();
        let expected = [(1, WcStatus::SUCCESS), (2, WcStatus::SUCCESS)];
        assert_eq!(outcome(&a.wait(2)), expected);
        assert_eq!(b.state(), QpState::Rts);
    }
}
