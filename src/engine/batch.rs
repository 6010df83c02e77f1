//! The work requests of a batch, which are posted with one doorbell.
//!
//! A batch shares one slot, which its last work request completes, because a completion covers the
//! unsignalled work before it. The work queue records which earlier parts failed.

use smallvec::SmallVec;

use super::slot::Slot;
use super::work_request::Receiver;
use crate::types::{Data, SendFlags, SendOp, SendWr, Sge};

/// Work requests that are posted without an allocation.
const BATCH_INLINE: usize = 32;

#[derive(Debug, Clone, Copy)]
pub(crate) struct BatchEntry {
    pub(crate) op: SendOp,
    pub(crate) flags: SendFlags,
    pub(crate) remote_len: u64,
}

#[derive(Default)]
pub(super) struct Pieces {
    pub(super) sges: SmallVec<[Sge; BATCH_INLINE]>,
    /// Elements of each work request; empty if each has one.
    pub(super) lengths: SmallVec<[usize; BATCH_INLINE]>,
}

/// A batch that has passed all checks.
pub(super) struct Parts<'a> {
    pub(super) entries: &'a [BatchEntry],
    pub(super) pieces: Pieces,
    pub(super) common: SendFlags,
    pub(super) signal_every: u32,
    pub(super) to: Option<Receiver<'a>>,
}

impl Parts<'_> {
    /// Returns true if each work request has one element and there is no receiver.
    pub(super) fn is_plain(&self) -> bool {
        self.pieces.lengths.is_empty() && self.to.is_none()
    }

    pub(super) fn list<Q>(&self, slot: &Slot<Q>) -> impl Iterator<Item = SendWr<'_>> {
        let (mut sges, mut lengths) = (&self.pieces.sges[..], self.pieces.lengths.iter());
        let target = self.to.map(Receiver::target);
        let (mut ids, mut flags) = (slot.ids(), self.flags());
        self.entries.iter().map(move |entry| {
            let length = lengths.next().copied().unwrap_or(1);
            let (own, rest) = sges.split_at_checked(length).unwrap_or_default();
            sges = rest;
            SendWr {
                wr_id: ids.next(),
                op: entry.op,
                flags: flags.next(entry),
                data: Data::Sges(own),
                target,
            }
        })
    }

    /// Builds the work requests of a [plain](Self::is_plain) batch, whose shape is known at compile
    /// time.
    pub(super) fn plain_list<Q>(&self, slot: &Slot<Q>) -> impl Iterator<Item = SendWr<'_>> {
        let (mut ids, mut flags) = (slot.ids(), self.flags());
        self.entries.iter().zip(&self.pieces.sges).map(move |(entry, sge)| {
            let data = Data::Sges(std::slice::from_ref(sge));
            SendWr { wr_id: ids.next(), op: entry.op, flags: flags.next(entry), data, target: None }
        })
    }

    fn flags(&self) -> Flags {
        let remaining = self.entries.len();
        let every = if self.signal_every == 0 { remaining } else { self.signal_every as usize };
        Flags {
            common: self.common - SendFlags::SIGNALED,
            every,
            remaining,
            until: every.min(remaining),
        }
    }
}

/// The flags of the work requests: every `every`-th and the last are signalled.
struct Flags {
    common: SendFlags,
    every: usize,
    /// Work requests after the last signalled one.
    remaining: usize,
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
        self.remaining = self.remaining.saturating_sub(self.every);
        self.until = self.every.min(self.remaining);
        flags | SendFlags::SIGNALED
    }
}
