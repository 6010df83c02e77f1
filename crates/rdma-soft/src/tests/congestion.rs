//! Congestion: marked packets, notifications, and the window of requesters.

use super::*;
use crate::net::node::Node;
use crate::roce::ip_fields::Origin;
use crate::roce::packet::{Body, Packet};
use rdma_provider::types::{Gid, WcStatus};

/// Traffic class ECT(0): switches may mark the packets.
const MARKABLE: u8 = 2;
const SENDERS: usize = 8;
const LENGTH: usize = 64 << 10;
const WRITES: usize = 16;

/// Sums over all queue pairs.
#[derive(Debug, Default)]
struct Outcome {
    link: LinkCounters,
    retransmitted: u64,
    /// Packets that arrived with a mark, and notifications sent and received.
    marked: u64,
    notified: u64,
    handled: u64,
}

/// Writes from eight devices to one, behind a link of 10 Gbit/s with a buffer of 256 KiB, twice.
/// Returns the counters after both rounds, and the time of the second.
///
/// The windows of all senders together exceed the buffer, so the first round begins with losses
/// whatever the senders do later.
fn incast(transport: Transport, traffic_class: u8) -> (Outcome, Outcome, Duration) {
    let queue = Bottleneck { rate: 1_250_000_000, buffer: 256 << 10, mark_above: Some(64 << 10) };
    let delay = Duration::from_micros(5)..Duration::from_micros(5);
    let network = Network::simulated(3, Faults::none().delay(delay).bottleneck(queue));
    let options = Options { transport, traffic_class, timeout: 14, ..Options::default() };
    let all: Vec<_> = (0..SENDERS)
        .map(|number| {
            let (from, to) = (format!("sender {number}"), "receiver");
            let pair = (End::new(&network, &from, &options), End::new(&network, to, &options));
            connect(&pair.0, &pair.1, &options);
            let buffers = (pair.0.buffer(LENGTH), pair.1.buffer(LENGTH));
            buffers.0.fill((0..LENGTH).map(|at| (at % 251) as u8 ^ number as u8));
            (pair, buffers)
        })
        .collect();
    let write_all = || {
        let start = network.now();
        for ((sender, _), (from, to)) in &all {
            for write in 0..WRITES {
                let sges = [from.sge(0, LENGTH)];
                sender.send(write as u64, SendOp::Write(to.remote(0)), &sges).unwrap();
            }
        }
        for ((sender, _), (from, to)) in &all {
            let done = sender.wait(WRITES);
            assert!(done.iter().all(|done| done.status == WcStatus::SUCCESS), "{done:?}");
            if transport == Transport::Rc {
                assert_eq!(to.bytes(0, LENGTH), from.bytes(0, LENGTH));
            }
        }
        let time = network.now() - start;
        // Timers that are not needed any more.
        assert!(network.run_until_idle(Duration::from_secs(1)));
        time
    };
    let counters = || {
        let mut outcome = Outcome { link: network.counters(), ..Outcome::default() };
        for ((sender, receiver), _) in &all {
            let ((sent, _), (_, received)) = (sender.qp.0.counters(), receiver.qp.0.counters());
            outcome.retransmitted += sent.retransmitted;
            outcome.handled += sent.congestion_notifications;
            outcome.marked += received.marked;
            outcome.notified += received.congestion_notifications;
        }
        outcome
    };
    write_all();
    let first = counters();
    let time = write_all();
    (first, counters(), time)
}

#[test]
fn notified_senders_lose_no_packets_where_others_lose_many() {
    let (before, without, slow) = incast(Transport::Rc, 0);
    let lost_without = without.link.lost - before.link.lost;
    assert!(lost_without > 100 && without.retransmitted > before.retransmitted, "{without:?}");
    assert_eq!((without.link.marked, without.handled), (0, 0));
    let (before, with, fast) = incast(Transport::Rc, MARKABLE);
    let lost_with = with.link.lost - before.link.lost;
    assert!(with.link.marked > before.link.marked, "{with:?}");
    assert!(lost_with * 10 < lost_without, "{lost_with} and {lost_without}: {with:?}");
    assert!((with.handled, with.marked) == (with.notified, with.link.marked), "{with:?}");
    assert!(fast < slow, "{fast:?} {slow:?}");
    // The link is used: 8 MiB take 6.7 ms at its rate.
    assert!(fast < Duration::from_micros(9_000), "{fast:?}");
}

#[test]
fn notification_is_sent_at_most_once_in_50_us() {
    let (before, after, time) = incast(Transport::Rc, MARKABLE);
    let intervals = (time.as_micros() as u64 / 50 + 1) * SENDERS as u64;
    assert!((1..=intervals).contains(&(after.notified - before.notified)), "{after:?} {time:?}");
}

#[test]
fn notifications_to_an_unreliable_sender_harm_nothing() {
    let (_, outcome, _) = incast(Transport::Uc, MARKABLE);
    assert!(outcome.notified > 0 && outcome.handled == 0, "{outcome:?}");
}

#[test]
fn notifications_of_strangers_and_for_unknown_queue_pairs_are_ignored() {
    let network = Network::simulated(1, Faults::none());
    let (a, b) = connected(&network, &Options::default());
    let stranger = Gid::from(std::net::IpAddr::from([127, 9, 9, 9]));
    let peer = b.address().dgid;
    let deliver = |gid: Gid, qpn: Qpn, pkey: u16| {
        let packet = Packet::congestion_notification(pkey, qpn);
        assert_eq!(packet.body, Body::Congestion);
        let device = std::sync::Arc::clone(&a.qp.0.device);
        let origin = Origin { gid, ..Origin::default() };
        device.receive(&mut std::iter::once((origin, packet, &[][..])))
    };
    let received = || a.qp.0.counters().0.congestion_notifications;
    assert_eq!((deliver(stranger, a.qp.qpn(), DEFAULT_PKEY), received()), (0, 0));
    assert_eq!((deliver(peer, a.qp.qpn(), 0x1234), received()), (0, 0));
    assert_eq!((deliver(peer, Qpn(0x00f0_f0f0), DEFAULT_PKEY), received()), (1, 0));
    assert_eq!((deliver(peer, a.qp.qpn(), DEFAULT_PKEY), received()), (0, 1));
}

#[test]
fn switch_marks_only_packets_of_markable_classes_and_loses_what_does_not_fit() {
    let queue = Bottleneck { rate: 1_000, buffer: 4_000, mark_above: Some(0) };
    let network = Network::simulated(1, Faults::none().bottleneck(queue));
    let options =
        Options { transport: Transport::Uc, traffic_class: MARKABLE, ..Options::default() };
    let (a, b) = connected(&network, &options);
    let (from, to) = (a.buffer(1024), b.buffer(1024));
    for write in 0..8 {
        a.send(write, SendOp::Write(to.remote(0)), &[from.sge(0, 1024)]).unwrap();
    }
    a.wait(8);
    network.run_until_idle(Duration::from_secs(60));
    let counters = network.counters();
    // Three packets of 1,056 bytes fit, of which the first finds an empty queue.
    assert_eq!((counters.lost, counters.marked), (5, 2), "{counters:?}");
    assert!(network.now() > Duration::from_secs(3), "{:?}", network.now());
}
