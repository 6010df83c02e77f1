//! Links that are dead, one-way or heal again.

#![allow(unsafe_code)]

use std::time::Duration;

use tokio_rdma::software::{Faults, Network};
use tokio_rdma::types::{
    AckTimeout, Data, QpState, RecvWr, SendFlags, SendOp, SendWr, Transport, WcStatus, WrId,
};
use tokio_rdma::verbs::Qp;

use super::memory::Memory;
use super::setup::{Side, Terms, connect, end, is};

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
        // SAFETY: the memory outlives the queue pairs and is looked at only after the completion.
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

    /// What comes to side 0, and when.
    fn wait(&self, count: usize) -> (Vec<(u64, WcStatus)>, Duration) {
        let (start, mut all) = (self.network.now(), Vec::new());
        while all.len() < count {
            assert!(self.network.step(), "idle after {all:?}");
            all.extend(self.poll(0));
        }
        (all, self.network.now() - start)
    }

    /// Lets everything from side 0 arrive, and nothing that comes back, until there are `count` completions.
    fn deaf(&self, count: usize) -> Vec<(u64, WcStatus)> {
        let mut all = Vec::new();
        while all.len() < count {
            // Packets take a microsecond and timers much longer: what leaves with a timer is a request, and what
            // leaves when a packet arrives is an answer.
            // All answers are lost, and nothing else: a request is underway if there are more of them than answers.
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
fn a_dead_link_is_noticed_in_time() {
    for retry_count in [0, 1, 3, 7] {
        for code in [1, 5, 8, 14, 18] {
            let timeout = AckTimeout::from_code(code);
            let pair = Pair::new(Terms { timeout, retry_count, ..Terms::usual() });
            pair.receive(0, 9);
            pair.receive(1, 19);
            // The link worked before: retries count from now.
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
            assert_eq!(pair.network.counters().lost, 3 * (u64::from(retry_count) + 1));
            // The other side has heard nothing, and tells when it is asked to do something.
            assert!(pair.network.run_until_idle(Duration::from_secs(1)));
            assert_eq!(pair.poll(1), []);
            end(&pair.qps[1]);
            assert_eq!(pair.poll(1), [(19, flushed)]);
        }
    }
}

#[test]
fn a_link_that_heals_in_time_loses_nothing() {
    for retry_count in 1..=7 {
        let pair = Pair::new(Terms { retry_count, ..Terms::usual() });
        let each = Duration::from_nanos(Terms::usual().timeout.nanoseconds().unwrap());
        // Twice: the first outage does not count for the second.
        for round in 1..=2 {
            pair.network.set_loss(1.0);
            pair.receive(1, round);
            pair.send(0, 10 * round, pair.add(), 8);
            pair.send(0, 10 * round + 1, SendOp::Send, 100);
            // Until only one repetition is left.
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
fn what_was_done_and_not_answered_is_not_done_again() {
    // One-way: requests arrive, answers do not.
    for retry_count in [0, 2, 7] {
        let pair = Pair::new(Terms { retry_count, ..Terms::usual() });
        pair.send(0, 1, pair.add(), 8);
        assert_eq!(pair.deaf(1), [(1, WcStatus::RETRY_EXC_ERR)]);
        assert_eq!(
            pair.memories[1].word(8),
            1,
            "executed once, although sent {} times",
            retry_count + 1
        );
        let pair = Pair::new(Terms { retry_count, ..Terms::usual() });
        pair.receive(1, 5);
        pair.receive(1, 6);
        pair.send(0, 1, SendOp::Send, 100);
        assert_eq!(pair.deaf(1), [(1, WcStatus::RETRY_EXC_ERR)]);
        assert_eq!(pair.poll(1), [(5, WcStatus::SUCCESS)], "delivered once");
        end(&pair.qps[1]);
        assert_eq!(pair.poll(1), [(6, WcStatus::WR_FLUSH_ERR)]);
    }
}

#[test]
fn answers_that_come_at_last_are_those_of_the_first_time() {
    let pair = Pair::new(Terms::usual());
    pair.send(0, 1, pair.add(), 8);
    // The request arrives, the answer is lost, and so are the next two.
    for loss in [1.0, 0.0, 1.0, 0.0, 1.0, 0.0] {
        pair.network.set_loss(loss);
        let sent = pair.network.counters().sent;
        while pair.network.counters().sent == sent {
            assert!(pair.network.step());
        }
    }
    // Meanwhile its owner changes the word.
    assert_eq!(pair.memories[1].word(8), 1);
    pair.memories[1].fill(8, &77_u64.to_ne_bytes());
    assert_eq!(pair.wait(1).0, [(1, WcStatus::SUCCESS)]);
    assert_eq!((pair.memories[0].word(0), pair.memories[1].word(8)), (0, 77));
}

#[test]
fn a_port_that_goes_down_and_comes_back_loses_nothing() {
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
