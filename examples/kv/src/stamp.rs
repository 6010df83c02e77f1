//! Values that identify their writer in every word.

use std::fmt;

/// The identity of a value. A value starts with its stamp, and every further word depends on it, so
/// no part can pass for a part of another value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Stamp {
    /// The number of the key.
    pub key: u32,
    /// The number of the writer.
    pub writer: u32,
    /// The number of values that the writer made before.
    pub sequence: u64,
}

/// The error of a value that is not made from one stamp.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mixed {
    /// The length of the value, in bytes.
    pub len: usize,
    /// The stamp at the start, if the value is long enough.
    pub stamp: Option<Stamp>,
    /// The first byte that does not match the stamp.
    pub at: usize,
}

impl Stamp {
    /// The minimum length of a value, in bytes.
    pub const LEN: usize = 16;

    /// Returns the value of this stamp, of [`LEN`](Self::LEN) to `longest` bytes.
    ///
    /// # Panics
    ///
    /// Panics if `longest` is less than [`LEN`](Self::LEN).
    #[must_use]
    pub fn value(&self, longest: usize) -> Vec<u8> {
        assert!(longest >= Self::LEN, "too short for a stamp");
        // Half of the values have the maximum length, so that all bytes of the slot are written
        // often.
        let len = match self.word(0) % 2 {
            0 => longest,
            _ => Self::LEN + (self.word(1) % (longest - Self::LEN + 1) as u64) as usize,
        };
        self.fill(len)
    }

    /// Returns the stamp of a value.
    ///
    /// # Errors
    ///
    /// [`Mixed`] if the value is not the one that its stamp makes with the same `longest`.
    pub fn decode(value: &[u8], longest: usize) -> Result<Self, Mixed> {
        let Some((key, rest)) = value.split_first_chunk() else {
            return Err(Mixed { len: value.len(), stamp: None, at: 0 });
        };
        let (Some((writer, rest)), true) = (rest.split_first_chunk(), value.len() <= longest)
        else {
            return Err(Mixed { len: value.len(), stamp: None, at: 4 });
        };
        let Some((sequence, _)) = rest.split_first_chunk() else {
            return Err(Mixed { len: value.len(), stamp: None, at: 8 });
        };
        let stamp = Self {
            key: u32::from_le_bytes(*key),
            writer: u32::from_le_bytes(*writer),
            sequence: u64::from_le_bytes(*sequence),
        };
        let expected = stamp.value(longest);
        let same = value.iter().zip(&expected).take_while(|(a, b)| a == b).count();
        if same == value.len() && value.len() == expected.len() {
            Ok(stamp)
        } else {
            Err(Mixed { len: value.len(), stamp: Some(stamp), at: same })
        }
    }

    fn fill(&self, len: usize) -> Vec<u8> {
        let mut value = Vec::with_capacity(len + 8);
        value.extend(self.key.to_le_bytes());
        value.extend(self.writer.to_le_bytes());
        value.extend(self.sequence.to_le_bytes());
        for index in 2.. {
            if value.len() >= len {
                break;
            }
            value.extend(self.word(index).to_le_bytes());
        }
        value.truncate(len);
        value
    }

    /// Returns a word that is distinct for each index and stamp: the finalizer of SplitMix64.
    fn word(&self, index: u64) -> u64 {
        let writer_id = u64::from(self.key) << 32 | u64::from(self.writer);
        let mut word = writer_id.wrapping_mul(0x9e37_79b9_7f4a_7c15)
            ^ self.sequence.rotate_left(32)
            ^ (index << 8);
        word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        word ^ (word >> 31)
    }
}

impl fmt::Display for Mixed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.stamp {
            Some(stamp) => {
                write!(
                    f,
                    "{} bytes that start with {stamp:?} but differ from it at byte {}",
                    self.len, self.at
                )
            }
            None => write!(f, "{} bytes, an invalid length", self.len),
        }
    }
}

impl std::error::Error for Mixed {}

#[cfg(test)]
mod tests {
    use super::*;

    const LONGEST: usize = 200;

    fn stamps() -> impl Iterator<Item = Stamp> {
        (0..4).flat_map(|key| {
            (0..4)
                .flat_map(move |writer| (0..8).map(move |sequence| Stamp { key, writer, sequence }))
        })
    }

    #[test]
    fn stamps_round_trip_and_lengths_vary() {
        let mut lens = std::collections::BTreeSet::new();
        for stamp in stamps() {
            let value = stamp.value(LONGEST);
            lens.insert(value.len());
            assert_eq!(Stamp::decode(&value, LONGEST), Ok(stamp));
        }
        assert!(lens.len() > 10, "{lens:?}");
    }

    #[test]
    fn value_with_a_word_of_another_is_mixed() {
        let values: Vec<_> = stamps().map(|stamp| stamp.value(LONGEST)).collect();
        for a in &values {
            for b in &values {
                for at in (0..a.len().min(b.len()) / 8 * 8).step_by(8) {
                    let mut mixed = a.clone();
                    mixed[at..at + 8].copy_from_slice(&b[at..at + 8]);
                    // Two stamps may have a word in common.
                    assert_eq!(Stamp::decode(&mixed, LONGEST).is_err(), mixed != *a, "byte {at}");
                }
            }
        }
    }

    #[test]
    fn hostile_values_are_mixed() {
        let mut random = fastrand::Rng::with_seed(4);
        for len in 0..2 * LONGEST {
            let value: Vec<u8> = (0..len).map(|_| random.u8(..)).collect();
            assert!(Stamp::decode(&value, LONGEST).is_err(), "{len} bytes");
        }
    }
}
