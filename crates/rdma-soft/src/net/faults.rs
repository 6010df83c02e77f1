//! The fault model of a network.

use std::collections::{BTreeSet, HashMap};
use std::ops::Range;
use std::time::Duration;

use rdma_provider::types::Gid;

use crate::roce::ip_fields::IpFields;

/// The fault model of a network: probabilities of loss, duplication, reordering and corruption, and
/// the delay of packets.
///
/// The default has no faults. Probabilities are clamped to 0 to 1.
///
/// ```
/// use rdma_soft::{Faults, Network};
/// use std::time::Duration;
///
/// let delay = Duration::from_micros(1)..Duration::from_micros(50);
/// let faults = Faults::none().loss(0.01).reorder(0.1).delay(delay);
/// assert_eq!(faults.loss, 0.01);
/// let network = Network::with_faults(7, faults);
/// assert_eq!(network.counters().sent, 0);
/// ```
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Faults {
    /// Probability that a packet is lost.
    pub loss: f64,
    /// Probability that a packet is duplicated.
    pub duplicate: f64,
    /// Probability that later packets overtake a packet.
    pub reorder: f64,
    /// Probability that one bit of a packet is flipped, which the receiver detects.
    pub corrupt: f64,
    /// Range of packet delays. Only `reorder` changes the order.
    pub delay: Range<Duration>,
    /// The queue of a switch in front of each device; `None` for links without limit.
    pub bottleneck: Option<Bottleneck>,
}

impl Default for Faults {
    fn default() -> Self {
        Self {
            loss: 0.0,
            duplicate: 0.0,
            reorder: 0.0,
            corrupt: 0.0,
            delay: Duration::ZERO..Duration::ZERO,
            bottleneck: None,
        }
    }
}

impl Faults {
    /// Creates a model without faults or delay.
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

    /// Sets the probability of reordering.
    #[must_use]
    pub const fn reorder(mut self, probability: f64) -> Self {
        self.reorder = probability;
        self
    }

    /// Sets the probability of corruption: a bit is inverted, which the check of the packet finds.
    #[must_use]
    pub const fn corrupt(mut self, probability: f64) -> Self {
        self.corrupt = probability;
        self
    }

    /// Sets the range of delays.
    #[must_use]
    pub const fn delay(mut self, delay: Range<Duration>) -> Self {
        self.delay = delay;
        self
    }

    /// Puts the queue of a switch in front of each device.
    #[must_use]
    pub const fn bottleneck(mut self, bottleneck: Bottleneck) -> Self {
        self.bottleneck = Some(bottleneck);
        self
    }
}

/// The queue of a switch, from which a device gets packets of all senders, one after the other.
///
/// A packet counts with its transport headers and its payload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bottleneck {
    /// Bytes per second of the link from the switch to the device; 0 counts as 1.
    pub rate: u64,
    /// Bytes that may wait. A packet that would exceed this is lost, so it must hold the longest.
    pub buffer: u64,
    /// Bytes above which the switch marks packets that it may mark (RFC 3168): those of a path with
    /// one of the two lowest bits of the traffic class. `None` for a switch that marks none.
    ///
    /// The receiving device answers marked packets of RC and UC with congestion notifications, upon
    /// which an RC requester sends less at once.
    pub mark_above: Option<u64>,
}

/// Packet counters of a network with faults or over UDP.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct LinkCounters {
    /// Packets sent; over UDP with faults, packets that pass the model count twice.
    pub sent: u64,
    /// Packets lost or refused by the kernel.
    pub lost: u64,
    /// Packets duplicated.
    pub duplicated: u64,
    /// Packets reordered.
    pub reordered: u64,
    /// Packets with a flipped bit.
    pub corrupted: u64,
    /// Packets marked by a [`Bottleneck`].
    pub marked: u64,
    /// Packets with a wrong ICRC.
    pub rejected: u64,
    /// Datagrams received by UDP.
    pub received: u64,
    /// Datagrams of disallowed peers, for unknown queue pairs or of unsupported kinds.
    pub unwanted: u64,
}

#[derive(Debug)]
pub(crate) struct Link {
    pub(crate) faults: Faults,
    pub(crate) counters: LinkCounters,
    random: fastrand::Rng,
    /// Latest arrival per direction, which keeps packets in order.
    newest: HashMap<(Gid, Gid), u64>,
    /// Times at which the queues in front of devices will be empty.
    empty_at: HashMap<Gid, u64>,
    /// Faults of single directions, once a control has named them.
    one_way: HashMap<(Gid, Gid), OneWay>,
}

/// The faults of the packets from one device to another.
#[derive(Debug, Default)]
pub(crate) struct OneWay {
    pub(crate) loss: f64,
    pub(crate) sent: u64,
    /// Packets to lose, by their number in `sent`.
    pub(crate) doomed: BTreeSet<u64>,
}

/// Arrival times of a packet and its duplicate.
pub(crate) type Arrivals = [Option<u64>; 2];

impl Link {
    pub(crate) fn new(seed: u64, faults: Faults) -> Self {
        Self {
            faults,
            counters: LinkCounters::default(),
            random: fastrand::Rng::with_seed(seed),
            newest: HashMap::new(),
            empty_at: HashMap::new(),
            one_way: HashMap::new(),
        }
    }

    pub(crate) fn one_way(&mut self, route: (Gid, Gid)) -> &mut OneWay {
        self.one_way.entry(route).or_default()
    }

    /// Applies the model to a packet. May mark it, and may damage `image`, but only if `passes`,
    /// the receiver's check, finds that.
    pub(crate) fn send(
        &mut self,
        now: u64,
        route: (Gid, Gid),
        (image, ip_fields): (&mut [u8], &mut IpFields),
        passes: impl Fn(&[u8]) -> bool,
    ) -> Arrivals {
        self.counters.sent += 1;
        if self.is_lost_one_way(route) || self.happens(self.faults.loss) {
            self.counters.lost += 1;
            return [None, None];
        }
        if self.happens(self.faults.corrupt) && !image.is_empty() {
            self.counters.corrupted += 1;
            // The check of a packet over IPv4 misses few damaged bits, which the checksum of UDP
            // finds on a wire. Here the kernel computes that after the damage.
            loop {
                let bit = self.random.usize(..image.len() * 8);
                image[bit / 8] ^= 1 << (bit % 8);
                if !passes(image) {
                    break;
                }
                image[bit / 8] ^= 1 << (bit % 8);
            }
        }
        let Some(now) = self.queue(now, route.1, image.len() as u64, ip_fields) else {
            self.counters.lost += 1;
            return [None, None];
        };
        let first = self.arrival(now, route);
        let second = self.happens(self.faults.duplicate).then(|| {
            self.counters.duplicated += 1;
            self.arrival(now, route)
        });
        [Some(first), second]
    }

    /// Puts a packet into the queue in front of a device. Returns when it leaves, or `None` if it
    /// does not fit.
    fn queue(&mut self, now: u64, to: Gid, length: u64, ip_fields: &mut IpFields) -> Option<u64> {
        let Some(Bottleneck { rate, buffer, mark_above }) = self.faults.bottleneck else {
            return Some(now);
        };
        let time_of = |bytes: u64| {
            let time = u128::from(bytes) * 1_000_000_000 / u128::from(rate.max(1));
            u64::try_from(time).unwrap_or(u64::MAX)
        };
        let empty_at = self.empty_at.entry(to).or_insert(0);
        let wait = empty_at.saturating_sub(now);
        if wait.saturating_add(time_of(length)) > time_of(buffer) {
            return None;
        }
        if mark_above.is_some_and(|bytes| wait > time_of(bytes)) && ip_fields.is_markable() {
            *ip_fields = ip_fields.marked();
            self.counters.marked += 1;
        }
        *empty_at = now.saturating_add(wait).saturating_add(time_of(length));
        Some(*empty_at)
    }

    fn arrival(&mut self, now: u64, route: (Gid, Gid)) -> u64 {
        let Range { start, end } = self.faults.delay.clone();
        let (start, end) = (start.as_nanos() as u64, end.as_nanos() as u64);
        let delay = if start < end { self.random.u64(start..end) } else { start };
        let at = now.saturating_add(delay);
        if self.happens(self.faults.reorder) {
            self.counters.reordered += 1;
            // Several packets overtake, whatever the delay.
            return at.saturating_add(delay).saturating_add(self.random.u64(1_000..50_000));
        }
        let newest = self.newest.entry(route).or_insert(0);
        *newest = at.max(*newest);
        *newest
    }

    fn is_lost_one_way(&mut self, route: (Gid, Gid)) -> bool {
        let Some(way) = self.one_way.get_mut(&route) else { return false };
        way.sent += 1;
        let (doomed, loss) = (way.doomed.remove(&way.sent), way.loss);
        doomed || self.happens(loss)
    }

    fn happens(&mut self, probability: f64) -> bool {
        probability > 0.0 && self.random.f64() < probability
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn damage_that_the_check_would_miss_is_replaced() {
        let mut link = Link::new(7, Faults::none().corrupt(1.0));
        let route = (Gid::default(), Gid::default());
        // A check of the last byte only.
        for _ in 0..100 {
            let mut image = [0; 16];
            let ip_fields = &mut IpFields::default();
            link.send(0, route, (&mut image, ip_fields), |image| image[15] == 0);
            let damaged: Vec<_> = (0..16).filter(|&at| image[at] != 0).collect();
            assert_eq!((damaged, image[15].count_ones()), (vec![15], 1));
        }
        assert_eq!(link.counters.corrupted, 100);
    }
}
