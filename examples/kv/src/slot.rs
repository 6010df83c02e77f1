//! What stands in a slot, and how a reader knows that it is whole.
//!
//! ```text
//!        0          16        24       26         28             32
//!        ├──────────┼─────────┼────────┼──────────┼──────────────┼─────────┬───────────┬╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌┐
//!        │ checksum │ version │ key    │ 0        │ value length │ key     │ value     │ of older values │
//!        │          │         │ length │          │              │         │           │                 │
//!        └──────────┴─────────┴────────┴──────────┴──────────────┴─────────┴───────────┴╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌┘
//!                   ╰───────────── what the checksum is of: XXH3, 128 bits ───────────╯
//! ```
//!
//! Numbers are little-endian. A slot with a key of no bytes is vacant; its version tells when it became so.
//!
//! The server writes a slot while readers READ it, and neither side does so in any order that could be relied on. So what
//! was read may be of several versions, in any mixture. The checksum binds all of it to one version: a mixture passes with a
//! probability of 2^-128, however it came about. docs/kv.md says what follows from that.

use bytes::{Buf, BufMut};
use twox_hash::XxHash3_128;

/// Bytes before the key.
pub(crate) const HEADER: usize = 32;

/// Bytes of the checksum, which comes first.
const CHECKSUM: usize = 16;

/// A slot that was read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Slot<'a> {
    /// Of the bucket, when this was written: each PUT and each DELETE has the next one.
    pub(crate) version: u64,
    /// Without a byte if the slot is vacant.
    pub(crate) key: &'a [u8],
    pub(crate) value: &'a [u8],
}

/// What was read is not what was written at any one time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Torn;

impl<'a> Slot<'a> {
    /// Without a key or a value.
    pub(crate) fn vacant(version: u64) -> Self {
        Self { version, key: &[], value: &[] }
    }

    /// As it is in memory, in whole words; the lengths are within those of a [`Layout`](crate::Layout).
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

    /// What is in `bytes`, if it was written in one piece.
    pub(crate) fn decode(bytes: &'a [u8]) -> Result<Self, Torn> {
        let slot = Self::decode_unchecked(bytes)?;
        let end = HEADER + slot.key.len() + slot.value.len();
        let (mut checksum, content) = bytes[..end].split_at(CHECKSUM);
        if checksum.get_u128_le() == XxHash3_128::oneshot(content) { Ok(slot) } else { Err(Torn) }
    }

    /// What seems to be in `bytes`, which may be a mixture; `Torn` only if its lengths reach beyond them.
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
    fn what_is_written_is_read_and_rest_of_the_slot_does_not_matter() {
        let mut bytes = slot(7, 0xaa, 100);
        bytes[200..].fill(0x55);
        let read = Slot::decode(&bytes).unwrap();
        assert_eq!((read.version, read.key, read.value), (7, &b"key"[..], &[0xaa; 100][..]));
        assert_eq!(Slot::decode(&Slot::vacant(3).encode()), Ok(Slot::vacant(3)));
    }

    #[test]
    fn every_mixture_of_two_versions_by_words_is_torn() {
        // Of another length, of the same, and of the same content but for the version.
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
                        // All prefixes and suffixes first, then anything.
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
    fn every_single_flipped_bit_is_found() {
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
                // Small lengths get past the first check.
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
