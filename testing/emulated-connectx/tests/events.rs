//! Completion channels and asynchronous events of the emulated device.

mod common;

use std::time::Duration;

use common::*;
use emulated_connectx::EmulatedConnectX;
use rdma_ibverbs::ffi::*;

/// Long enough for an unwanted event to arrive.
const SHORT: Duration = Duration::from_millis(30);

fn device() -> EmulatedConnectX {
    start(|_| {})
}

/// A connected pair whose completion queue has a channel.
struct Bed {
    a: Qp,
    b: Qp,
    source: Mr,
    target: Mr,
    channel: std::sync::Arc<Channel>,
    cq: std::sync::Arc<Cq>,
    context: std::sync::Arc<Context>,
}

fn bed() -> Bed {
    let context = Context::open(0);
    let pd = Pd::new(&context);
    let channel = Channel::new(&context);
    let cq = Cq::with(&context, 31, Some(&channel));
    let (a, b) = (Qp::new(&pd, RC, Queues::one(&cq)), Qp::new(&pd, RC, Queues::one(&cq)));
    a.connect(b.number(), context.route(), |_| {});
    b.connect(a.number(), context.route(), |_| {});
    Bed {
        a,
        b,
        source: Mr::new(&pd, 256, LOCAL),
        target: Mr::new(&pd, 256, ALL),
        channel,
        cq,
        context,
    }
}

impl Bed {
    fn write(&self, id: u64) {
        self.a.post(Work::write(id, vec![self.source.sge(0, 64)], &self.target, 0));
    }
}

#[test]
fn armed_queue_notifies_of_one_completion() {
    let device = device();
    let bed = bed();
    bed.write(1);
    bed.cq.ok(1);
    assert!(!bed.channel.is_readable(SHORT), "not armed");
    for round in 0..200 {
        bed.cq.arm(false);
        bed.write(round);
        assert!(bed.channel.is_readable(PATIENCE));
        assert_eq!(bed.channel.take(), Some(bed.cq.0));
        bed.cq.ok(round);
        assert_eq!(bed.channel.take(), None);
    }
    device.assert_clean();
}

#[test]
fn arming_after_a_completion_notifies_at_once() {
    let device = device();
    let bed = bed();
    for round in 0..50 {
        let before = device.counters().completions;
        bed.write(round);
        until("the completion", || device.counters().completions > before);
        bed.cq.arm(false);
        assert!(bed.channel.is_readable(PATIENCE));
        assert!(bed.channel.take().is_some());
        bed.cq.ok(round);
    }
    device.assert_clean();
}

#[test]
fn queue_armed_for_solicited_completions_waits_for_one() {
    let device = device();
    let bed = bed();
    bed.b.post_recv(1, vec![]);
    bed.b.post_recv(2, vec![]);
    bed.cq.arm(true);
    bed.a.post(Work::send(0, vec![]).flags(0));
    bed.cq.ok(1);
    assert!(!bed.channel.is_readable(SHORT));
    bed.a.post(Work::send(0, vec![]).flags(SOLICITED));
    assert!(bed.channel.is_readable(PATIENCE));
    assert!(bed.channel.take().is_some());
    bed.cq.ok(2);
    device.assert_clean();
}

#[test]
fn queue_with_an_unread_event_can_be_destroyed() {
    let device = device();
    let bed = bed();
    bed.cq.arm(false);
    bed.write(1);
    assert!(bed.channel.is_readable(PATIENCE));
    let Bed { a, b, channel, cq, .. } = bed;
    drop((a, b));
    // Would hang if the unread event were counted as read.
    drop(cq);
    assert!(!channel.is_readable(Duration::ZERO), "the event went with its queue");
    device.assert_clean();
}

#[test]
fn remote_access_error_raises_an_event_at_the_peer() {
    let device = device();
    let bed = bed();
    bed.a.post(Work::write(1, vec![bed.source.sge(0, 8)], &bed.source, 0));
    bed.cq.fails_with(1, ibv_wc_status::IBV_WC_REM_ACCESS_ERR);
    assert_eq!(bed.context.event(), ibv_event_type::IBV_EVENT_QP_ACCESS_ERR);
    assert_eq!(bed.a.state(), ibv_qp_state::IBV_QPS_ERR);
    assert_eq!(bed.b.state(), ibv_qp_state::IBV_QPS_ERR);
    device.assert_clean();
}

#[test]
fn failed_queue_pair_raises_a_fatal_event() {
    let device = device();
    let bed = bed();
    assert!(!device.fail_queue_pair(0xff_fff0));
    bed.b.post_recv(9, vec![]);
    assert!(device.fail_queue_pair(bed.b.number()));
    assert_eq!(bed.context.event(), ibv_event_type::IBV_EVENT_QP_FATAL);
    bed.cq.fails_with(9, ibv_wc_status::IBV_WC_WR_FLUSH_ERR);
    assert_eq!(bed.b.state(), ibv_qp_state::IBV_QPS_ERR);
}
