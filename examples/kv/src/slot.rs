//! The encoding of a slot, and the detection of torn READs.
//!
//! ```text
//!  0          16        24       26       28             32
//!  ├──────────┼─────────┼────────┼────────┼──────────────┼───────┬─────────┬╌╌╌╌╌╌╌╌╌╌╌╌┐
//!  │ checksum │ version │ key    │ 0      │ value length │ key   │ value   │ stale bytes│
//!  │          │         │ length │        │              │       │         │            │
//!  └──────────┴─────────┴────────┴────────┴──────────────┴───────┴─────────┴╌╌╌╌╌╌╌╌╌╌╌╌┘
//!             ╰────────── covered by the checksum: XXH3, 128 bits ─────────╯
//! ```
//!
//! Numbers are little-endian. A slot with an empty key is vacant; its version is the one of the
//! deletion.
//!
//! The server writes a slot while clients READ it, and neither access has a guaranteed order. A
//! READ may return any mixture of versions, which passes the checksum with a probability of 2^-128.

use bytes::{Buf, BufMut};
use twox_hash::XxHash3_128;

/// Fixed fields before the key.
pub(crate) const HEADER: usize = 32;

/// The first field.
const CHECKSUM: usize = 16;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Slot<'a> {
    /// The bucket's version, which each PUT and each DELETE increments.
    pub(crate) version: u64,
    /// Empty if the slot is vacant.
    pub(crate) key: &'a [u8],
    pub(crate) value: &'a [u8],
}

/// The error of a READ that returned a mixture of versions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Torn;

impl<'a> Slot<'a> {
    pub(crate) fn vacant(version: u64) -> Self {
        Self { version, key: &[], value: &[] }
    }

    /// Encodes the slot, padded to whole words. The lengths must be within a
    /// [`Layout`](crate::Layout).
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut bytes =
            Vec::with_capacity((HEADER + self.key.len() + self.value.len()).next_multiple_of(8));
        bytes.put_bytes(0, CHECKSUM);
        bytes.put_u64_le(self.version);
        bytes.put_u16_le(self.key.len() as u16);
        bytes.put_u16_le(0);
        bytes.put_u32_le(self.value.len() as u32);
        bytes.put_slice(self.key);
        bytes.put_slice(self.value);
        let checksum = XxHash3_128::oneshot(&bytes[CHECKSUM..]);
        bytes[..CHECKSUM].copy_from_slice(&checksum.to_le_bytes());
        bytes.resize(bytes.len().next_multiple_of(8), 0);
        bytes
    }

    /// Decodes `bytes` and verifies the checksum.
    pub(crate) fn decode(bytes: &'a [u8]) -> Result<Self, Torn> {
        let slot = Self::decode_unchecked(bytes)?;
        let end = HEADER + slot.key.len() + slot.value.len();
        let (mut checksum, content) = bytes[..end].split_at(CHECKSUM);
        if checksum.get_u128_le() == XxHash3_128::oneshot(content) { Ok(slot) } else { Err(Torn) }
    }

    /// Decodes `bytes` without the checksum. Returns `Torn` only if the lengths exceed `bytes`.
    pub(crate) fn decode_unchecked(bytes: &'a [u8]) -> Result<Self, Torn> {
        let (header, content) = bytes.split_at_checked(HEADER).ok_or(Torn)?;
        let mut header = &header[CHECKSUM..];
        let (version, key_len, _, value_len) =
            (header.get_u64_le(), header.get_u16_le(), header.get_u16_le(), header.get_u32_le());
        let (key, rest) = content.split_at_checked(key_len.into()).ok_or(Torn)?;
        let value = rest.get(..value_len as usize).ok_or(Torn)?;
        Ok(Self { version, key, value })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slot(version: u64, fill: u8, len: usize) -> Vec<u8> {
        let mut bytes = Slot { version, key: b"key", value: &vec![fill; len] }.encode();
        bytes.resize(256, 0);
        bytes
    }

    #[test]
    fn slot_round_trips_and_ignores_stale_bytes() {
        let mut bytes = slot(7, 0xaa, 100);
        bytes[200..].fill(0x55);
        let read = Slot::decode(&bytes).unwrap();
        assert_eq!((read.version, read.key, read.value), (7, &b"key"[..], &[0xaa; 100][..]));
        assert_eq!(Slot::decode(&Slot::vacant(3).encode()), Ok(Slot::vacant(3)));
    }

    #[test]
    fn every_mixture_of_two_versions_by_words_is_torn() {
        // Different lengths, equal lengths, and equal values of different versions.
        for (newer, older) in [
            (slot(2, 2, 48), slot(1, 1, 90)),
            (slot(2, 2, 40), slot(1, 1, 40)),
            (slot(2, 1, 8), slot(1, 1, 8)),
        ] {
            let words = (HEADER + 3 + 90usize).div_ceil(8);
            let mut random = fastrand::Rng::with_seed(1);
            let whole = |bytes: &[u8]| {
                Slot::decode(bytes) == Slot::decode(&newer)
                    || Slot::decode(bytes) == Slot::decode(&older)
            };
            for round in 0..5_000_u32 {
                let mixed: Vec<u8> = (0..newer.len() / 8)
                    .flat_map(|word| {
                        // All prefixes and suffixes, then random mixtures.
                        let cut = round as usize / 2;
                        let new = if cut <= words {
                            (word < cut) == (round % 2 == 0)
                        } else {
                            random.bool()
                        };
                        (if new { &newer } else { &older })[word * 8..][..8].to_vec()
                    })
                    .collect();
                assert!(
                    Slot::decode(&mixed) == Err(Torn) || whole(&mixed),
                    "round {round}: {mixed:?}"
                );
            }
        }
    }

    #[test]
    fn every_flipped_bit_is_detected() {
        let bytes = slot(7, 0xaa, 100);
        for bit in 0..(HEADER + 3 + 100) * 8 {
            let mut flipped = bytes.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(Slot::decode(&flipped), Err(Torn), "bit {bit}");
        }
    }

    #[test]
    fn hostile_bytes_are_torn_or_within_bounds() {
        let mut random = fastrand::Rng::with_seed(2);
        for len in 0..300 {
            for _ in 0..100 {
                let mut bytes: Vec<u8> = (0..len).map(|_| random.u8(..)).collect();
                assert_eq!(Slot::decode(&bytes), Err(Torn));
                // Small lengths pass the length check.
                if len >= HEADER {
                    bytes[24..HEADER].fill(0);
                    bytes[24] = random.u8(..);
                    bytes[28] = random.u8(..);
                }
                if let Ok(slot) = Slot::decode_unchecked(&bytes) {
                    assert!(HEADER + slot.key.len() + slot.value.len() <= len);
                }
            }
        }
    }
}
