//! Links that fail, fail in one direction, or recover.

#![allow(unsafe_code)]

use std::time::Duration;

use tokio_rdma::op::RetryConfig;
use tokio_rdma::software::{Faults, Network};
use tokio_rdma::types::{
    AckTimeout, Data, QpState, RecvWr, SendFlags, SendOp, SendWr, Transport, WcStatus, WrId,
};
use tokio_rdma::verbs::Qp;

use super::memory::Memory;
use super::setup::{Side, Terms, connect, fail, is};

const DELAY: Duration = Duration::from_micros(1);

struct Pair {
    qps: [Qp; 2],
    memories: [Memory; 2],
    sides: [Side; 2],
    network: Network,
}

impl Pair {
    fn new(terms: Terms) -> Self {
        let network = Network::simulated(1, Faults::none().delay(DELAY..DELAY));
        let sides = [Side::new(&network, "a"), Side::new(&network, "b")];
        let qps = [0, 1].map(|side: usize| sides[side].queue_pair(Transport::Rc, None, terms.caps));
        connect([(&sides[0], &qps[0], &terms), (&sides[1], &qps[1], &terms)]);
        let memories = [0, 1].map(|side: usize| Memory::new(&sides[side].pd, 4096));
        Self { qps, memories, sides, network }
    }

    fn send(&self, side: usize, wr_id: u64, op: SendOp, len: usize) {
        let sges = [self.memories[side].sge(0, len)];
        let wr = SendWr {
            wr_id: WrId(wr_id),
            op,
            flags: SendFlags::SIGNALED,
            data: Data::Sges(&sges),
            target: None,
        };
        // SAFETY: the memory outlives the queue pairs and is read only after the completion.
        unsafe { self.qps[side].post_send(&[wr]) }.unwrap();
    }

    fn receive(&self, side: usize, wr_id: u64) {
        let sges = [self.memories[side].sge(2048, 2048)];
        // SAFETY: as in `send`.
        unsafe { self.qps[side].post_recv(&[RecvWr { wr_id: WrId(wr_id), sges: &sges }]) }.unwrap();
    }

    fn poll(&self, side: usize) -> Vec<(u64, WcStatus)> {
        self.sides[side].poll().iter().map(|done| (done.wr_id.0, done.status)).collect()
    }

    fn add(&self) -> SendOp {
        SendOp::FetchAdd { remote: self.memories[1].remote(8), add: 1 }
    }

    fn wait(&self, count: usize) -> (Vec<(u64, WcStatus)>, Duration) {
        let (start, mut all) = (self.network.now(), Vec::new());
        while all.len() < count {
            assert!(self.network.step(), "idle after {all:?}");
            all.extend(self.poll(0));
        }
        (all, self.network.now() - start)
    }

    /// Delivers requests of side 0 and drops all answers until there are `count` completions.
    fn lose_answers(&self, count: usize) -> Vec<(u64, WcStatus)> {
        let mut all = Vec::new();
        while all.len() < count {
            // Timers are much longer than the delay of packets, so a packet sent by a timer is a
            // request, and a packet sent on arrival of another is an answer. Only answers are lost,
            // so a request is in flight if more requests than answers were sent.
            let link = self.network.counters();
            let arrives = link.sent - link.lost > link.lost;
            self.network.set_loss(if arrives { 1.0 } else { 0.0 });
            assert!(self.network.step(), "idle after {all:?}");
            all.extend(self.poll(0));
        }
        self.network.set_loss(0.0);
        all
    }
}

#[test]
fn dead_link_fails_within_the_retry_time() {
    for retry_count in [0, 1, 3, 7] {
        for code in [1, 5, 8, 14, 18] {
            let timeout = AckTimeout::from_code(code);
            let pair = Pair::new(Terms { timeout, retry_count, ..Terms::usual() });
            pair.receive(0, 9);
            pair.receive(1, 19);
            // Retries are counted from the last success.
            pair.send(0, 1, SendOp::Write(pair.memories[1].remote(0)), 8);
            assert_eq!(pair.wait(1).0, [(1, WcStatus::SUCCESS)]);
            pair.network.set_loss(1.0);
            for wr_id in 2..5 {
                pair.send(0, wr_id, SendOp::Send, 64);
            }
            let (all, took) = pair.wait(4);
            let mut sends: Vec<_> = all.iter().filter(|done| done.0 != 9).collect();
            sends.sort_by_key(|done| done.0);
            let flushed = WcStatus::WR_FLUSH_ERR;
            assert_eq!(sends, [&(2, WcStatus::RETRY_EXC_ERR), &(3, flushed), &(4, flushed)]);
            assert!(all.contains(&(9, flushed)));
            assert!(is(&pair.qps[0], QpState::Err) && is(&pair.qps[1], QpState::Rts));
            // IBTA 9.7.6.1.3: each wait lasts from once to four times the timeout.
            let each = Duration::from_nanos(timeout.nanoseconds().unwrap());
            let expected = each * (u32::from(retry_count) + 1);
            assert!(
                (expected..=4 * expected).contains(&took),
                "{retry_count} retries of {each:?} took {took:?}"
            );
            // Retransmissions before the timeout has passed once: after 67, 134, 268 and 537 ms.
            let early = if code == 18 { 4 } else { 0 };
            assert_eq!(pair.network.counters().lost, 3 * (u64::from(retry_count) + 1 + early));
            // The peer is unaffected.
            assert!(pair.network.run_until_idle(Duration::from_secs(1)));
            assert_eq!(pair.poll(1), []);
            fail(&pair.qps[1]);
            assert_eq!(pair.poll(1), [(19, flushed)]);
        }
    }
}

#[test]
fn default_options_outlast_five_seconds_and_repair_a_loss_in_less_than_a_tenth() {
    let RetryConfig { timeout, retry_count, .. } = RetryConfig::default();
    let pair = Pair::new(Terms { timeout, retry_count, ..Terms::usual() });
    for round in 0..3 {
        pair.network.set_loss(1.0);
        let start = pair.network.now();
        pair.send(0, round, pair.add(), 8);
        while pair.network.now() - start < Duration::from_secs(5) {
            assert!(pair.network.step());
        }
        assert_eq!(pair.poll(0), []);
        pair.network.set_loss(0.0);
        let (done, took) = pair.wait(1);
        assert_eq!(done, [(round, WcStatus::SUCCESS)]);
        assert!(took <= Duration::from_millis(1100), "{took:?} after the outage");
        assert_eq!(pair.memories[1].word(8), round + 1);

        // One packet is lost, and none follows it.
        let sent = pair.network.counters().sent;
        pair.network.set_loss(1.0);
        pair.send(0, 10 + round, SendOp::Write(pair.memories[1].remote(0)), 8);
        while pair.network.counters().sent == sent {
            assert!(pair.network.step());
        }
        pair.network.set_loss(0.0);
        let (done, took) = pair.wait(1);
        assert_eq!(done, [(10 + round, WcStatus::SUCCESS)]);
        assert!(took < Duration::from_millis(100), "{took:?} after a loss");
    }
}

#[test]
fn link_restored_in_time_loses_nothing() {
    for retry_count in 1..=7 {
        let pair = Pair::new(Terms { retry_count, ..Terms::usual() });
        let each = Duration::from_nanos(Terms::usual().timeout.nanoseconds().unwrap());
        // The second outage has all retries again.
        for round in 1..=2 {
            pair.network.set_loss(1.0);
            pair.receive(1, round);
            pair.send(0, 10 * round, pair.add(), 8);
            pair.send(0, 10 * round + 1, SendOp::Send, 100);
            let start = pair.network.now();
            while pair.network.now() - start < each * u32::from(retry_count - 1) {
                assert!(pair.network.step());
            }
            assert_eq!(pair.poll(0), []);
            pair.network.set_loss(0.0);
            assert_eq!(pair.wait(1).0, [(10 * round, WcStatus::SUCCESS)]);
            assert!(pair.network.run_until_idle(Duration::from_secs(1)));
            assert_eq!(pair.poll(0), [(10 * round + 1, WcStatus::SUCCESS)]);
            assert_eq!(pair.poll(1), [(round, WcStatus::SUCCESS)]);
            assert_eq!(pair.memories[1].word(8), round);
        }
    }
}

#[test]
fn retransmitted_request_is_executed_once() {
    for retry_count in [0, 2, 7] {
        let pair = Pair::new(Terms { retry_count, ..Terms::usual() });
        pair.send(0, 1, pair.add(), 8);
        assert_eq!(pair.lose_answers(1), [(1, WcStatus::RETRY_EXC_ERR)]);
        assert_eq!(
            pair.memories[1].word(8),
            1,
            "executed once although sent {} times",
            retry_count + 1
        );
        let pair = Pair::new(Terms { retry_count, ..Terms::usual() });
        pair.receive(1, 5);
        pair.receive(1, 6);
        pair.send(0, 1, SendOp::Send, 100);
        assert_eq!(pair.lose_answers(1), [(1, WcStatus::RETRY_EXC_ERR)]);
        assert_eq!(pair.poll(1), [(5, WcStatus::SUCCESS)], "delivered once");
        fail(&pair.qps[1]);
        assert_eq!(pair.poll(1), [(6, WcStatus::WR_FLUSH_ERR)]);
    }
}

#[test]
fn retransmitted_atomic_returns_the_first_result() {
    let pair = Pair::new(Terms::usual());
    pair.send(0, 1, pair.add(), 8);
    // Three times, the request arrives and its answer is lost.
    for loss in [1.0, 0.0, 1.0, 0.0, 1.0, 0.0] {
        pair.network.set_loss(loss);
        let sent = pair.network.counters().sent;
        while pair.network.counters().sent == sent {
            assert!(pair.network.step());
        }
    }
    // The owner changes the word, but a repeated answer has the first result.
    assert_eq!(pair.memories[1].word(8), 1);
    pair.memories[1].fill(8, &77_u64.to_ne_bytes());
    assert_eq!(pair.wait(1).0, [(1, WcStatus::SUCCESS)]);
    assert_eq!((pair.memories[0].word(0), pair.memories[1].word(8)), (0, 77));
}

#[test]
fn port_outage_loses_nothing() {
    for down in ["a", "b"] {
        let pair = Pair::new(Terms::usual());
        let control = pair.network.control(down).unwrap();
        pair.receive(1, 5);
        control.set_port(false);
        pair.send(0, 1, SendOp::Send, 100);
        let each = Duration::from_nanos(Terms::usual().timeout.nanoseconds().unwrap());
        while pair.network.now() < 3 * each {
            assert!(pair.network.step());
        }
        assert_eq!((pair.poll(0), pair.poll(1)), (vec![], vec![]));
        control.set_port(true);
        assert_eq!(pair.wait(1).0, [(1, WcStatus::SUCCESS)]);
        assert_eq!(pair.poll(1), [(5, WcStatus::SUCCESS)]);
    }
}
