//! Many work requests, one doorbell: what a batch consists of.
//!
//! A batch is in one slot, which its last work request ends: unsignalled work before a completion is done. Which of those before
//! the last failed is noted aside.

use smallvec::SmallVec;

use super::slot::Slot;
use super::work_request::To;
use crate::types::{Data, SendFlags, SendOp, SendWr, Sge};

/// Work requests of a batch for which posting needs no allocation.
const BATCH_INLINE: usize = 32;

/// One work request of a batch, without its buffer.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BatchEntry {
    pub(crate) op: SendOp,
    pub(crate) flags: SendFlags,
    pub(crate) room: u64,
}

/// Scatter/gather elements of a batch, one work request after the other.
#[derive(Default)]
pub(super) struct Pieces {
    pub(super) sges: SmallVec<[Sge; BATCH_INLINE]>,
    /// How many are of each work request; empty if one is of each.
    pub(super) lengths: SmallVec<[usize; BATCH_INLINE]>,
}

/// A batch that may be posted.
pub(super) struct Parts<'a> {
    pub(super) entries: &'a [BatchEntry],
    pub(super) pieces: Pieces,
    pub(super) common: SendFlags,
    pub(super) signal_every: u32,
    pub(super) to: Option<To<'a>>,
}

impl Parts<'_> {
    /// True if each has one element and none a receiver of its own.
    pub(super) fn is_plain(&self) -> bool {
        self.pieces.lengths.is_empty() && self.to.is_none()
    }

    /// Its work requests, put together one by one, with the numbers that those in `slot` have.
    pub(super) fn list<Q>(&self, slot: &Slot<Q>) -> impl Iterator<Item = SendWr<'_>> {
        let (mut sges, mut lengths) = (&self.pieces.sges[..], self.pieces.lengths.iter());
        let target = self.to.map(To::target);
        let (mut ids, mut flags) = (slot.ids(), self.flags());
        self.entries.iter().map(move |entry| {
            let length = lengths.next().copied().unwrap_or(1);
            let (own, behind) = sges.split_at_checked(length).unwrap_or_default();
            sges = behind;
            SendWr {
                wr_id: ids.next(),
                op: entry.op,
                flags: flags.next(entry),
                data: Data::Sges(own),
                target,
            }
        })
    }

    /// As [`list`](Self::list), if all [are plain](Self::is_plain): what they have in common, the compiler knows.
    pub(super) fn plain_list<Q>(&self, slot: &Slot<Q>) -> impl Iterator<Item = SendWr<'_>> {
        let (mut ids, mut flags) = (slot.ids(), self.flags());
        self.entries.iter().zip(&self.pieces.sges).map(move |(entry, sge)| {
            let data = Data::Sges(std::slice::from_ref(sge));
            SendWr { wr_id: ids.next(), op: entry.op, flags: flags.next(entry), data, target: None }
        })
    }

    fn flags(&self) -> Flags {
        let left = self.entries.len();
        let every = if self.signal_every == 0 { left } else { self.signal_every as usize };
        Flags { common: self.common - SendFlags::SIGNALED, every, left, until: every.min(left) }
    }
}

/// Flags of the work requests of a batch: the last is signalled, and each so many.
struct Flags {
    common: SendFlags,
    every: usize,
    /// From behind the last that was signalled.
    left: usize,
    /// The next to be signalled.
    until: usize,
}

impl Flags {
    #[inline(always)]
    fn next(&mut self, entry: &BatchEntry) -> SendFlags {
        let flags = entry.flags | self.common;
        self.until -= 1;
        if self.until > 0 {
            return flags;
        }
        self.left = self.left.saturating_sub(self.every);
        self.until = self.every.min(self.left);
        flags | SendFlags::SIGNALED
    }
}
