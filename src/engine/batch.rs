//! The work requests of a batch, posted with one doorbell. They share one slot, which the last one
//! completes: its completion covers the unsignalled work before it. The work queue records which
//! earlier parts failed.

use std::ops::Deref;

use rdma_provider::contract::{PlainOp, PlainWr};
use smallvec::SmallVec;

use super::slot::Slot;
use super::work_request::Receiver;
use crate::memory::PdKey;
use crate::types::{Data, SendFlags, SendOp, SendWr, Sge, WrId};

const BATCH_INLINE: usize = 32;

#[derive(Debug, Clone, Copy)]
pub(crate) struct BatchEntry {
    pub(crate) op: SendOp,
    pub(crate) flags: SendFlags,
    pub(crate) remote_len: u64,
    sge: Sge,
}

#[derive(Debug)]
pub(crate) struct Entries {
    list: Vec<BatchEntry>,
    // What all buffers have in common, so that posting need not check each.
    /// The protection domain of the buffers. `None` without buffers, or if
    /// [`are_plain`](Self::are_plain) cannot hold.
    pd: Option<PdKey>,
    longest: u32,
}

impl Entries {
    pub(crate) const fn new() -> Self {
        Self { list: Vec::new(), pd: None, longest: 0 }
    }

    // A call costs 38 instructions of each request of a batch.
    #[inline(always)]
    pub(crate) fn push(&mut self, op: SendOp, remote_len: u64, buffer: Option<(Sge, PdKey)>) {
        let sge = match buffer {
            Some((sge, pd)) => {
                // The operation is a constant in each caller.
                if PlainOp::of(op).is_some() {
                    self.add_plain(pd, sge.length, remote_len);
                } else {
                    self.pd = None;
                }
                sge
            }
            None => {
                self.pd = None;
                Sge::default()
            }
        };
        self.list.push(BatchEntry { op, flags: SendFlags::empty(), remote_len, sge });
    }

    pub(crate) fn fence_last(&mut self) {
        if let Some(last) = self.list.last_mut() {
            last.flags |= SendFlags::FENCE;
        }
    }

    #[inline]
    fn add_plain(&mut self, pd: PdKey, length: u32, remote_len: u64) {
        let is_like_others = self.pd == Some(pd)
            && (1..=self.longest).contains(&length)
            && u64::from(length) <= remote_len;
        if !is_like_others {
            self.add_different(pd, length, remote_len);
        }
    }

    #[cold]
    fn add_different(&mut self, pd: PdKey, length: u32, remote_len: u64) {
        let others = if self.list.is_empty() { Some(pd) } else { self.pd };
        let is_plain = others == Some(pd) && length > 0 && u64::from(length) <= remote_len;
        self.pd = is_plain.then_some(pd);
        self.longest = self.longest.max(length);
    }

    pub(crate) fn clear(&mut self) {
        self.list.clear();
        (self.pd, self.longest) = (None, 0);
    }

    /// Returns true if all requests are SENDs, WRITEs or READs of one element of `pd`, with 1 to
    /// `limit` bytes that fit its remote region.
    pub(super) fn are_plain(&self, pd: PdKey, limit: u64) -> bool {
        self.pd == Some(pd) && u64::from(self.longest) <= limit
    }
}

impl Deref for Entries {
    type Target = [BatchEntry];

    fn deref(&self) -> &[BatchEntry] {
        &self.list
    }
}

#[derive(Default)]
pub(super) struct Pieces {
    pub(super) sges: SmallVec<[Sge; BATCH_INLINE]>,
    pub(super) lengths: SmallVec<[usize; BATCH_INLINE]>,
}

impl Pieces {
    fn iter(&self) -> impl Iterator<Item = &[Sge]> {
        let mut sges = &self.sges[..];
        self.lengths.iter().map(move |&length| {
            let (own, rest) = sges.split_at_checked(length).unwrap_or_default();
            sges = rest;
            own
        })
    }
}

#[derive(Clone, Copy)]
pub(super) struct Parts<'a> {
    pub(super) entries: &'a [BatchEntry],
    /// `None` if [`Entries::are_plain`] held.
    pub(super) pieces: Option<&'a Pieces>,
    pub(super) common: SendFlags,
    pub(super) signal_every: u32,
    pub(super) to: Option<Receiver<'a>>,
}

impl<'a> Parts<'a> {
    pub(super) fn list<Q>(&self, slot: &Slot<Q>) -> impl Iterator<Item = SendWr<'a>> {
        let mut pieces = self.pieces.map(Pieces::iter);
        let target = self.to.map(Receiver::target);
        let (mut ids, mut flags) = (slot.ids(), self.flags());
        self.entries.iter().map(move |entry| {
            let sges = match &mut pieces {
                Some(pieces) => pieces.next().unwrap_or_default(),
                None => std::slice::from_ref(&entry.sge),
            };
            SendWr {
                wr_id: ids.next(),
                op: entry.op,
                flags: flags.next(entry),
                data: Data::Sges(sges),
                target,
            }
        })
    }

    pub(super) fn plain(&self) -> Option<PlainParts<'a>> {
        (self.pieces.is_none() && self.to.is_none()).then_some(PlainParts(*self))
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

pub(super) struct PlainParts<'a>(Parts<'a>);

impl<'a> PlainParts<'a> {
    pub(super) fn list<Q>(&self, slot: &Slot<Q>) -> impl Iterator<Item = SendWr<'a>> {
        self.build(slot, |wr_id, flags, entry| {
            let data = Data::Sges(std::slice::from_ref(&entry.sge));
            SendWr { wr_id, op: entry.op, flags, data, target: None }
        })
    }

    pub(super) fn short_list<Q>(&self, slot: &Slot<Q>) -> impl ExactSizeIterator<Item = PlainWr> {
        self.build(slot, |wr_id, flags, entry| {
            let Some(op) = PlainOp::of(entry.op) else {
                unreachable!("`Entries::push` takes no other operation for plain")
            };
            PlainWr { wr_id, op, flags, buffer: entry.sge }
        })
    }

    #[inline]
    fn build<Q, T>(
        &self,
        slot: &Slot<Q>,
        make: impl Fn(WrId, SendFlags, &'a BatchEntry) -> T,
    ) -> impl ExactSizeIterator<Item = T> {
        let (mut ids, mut flags) = (slot.ids(), self.0.flags());
        self.0.entries.iter().map(move |entry| make(ids.next(), flags.next(entry), entry))
    }
}

/// Every `every`-th work request and the last are signalled.
struct Flags {
    common: SendFlags,
    every: usize,
    remaining: usize,
    until: usize,
}

impl Flags {
    #[inline]
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
