//! The interface for tests: stepping, faults, held and delayed completions.

mod common;

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use common::*;
use emulated_connectx::{EmulatedConnectX, Release, Status};
use rdma_ibverbs::ffi::*;

/// Returns the device to one test at a time: stepping and holding affect all of it.
fn device() -> (EmulatedConnectX, MutexGuard<'static, ()>) {
    static ALONE: Mutex<()> = Mutex::new(());
    let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    (start(|options| options.manual_stepping = true), alone)
}

fn writes(pair: &Pair, ids: std::ops::Range<u64>) {
    for id in ids {
        pair.a.post(Work::write(id, vec![pair.source.sge(0, 8)], &pair.target, 8 * id));
    }
}

#[test]
fn steps_execute_one_request_each_in_turn() {
    let (device, _alone) = device();
    let pairs = [Pair::new(RC), Pair::new(RC)];
    assert!(!device.step());
    pairs.iter().for_each(|pair| writes(pair, 0..3));
    for id in 0..3 {
        assert!(device.step() && device.step());
        pairs.iter().for_each(|pair| pair.succeed(id..id + 1));
        assert!(pairs.iter().all(|pair| pair.a.queues.send.poll().is_none()));
    }
    assert!(!device.step());
    device.assert_clean();
}

#[test]
fn chosen_request_fails_with_the_chosen_status() {
    let (device, _alone) = device();
    for (status, expected) in [
        (Status::RemoteAborted, ibv_wc_status::IBV_WC_REM_ABORT_ERR),
        (Status::LocalProtection, ibv_wc_status::IBV_WC_LOC_PROT_ERR),
        (Status::RetryExceeded, ibv_wc_status::IBV_WC_RETRY_EXC_ERR),
    ] {
        let (pair, other) = (Pair::new(RC), Pair::new(RC));
        device.fail_request(Some(pair.a.number()), 2, status);
        writes(&other, 0..4);
        writes(&pair, 0..4);
        device.run_until_idle(100);
        other.succeed(0..4);
        pair.succeed(0..2);
        pair.a.queues.send.fails_with(2, expected);
        pair.a.queues.send.fails_with(3, ibv_wc_status::IBV_WC_WR_FLUSH_ERR);
        assert_eq!(pair.b.state(), ibv_qp_state::IBV_QPS_RTS, "the peer is unaffected");
    }
    device.assert_clean();
}

#[test]
fn held_completions_come_in_the_order_of_the_release() {
    let (device, _alone) = device();
    for (order, expected) in [
        (Release::InOrder, [0, 1, 10, 11]),
        (Release::QueuePairsReversed, [10, 11, 0, 1]),
        (Release::Interleaved, [0, 10, 1, 11]),
    ] {
        let context = Context::open(0);
        let pd = Pd::new(&context);
        let cq = Cq::new(&context, 31);
        let make = || Qp::new(&pd, RC, Queues::one(&cq));
        let (a, b, c, d) = (make(), make(), make(), make());
        for (from, to) in [(&a, &b), (&b, &a), (&c, &d), (&d, &c)] {
            from.connect(to.number(), context.route(), |_| {});
        }
        let memory = Mr::new(&pd, 64, ALL);
        device.hold_completions(None);
        for (qp, from) in [(&a, 0), (&c, 10)] {
            for id in from..from + 2 {
                qp.post(Work::write(id, vec![memory.sge(0, 8)], &memory, 8));
                device.run_until_idle(10);
            }
        }
        assert_eq!(device.held_completions(), 4);
        assert!(cq.poll().is_none());
        device.release_completions(order);
        assert_eq!(expected.map(|_| cq.next().wr_id), expected, "{order:?}");
    }
    device.assert_clean();
}

#[test]
fn completions_of_one_queue_pair_are_held_and_others_are_not() {
    let (device, _alone) = device();
    let (held, free) = (Pair::new(RC), Pair::new(RC));
    device.hold_completions(Some(held.a.number()));
    writes(&held, 0..2);
    writes(&free, 0..2);
    device.run_until_idle(10);
    free.succeed(0..2);
    assert!(held.a.queues.send.poll().is_none());
    assert_eq!(held.target.bytes()[..8], held.source.bytes()[..8]);
    device.release_completions(Release::InOrder);
    held.succeed(0..2);
    // Held completions are dropped with their queue pair.
    device.hold_completions(None);
    writes(&held, 0..1);
    device.run_until_idle(10);
    drop(held);
    assert_eq!(device.held_completions(), 0);
    device.release_completions(Release::InOrder);
    device.assert_clean();
}

#[test]
fn delayed_completions_come_later() {
    let (device, _alone) = device();
    let pair = Pair::new(RC);
    let delay = Duration::from_millis(20);
    device.delay_completions(delay);
    writes(&pair, 0..3);
    let before = Instant::now();
    device.run_until_idle(10);
    device.delay_completions(Duration::ZERO);
    pair.succeed(0..3);
    assert!(before.elapsed() >= delay);
    device.assert_clean();
}

#[test]
fn counters_count() {
    let (device, _alone) = device();
    let without = device.counters();
    let pair = Pair::new(RC);
    let before = device.counters();
    // Each end has at least 32 requests, and 32 receives with lists of 4.
    assert!(before.queue_bytes - without.queue_bytes >= 2 * 2 * 32 * 64);
    writes(&pair, 0..5);
    device.run_until_idle(10);
    let after = device.counters();
    assert_eq!(after.queue_bytes, before.queue_bytes);
    assert_eq!((after.requests - before.requests, after.completions - before.completions), (5, 5));
    assert!((1..=5).contains(&(after.doorbells - before.doorbells)));
    assert_eq!(after.errors, before.errors);
}

#[test]
fn attempts_without_a_receive_are_counted() {
    let (device, _alone) = device();
    for retries in [0, 1, 5] {
        let pair = Pair::with(RC, None, |attr| attr.rnr_retry = retries);
        let before = device.counters();
        pair.a.post(Work::send(1, vec![]));
        assert_eq!(device.run_until_idle(1000), usize::from(retries) + 1);
        pair.a.queues.send.fails_with(1, ibv_wc_status::IBV_WC_RNR_RETRY_EXC_ERR);
        assert_eq!(device.counters().rnr_naks - before.rnr_naks, u64::from(retries) + 1);
        assert_eq!(pair.b.state(), ibv_qp_state::IBV_QPS_RTS);
    }
    // Infinite retries, until a receive is posted.
    let pair = Pair::new(RC);
    pair.a.post(Work::send(1, vec![]));
    assert_eq!(device.run_until_idle(100), 100);
    pair.b.post_recv(2, vec![]);
    assert_eq!(device.run_until_idle(100), 1);
    pair.a.queues.send.ok(1);
    pair.b.queues.recv.ok(2);

    for retries in [0, 3] {
        let pair = Pair::with(RC, None, |attr| attr.retry_cnt = retries);
        assert_eq!(pair.b.to(ibv_qp_state::IBV_QPS_RESET), 0);
        let before = device.counters();
        pair.a.post(Work::send(1, vec![]));
        device.run_until_idle(1000);
        pair.a.queues.send.fails_with(1, ibv_wc_status::IBV_WC_RETRY_EXC_ERR);
        assert!(device.counters().timeouts - before.timeouts > u64::from(retries));
    }
    device.assert_clean();
}
