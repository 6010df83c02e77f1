//! Over UDP, packets that nobody acknowledges leave at a pace.

use super::*;
use crate::types::WcStatus;

#[test]
fn unreliable_waits_for_the_pace_and_reliable_does_not() {
    let network = over_udp(&["a", "b"]);
    let ends = |transport| connected(&network, &Options { transport, ..Options::default() });
    let ((reliable, its_peer), (unreliable, peer)) = (ends(Transport::Rc), ends(Transport::Uc));
    let device = unreliable.qp.0.device();
    // As if that had just been sent, which takes 200 ms.
    device.endpoint().unwrap().pace().spend(device.network.scheduler.now(), 80_000_000);
    let start = Instant::now();
    let (from, to) = (unreliable.buffer(8), peer.buffer(8));
    unreliable.send(1, SendOp::Write(to.remote(0)), &[from.sge(0, 8)]).unwrap();
    assert!(unreliable.poll().is_empty() || start.elapsed() > Duration::from_millis(199), "it has left");
    let (other, there) = (reliable.buffer(8), its_peer.buffer(8));
    reliable.send(2, SendOp::Write(there.remote(0)), &[other.sge(0, 8)]).unwrap();
    assert_eq!(outcome(&reliable.wait(1)), [(2, WcStatus::SUCCESS)]);
    assert_eq!(outcome(&unreliable.wait(1)), [(1, WcStatus::SUCCESS)]);
    assert!(start.elapsed() > Duration::from_millis(199), "{:?}", start.elapsed());
}
