//! Over UDP, unacknowledged packets are paced.

use super::*;
use rdma_provider::types::{DirectConfig, WcStatus};

#[test]
fn unreliable_sends_are_paced_and_reliable_ones_are_not() {
    let network = over_udp(&["a", "b"]);
    let ends = |transport| connected(&network, &Options { transport, ..Options::default() });
    let ((reliable, its_peer), (unreliable, peer)) = (ends(Transport::Rc), ends(Transport::Uc));
    let device = &unreliable.qp.0.device;
    let start = Instant::now();
    // As if data had just been sent that takes 200 ms.
    device.endpoint().unwrap().pace().spend(device.network.scheduler.now(), 80_000_000);
    let (from, to) = (unreliable.buffer(8), peer.buffer(8));
    unreliable.send(1, SendOp::Write(to.remote(0)), &[from.sge(0, 8)]).unwrap();
    assert!(
        unreliable.poll().is_empty() || start.elapsed() > Duration::from_millis(199),
        "sent without delay"
    );
    let (other, there) = (reliable.buffer(8), its_peer.buffer(8));
    reliable.send(2, SendOp::Write(there.remote(0)), &[other.sge(0, 8)]).unwrap();
    assert_eq!(outcome(&reliable.wait(1)), [(2, WcStatus::SUCCESS)]);
    assert_eq!(outcome(&unreliable.wait(1)), [(1, WcStatus::SUCCESS)]);
    assert!(start.elapsed() > Duration::from_millis(199), "{:?}", start.elapsed());
}

#[test]
fn short_send_is_not_delayed_by_a_busy_queue_pair() {
    const MUCH: u64 = 4;
    let network = over_udp(&["a", "b"]);
    let options = Options { transport: Transport::Uc, mtu: Mtu::Mtu4096, ..Options::default() };
    let (busy, peer) = connected(&network, &options);
    let (mut other, there) = (End::new(&network, "a", &options), End::new(&network, "b", &options));
    // Both use one completion queue, whose order is the order of sending.
    let init = QpInit {
        transport: Transport::Uc,
        send_cq: &busy.cq,
        recv_cq: &busy.cq,
        srq: None,
        caps: options.caps,
        direct: DirectConfig::DEFAULT,
    };
    other.qp = busy.pd.create_qp(&init).unwrap();
    connect(&other, &there, &options);
    let (from, to, to_other) = (busy.buffer(16 << 10), peer.buffer(16 << 10), there.buffer(8));
    let device = &busy.qp.0.device;
    let pace = device.endpoint().unwrap().pace();
    // A packet takes 40 ms, so the next sender must wait unless this thread is not scheduled for as
    // long.
    pace.slow_down(4_000);
    for _ in 0..100 {
        // As if data had just been sent that takes 200 ms.
        let (begin, spent) = (Instant::now(), Duration::from_millis(200));
        pace.spend(device.network.scheduler.now(), 20_000);
        for number in 0..MUCH {
            busy.send(number, SendOp::Write(to.remote(0)), &[from.sge(0, 16 << 10)]).unwrap();
        }
        other.send(MUCH, SendOp::Write(to_other.remote(0)), &[from.sge(0, 8)]).unwrap();
        let in_time = begin.elapsed() < spent;
        let order: Vec<u64> =
            outcome(&busy.wait(1 + MUCH as usize)).into_iter().map(|(number, _)| number).collect();
        if in_time {
            let before = order.iter().position(|&number| number == MUCH).unwrap();
            assert!(before < 2, "{before} of {MUCH} messages were sent before: {order:?}");
            return;
        }
    }
    panic!("not scheduled for 200 ms in 100 attempts");
}
