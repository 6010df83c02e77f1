//! The slabs of the process by address, to find the registered memory that `Bytes` refer to.

use std::collections::BTreeMap;
use std::sync::{Arc, Weak};

use parking_lot::RwLock;

use super::buf::Slab;

/// The shortest chunks of a slab in the index. Copies of fewer bytes cost less than a search.
pub(super) const SHORTEST: usize = 4096;

/// Slabs by the address of their first byte.
static SLABS: RwLock<BTreeMap<usize, Entry>> = RwLock::new(BTreeMap::new());

struct Entry {
    /// The address after the last byte.
    end: usize,
    slab: Weak<Slab>,
}

pub(super) fn insert(slab: &Arc<Slab>) {
    let (start, end) = slab.range();
    SLABS.write().insert(start, Entry { end, slab: Arc::downgrade(slab) });
}

/// Removes a slab before its memory is freed: another one may have the address then.
pub(super) fn remove(start: usize) {
    SLABS.write().remove(&start);
}

/// Returns the slab with all of `len` bytes at `address`. If these exist, the result is not the
/// last reference to the slab.
pub(super) fn find(address: usize, len: usize) -> Option<Arc<Slab>> {
    let slabs = SLABS.read();
    let (_, entry) = slabs.range(..=address).next_back()?;
    let within = address.checked_add(len).is_some_and(|end| end <= entry.end);
    within.then(|| entry.slab.upgrade()).flatten()
}
