//! The slabs of a protection domain by address, to find the registered memory behind `Bytes`.

use std::any::Any;
use std::sync::Arc;

use super::buf::Slab;
use crate::verbs::{Indexed, ProtectionDomain};

/// The shortest `Bytes` that are looked up, and the shortest chunks in the index: copying fewer
/// bytes costs less than a search.
pub(super) const SHORTEST: usize = 4096;

pub(super) fn insert(slab: &Arc<Slab>) {
    let (start, end) = slab.range();
    let memory: Arc<dyn Any + Send + Sync> = slab.clone();
    let entry = Indexed { end, memory: Arc::downgrade(&memory) };
    slab.registration().pd().index().write().insert(start, entry);
}

/// Removes a slab before its memory is freed: a later slab may have the same address.
pub(super) fn remove(slab: &Slab) {
    slab.registration().pd().index().write().remove(&slab.range().0);
}

/// Returns the slab of `pd` with all of `len` bytes at `address`. The caller holds these bytes,
/// whose owner keeps the slab, so dropping the result frees no memory.
pub(super) fn find(pd: &ProtectionDomain, address: usize, len: usize) -> Option<Arc<Slab>> {
    let index = pd.index().read();
    let (_, entry) = index.range(..=address).next_back()?;
    if address.checked_add(len)? > entry.end {
        return None;
    }
    entry.memory.upgrade()?.downcast().ok()
}
