//! Random choices of a run.

use std::time::Duration;

use fastrand::Rng;
use tokio_rdma::software::Faults;
use tokio_rdma::types::Mtu;

const MOST: f64 = 0.1;
pub(crate) const LARGEST: usize = 64 << 10;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mix {
    None,
    All,
    Single(u8),
    /// Changes at random during the run.
    Changing,
}

impl Mix {
    pub(crate) fn draw(random: &mut Rng) -> Self {
        match random.u8(..20) {
            0 => Self::None,
            1..9 => Self::All,
            9..14 => Self::Single(random.u8(..5)),
            _ => Self::Changing,
        }
    }

    pub(crate) fn faults(self, random: &mut Rng) -> Faults {
        let mut probability = |number| match self {
            Self::None => 0.0,
            Self::Single(one) if one != number => 0.0,
            Self::Single(_) | Self::All | Self::Changing => random.f64() * MOST,
        };
        let faults = Faults::none()
            .loss(probability(0))
            .duplicate(probability(1))
            .reorder(probability(2))
            .corrupt(probability(3));
        let spread = match self {
            Self::None => 0,
            Self::Single(one) if one != 4 => 0,
            _ => random.u64(1..40_000),
        };
        let least = random.u64(..10_000);
        faults.delay(Duration::from_nanos(least)..Duration::from_nanos(least + spread))
    }
}

/// Returns a length, mostly near multiples of the MTU.
pub(crate) fn size(random: &mut Rng, mtu: Mtu, largest: usize) -> usize {
    let mtu = mtu.bytes();
    let size = match random.u8(..40) {
        0..4 => 0,
        4..10 => random.usize(1..64),
        10..20 => mtu * random.usize(1..=4) - 1 + random.usize(..3),
        20..36 => random.usize(..mtu * 3),
        36..39 => mtu * random.usize(1..=16) - 1 + random.usize(..3),
        _ => random.usize(..=LARGEST),
    };
    size.min(largest)
}

/// Returns random bytes from which all sent data are taken; a part identifies its position.
pub(crate) fn noise() -> &'static [u8] {
    static NOISE: std::sync::OnceLock<Vec<u8>> = std::sync::OnceLock::new();
    NOISE.get_or_init(|| {
        let mut random = Rng::with_seed(1);
        std::iter::repeat_with(|| random.u8(..)).take(4 * LARGEST).collect()
    })
}
