//! Over UDP, threads that post to one queue pair at the same time send its packets in order.

use super::*;
use rdma_provider::types::WcStatus;

const THREADS: u64 = 4;
const POSTS: u64 = 1000;
/// Three packets.
const LENGTH: usize = 10_000;

#[test]
fn concurrent_posts_keep_packets_in_order() {
    // With this timeout, 134 s, no request fails on a busy machine. The device still retransmits a
    // packet whose acknowledgement is late.
    let options = Options { mtu: Mtu::Mtu4096, timeout: 25, ..Options::default() };
    let network = over_udp(&["a", "b"]);
    let (a, b) = connected(&network, &options);
    let (from, to) = (a.buffer(LENGTH), b.buffer(LENGTH));
    let (sge, remote) = (from.sge(0, LENGTH), to.remote(0));
    let begin = Instant::now();
    std::thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| {
                for post in 0..POSTS {
                    // The send queue is full until completions are polled.
                    while a.send(post, SendOp::Write(remote), &[sge]).is_err() {
                        assert!(begin.elapsed() < HANG, "the send queue stays full");
                        std::thread::yield_now();
                    }
                }
            });
        }
        let mut completed = 0;
        while completed < THREADS * POSTS {
            assert!(begin.elapsed() < HANG, "{completed} writes completed");
            for completion in a.poll() {
                assert_eq!(completion.status, WcStatus::SUCCESS);
                completed += 1;
            }
            std::thread::yield_now();
        }
    });
    let (sent, received) = (a.qp.counters().0, b.qp.counters().1);
    assert_eq!(received.out_of_sequence, 0, "{sent:?}");
    assert!(received.duplicates <= sent.retransmitted, "{received:?}, {sent:?}");
    assert_eq!(sent.packets - sent.retransmitted, THREADS * POSTS * 3);
}
