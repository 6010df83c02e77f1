//! What may go wrong between two devices.

use std::collections::HashMap;
use std::ops::Range;
use std::time::Duration;

use rdma_provider::types::Gid;

/// Fault model of a network: how probable it is that a packet is lost, repeated, overtaken or
/// corrupted, and how long it travels.
///
/// The default has no faults. Probabilities outside 0 to 1 count as the nearer of the two.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Faults {
    /// Probability that a packet is lost.
    pub loss: f64,
    /// Probability that a packet arrives twice.
    pub duplicate: f64,
    /// Probability that a packet is held back, so that later ones overtake it.
    pub reorder: f64,
    /// Probability that a bit of a packet is flipped. The receiver finds out and drops it.
    pub corrupt: f64,
    /// How long a packet travels. Packets stay in order unless `reorder` says otherwise.
    pub delay: Range<Duration>,
}

impl Default for Faults {
    fn default() -> Self {
        Self { loss: 0.0, duplicate: 0.0, reorder: 0.0, corrupt: 0.0, delay: Duration::ZERO..Duration::ZERO }
    }
}

impl Faults {
    /// No faults, no delay.
    #[must_use]
    pub fn none() -> Self {
        Self::default()
    }

    /// Sets the probability of loss.
    #[must_use]
    pub const fn loss(mut self, probability: f64) -> Self {
        self.loss = probability;
        self
    }

    /// Sets the probability of duplication.
    #[must_use]
    pub const fn duplicate(mut self, probability: f64) -> Self {
        self.duplicate = probability;
        self
    }

    /// Sets the probability of being overtaken.
    #[must_use]
    pub const fn reorder(mut self, probability: f64) -> Self {
        self.reorder = probability;
        self
    }

    /// Sets the probability of corruption.
    #[must_use]
    pub const fn corrupt(mut self, probability: f64) -> Self {
        self.corrupt = probability;
        self
    }

    /// Sets how long packets travel.
    #[must_use]
    pub const fn delay(mut self, delay: Range<Duration>) -> Self {
        self.delay = delay;
        self
    }
}

/// What a network with faults has done to its packets, and what one over UDP has sent and received.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct LinkCounters {
    /// Packets handed to the network. Over UDP with faults, those that passed the fault model are counted once more as they
    /// leave.
    pub sent: u64,
    /// Packets lost, over UDP also those that the kernel did not take.
    pub lost: u64,
    /// Packets that arrived twice.
    pub duplicated: u64,
    /// Packets held back.
    pub reordered: u64,
    /// Packets of which a bit was flipped.
    pub corrupted: u64,
    /// Packets that reached a device and were found damaged there.
    pub rejected: u64,
    /// Packets received by UDP, whatever they were.
    pub received: u64,
    /// Of them, those from peers that are not allowed, for nobody, or of a kind that is not spoken here.
    pub unwanted: u64,
}

/// The wire between all devices of a network.
#[derive(Debug)]
pub(crate) struct Link {
    pub(crate) faults: Faults,
    pub(crate) counters: LinkCounters,
    random: fastrand::Rng,
    /// When the newest packet between two devices arrives: keeps their packets in order.
    newest: HashMap<(Gid, Gid), u64>,
}

/// When a packet arrives; a second time for its duplicate.
pub(crate) type Arrivals = [Option<u64>; 2];

impl Link {
    pub(crate) fn new(seed: u64, faults: Faults) -> Self {
        Self {
            faults,
            counters: LinkCounters::default(),
            random: fastrand::Rng::with_seed(seed),
            newest: HashMap::new(),
        }
    }

    /// Decides about a packet sent at `now`; may change `image`.
    pub(crate) fn send(&mut self, now: u64, route: (Gid, Gid), image: &mut [u8]) -> Arrivals {
        self.counters.sent += 1;
        if self.happens(self.faults.loss) {
            self.counters.lost += 1;
            return [None, None];
        }
        if self.happens(self.faults.corrupt) && !image.is_empty() {
            self.counters.corrupted += 1;
            let bit = self.random.usize(..image.len() * 8);
            image[bit / 8] ^= 1 << (bit % 8);
        }
        let first = self.arrival(now, route);
        let second = self.happens(self.faults.duplicate).then(|| {
            self.counters.duplicated += 1;
            self.arrival(now, route)
        });
        [Some(first), second]
    }

    fn arrival(&mut self, now: u64, route: (Gid, Gid)) -> u64 {
        let Range { start, end } = self.faults.delay.clone();
        let (start, end) = (start.as_nanos() as u64, end.as_nanos() as u64);
        let delay = if start < end { self.random.u64(start..end) } else { start };
        let at = now.saturating_add(delay);
        if self.happens(self.faults.reorder) {
            self.counters.reordered += 1;
            // Long enough for the next few to pass, whatever the delay.
            return at.saturating_add(delay).saturating_add(self.random.u64(1_000..50_000));
        }
        let newest = self.newest.entry(route).or_insert(0);
        *newest = at.max(*newest);
        *newest
    }

    fn happens(&mut self, probability: f64) -> bool {
        probability > 0.0 && self.random.f64() < probability
    }
}
