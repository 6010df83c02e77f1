//! Frames and offers on their way to the peer.

use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use super::stream_state::Held;
use crate::error::OpErrorKind;
use crate::memory::{Buf, BufMut, Gather, ReadOnlyRegion};
use crate::op::Send;

#[derive(Debug, Default)]
pub(super) struct Outbox {
    /// Frames in flight; after termination, an `Abort` that the driver awaits.
    pub(super) sends: VecDeque<Sent>,
    /// Bytes of a stream that wait for credits or for the frames before them; see `writing.rs`. All
    /// buffers but the last one are full.
    pub(super) held: VecDeque<Held>,
    /// Frames removed from `sends`.
    pub(super) reaped: u64,
    /// Frames in `sends` with a buffer of the application.
    pub(super) in_place: usize,
    /// Long messages not fetched by the peer, and their bytes.
    pub(super) offers: VecDeque<ReadOnlyRegion>,
    pub(super) offered: u64,
    /// All long messages so far.
    offers_made: u64,
}

/// A position in the stream of sent frames; both counts are monotonic.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Mark {
    pub(super) frames: u64,
    pub(super) offers: u64,
}

/// The frames whose completion something waits for.
#[derive(Debug, Clone, Copy)]
pub(super) enum Awaited {
    All,
    /// Those before the mark, if it is not reached.
    Before(Mark),
    /// About half: the first one would wake the driver for every frame.
    Half,
    /// Those with a buffer of the application.
    InPlace,
}

impl Outbox {
    #[inline]
    pub(super) fn push(&mut self, sent: Sent) {
        self.in_place += usize::from(sent.is_in_place());
        self.sends.push_back(sent);
    }

    pub(super) fn offer(&mut self, region: ReadOnlyRegion) {
        self.offered += region.len();
        self.offers_made += 1;
        self.offers.push_back(region);
    }

    /// Removes the oldest offer, which the peer has fetched.
    pub(super) fn fetched(&mut self) -> Option<ReadOnlyRegion> {
        let region = self.offers.pop_front()?;
        self.offered -= region.len();
        Some(region)
    }

    /// Returns true if a message of `len` bytes may be offered beside the others. One always may.
    pub(super) fn may_offer(&self, len: u64, limit: u64) -> bool {
        self.offers.is_empty() || self.offered + len <= limit
    }

    /// Returns the position after everything sent so far.
    pub(super) fn position(&self) -> Mark {
        Mark { frames: self.reaped + self.sends.len() as u64, offers: self.offers_made }
    }

    /// Returns true if all frames before `mark` were acknowledged and all offers fetched.
    pub(super) fn has_reached(&self, mark: Mark) -> bool {
        self.reaped >= mark.frames && self.offers_made - self.offers.len() as u64 >= mark.offers
    }

    /// Returns the index of the last send that something waits for, if it is in flight.
    #[inline]
    pub(super) fn last_of(&self, awaited: Awaited) -> Option<usize> {
        let last = self.sends.len().checked_sub(1)?;
        match awaited {
            Awaited::All => Some(last),
            Awaited::Before(mark) => {
                let before = mark.frames.checked_sub(self.reaped + 1)? as usize;
                (before <= last).then_some(before)
            }
            Awaited::Half => Some(self.sends.len() / 2),
            Awaited::InPlace if self.in_place == 0 => None,
            Awaited::InPlace => self.sends.iter().rposition(Sent::is_in_place),
        }
    }

    /// Polls sent frame `index`. Removes it if it is complete and the oldest.
    #[inline(always)]
    pub(super) fn poll_sent(
        &mut self,
        index: usize,
        context: &mut Context<'_>,
    ) -> Poll<Result<(), OpErrorKind>> {
        let Some(sent) = self.sends.get_mut(index) else { return Poll::Ready(Ok(())) };
        let in_place = usize::from(sent.is_in_place());
        let result = ready!(sent.poll(context));
        self.in_place -= in_place;
        if index == 0 {
            self.sends.pop_front();
            self.reaped += 1;
        }
        Poll::Ready(result)
    }

    /// Polls all sent frames, and calls `on_error` for those that failed. Returns true if one is
    /// pending.
    pub(super) fn poll_all(
        &mut self,
        context: &mut Context<'_>,
        mut on_error: impl FnMut(OpErrorKind),
    ) -> bool {
        let mut pending = false;
        for sent in &mut self.sends {
            let in_place = usize::from(sent.is_in_place());
            match sent.poll(context) {
                Poll::Ready(result) => {
                    self.in_place -= in_place;
                    result.err().into_iter().for_each(&mut on_error);
                }
                Poll::Pending => pending = true,
            }
        }
        pending
    }
}

#[derive(Debug)]
pub(super) enum Sent {
    Inline(Send<()>),
    Copied(Send<BufMut>),
    /// From the application's buffer.
    InPlace(Send<Buf>),
    Abort(Send<()>),
    Done,
}

impl Sent {
    pub(super) fn is_finished(&self) -> bool {
        match self {
            Self::Inline(send) | Self::Abort(send) => send.is_finished(),
            Self::Copied(send) => send.is_finished(),
            Self::InPlace(send) => send.is_finished(),
            Self::Done => true,
        }
    }

    pub(super) fn refusal(&self) -> Option<OpErrorKind> {
        match self {
            Self::Inline(send) | Self::Abort(send) => send.refusal(),
            Self::Copied(send) => send.refusal(),
            Self::InPlace(send) => send.refusal(),
            Self::Done => None,
        }
    }

    pub(super) fn is_in_place(&self) -> bool {
        matches!(self, Self::InPlace(..))
    }

    /// Returns true if it is a posted `Abort`.
    pub(super) fn is_posted_abort(&self) -> bool {
        matches!(self, Self::Abort(send) if !send.is_queued())
    }

    #[inline(always)]
    pub(super) fn poll(&mut self, context: &mut Context<'_>) -> Poll<Result<(), OpErrorKind>> {
        let result = ready!(match self {
            Self::Inline(send) | Self::Abort(send) => poll(send, context),
            Self::Copied(send) => poll(send, context),
            Self::InPlace(send) => poll(send, context),
            Self::Done => return Poll::Ready(Ok(())),
        });
        *self = Self::Done;
        Poll::Ready(result)
    }
}

#[inline(always)]
fn poll<B: Gather>(send: &mut Send<B>, context: &mut Context<'_>) -> Poll<Result<(), OpErrorKind>> {
    Pin::new(send).poll(context).map_ok(drop).map_err(|error| error.kind())
}
