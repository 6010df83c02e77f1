//! How much peers may ask of a manager: half-open connections, and answers to messages.
//!
//! Both are in fixed memory, or bounded by what they count. What is beyond a limit is as good as lost on the way: peers that
//! mean well repeat it.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, HashMap};

use rdma_provider::types::Gid;

use super::connection::Connection;
use super::message::{CmTimeout, CommId};

/// Requests of one peer that have not come to a connection or to a refusal. A program makes a queue pair for each that it
/// accepts, so this is what a peer can make it hold.
pub(super) const HALF_OPEN_OF_PEER: u32 = 256;
/// Those of all peers.
pub(super) const HALF_OPEN: u32 = 4096;
/// Repetitions of a program's answer that is not confirmed, and nanoseconds between them, while more than half of these records
/// are taken: forged requests would otherwise choose how long each keeps its record. An honest peer confirms at once. Records
/// that [give way](Yielding) need no such haste, and a peer on a busy machine may confirm late.
pub(super) const HURRIED_RETRIES: u8 = 3;
pub(super) const HURRIED_TIMEOUT: u64 = CmTimeout(16).nanoseconds();

/// Connections that peers have begun and not completed.
#[derive(Debug, Default)]
pub(super) struct HalfOpen {
    of_peers: HashMap<Gid, u32>,
    total: u32,
}

impl HalfOpen {
    /// One more, if there may be.
    pub(super) fn open(&mut self, peer: Gid) -> bool {
        if self.is_full() || self.is_full_for(peer) {
            return false;
        }
        *self.of_peers.entry(peer).or_default() += 1;
        self.total += 1;
        true
    }

    /// No peer may begin another.
    pub(super) const fn is_full(&self) -> bool {
        self.total >= HALF_OPEN
    }

    /// This peer may not begin another.
    pub(super) fn is_full_for(&self, peer: Gid) -> bool {
        self.of_peers.get(&peer).is_some_and(|&count| count >= HALF_OPEN_OF_PEER)
    }

    /// True if the record of this connection is scarce, and does not give way.
    pub(super) const fn hurries(&self, connection: &Connection) -> bool {
        connection.half_open && connection.yielding.is_none() && self.total > HALF_OPEN / 2
    }

    /// One that was opened has become something else.
    pub(super) fn close(&mut self, peer: Gid) {
        let Some(count) = self.of_peers.get_mut(&peer) else { return };
        *count -= 1;
        self.total -= 1;
        if *count == 0 {
            self.of_peers.remove(&peer);
        }
    }

    #[cfg(test)]
    pub(super) const fn total(&self) -> u32 {
        self.total
    }
}

/// Half-open connections that the manager has answered in the name of a listener, and that give way: no program knows of
/// them, and no queue pair was made.
#[derive(Debug, Default)]
pub(super) struct Yielding {
    /// Of each peer, by age.
    of_peers: HashMap<Gid, BTreeMap<u64, CommId>>,
    /// Peers by how many they have, then by the age of their oldest: the last has the most, and of those the oldest.
    order: BTreeSet<(usize, Reverse<u64>, Gid)>,
    len: u32,
    last: u64,
}

impl Yielding {
    /// How many there are.
    pub(super) const fn len(&self) -> u32 {
        self.len
    }

    /// Adds one; the number by which it is removed.
    pub(super) fn add(&mut self, peer: Gid, id: CommId) -> u64 {
        self.last += 1;
        self.len += 1;
        let number = self.last;
        self.change(peer, |of_peer| of_peer.extend([(number, id)]));
        number
    }

    pub(super) fn remove(&mut self, peer: Gid, number: u64) {
        self.len -= 1;
        self.change(peer, |of_peer| {
            of_peer.remove(&number);
        });
    }

    /// The oldest of a peer.
    pub(super) fn oldest_of(&self, peer: Gid) -> Option<CommId> {
        self.of_peers.get(&peer)?.first_key_value().map(|(_, &id)| id)
    }

    /// The oldest of the peer that has the most.
    pub(super) fn of_largest_share(&self) -> Option<CommId> {
        self.order.last().and_then(|&(_, _, peer)| self.oldest_of(peer))
    }

    fn change(&mut self, peer: Gid, change: impl FnOnce(&mut BTreeMap<u64, CommId>)) {
        let place = |of_peer: &BTreeMap<u64, CommId>| {
            of_peer.first_key_value().map(|(&oldest, _)| (of_peer.len(), Reverse(oldest), peer))
        };
        let of_peer = self.of_peers.entry(peer).or_default();
        let before = place(of_peer);
        change(of_peer);
        let after = place(of_peer);
        if after.is_none() {
            self.of_peers.remove(&peer);
        }
        if before != after {
            before.map(|before| self.order.remove(&before));
            after.map(|after| self.order.insert(after));
        }
    }

    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.of_peers.is_empty() && self.order.is_empty() && self.len == 0
    }
}

/// Answers that may be sent: to each peer, and to all. An answer is as long as what it answers. Those that are repeated count
/// too, so a request in another's name is not multiplied without bound; and the time that all cost is bounded.
#[derive(Debug)]
pub(super) struct Answers {
    /// Peers whose addresses fall together share one: as many as there are, none takes memory.
    peers: [Bucket; 64],
    all: Bucket,
    /// Odd; makes it hard to fall together with somebody on purpose.
    mix: u64,
}

/// A rate with a burst, as the time at which nothing would be owed any more.
#[derive(Debug, Clone, Copy, Default)]
struct Bucket(u64);

/// Nanoseconds that each answer costs, and how many may come at once.
#[derive(Clone, Copy)]
struct Rate {
    cost: u64,
    burst: u64,
}

/// 10,000 a second: ten times what a storm of connections from one host is answered with.
const OF_PEER: Rate = Rate { cost: 100_000, burst: 4096 };
/// 40,000 a second, which take less than half of a core.
const OF_ALL: Rate = Rate { cost: 25_000, burst: 16_384 };

impl Bucket {
    const fn allows(self, now: u64, rate: Rate) -> bool {
        self.0 <= now.saturating_add(rate.cost * (rate.burst - 1))
    }

    fn take(&mut self, now: u64, rate: Rate) {
        self.0 = self.0.max(now) + rate.cost;
    }
}

impl Answers {
    pub(super) fn new(seed: u64) -> Self {
        Self { peers: [Bucket::default(); 64], all: Bucket::default(), mix: seed | 1 }
    }

    /// True if another answer to `peer` may be sent now, which is counted then.
    pub(super) fn take(&mut self, now: u64, peer: Gid) -> bool {
        let gid = u128::from_be_bytes(peer.0);
        let mixed = ((gid >> 64) as u64 ^ gid as u64).wrapping_mul(self.mix);
        let bucket = &mut self.peers[(mixed >> 58) as usize];
        let allowed = bucket.allows(now, OF_PEER) && self.all.allows(now, OF_ALL);
        if allowed {
            bucket.take(now, OF_PEER);
            self.all.take(now, OF_ALL);
        }
        allowed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn oldest_of_the_largest_share_gives_way_first() {
        let mut yielding = Yielding::default();
        let mut numbers = HashMap::new();
        for (id, peer) in [(1, 9), (2, 1), (3, 1), (4, 5), (5, 1), (6, 5)] {
            numbers.insert(id, (gid(peer), yielding.add(gid(peer), id)));
        }
        assert_eq!((yielding.oldest_of(gid(5)), yielding.oldest_of(gid(7))), (Some(4), None));
        let mut given = Vec::new();
        while let Some(id) = yielding.of_largest_share() {
            let (peer, number) = numbers.remove(&id).unwrap();
            yielding.remove(peer, number);
            given.push(id);
        }
        // Of peer 1 until it has fewer than peer 5, and of equal shares the one with the oldest.
        assert_eq!(given, [2, 3, 4, 1, 5, 6]);
        assert!(yielding.is_empty());
    }

    const SECOND: u64 = 1_000_000_000;

    fn gid(number: u32) -> Gid {
        std::net::Ipv4Addr::from(0x0a00_0000 | number).into()
    }

    #[test]
    fn peer_that_asks_all_the_time_gets_a_burst_and_then_its_rate() {
        let mut answers = Answers::new(0x1234_5678_9abc_def0);
        let taken = |answers: &mut Answers, now| {
            (0..100_000).filter(|_| answers.take(now, gid(1))).count() as u64
        };
        assert_eq!(taken(&mut answers, 0), OF_PEER.burst);
        assert_eq!(taken(&mut answers, SECOND / 10), 1_000);
        assert!(
            answers.take(SECOND / 10, gid(2)) || answers.take(SECOND / 10, gid(3)),
            "others are not held up"
        );
        // After a long pause it has no more than a burst.
        assert_eq!(taken(&mut answers, 3_600 * SECOND), OF_PEER.burst);
    }

    #[test]
    fn many_peers_together_get_no_more_than_all_may() {
        let mut answers = Answers::new(0x1234_5678_9abc_def0);
        let taken =
            (0..200_000).filter(|number| answers.take(0, gid(number % 10_000))).count() as u64;
        assert_eq!(taken, OF_ALL.burst);
    }

    #[test]
    fn half_open_connections_are_bounded_for_each_peer_and_in_total() {
        let mut open = HalfOpen::default();
        assert_eq!((0..1_000).filter(|_| open.open(gid(1))).count() as u32, HALF_OPEN_OF_PEER);
        assert!(open.open(gid(2)));
        assert_eq!(
            (0..100_000).filter(|number| open.open(gid(3 + number))).count() as u32,
            HALF_OPEN - HALF_OPEN_OF_PEER - 1
        );
        open.close(gid(1));
        assert!(open.open(gid(1)) && !open.open(gid(1)));
        for number in 0..100_010 {
            for _ in 0..HALF_OPEN_OF_PEER {
                open.close(gid(number));
            }
        }
        assert_eq!((open.total(), open.of_peers.len()), (0, 0));
    }
}
