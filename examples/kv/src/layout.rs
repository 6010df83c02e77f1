//! The layout of the table in memory.

use std::ops::Range;

use bytes::{Buf, BufMut};
use tokio_rdma::error::LimitError;
use tokio_rdma::{RemoteRegion, SetupError};
use twox_hash::XxHash3_64;

use crate::error::{ProtocolError, Refusal};
use crate::slot::HEADER;

/// The layout of a table: buckets of slots, each of which holds one key and its value.
///
/// A key is stored only in its bucket, so a reader of the bucket sees every place where it can be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Layout {
    buckets: u32,
    slots: u32,
    max_key: u32,
    max_value: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) bucket: u32,
    /// The slot that the key gets if it is vacant.
    pub(crate) home: u32,
}

impl Layout {
    /// The maximum number of slots in a bucket.
    pub const MAX_SLOTS: u32 = 8;
    /// The maximum length of keys, in bytes.
    pub const MAX_KEY: u32 = 1024;
    /// The maximum length of values, in bytes. A client buffers several buckets.
    pub const MAX_VALUE: u32 = 64 << 10;
    /// The maximum size of a table, in bytes.
    pub const MAX_BYTES: u64 = 1 << 40;

    const ENCODED: usize = 16;

    /// Creates a layout for keys of 1 to `max_key` and values of 0 to `max_value` bytes.
    ///
    /// # Errors
    ///
    /// [`SetupError::Limit`] or [`SetupError::TooSmall`], with the name of the value out of range.
    pub fn new(buckets: u32, slots: u32, max_key: u32, max_value: u32) -> Result<Self, SetupError> {
        for (field, asked) in
            [("buckets", buckets), ("slots of a bucket", slots), ("bytes of a key", max_key)]
        {
            if asked == 0 {
                return Err(SetupError::TooSmall { field, asked: 0, least: 1 });
            }
        }
        let layout = Self { buckets, slots, max_key, max_value };
        let within = |field, asked, allowed| match asked {
            asked if asked <= allowed => Ok(()),
            asked => Err(LimitError { field, asked, allowed }),
        };
        within("slots of a bucket", slots.into(), Self::MAX_SLOTS.into())?;
        within("bytes of a key", max_key.into(), Self::MAX_KEY.into())?;
        within("bytes of a value", max_value.into(), Self::MAX_VALUE.into())?;
        // With the limits above the product does not overflow.
        within("bytes of the table", layout.bytes(), Self::MAX_BYTES)?;
        Ok(layout)
    }

    /// Returns the number of buckets.
    #[must_use]
    pub fn buckets(&self) -> u32 {
        self.buckets
    }

    /// Returns the number of slots in a bucket.
    #[must_use]
    pub fn slots(&self) -> u32 {
        self.slots
    }

    /// Returns the maximum key length, in bytes.
    #[must_use]
    pub fn max_key(&self) -> usize {
        self.max_key as usize
    }

    /// Returns the maximum value length, in bytes.
    #[must_use]
    pub fn max_value(&self) -> usize {
        self.max_value as usize
    }

    /// Returns the size of a slot, in bytes. Slots do not share a cache line of 64 bytes.
    #[must_use]
    pub fn slot_bytes(&self) -> usize {
        (HEADER + self.max_key() + self.max_value()).next_multiple_of(64)
    }

    /// Returns the size of a bucket, in bytes.
    #[must_use]
    pub fn bucket_bytes(&self) -> usize {
        self.slots as usize * self.slot_bytes()
    }

    /// Returns the size of the table, in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        u64::from(self.buckets) * self.bucket_bytes() as u64
    }

    pub(crate) fn check_key(&self, key: &[u8]) -> Result<(), Refusal> {
        let (len, allowed) = (key.len() as u64, self.max_key.into());
        if (1..=allowed).contains(&len) { Ok(()) } else { Err(Refusal::KeyLength { len, allowed }) }
    }

    pub(crate) fn check_value(&self, value: &[u8]) -> Result<(), Refusal> {
        let (len, allowed) = (value.len() as u64, self.max_value.into());
        if len <= allowed { Ok(()) } else { Err(Refusal::ValueLength { len, allowed }) }
    }

    pub(crate) fn place(&self, key: &[u8]) -> Place {
        let hash = XxHash3_64::oneshot(key);
        let (bucket, rest) = (hash % u64::from(self.buckets), hash / u64::from(self.buckets));
        Place { bucket: bucket as u32, home: (rest % u64::from(self.slots)) as u32 }
    }

    /// Returns the byte range of a slot in the table.
    pub(crate) fn slot(&self, bucket: u32, slot: u32) -> Range<u64> {
        let start = self.bucket(bucket).start + u64::from(slot) * self.slot_bytes() as u64;
        start..start + self.slot_bytes() as u64
    }

    pub(crate) fn bucket(&self, bucket: u32) -> Range<u64> {
        let start = u64::from(bucket) * self.bucket_bytes() as u64;
        start..start + self.bucket_bytes() as u64
    }

    /// Encodes the layout and the table's memory for clients.
    pub(crate) fn encode(&self, table: &RemoteRegion) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(MAGIC.len() + Self::ENCODED + RemoteRegion::ENCODED_LEN);
        bytes.put_slice(MAGIC);
        for field in [self.buckets, self.slots, self.max_key, self.max_value] {
            bytes.put_u32_le(field);
        }
        bytes.put_slice(&table.to_bytes());
        bytes
    }

    /// Decodes the result of [`encode`](Self::encode). The peer is not trusted.
    pub(crate) fn decode(bytes: &[u8]) -> Result<(Self, RemoteRegion), ProtocolError> {
        let (mut fields, table) = bytes
            .strip_prefix(MAGIC)
            .and_then(|rest| rest.split_at_checked(Self::ENCODED))
            .ok_or(ProtocolError::UserData { len: bytes.len() })?;
        let table =
            RemoteRegion::from_bytes(table).ok_or(ProtocolError::UserData { len: bytes.len() })?;
        let [buckets, slots, max_key, max_value] = [(); 4].map(|()| fields.get_u32_le());
        let layout = Self::new(buckets, slots, max_key, max_value)?;
        // Every slice of the table is within the address space.
        if layout.bytes() != table.len() || table.addr().checked_add(table.len()).is_none() {
            return Err(ProtocolError::Table { layout, table });
        }
        Ok((layout, table))
    }
}

/// Protocol and version.
const MAGIC: &[u8] = b"kv 1";

#[cfg(test)]
mod tests {
    use super::*;
    use tokio_rdma::types::Rkey;

    #[test]
    fn slots_of_a_table_cover_it_without_overlap() {
        let layout = Layout::new(3, 4, 10, 100).unwrap();
        assert_eq!(layout.slot_bytes(), 192);
        let mut end = 0;
        for bucket in 0..3 {
            assert_eq!(layout.bucket(bucket).start, end);
            for slot in 0..4 {
                let range = layout.slot(bucket, slot);
                assert_eq!(range.start, end);
                end = range.end;
            }
            assert_eq!(layout.bucket(bucket).end, end);
        }
        assert_eq!(layout.bytes(), end);
    }

    #[test]
    fn keys_are_spread_over_all_slots() {
        let layout = Layout::new(5, 4, 8, 8).unwrap();
        let mut seen = [[0; 4]; 5];
        for key in 0..10_000_u64 {
            let place = layout.place(&key.to_le_bytes());
            seen[place.bucket as usize][place.home as usize] += 1;
        }
        assert!(seen.iter().flatten().all(|&keys| (400..600).contains(&keys)), "{seen:?}");
    }

    #[test]
    fn exceeded_limits_are_reported_by_name() {
        for (layout, field, allowed) in [
            (Layout::new(1, 9, 1, 1), "slots of a bucket", 8),
            (Layout::new(1, 1, 1025, 1), "bytes of a key", 1024),
            (Layout::new(1, 1, 1, 65537), "bytes of a value", 65536),
            (Layout::new(u32::MAX, 8, 1024, 65536), "bytes of the table", 1 << 40),
        ] {
            let SetupError::Limit(error) = layout.unwrap_err() else {
                panic!("{field} is not beyond a limit")
            };
            assert_eq!((error.field, error.allowed), (field, allowed));
        }
        let none = SetupError::TooSmall { field: "buckets", asked: 0, least: 1 };
        assert_eq!(Layout::new(0, 1, 1, 1), Err(none));
    }

    #[test]
    fn malformed_user_data_is_refused() {
        let layout = Layout::new(3, 4, 10, 100).unwrap();
        let table = RemoteRegion::new(4096, layout.bytes(), Rkey(7));
        let bytes = layout.encode(&table);
        assert_eq!(Layout::decode(&bytes), Ok((layout, table)));
        for len in 0..bytes.len() {
            assert!(Layout::decode(&bytes[..len]).is_err());
        }
        assert!(Layout::decode(&[&bytes[..], &[0]].concat()).is_err());
        let (short, wraps) = ((4096, layout.bytes() - 1), (u64::MAX - 5, layout.bytes()));
        for (addr, len) in [short, wraps] {
            let wrong = layout.encode(&RemoteRegion::new(addr, len, Rkey(7)));
            assert!(matches!(Layout::decode(&wrong), Err(ProtocolError::Table { .. })));
        }
        // Corrupts each field, and each pair of fields.
        for (field, other) in (0..16).map(|both| (both / 4, both % 4)) {
            for value in [0, u32::MAX] {
                let mut wrong = bytes.clone();
                for at in [field, other] {
                    wrong[4 + at * 4..][..4].copy_from_slice(&u32::to_le_bytes(value));
                }
                assert!(Layout::decode(&wrong).is_err(), "fields {field} and {other} are {value}");
            }
        }
    }
}
