//! Limits on peers: half-open connections and answers, in bounded memory.
//!
//! Messages beyond a limit are treated as lost; honest peers retransmit.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use rdma_provider::types::Gid;

use super::connection::Connection;
use super::message::{CmTimeout, CommId};

/// Maximum half-open connections per peer. It bounds the queue pairs that a peer can make the
/// program create.
pub(super) const MAX_HALF_OPEN_PER_PEER: u32 = 256;
/// Maximum half-open connections of all peers.
pub(super) const MAX_HALF_OPEN: u32 = 4096;
/// Retransmissions of a REP, and nanoseconds between them, while more than half of the records are
/// in use. Otherwise forged requests could choose how long records are kept. [`Evictable`]
/// records are exempt, as busy peers confirm late.
pub(super) const SCARCE_RETRIES: u8 = 3;
pub(super) const SCARCE_TIMEOUT: u64 = CmTimeout(16).nanoseconds();

#[derive(Debug, Default)]
pub(super) struct HalfOpen {
    by_peer: BTreeMap<Gid, u32>,
    total: u32,
}

impl HalfOpen {
    /// Counts one more connection. Returns false if a limit is reached.
    pub(super) fn open(&mut self, peer: Gid) -> bool {
        if self.is_full() || self.is_full_for(peer) {
            return false;
        }
        *self.by_peer.entry(peer).or_default() += 1;
        self.total += 1;
        true
    }

    pub(super) const fn is_full(&self) -> bool {
        self.total >= MAX_HALF_OPEN
    }

    pub(super) fn is_full_for(&self, peer: Gid) -> bool {
        self.by_peer.get(&peer).is_some_and(|&count| count >= MAX_HALF_OPEN_PER_PEER)
    }

    /// Returns true if records are scarce and this connection's is not evictable.
    pub(super) const fn is_scarce_for(&self, connection: &Connection) -> bool {
        connection.half_open && connection.evictable.is_none() && self.total > MAX_HALF_OPEN / 2
    }

    pub(super) fn close(&mut self, peer: Gid) {
        let Some(count) = self.by_peer.get_mut(&peer) else { return };
        *count -= 1;
        self.total -= 1;
        if *count == 0 {
            self.by_peer.remove(&peer);
        }
    }

    #[cfg(test)]
    pub(super) const fn total(&self) -> u32 {
        self.total
    }
}

/// Half-open connections that the manager auto-accepted. They can be evicted because the program
/// does not know them, and they have no queue pair.
#[derive(Debug, Default)]
pub(super) struct Evictable {
    /// By age.
    by_peer: BTreeMap<Gid, BTreeMap<u64, CommId>>,
    /// By number of connections, then by age of the oldest. The last entry is evicted first.
    order: BTreeSet<(usize, Reverse<u64>, Gid)>,
    len: u32,
    last: u64,
}

impl Evictable {
    pub(super) const fn len(&self) -> u32 {
        self.len
    }

    /// Adds a connection and returns the number for its removal.
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

    pub(super) fn oldest_of(&self, peer: Gid) -> Option<CommId> {
        self.by_peer.get(&peer)?.first_key_value().map(|(_, &id)| id)
    }

    /// Returns the oldest connection of the peer that has the most.
    pub(super) fn oldest_of_largest(&self) -> Option<CommId> {
        self.order.last().and_then(|&(_, _, peer)| self.oldest_of(peer))
    }

    fn change(&mut self, peer: Gid, change: impl FnOnce(&mut BTreeMap<u64, CommId>)) {
        let rank = |of_peer: &BTreeMap<u64, CommId>| {
            of_peer.first_key_value().map(|(&oldest, _)| (of_peer.len(), Reverse(oldest), peer))
        };
        let of_peer = self.by_peer.entry(peer).or_default();
        let before = rank(of_peer);
        change(of_peer);
        let after = rank(of_peer);
        if after.is_none() {
            self.by_peer.remove(&peer);
        }
        if before != after {
            before.map(|before| self.order.remove(&before));
            after.map(|after| self.order.insert(after));
        }
    }

    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.by_peer.is_empty() && self.order.is_empty() && self.len == 0
    }
}

/// Rate limits on answers, including retransmissions. They bound amplification of forged requests
/// and the total CPU time. An answer is as long as its request.
#[derive(Debug)]
pub(super) struct Answers {
    /// Peers whose addresses hash to the same index share a bucket.
    peers: [Bucket; 64],
    all: Bucket,
    /// An odd multiplier that makes deliberate collisions hard.
    mix: u64,
}

/// A token bucket: the time at which the debt is paid, in nanoseconds.
#[derive(Debug, Clone, Copy, Default)]
struct Bucket(u64);

#[derive(Clone, Copy)]
struct Rate {
    cost: u64,
    burst: u64,
}

/// 10,000 answers/s: ten times what a connection storm from one host needs.
const PER_PEER: Rate = Rate { cost: 100_000, burst: 4096 };
/// 40,000 answers/s, which take less than half of a core.
const TOTAL: Rate = Rate { cost: 25_000, burst: 16_384 };

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

    /// Counts an answer to `peer`. Returns false if it exceeds a limit.
    pub(super) fn take(&mut self, now: u64, peer: Gid) -> bool {
        let gid = u128::from_be_bytes(peer.0);
        let mixed = ((gid >> 64) as u64 ^ gid as u64).wrapping_mul(self.mix);
        let bucket = &mut self.peers[(mixed >> 58) as usize];
        let allowed = bucket.allows(now, PER_PEER) && self.all.allows(now, TOTAL);
        if allowed {
            bucket.take(now, PER_PEER);
            self.all.take(now, TOTAL);
        }
        allowed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn oldest_of_the_peer_with_most_comes_first() {
        let mut evictable = Evictable::default();
        let mut numbers = BTreeMap::new();
        for (id, peer) in [(1, 9), (2, 1), (3, 1), (4, 5), (5, 1), (6, 5)] {
            numbers.insert(id, (gid(peer), evictable.add(gid(peer), id)));
        }
        assert_eq!((evictable.oldest_of(gid(5)), evictable.oldest_of(gid(7))), (Some(4), None));
        let mut given = Vec::new();
        while let Some(id) = evictable.oldest_of_largest() {
            let (peer, number) = numbers.remove(&id).unwrap();
            evictable.remove(peer, number);
            given.push(id);
        }
        // Peer 1 until it has fewer than peer 5; among equals, the peer with the oldest.
        assert_eq!(given, [2, 3, 4, 1, 5, 6]);
        assert!(evictable.is_empty());
    }

    const SECOND: u64 = 1_000_000_000;

    fn gid(number: u32) -> Gid {
        std::net::Ipv4Addr::from(0x0a00_0000 | number).into()
    }

    #[test]
    fn busy_peer_gets_a_burst_then_its_rate() {
        let mut answers = Answers::new(0x1234_5678_9abc_def0);
        let taken = |answers: &mut Answers, now| {
            (0..100_000).filter(|_| answers.take(now, gid(1))).count() as u64
        };
        assert_eq!(taken(&mut answers, 0), PER_PEER.burst);
        assert_eq!(taken(&mut answers, SECOND / 10), 1_000);
        assert!(
            answers.take(SECOND / 10, gid(2)) || answers.take(SECOND / 10, gid(3)),
            "other peers are not delayed"
        );
        assert_eq!(taken(&mut answers, 3_600 * SECOND), PER_PEER.burst);
    }

    #[test]
    fn total_limit_applies_to_many_peers() {
        let mut answers = Answers::new(0x1234_5678_9abc_def0);
        let taken =
            (0..200_000).filter(|number| answers.take(0, gid(number % 10_000))).count() as u64;
        assert_eq!(taken, TOTAL.burst);
    }

    #[test]
    fn half_open_connections_are_bounded_for_each_peer_and_in_total() {
        let mut open = HalfOpen::default();
        assert_eq!((0..1_000).filter(|_| open.open(gid(1))).count() as u32, MAX_HALF_OPEN_PER_PEER);
        assert!(open.open(gid(2)));
        assert_eq!(
            (0..100_000).filter(|number| open.open(gid(3 + number))).count() as u32,
            MAX_HALF_OPEN - MAX_HALF_OPEN_PER_PEER - 1
        );
        open.close(gid(1));
        assert!(open.open(gid(1)) && !open.open(gid(1)));
        for number in 0..100_010 {
            for _ in 0..MAX_HALF_OPEN_PER_PEER {
                open.close(gid(number));
            }
        }
        assert_eq!((open.total(), open.by_peer.len()), (0, 0));
    }
}
