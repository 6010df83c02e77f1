//! Completion queues: slots, order, overrun, notification and channels.

use std::os::fd::{AsFd, AsRawFd};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Wake, Waker};
use std::thread::{self, ThreadId};
use std::time::Duration;

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio_rdma::types::{
    AsyncEvent, Data, QpState, SendFlags, SendOp, WcOpcode, WcStatus, WorkCompletion,
};
use tokio_rdma::verbs::{Channel, Cq};
use tokio_rdma::{CompletionMode, CompletionQueue, Device, OpErrorKind, SetupError, VerbError};

use crate::common::raw::{End, Options, connect, connected, outcome, poll, request, take};
use crate::common::{
    Memory, Setup, events, eventually, run, rxe, skip, skip_on_emulated_device, within,
};

const ENOMEM: i32 = 12;
const NONE: SendFlags = SendFlags::empty();
const SIGNALED: SendFlags = SendFlags::SIGNALED;

#[test]
fn polling_a_send_completion_frees_the_slots_up_to_it() {
    let mut options = Options::default();
    options.caps.max_send_wr = 4;
    let (a, b, setup) = connected(&options);
    let depth = rxe::depth(&setup.a, a.qp.caps().max_send_wr);
    let to = b.memory(8);
    let post = |id, flags| {
        a.send_with(id, SendOp::Write(to.remote(0)), flags, Data::Inline(&[1; 8]))
            .map_err(|error| error.error.errno)
    };
    for id in 0..u64::from(depth) {
        post(id, if id == 2 { SIGNALED } else { NONE }).unwrap();
    }
    if setup.known(&rxe::SLOTS_FREED_EARLY) {
        assert_eq!(outcome(&a.sent(1)), [(2, WcStatus::SUCCESS)]);
        // Only work that is not executed fills the queue.
        for id in 10..10 + u64::from(depth) {
            a.send(id, SendOp::Send, &[]).unwrap();
        }
        assert_eq!(post(99, SIGNALED), Err(ENOMEM));
        b.recv(1, &[]).unwrap();
        assert_eq!(outcome(&a.sent(1)), [(10, WcStatus::SUCCESS)]);
        post(99, SIGNALED).unwrap();
        assert_eq!((post(99, SIGNALED), a.state()), (Err(ENOMEM), QpState::Rts));
        return;
    }
    assert_eq!(post(99, NONE), Err(ENOMEM), "execution alone frees no slot");
    assert_eq!(outcome(&a.sent(1)), [(2, WcStatus::SUCCESS)]);
    for id in 10..13 {
        post(id, NONE)
            .unwrap_or_else(|errno| panic!("{id}: {errno}, although three slots were freed"));
    }
    // Without a completion the slots are never freed, as on real devices.
    assert_eq!(post(99, SIGNALED), Err(ENOMEM));
    assert_eq!(outcome(&a.sent(0)), []);
    assert_eq!(post(99, SIGNALED), Err(ENOMEM));
    assert_eq!(a.state(), QpState::Rts);
}

#[test]
fn list_longer_than_the_send_queue_is_posted_in_part() {
    let mut options = Options::default();
    options.caps.max_send_wr = 4;
    let (a, b, setup) = connected(&options);
    let depth = rxe::depth(&setup.a, a.qp.caps().max_send_wr) as usize;
    let to = b.memory(8);
    // A SEND without a receive is not executed and so holds its slot on every device.
    let op = if setup.known(&rxe::SLOTS_FREED_EARLY) {
        SendOp::Send
    } else {
        SendOp::Write(to.remote(0))
    };
    let list: Vec<_> =
        (0..depth as u64 + 3).map(|id| request(id, op, SIGNALED, Data::Inline(&[1; 8]))).collect();
    let refused = a.post(&list).unwrap_err();
    if !setup.is_software() && refused.error.verb == "ibv_wr_complete" {
        // The list is posted whole or not at all.
        assert_eq!(refused.posted, 0);
        return assert_eq!(outcome(&a.sent(0)), []);
    }
    assert_eq!(
        (refused.posted, refused.error.verb, refused.error.errno),
        (depth, "ibv_post_send", ENOMEM)
    );
    (0..depth as u64).for_each(|id| b.recv(id, &[to.sge(0, 8)]).unwrap());
    let done = a.sent(depth);
    assert_eq!(
        done.iter().map(|wc| wc.wr_id.0).collect::<Vec<_>>(),
        (0..depth as u64).collect::<Vec<_>>()
    );
}

#[test]
fn polling_a_receive_completion_frees_its_slot() {
    let mut options = Options::default();
    options.caps.max_recv_wr = 2;
    let (a, b, setup) = connected(&options);
    let depth = u64::from(rxe::depth(&setup.b, b.qp.caps().max_recv_wr));
    for id in 0..depth {
        b.recv(id, &[]).unwrap();
    }
    assert_eq!(b.recv(9, &[]).unwrap_err().error.errno, ENOMEM);
    a.send(1, SendOp::Send, &[]).unwrap();
    a.sent(1);
    if !setup.known(&rxe::SLOTS_FREED_EARLY) {
        assert_eq!(
            b.recv(9, &[]).unwrap_err().error.errno,
            ENOMEM,
            "consumption alone frees no slot"
        );
    }
    assert_eq!(outcome(&b.received(1)), [(0, WcStatus::SUCCESS)]);
    b.recv(9, &[]).unwrap();
    assert_eq!(b.recv(9, &[]).unwrap_err().error.errno, ENOMEM);
}

#[test]
fn completions_arrive_in_posting_order_with_their_opcodes() {
    let (a, b, _setup) = connected(&Options::default());
    let (from, to) = (a.memory(8192), b.memory(8192));
    let (remote, word) = (to.remote(0), from.sge(0, 8));
    for id in 0..3 {
        b.recv(id, &[to.sge(0, 8192)]).unwrap();
    }
    let ops = [
        (SendOp::Read(remote), vec![from.sge(0, 8192)], WcOpcode::RDMA_READ),
        (SendOp::Write(remote), vec![word], WcOpcode::RDMA_WRITE),
        (SendOp::FetchAdd { remote, add: 1 }, vec![word], WcOpcode::FETCH_ADD),
        (SendOp::Send, vec![from.sge(0, 3000)], WcOpcode::SEND),
        (SendOp::CompareSwap { remote, compare: 0, swap: 0 }, vec![word], WcOpcode::COMP_SWAP),
        (SendOp::SendWithImm(tokio_rdma::Imm(5)), vec![], WcOpcode::SEND),
        (
            SendOp::WriteWithImm(remote, tokio_rdma::Imm(6)),
            vec![from.sge(0, 100)],
            WcOpcode::RDMA_WRITE,
        ),
    ];
    for (id, (op, sges, _)) in ops.iter().enumerate() {
        a.send(id as u64, *op, sges).unwrap();
    }
    for (id, (wc, (op, sges, opcode))) in a.sent(ops.len()).iter().zip(&ops).enumerate() {
        assert_eq!(
            (wc.wr_id.0, wc.status, wc.opcode, wc.qpn),
            (id as u64, WcStatus::SUCCESS, *opcode, a.qp.qpn())
        );
        if op.reads_back() {
            assert_eq!(wc.byte_len, sges[0].length, "{op:?}");
        }
    }
    let received = b.received(3);
    let seen: Vec<_> =
        received.iter().map(|wc| (wc.wr_id.0, wc.opcode, wc.byte_len, wc.imm())).collect();
    let expected = [
        (0, WcOpcode::RECV, 3000, None),
        (1, WcOpcode::RECV, 0, Some(tokio_rdma::Imm(5))),
        (2, WcOpcode::RECV_RDMA_WITH_IMM, 100, Some(tokio_rdma::Imm(6))),
    ];
    assert_eq!(seen, expected);
}

#[test]
fn signalled_completion_covers_unsignalled_work_before_it() {
    let (a, b, _setup) = connected(&Options::default());
    let (from, to) = (Memory::patterned(&a.pd, 2400, 3), b.memory(2400));
    for at in 0..24 {
        let flags = if at == 23 { SIGNALED } else { NONE };
        a.send_with(
            at,
            SendOp::Write(to.remote(at as usize * 100)),
            flags,
            Data::Sges(&[from.sge(at as usize * 100, 100)]),
        )
        .unwrap();
    }
    assert_eq!(outcome(&a.sent(1)), [(23, WcStatus::SUCCESS)]);
    assert_eq!(to.all(), from.all());
}

#[test]
fn reads_over_the_outstanding_limit_wait() {
    let (a, b, _setup) =
        connected(&Options { rd_atomic: 1, dest_rd_atomic: 1, ..Options::default() });
    let (to, from) = (a.memory(20 * 3000), Memory::patterned(&b.pd, 20 * 3000, 4));
    for at in 0..20 {
        a.send(
            at,
            SendOp::Read(from.remote(at as usize * 3000)),
            &[to.sge(at as usize * 3000, 3000)],
        )
        .unwrap();
    }
    assert_eq!(outcome(&a.sent(20)), (0..20).map(|id| (id, WcStatus::SUCCESS)).collect::<Vec<_>>());
    assert_eq!(to.all(), from.all());
}

/// Returns the event that each lost completion raises.
fn overrun_event(device: &tokio_rdma::Device) -> AsyncEvent {
    let mut seen = Vec::new();
    eventually("an event", || {
        seen.extend(events(device));
        (!seen.is_empty()).then_some(())
    });
    assert!(seen.iter().all(|event| *event == seen[0]), "{seen:?}");
    seen[0]
}

#[test]
fn overrun_by_sends_fails_the_queue_and_its_queue_pairs() {
    if skip_on_emulated_device(
        "overrun_by_sends_fails_the_queue_and_its_queue_pairs",
        "an overrun is reported by an event, which queues of the verbs layer do not read",
    ) {
        return;
    }
    let options = Options { send_cqe: 2, ..Options::default() };
    let (a, b, setup) = connected(&options);
    if a.send_cq.capacity() > 8 {
        return skip("overrun_by_sends", "the completion queue was rounded up");
    }
    let to = b.memory(8);
    let other = End::on(
        &setup.a,
        &options,
        a.send_cq.clone(),
        Cq::new(&setup.a, 8, None, 0).unwrap(),
        None,
    );
    let third = End::new(&setup.b, &options);
    connect(&other, &third, &options);
    other.recv(50, &[]).unwrap();
    for id in 0..u64::from(a.send_cq.capacity()) + 1 {
        a.send_with(id, SendOp::Write(to.remote(0)), SIGNALED, Data::Inline(&[1; 8])).unwrap();
    }
    if setup.known(&rxe::OVERRUN_IS_AN_EVENT) {
        assert_eq!(overrun_event(&setup.a), AsyncEvent::CqError { cq: a.send_cq.id() });
        let kept = u64::from(a.send_cq.capacity());
        let done: Vec<_> = (0..kept).map(|id| (id, WcStatus::SUCCESS)).collect();
        assert_eq!(outcome(&a.sent(done.len())), done);
        let states = [a.state(), b.state(), other.state(), third.state()];
        return assert_eq!(states, [QpState::Rts; 4]);
    }
    eventually("overrun", || a.send_cq.poll(&mut []).is_err().then_some(()));
    for _ in 0..3 {
        let error = a.send_cq.poll(&mut [WorkCompletion::default(); 4]).unwrap_err();
        assert_eq!((error.verb, error.errno), ("ibv_poll_cq", 5));
    }
    eventually("ERR", || {
        (a.state() == QpState::Err && other.state() == QpState::Err).then_some(())
    });
    assert_eq!(outcome(&other.received(1)), [(50, WcStatus::WR_FLUSH_ERR)]);
    assert_eq!((b.state(), third.state()), (QpState::Rts, QpState::Rts));
    let mut qps = [a.qp.qpn(), other.qp.qpn()];
    qps.sort_unstable();
    let expected = [
        AsyncEvent::CqError { cq: a.send_cq.id() },
        AsyncEvent::QpFatal(qps[0]),
        AsyncEvent::QpFatal(qps[1]),
    ];
    let mut seen = Vec::new();
    eventually("three events", || {
        seen.extend(events(&setup.a));
        (seen.len() >= 3).then_some(())
    });
    assert_eq!(seen, expected);
    assert_eq!(events(&setup.b), []);
}

#[test]
fn overrun_by_receives_fails_the_queue_and_its_queue_pair() {
    if skip_on_emulated_device(
        "overrun_by_receives_fails_the_queue_and_its_queue_pair",
        "an overrun is reported by an event, which queues of the verbs layer do not read",
    ) {
        return;
    }
    let options = Options { recv_cqe: 1, retry_count: 1, timeout: 14, ..Options::default() };
    let (a, b, setup) = connected(&options);
    if b.recv_cq.capacity() > 8 {
        return skip("overrun_by_receives", "the completion queue was rounded up");
    }
    let messages = u64::from(b.recv_cq.capacity()) + 1;
    for id in 0..messages {
        b.recv(id, &[]).unwrap();
        a.send(id, SendOp::Send, &[]).unwrap();
    }
    if setup.known(&rxe::OVERRUN_IS_AN_EVENT) {
        assert_eq!(overrun_event(&setup.b), AsyncEvent::CqError { cq: b.recv_cq.id() });
        eventually("ERR", || (b.state() == QpState::Err).then_some(()));
        let done: Vec<_> = (0..messages - 1).map(|id| (id, WcStatus::SUCCESS)).collect();
        assert_eq!(outcome(&poll(&b.recv_cq)[..done.len()]), done);
        let sent = outcome(&a.sent(messages as usize));
        assert_eq!(sent[..done.len()], done);
        return assert_ne!(sent[done.len()].1, WcStatus::SUCCESS);
    }
    eventually("overrun", || b.recv_cq.poll(&mut []).is_err().then_some(()));
    let error = b.recv_cq.poll(&mut [WorkCompletion::default()]).unwrap_err();
    assert_eq!((error.verb, error.errno), ("ibv_poll_cq", 5));
    eventually("ERR", || (b.state() == QpState::Err).then_some(()));
    let expected = [AsyncEvent::CqError { cq: b.recv_cq.id() }, AsyncEvent::QpFatal(b.qp.qpn())];
    let mut seen = Vec::new();
    eventually("two events", || {
        seen.extend(events(&setup.b));
        (seen.len() >= 2).then_some(())
    });
    assert_eq!(seen, expected);
    let (sent, last) = (a.sent(messages as usize), messages);
    a.send(last, SendOp::Send, &[]).unwrap();
    assert!(
        sent.iter().all(|wc| [WcStatus::SUCCESS, WcStatus::RETRY_EXC_ERR].contains(&wc.status))
    );
    let after = a.sent(1)[0].status;
    assert!([WcStatus::RETRY_EXC_ERR, WcStatus::WR_FLUSH_ERR].contains(&after), "{after:?}");
}

/// Returns a pair whose receiver has a channel and 16 posted receives.
fn with_channel() -> (End, End, Channel, Setup) {
    let setup = Setup::new();
    let options = Options::default();
    let channel = Channel::new(&setup.b).unwrap();
    let (a, b) =
        (End::new(&setup.a, &options), End::with(&setup.b, &options, Some(&channel), None));
    connect(&a, &b, &options);
    for id in 0..16 {
        b.recv(id, &[]).unwrap();
    }
    (a, b, channel, setup)
}

const COOKIE: u64 = 2;

fn send(a: &End, solicited: bool) {
    let flags = if solicited { SIGNALED | SendFlags::SOLICITED } else { SIGNALED };
    a.send_with(1, SendOp::Send, flags, Data::Sges(&[])).unwrap();
    a.sent(1);
}

/// Waits for an event, which a real device may raise after the completion is visible.
fn event(channel: &Channel) -> u64 {
    eventually("event", || channel.next_event().unwrap())
}

// Neither unacknowledged events nor surplus acknowledgements block destruction.
#[test]
fn queue_is_destroyed_with_any_number_of_acknowledged_events() {
    for acknowledged in [0, 1, 2, 100] {
        let (a, b, channel, _setup) = with_channel();
        for _ in 0..2 {
            b.recv_cq.arm(false).unwrap();
            send(&a, false);
            assert_eq!(event(&channel), COOKIE);
            b.received(1);
        }
        b.recv_cq.acknowledge(acknowledged);
    }
}

#[test]
fn arm_fires_once_for_the_next_completion() {
    let (a, b, channel, _setup) = with_channel();
    send(&a, false);
    assert_eq!(channel.next_event().unwrap(), None, "not armed");
    b.recv_cq.arm(false).unwrap();
    assert_eq!(channel.next_event().unwrap(), None, "queued completions raise no event");
    send(&a, false);
    send(&a, false);
    assert_eq!(event(&channel), COOKIE);
    assert_eq!(channel.next_event().unwrap(), None, "one arm, one event");
    assert_eq!(b.received(3).len(), 3);
    b.recv_cq.arm(false).unwrap();
    b.recv_cq.arm(false).unwrap();
    send(&a, false);
    assert_eq!((event(&channel), channel.next_event().unwrap()), (COOKIE, None));
    b.recv_cq.acknowledge(2);
}

#[test]
fn solicited_arm_fires_for_solicited_completions_and_errors_only() {
    if skip_on_emulated_device(
        "solicited_arm_fires_for_solicited_completions_and_errors_only",
        "libmlx5 arms from the consumer index, so unpolled completions raise an event",
    ) {
        return;
    }
    let (a, b, channel, _setup) = with_channel();
    b.recv_cq.arm(true).unwrap();
    send(&a, false);
    assert_eq!(channel.next_event().unwrap(), None);
    send(&a, true);
    assert_eq!(event(&channel), COOKIE);
    b.recv_cq.arm(true).unwrap();
    a.send_with(
        2,
        SendOp::WriteWithImm(tokio_rdma::types::RemoteAddr::default(), tokio_rdma::Imm(0)),
        SIGNALED | SendFlags::SOLICITED,
        Data::Sges(&[]),
    )
    .unwrap();
    a.sent(1);
    assert_eq!(event(&channel), COOKIE, "solicited WRITE_WITH_IMM");
    b.recv_cq.arm(true).unwrap();
    // A solicited WRITE consumes no receive and so raises no event.
    let remote = tokio_rdma::types::RemoteAddr::default();
    a.send_with(3, SendOp::Write(remote), SIGNALED | SendFlags::SOLICITED, Data::Sges(&[]))
        .unwrap();
    a.sent(1);
    assert_eq!(channel.next_event().unwrap(), None);
    b.to(QpState::Err);
    assert_eq!(event(&channel), COOKIE, "flushed");
    assert_eq!(channel.next_event().unwrap(), None);
    b.recv_cq.acknowledge(3);
}

#[test]
fn arm_for_any_completion_overrides_a_solicited_arm() {
    if skip_on_emulated_device(
        "arm_for_any_completion_overrides_a_solicited_arm",
        "the last arm request applies",
    ) {
        return;
    }
    let (a, b, channel, _setup) = with_channel();
    b.recv_cq.arm(false).unwrap();
    b.recv_cq.arm(true).unwrap();
    send(&a, false);
    assert_eq!(event(&channel), COOKIE);
    b.recv_cq.arm(true).unwrap();
    b.recv_cq.arm(false).unwrap();
    send(&a, false);
    assert_eq!(event(&channel), COOKIE);
    b.recv_cq.acknowledge(2);
}

#[test]
fn channel_descriptor_is_readable_while_it_has_events() {
    run(1, "channel descriptor", async {
        let (a, b, channel, _setup) = with_channel();
        #[allow(deprecated, reason = "its successor is not in the oldest Tokio we work with")]
        let fd = AsyncFd::with_interest(channel.as_fd().as_raw_fd(), Interest::READABLE).unwrap();
        b.recv_cq.arm(false).unwrap();
        send(&a, false);
        let mut ready = within("readiness", fd.readable()).await.unwrap();
        assert_eq!(event(&channel), COOKIE);
        assert_eq!(channel.next_event().unwrap(), None);
        ready.clear_ready();
        b.received(1);
        b.recv_cq.arm(false).unwrap();
        let (waited, ()) =
            tokio::join!(within("second readiness", fd.readable()), async { send(&a, false) });
        waited.unwrap().clear_ready();
        assert_eq!(event(&channel), COOKIE);
        b.recv_cq.acknowledge(2);
    });
}

#[test]
fn events_of_one_channel_identify_their_queues() {
    let setup = Setup::new();
    let options = Options::default();
    let channel = Channel::new(&setup.b).unwrap();
    let ends: Vec<_> = (0..3)
        .map(|index| {
            let a = End::new(&setup.a, &options);
            let recv_cq = Cq::new(&setup.b, 8, Some(&channel), 100 + index).unwrap();
            let send_cq = Cq::new(&setup.b, 8, None, 0).unwrap();
            let b = End::on(&setup.b, &options, send_cq, recv_cq, None);
            connect(&a, &b, &options);
            b.recv(index, &[]).unwrap();
            b.recv_cq.arm(false).unwrap();
            (a, b)
        })
        .collect();
    for (a, _) in ends.iter().rev() {
        send(a, false);
    }
    let cookies = [(); 3].map(|()| event(&channel));
    assert_eq!(cookies, [102, 101, 100]);
    for (_, b) in &ends {
        b.recv_cq.acknowledge(1);
    }
}

#[test]
fn poll_returns_the_oldest_completions_that_fit() {
    let (a, b, _channel, _setup) = with_channel();
    for _ in 0..5 {
        send(&a, false);
    }
    assert_eq!(b.recv_cq.poll(&mut []).unwrap(), 0);
    let mut two = [WorkCompletion::default(); 2];
    assert_eq!(b.recv_cq.poll(&mut two).unwrap(), 2);
    assert_eq!(outcome(&two), [(0, WcStatus::SUCCESS), (1, WcStatus::SUCCESS)]);
    assert_eq!(
        outcome(&take(&b.recv_cq, 3)),
        [(2, WcStatus::SUCCESS), (3, WcStatus::SUCCESS), (4, WcStatus::SUCCESS)]
    );
    assert_eq!(poll(&b.recv_cq), []);
}

// A waiter arms the queue, polls, and sleeps if a poll returns fewer completions than fit.
#[test]
fn short_poll_means_the_queue_is_empty() {
    let setup = Setup::new();
    let mut options = Options::default();
    (options.caps.max_send_wr, options.caps.max_recv_wr) = (128, 128);
    (options.send_cqe, options.recv_cqe) = (256, 256);
    let (a, b) = (End::new(&setup.a, &options), End::new(&setup.b, &options));
    connect(&a, &b, &options);
    let mut all = [WorkCompletion::default(); 100];
    for (many, capacity) in
        [(15, 32), (16, 32), (17, 32), (32, 32), (33, 100), (99, 100), (100, 100)]
    {
        for id in 0..many {
            b.recv(id, &[]).unwrap();
        }
        for id in 0..many {
            a.send(id, SendOp::Send, &[]).unwrap();
        }
        // When the last send completes, all receives have completed.
        a.sent(many as usize);
        let expected: Vec<_> = (0..many).map(|id| (id, WcStatus::SUCCESS)).collect();
        assert_eq!(
            b.recv_cq.poll(&mut all[..capacity]).unwrap(),
            many as usize,
            "{many} completions, capacity {capacity}"
        );
        assert_eq!(outcome(&all[..many as usize]), expected);
    }
}

#[test]
fn sends_and_receives_can_share_a_queue() {
    let setup = Setup::new();
    let options = Options::default();
    let shared = |device| {
        let cq = Cq::new(device, 64, None, 0).unwrap();
        End::on(device, &options, cq.clone(), cq, None)
    };
    let (a, b) = (shared(&setup.a), shared(&setup.b));
    connect(&a, &b, &options);
    a.recv(1, &[]).unwrap();
    b.recv(2, &[]).unwrap();
    a.send(3, SendOp::Send, &[]).unwrap();
    b.send(4, SendOp::Send, &[]).unwrap();
    for (end, sent, received) in [(&a, 3, 1), (&b, 4, 2)] {
        let mut all = take(&end.send_cq, 2);
        all.sort_by_key(|wc| wc.wr_id.0);
        let opcodes: Vec<_> = all.iter().map(|wc| (wc.wr_id.0, wc.opcode)).collect();
        assert_eq!(opcodes, [(received, WcOpcode::RECV), (sent, WcOpcode::SEND)]);
    }
}

#[test]
fn queue_sizes_and_vectors_over_device_limits_are_refused() {
    let setup = Setup::new();
    let attr = setup.a.attr();
    let too_large = Cq::new(&setup.a, attr.max_cqe + 1, None, 0).unwrap_err();
    let SetupError::Limit(limit) = too_large else { panic!("{too_large:?}") };
    assert_eq!((limit.asked, limit.allowed), (u64::from(attr.max_cqe) + 1, attr.max_cqe.into()));
    let vector = Cq::on_vector(&setup.a, 8, None, attr.completion_vectors, 0).unwrap_err();
    let SetupError::Limit(limit) = vector else { panic!("{vector:?}") };
    assert_eq!((limit.field, limit.asked), ("completion vector", attr.completion_vectors.into()));
    assert!(Cq::new(&setup.a, 0, None, 0).is_err(), "a queue without entries");
    let channel = Channel::new(&setup.b).unwrap();
    let foreign = Cq::new(&setup.a, 8, Some(&channel), 0).unwrap_err();
    assert_eq!(foreign, SetupError::Foreign { what: "completion channel" });
}

/// A waker that blocks other threads until the gate opens.
struct Gate {
    test: ThreadId,
    entered: AtomicBool,
    open: AtomicBool,
}

impl Wake for Gate {
    fn wake(self: Arc<Self>) {
        if thread::current().id() != self.test {
            self.entered.store(true, Ordering::SeqCst);
            eventually("the gate to open", || self.open.load(Ordering::SeqCst).then_some(()));
        }
    }
}

/// Blocks the polling thread of a [`CompletionMode::BusyPoll`] until dropped.
struct Held {
    gate: Arc<Gate>,
    /// The queue pair of the receive whose waker blocks the thread.
    _receiver: tokio_rdma::QueuePair,
}

impl Held {
    fn hold(device: &Device, mode: CompletionMode) -> Self {
        let pd = device.protection_domain().unwrap();
        let build = |mode| {
            let queue = CompletionQueue::new(device, mode).unwrap();
            tokio_rdma::QueuePair::new(&pd, &queue).unwrap()
        };
        // Two queues, so that only the thread polls the receiver's.
        let (receiver, sender) = (build(mode), build(CompletionMode::Cooperative));
        receiver.connect(&sender.endpoint()).unwrap();
        sender.connect(&receiver.endpoint()).unwrap();
        let test = thread::current().id();
        let gate =
            Arc::new(Gate { test, entered: AtomicBool::new(false), open: AtomicBool::new(false) });
        let waker = Waker::from(gate.clone());
        let mut receive = receiver.recv(());
        assert!(Pin::new(&mut receive).poll(&mut Context::from_waker(&waker)).is_pending());
        let mut send = sender.send(());
        eventually("a SEND", || {
            Pin::new(&mut send)
                .poll(&mut Context::from_waker(Waker::noop()))
                .is_ready()
                .then_some(())
        });
        eventually("the thread that polls", || gate.entered.load(Ordering::SeqCst).then_some(()));
        Self { gate, _receiver: receiver }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.gate.open.store(true, Ordering::SeqCst);
    }
}

#[test]
fn failed_completion_queue_fails_every_operation() {
    // The operation layer reserves entries, so only verbs objects can overrun its queue.
    for mode in ["event", "busy_poll", "cooperative", "hybrid"] {
        run(1, mode, async {
            let setup = Setup::new();
            let completion_mode = crate::common::mode(mode);
            let queue = CompletionQueue::builder(&setup.a)
                .capacity(4)
                .mode(completion_mode.clone())
                .build()
                .unwrap();
            if queue.capacity() > 8 {
                return skip("failed_completion_queue", "the completion queue was rounded up");
            }
            if setup.known(&rxe::OVERRUN_IS_AN_EVENT) {
                return skip(
                    "failed_completion_queue",
                    "an overrun does not fail a completion queue",
                );
            }
            let pd = setup.a.protection_domain().unwrap();
            let build = || {
                tokio_rdma::QueuePair::builder(&pd, &queue)
                    .max_send_wr(1)
                    .max_recv_wr(1)
                    .build()
                    .unwrap()
            };
            let (first, second) = (build(), build());
            first.connect(&second.endpoint()).unwrap();
            second.connect(&first.endpoint()).unwrap();
            let pool = tokio_rdma::Pool::new(&pd, 64, 4).unwrap();
            let receives =
                [first.recv(pool.try_alloc(8).unwrap()), second.recv(pool.try_alloc(8).unwrap())];
            let options = Options::default();
            let recv_cq = Cq::new(&setup.a, 8, None, 0).unwrap();
            let shared = queue.verbs().clone();
            let intruder = End::on(&setup.a, &options, shared.clone(), recv_cq, None);
            let peer = End::new(&setup.b, &options);
            connect(&intruder, &peer, &options);
            // The polling thread could keep up with the device, so it is blocked meanwhile.
            let held = (mode == "busy_poll").then(|| Held::hold(&setup.a, completion_mode));
            // Posted until a completion is lost, because the send queue may be full before.
            let write = SendOp::Write(tokio_rdma::types::RemoteAddr::default());
            let list: Vec<_> = (0..16)
                .map(|id| request(u64::MAX - id, write, SIGNALED, Data::Sges(&[])))
                .collect();
            // One of 16384 empty polls reads asynchronous events. An attempt makes a tenth of them,
            // because on a busy machine each attempt yields the processor for milliseconds.
            eventually("overrun", || {
                let _full_or_not = intruder.post(&list);
                (0..1638).any(|_| shared.poll(&mut []).is_err()).then_some(())
            });
            drop(held);
            for receive in receives {
                let error = within("a receive on a failed queue", receive).await.unwrap_err();
                let failed = matches!(error.kind(), OpErrorKind::CompletionQueue(_))
                    || error.status() == Some(WcStatus::WR_FLUSH_ERR);
                assert!(failed, "{mode}: {error}");
                assert_eq!(error.into_buffer().len(), 8);
            }
            let late = within("a late send", first.send(())).await.unwrap_err();
            assert!(
                matches!(late.kind(), OpErrorKind::Closed | OpErrorKind::CompletionQueue(_)),
                "{mode}: {late}"
            );
            drop((first, second));
            assert_eq!(pool.available(), 4, "{mode}: buffers are lost");
        });
    }
}

#[test]
fn event_moderation_is_applied_or_refused() {
    let setup = Setup::new();
    let cq = Cq::new(&setup.a, 16, None, 0).unwrap();
    match cq.moderate(4, Duration::from_micros(50)) {
        Ok(()) => cq.moderate(0, Duration::ZERO).unwrap(),
        // EOPNOTSUPP, or ENOSYS from drivers without the call.
        Err(SetupError::Verb(error)) => assert!([95, 38].contains(&error.errno), "{error}"),
        Err(error) => panic!("{error}"),
    }
    let too_long = cq.moderate(1, Duration::from_secs(1)).unwrap_err();
    assert!(matches!(too_long, SetupError::Limit(limit) if limit.allowed == 65535), "{too_long}");
}

#[test]
fn resized_queue_keeps_its_completions() {
    let (a, b, setup) = connected(&Options { send_cqe: 8, ..Options::default() });
    let send = |id| {
        b.recv(id, &[]).unwrap();
        a.send(id, SendOp::Send, &[]).unwrap();
        assert_eq!(outcome(&b.received(1)), [(id, WcStatus::SUCCESS)]);
    };
    (1..=3).for_each(send);
    let before = a.send_cq.capacity();
    for (asked, least) in [(0, 1), (a.device.attr().max_cqe + 1, 0)] {
        let refused = a.send_cq.resize(asked).unwrap_err();
        let typed = match refused {
            SetupError::TooSmall { .. } => least == 1,
            SetupError::Limit(_) => least == 0,
            _ => false,
        };
        assert!(typed, "{asked}: {refused:?}");
    }
    match a.send_cq.resize(100) {
        Err(SetupError::Verb(error))
            if !setup.is_software() && a.device.attr().vendor_id == 0x2c9 =>
        {
            assert_eq!((error.errno, a.send_cq.capacity()), (VerbError::EOPNOTSUPP, before));
            return;
        }
        resized => resized.unwrap(),
    }
    assert!(a.send_cq.capacity() >= 100);
    // More than fitted before.
    (4..=24).for_each(send);
    let fewer = a.send_cq.resize(5).unwrap_err();
    assert!(matches!(fewer, SetupError::Verb(error) if error.errno == VerbError::EINVAL));
    assert!(a.send_cq.capacity() >= 100);
    let expected: Vec<_> = (1..=24).map(|id| (id, WcStatus::SUCCESS)).collect();
    assert_eq!(outcome(&a.sent(24)), expected);
    a.send_cq.resize(8).unwrap();
    assert!((8..100).contains(&a.send_cq.capacity()));
    send(25);
    assert_eq!(outcome(&a.sent(1)), [(25, WcStatus::SUCCESS)]);
}
