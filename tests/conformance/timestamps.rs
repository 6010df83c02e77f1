//! Completions with the time at which the device wrote them.

use std::time::Instant;

use futures::future::{join, join_all};
use tokio_rdma::types::{RemoteAddr, Rkey, SendOp, Timestamp, TimestampedCompletion, Transport};
use tokio_rdma::verbs::{Cq, DeviceClock};
use tokio_rdma::{CompletionQueue, Device, SharedReceiveQueue};

use crate::common::pair::{Pair, Shape};
use crate::common::raw::{End, Options, connect};
use crate::common::{Setup, Wire, eventually, hardware, in_every_mode, skip, within};

/// More than a poll takes at once.
const MESSAGES: usize = 40;

/// Returns false on a device without a clock, which refuses queues with timestamps.
fn has_clock(device: &Device, test: &str) -> bool {
    const REFUSAL: &str = "unsupported: the device lacks completion timestamps";
    let has = device.attr().clock.is_some();
    if !has {
        let queue = CompletionQueue::builder(device).timestamps(true).build();
        assert_eq!(queue.unwrap_err().to_string(), REFUSAL);
        assert_eq!(DeviceClock::new(device).unwrap_err().to_string(), REFUSAL);
        skip(test, "the device has no clock");
    }
    has
}

/// Returns true if both ends have the same clock, and a message is received before the completion
/// of its SEND is written. An adapter may acknowledge it earlier.
fn receives_first() -> bool {
    match crate::wire() {
        Wire::Udp => false,
        Wire::Emulated => true,
        _ => hardware().is_none(),
    }
}

in_every_mode! {
    operations_return_times_between_post_and_result,
    operation_without_timestamps_returns_none,
    shared_receive_returns_its_time,
}

async fn operations_return_times_between_post_and_result(mode: &str) {
    let setup = Setup::new();
    if !has_clock(&setup.a, "operations_return_times") {
        return;
    }
    let shape = Shape { timestamps: true, ..Shape::new(Transport::Rc, mode) };
    let Pair { a, b, setup: _setup } = Pair::shaped(setup, &shape);
    let region = b.region(8);
    let before = Instant::now();
    let clock = |device: &Device| DeviceClock::new(device).unwrap();
    let (mut ours, mut theirs) = (clock(a.pd.device()), clock(b.pd.device()));
    let receives: Vec<_> = (0..MESSAGES).map(|_| b.qp.recv(b.blank(8)).timestamped()).collect();
    let sends: Vec<_> = (0..MESSAGES).map(|_| a.qp.send(a.buffer(&[1; 8])).timestamped()).collect();
    let read = a.qp.read(a.blank(8), region.grant()).timestamped();
    let done = async {
        let (received, sent) = join(join_all(receives), join_all(sends)).await;
        (received, sent, read.await)
    };
    let (received, sent, read) = within("messages", done).await;
    ours.synchronize().unwrap();
    theirs.synchronize().unwrap();
    let after = Instant::now();
    let received: Vec<_> = received.into_iter().map(|it| it.unwrap().1.unwrap()).collect();
    let sent: Vec<_> = sent.into_iter().map(|it| it.unwrap().1.unwrap()).collect();
    let (bytes, executed) = read.unwrap();
    assert_eq!(&bytes[..], [0; 8]);
    assert!(sent.last().unwrap().0 <= executed.unwrap().0);
    for (times, clock) in [(&received, &theirs), (&sent, &ours)] {
        assert!(times.is_sorted_by_key(|time| time.0), "{times:?}");
        for &time in times {
            // Between two samples, conversion adds no error that leaves their interval.
            let instant = clock.instant(time);
            assert!(before <= instant && instant <= after, "{time:?} {clock:?}");
        }
    }
    if receives_first() {
        let pairs = received.iter().zip(&sent);
        assert!(
            pairs.clone().all(|(received, sent)| received.0 <= sent.0),
            "{received:?} {sent:?}"
        );
    }
}

async fn operation_without_timestamps_returns_none(mode: &str) {
    let Pair { a, b, setup: _setup } = Pair::new(Transport::Rc, mode);
    let receive = b.qp.recv(b.blank(8)).timestamped();
    let send = a.qp.send(a.buffer(&[1; 8])).timestamped();
    let (received, sent) = within("a message", join(receive, send)).await;
    let (received, time) = received.unwrap();
    assert_eq!((&received.buffer[..], time), (&[1; 8][..], None));
    assert_eq!(sent.unwrap().1, None);
}

async fn shared_receive_returns_its_time(mode: &str) {
    let setup = Setup::new();
    if !has_clock(&setup.a, "shared_receive") {
        return;
    }
    let queue = CompletionQueue::builder(&setup.a).mode(crate::common::mode(mode));
    let queue = queue.timestamps(true).build().unwrap();
    let pd = setup.a.protection_domain().unwrap();
    let srq = SharedReceiveQueue::new(&pd, &queue, 4, 1).unwrap();
    let qp =
        tokio_rdma::QueuePair::builder(&pd, &queue).shared_receive_queue(&srq).build().unwrap();
    qp.connect(&qp.endpoint()).unwrap();
    let pool = tokio_rdma::Pool::new(&pd, 8, 4).unwrap();
    for _ in 0..3 {
        let receive = srq.recv(pool.try_alloc(8).unwrap()).timestamped();
        let send = qp.send(pool.copy_from(&[1; 8]).unwrap()).timestamped();
        let (received, sent) = within("a message", join(receive, send)).await;
        let (received, sent) = (received.unwrap().1.unwrap(), sent.unwrap().1.unwrap());
        assert!(!receives_first() || received.0 <= sent.0);
    }
}

/// Polls until one completion arrives.
fn next(cq: &Cq) -> TimestampedCompletion {
    let mut one = [TimestampedCompletion::default()];
    eventually("a completion", || (cq.poll_timestamped(&mut one).unwrap() == 1).then_some(one[0]))
}

#[test]
fn bare_queue_returns_times_in_order_also_after_a_poll_without_them() {
    let setup = Setup::new();
    if !has_clock(&setup.a, "bare_queue") {
        return;
    }
    let options = Options::default();
    let end = |device: &Device| {
        let cq = || Cq::timestamped(device, 64, None, 0, 0).unwrap();
        End::on(device, &options, cq(), cq(), None)
    };
    let (a, b) = (end(&setup.a), end(&setup.b));
    connect(&a, &b, &options);
    let mut clock = DeviceClock::new(&setup.b).unwrap();
    let message = |number| {
        b.recv(number, &[b.scratch.sge(0, 8)]).unwrap();
        a.send(number, SendOp::Send, &[a.scratch.sge(0, 8)]).unwrap();
        assert!(next(&a.send_cq).completion.status.is_success());
    };
    message(1);
    let mut one = [Default::default()];
    eventually("a completion", || (b.recv_cq.poll(&mut one).unwrap() == 1).then_some(()));
    let later = Instant::now();
    message(2);
    message(3);
    let (second, third) = (next(&b.recv_cq), next(&b.recv_cq));
    clock.synchronize().unwrap();
    assert_eq!([second, third].map(|it| it.completion.wr_id.0), [2, 3]);
    assert!(second.timestamp.0 <= third.timestamp.0);
    assert_eq!(second.completion.byte_len, 8);
    if setup.is_software() {
        assert!(clock.instant(second.timestamp) + clock.error() >= later, "{clock:?}");
    }
    // A failure has no time.
    let wrong = RemoteAddr { addr: 8, rkey: Rkey(0xdead_be00) };
    a.send(4, SendOp::Write(wrong), &[a.scratch.sge(0, 8)]).unwrap();
    let failed = next(&a.send_cq);
    assert!(!failed.completion.status.is_success());
    assert_eq!((failed.completion.wr_id.0, failed.timestamp), (4, Timestamp(0)));
    let plain = Cq::new(&setup.a, 4, None, 0).unwrap();
    assert_eq!(plain.poll_timestamped(&mut [failed]).unwrap_err().errno, 22);
}
