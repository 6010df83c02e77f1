//! The partition key table of the port.

use std::sync::atomic::{AtomicU32, Ordering};

use rdma_provider::locks::RwLock;

use crate::roce::partition::{self, DEFAULT_PKEY};

#[derive(Debug)]
pub(crate) struct Pkeys {
    table: RwLock<Vec<u16>>,
    violations: AtomicU32,
}

impl Pkeys {
    pub(super) fn new() -> Self {
        Self { table: RwLock::new(vec![DEFAULT_PKEY]), violations: AtomicU32::new(0) }
    }

    pub(crate) fn table(&self) -> Vec<u16> {
        self.table.read().clone()
    }

    pub(super) fn set(&self, table: &[u16]) {
        let table = table[..table.len().min(u16::MAX.into())].to_vec();
        *self.table.write() = table;
    }

    /// Returns the P_Key at `index`, unless the entry is empty.
    pub(crate) fn at(&self, index: u16) -> Option<u16> {
        let table = self.table.read();
        table.get(usize::from(index)).copied().filter(|&pkey| partition::is_valid(pkey))
    }

    /// Returns the first P_Key, for packets between queue pairs 1.
    pub(crate) fn first(&self) -> u16 {
        let table = self.table.read();
        table.iter().copied().find(|&pkey| partition::is_valid(pkey)).unwrap_or(DEFAULT_PKEY)
    }

    /// Returns the index of the entry that may exchange packets with `pkey`.
    pub(crate) fn find(&self, pkey: u16) -> Option<u16> {
        partition::find(&self.table.read(), pkey)
    }

    /// Returns the number of packets that were dropped because of their P_Key.
    pub(crate) fn violations(&self) -> u32 {
        self.violations.load(Ordering::Relaxed)
    }

    #[cold]
    pub(crate) fn count_violation(&self) {
        self.violations.fetch_add(1, Ordering::Relaxed);
    }
}
