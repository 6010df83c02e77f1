//! Compressed sessions: CQEs that differ only in counter, operation and length.
//!
//! ```text
//! entry     0      1            2 … 7   8              9 … 15   16
//!           title  minis 0..8   hole    minis 8..16    hole     minis 16..24   …
//! ```
//!
//! The title is a CQE of format 3, whose length is the number of CQEs. The adapter has written all
//! arrays before it, and nothing to the holes. Linux (`en_rx.c`) and DPDK (`mlx5_rx.c`) decode this
//! layout; UCX decodes another, which only DEVX can request.
//!
//! A session is expanded in place when its title is the next entry. All other code sees entries
//! with the owner bits of their pass: polling with any limit, arming, and removing the completions
//! of a queue pair.

use super::super::doorbell::to_device;
use super::super::errors::BadEntry;
use super::super::layout::{Be16, Be32, Cqe, MINIS, MiniCqe, cqe};
use super::{CompletionQueue, QPN};

impl CompletionQueue {
    /// Returns whether `entry` begins a compressed session. Failures are not compressed.
    pub(super) fn is_title(&self, entry: &Cqe) -> bool {
        self.setup.compressed
            && entry.op_own & cqe::FORMAT == cqe::COMPRESSED
            && entry.op_own >> 4 <= cqe::SEND_WITH_INVALIDATE
    }

    /// Writes the CQEs of the session that `title` begins at `index` into its entries. At most
    /// `limit` entries from `index` on belong to software.
    ///
    /// # Errors
    ///
    /// [`BadEntry::Session`]: the session has fewer than two CQEs, so that its array is outside, or
    /// more than `limit`.
    #[cold]
    pub(super) fn expand(&self, index: u32, title: &Cqe, limit: u32) -> Result<(), BadEntry> {
        let entries = title.length.get();
        let is_request = title.op_own >> 4 == cqe::REQUEST;
        if !(2..=limit.min(self.setup.entries)).contains(&entries) {
            return Err(BadEntry::Session { entries });
        }
        let mut first = 0;
        while first < entries {
            // Copied before the entries below overwrite it. They overwrite no other array.
            let array = self.cqe(index.wrapping_add(first.max(1))).cast::<[MiniCqe; MINIS]>();
            // SAFETY: S3: within the ring; any bytes are mini-CQEs.
            let array = unsafe { array.read_volatile() };
            for (at, mini) in (first..entries).zip(array) {
                let place = index.wrapping_add(at);
                let entry = Cqe { op_own: self.expanded(title.op_own, place), ..*title };
                let entry = mini.apply(&entry, is_request, at as u16);
                // SAFETY: S3: within the ring; the entry belongs to software.
                unsafe { self.cqe(place).write_volatile(entry) };
            }
            first += MINIS as u32;
        }
        // Before the consumer index: the adapter may overwrite the entries then.
        to_device();
        Ok(())
    }

    /// Returns the last byte of the CQE at `index`, from the one of its title.
    fn expanded(&self, op_own: u8, index: u32) -> u8 {
        op_own & !(cqe::FORMAT | cqe::OWNER) | self.owner(index)
    }
}

impl MiniCqe {
    /// Returns CQE `at` of a session, from one with the fields of the title.
    fn apply(self, title: &Cqe, is_request: bool, at: u16) -> Cqe {
        let mut entry = Cqe { length: self.length, ..*title };
        if is_request {
            entry.counter = self.counter;
            let qpn = title.opcode_qpn.get() & QPN;
            entry.opcode_qpn = Be32::new(u32::from(self.opcode) << 24 | qpn);
        } else {
            // The first word is a hash. Counters of receives are consecutive.
            entry.counter = Be16::new(title.counter.get().wrapping_add(at));
        }
        entry
    }
}
