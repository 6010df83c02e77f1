//! The slabs of a protection domain by address, to find the registered memory behind `Bytes`.

use std::any::Any;
use std::sync::{Arc, Weak};

use bytes::Bytes;

use super::buf::{Buf, Slab};
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

/// Most searches find the slab of the search before, without the index.
#[derive(Debug, Default)]
pub(crate) struct SlabFinder {
    start: usize,
    end: usize,
    slab: Weak<Slab>,
}

impl SlabFinder {
    #[inline]
    pub(crate) fn view(&mut self, bytes: &Bytes, pd: &ProtectionDomain) -> Option<Buf> {
        Buf::of_bytes_in(bytes, |address, len| self.find(pd, address, len))
    }

    #[inline]
    pub(super) fn find(
        &mut self,
        pd: &ProtectionDomain,
        address: usize,
        len: usize,
    ) -> Option<Arc<Slab>> {
        let within = self.start <= address && ends_within(self.end, address, len);
        if within && let Some(slab) = self.slab.upgrade() {
            return Some(slab);
        }
        let slab = find(pd, address, len)?;
        let (start, end) = slab.range();
        *self = Self { start, end, slab: Arc::downgrade(&slab) };
        Some(slab)
    }
}

/// Returns the slab of `pd` with all of `len` bytes at `address`. The caller holds these bytes,
/// whose owner keeps the slab, so dropping the result frees no memory.
pub(super) fn find(pd: &ProtectionDomain, address: usize, len: usize) -> Option<Arc<Slab>> {
    let index = pd.index().read();
    let (_, entry) = index.range(..=address).next_back()?;
    let memory = ends_within(entry.end, address, len).then(|| entry.memory.upgrade()).flatten()?;
    memory.downcast().ok()
}

fn ends_within(end: usize, address: usize, len: usize) -> bool {
    address.checked_add(len).is_some_and(|after| after <= end)
}
