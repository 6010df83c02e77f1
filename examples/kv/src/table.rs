//! The server's side of the table.

use bytes::Bytes;
use parking_lot::Mutex;
use tokio_rdma::memory::HostMemory;
use tokio_rdma::{Access, ExposedRegion, ProtectionDomain, RemoteRegion, SetupError};

use crate::error::Refusal;
use crate::layout::Layout;
use crate::protocol::{Answer, Request};
use crate::slot::{HEADER, Slot};

/// A value with its version.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Versioned {
    /// Later PUTs and DELETEs of the same key have greater versions.
    pub version: u64,
    /// The value.
    pub value: Bytes,
}

/// A hash table in memory that peers may READ but not write.
///
/// Each bucket has a lock for its writers; READs take no lock. A key stays in its slot until it is
/// deleted, so a client that reads the whole bucket cannot miss a key that moved.
#[derive(Debug)]
pub struct Table {
    layout: Layout,
    /// Copied to and from, never borrowed, because devices read it at any time.
    memory: ExposedRegion,
    buckets: Box<[Mutex<Bucket>]>,
}

/// The server's private state of a bucket.
#[derive(Debug)]
struct Bucket {
    /// The version of the last change.
    version: u64,
    /// The key in each slot.
    keys: Box<[Option<Box<[u8]>>]>,
}

impl Table {
    /// Creates an empty table.
    ///
    /// # Errors
    ///
    /// The memory cannot be allocated or registered.
    pub fn new(pd: &ProtectionDomain, layout: Layout) -> Result<Self, SetupError> {
        let bytes = usize::try_from(layout.bytes())
            .map_err(|_| SetupError::Unsupported { what: "tables beyond the address space" })?;
        let memory = ExposedRegion::new(pd, HostMemory::zeroed(bytes)?, Access::REMOTE_READ)?;
        let bucket =
            |_| Mutex::new(Bucket { version: 0, keys: vec![None; layout.slots() as usize].into() });
        let table = Self { layout, memory, buckets: (0..layout.buckets()).map(bucket).collect() };
        for bucket in 0..layout.buckets() {
            for slot in 0..layout.slots() {
                table.write(bucket, slot, &Slot::vacant(0));
            }
        }
        Ok(table)
    }

    /// Returns the layout.
    #[must_use]
    pub fn layout(&self) -> Layout {
        self.layout
    }

    /// Returns the grant that allows clients to read the table.
    #[must_use]
    pub fn grant(&self) -> RemoteRegion {
        self.memory.grant()
    }

    /// Returns the value of a key.
    #[must_use]
    pub fn get(&self, key: &[u8]) -> Option<Versioned> {
        let place = self.layout.place(key);
        let bucket = self.buckets[place.bucket as usize].lock();
        let slot = bucket.slot_of(key)?;
        let mut bytes = vec![0; self.layout.slot_bytes()];
        let range = self.layout.slot(place.bucket, slot);
        self.memory
            .read(range.start as usize, &mut bytes)
            .unwrap_or_else(|error| unreachable!("{error}"));
        drop(bucket);
        // Slots are written only under the lock.
        let Ok(slot) = Slot::decode(&bytes) else { unreachable!("a torn slot under the lock") };
        let (version, start, len) = (slot.version, HEADER + slot.key.len(), slot.value.len());
        Some(Versioned { version, value: Bytes::from(bytes).slice(start..start + len) })
    }

    /// Sets the value of a key and returns the new version.
    ///
    /// # Errors
    ///
    /// [`Refusal`] if the key or the value is too long, or the bucket is full. The table is
    /// unchanged.
    pub fn put(&self, key: &[u8], value: &[u8]) -> Result<u64, Refusal> {
        self.layout.check_key(key)?;
        self.layout.check_value(value)?;
        let place = self.layout.place(key);
        let mut bucket = self.buckets[place.bucket as usize].lock();
        let slot = bucket
            .slot_of(key)
            .or_else(|| bucket.vacant_slot(place.home))
            .ok_or(Refusal::Full { slots: self.layout.slots().into() })?;
        bucket.version += 1;
        bucket.keys[slot as usize].get_or_insert_with(|| key.into());
        self.write(place.bucket, slot, &Slot { version: bucket.version, key, value });
        Ok(bucket.version)
    }

    /// Deletes a key. Returns the version of the deletion, or `None` if the key is absent.
    pub fn delete(&self, key: &[u8]) -> Option<u64> {
        let place = self.layout.place(key);
        let mut bucket = self.buckets[place.bucket as usize].lock();
        let slot = bucket.slot_of(key)?;
        bucket.version += 1;
        bucket.keys[slot as usize] = None;
        self.write(place.bucket, slot, &Slot::vacant(bucket.version));
        Some(bucket.version)
    }

    pub(crate) fn answer(&self, request: &Request<'_>) -> Answer {
        match *request {
            Request::Get(key) => self.get(key).map_or(Answer::Absent, Answer::Found),
            Request::Put(key, value) => {
                self.put(key, value).map_or_else(Answer::Refused, Answer::Done)
            }
            Request::Delete(key) => self.delete(key).map_or(Answer::Absent, Answer::Done),
        }
    }

    /// Writes a slot. A READ that overlaps detects it by the checksum.
    fn write(&self, bucket: u32, slot: u32, content: &Slot<'_>) {
        let range = self.layout.slot(bucket, slot);
        self.memory
            .write(range.start as usize, &content.encode())
            .unwrap_or_else(|error| unreachable!("{error}"));
    }
}

/// Writes with a pause, for tests.
#[cfg(test)]
impl Table {
    /// Puts like [`put`](Self::put), and calls `meanwhile` after the first `split` bytes of the
    /// slot.
    pub(crate) fn put_with_pause<T>(
        &self,
        key: &[u8],
        value: &[u8],
        split: usize,
        meanwhile: impl FnOnce() -> T,
    ) -> (u64, T) {
        let place = self.layout.place(key);
        let mut bucket = self.buckets[place.bucket as usize].lock();
        let slot = bucket.slot_of(key).or_else(|| bucket.vacant_slot(place.home)).unwrap();
        bucket.version += 1;
        bucket.keys[slot as usize].get_or_insert_with(|| key.into());
        let start = self.layout.slot(place.bucket, slot).start as usize;
        let image = Slot { version: bucket.version, key, value }.encode();
        self.memory.write(start, &image[..split]).unwrap();
        let done = meanwhile();
        self.memory.write(start + split, &image[split..]).unwrap();
        (bucket.version, done)
    }
}

impl Bucket {
    fn slot_of(&self, key: &[u8]) -> Option<u32> {
        self.keys.iter().position(|other| other.as_deref() == Some(key)).map(|slot| slot as u32)
    }

    /// Returns the home slot if it is vacant, or else the first vacant slot.
    fn vacant_slot(&self, home: u32) -> Option<u32> {
        if self.keys[home as usize].is_none() {
            return Some(home);
        }
        self.keys.iter().position(Option::is_none).map(|slot| slot as u32)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio_rdma::Device;
    use tokio_rdma::software::Network;

    fn table(buckets: u32, slots: u32) -> Table {
        let pd = Device::software_in(&Network::new(), "one").unwrap().protection_domain().unwrap();
        Table::new(&pd, Layout::new(buckets, slots, 8, 16).unwrap()).unwrap()
    }

    #[test]
    fn versions_of_a_key_increase_across_deletion() {
        let table = table(1, 2);
        let first = table.put(b"key", b"one").unwrap();
        let second = table.put(b"key", b"two").unwrap();
        let gone = table.delete(b"key").unwrap();
        assert_eq!((table.get(b"key"), table.delete(b"key")), (None, None));
        let third = table.put(b"key", b"").unwrap();
        assert!(first < second && second < gone && gone < third);
        assert_eq!(table.get(b"key"), Some(Versioned { version: third, value: Bytes::new() }));
    }

    #[test]
    fn full_bucket_refuses_new_keys_and_accepts_existing_ones() {
        let table = table(1, 3);
        for key in [b"a", b"b", b"c"] {
            table.put(key, b"value").unwrap();
        }
        assert_eq!(table.put(b"d", b"value"), Err(Refusal::Full { slots: 3 }));
        table.put(b"b", b"other").unwrap();
        table.delete(b"a").unwrap();
        table.put(b"d", b"value").unwrap();
        let value = |key: &[u8]| table.get(key).map(|found| found.value);
        assert_eq!(value(b"a"), None);
        assert_eq!((value(b"b"), value(b"d")), (Some("other".into()), Some("value".into())));
    }

    #[test]
    fn lengths_beyond_the_limits_are_refused() {
        let table = table(4, 2);
        table.put(&[1; 8], &[2; 16]).unwrap();
        assert_eq!(table.put(&[1; 9], b""), Err(Refusal::KeyLength { len: 9, allowed: 8 }));
        assert_eq!(table.put(b"", b""), Err(Refusal::KeyLength { len: 0, allowed: 8 }));
        assert_eq!(table.put(b"k", &[0; 17]), Err(Refusal::ValueLength { len: 17, allowed: 16 }));
        assert_eq!((table.get(b""), table.get(&[9; 99])), (None, None));
    }
}
