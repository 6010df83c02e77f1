//! Frames and offers on their way to the peer.

use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use super::stream_state::Held;
use crate::error::{OpError, OpErrorKind};
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
    /// Frames in `sends` with a buffer of the service.
    pub(super) lent: usize,
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
    /// Those with a buffer of the service.
    Lent,
}

impl Outbox {
    #[inline]
    pub(super) fn push(&mut self, sent: Sent) {
        self.lent += usize::from(sent.is_lent());
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
            Awaited::Lent if self.lent == 0 => None,
            Awaited::Lent => self.sends.iter().rposition(Sent::is_lent),
        }
    }

    /// Polls sent frame `index`. Removes it if it is complete and the oldest, and then returns the
    /// service's buffer, too, which is dropped without the lock.
    #[inline]
    pub(super) fn poll_sent(
        &mut self,
        index: usize,
        context: &mut Context<'_>,
    ) -> Poll<(Result<(), OpErrorKind>, Option<Buf>)> {
        let Some(sent) = self.sends.get_mut(index) else { return Poll::Ready((Ok(()), None)) };
        if index > 0 {
            return sent.poll(context).map(|result| (result, None));
        }
        let (result, lent) = ready!(sent.poll_once(context));
        self.sends.pop_front();
        self.reaped += 1;
        self.lent -= usize::from(lent.is_some());
        Poll::Ready((result, lent))
    }
}

#[derive(Debug)]
pub(super) enum Sent {
    Inline(Send<()>),
    Copied(Send<BufMut>),
    Lent(Send<Buf>),
    Abort(Send<()>),
    /// A lent buffer is dropped without the lock (`AfterUnlock::return_sent`): it may be the last
    /// view.
    Done(Option<Buf>),
}

impl Sent {
    pub(super) fn is_finished(&self) -> bool {
        match self {
            Self::Inline(send) | Self::Abort(send) => send.is_finished(),
            Self::Copied(send) => send.is_finished(),
            Self::Lent(send) => send.is_finished(),
            Self::Done(_) => true,
        }
    }

    pub(super) fn refusal(&self) -> Option<OpErrorKind> {
        match self {
            Self::Inline(send) | Self::Abort(send) => send.refusal(),
            Self::Copied(send) => send.refusal(),
            Self::Lent(send) => send.refusal(),
            Self::Done(_) => None,
        }
    }

    pub(super) fn is_lent(&self) -> bool {
        matches!(self, Self::Lent(..))
    }

    /// Returns true if it is a posted `Abort`.
    pub(super) fn is_posted_abort(&self) -> bool {
        matches!(self, Self::Abort(send) if !send.is_queued())
    }

    /// Polls the send. A lent buffer then stays in [`Done`](Self::Done).
    pub(super) fn poll(&mut self, context: &mut Context<'_>) -> Poll<Result<(), OpErrorKind>> {
        let (result, lent) = ready!(self.poll_once(context));
        *self = Self::Done(lent);
        Poll::Ready(result)
    }

    /// Polls the send and returns its result with a lent buffer. The caller must not poll again
    /// after that.
    #[inline]
    pub(super) fn poll_once(
        &mut self,
        context: &mut Context<'_>,
    ) -> Poll<(Result<(), OpErrorKind>, Option<Buf>)> {
        match self {
            Self::Inline(send) | Self::Abort(send) => {
                poll(send, context).map(|result| (result, None))
            }
            Self::Copied(send) => poll(send, context).map(|result| (result, None)),
            Self::Lent(send) => Pin::new(send).poll(context).map(split_result),
            Self::Done(lent) => Poll::Ready((Ok(()), lent.take())),
        }
    }
}

/// Splits the result of a lent buffer's send.
fn split_result(result: Result<Buf, OpError<Buf>>) -> (Result<(), OpErrorKind>, Option<Buf>) {
    match result {
        Ok(buffer) => (Ok(()), Some(buffer)),
        Err(error) => (Err(error.kind()), Some(error.into_buffer())),
    }
}

#[inline]
fn poll<B: Gather>(send: &mut Send<B>, context: &mut Context<'_>) -> Poll<Result<(), OpErrorKind>> {
    Pin::new(send).poll(context).map_ok(drop).map_err(|error| error.kind())
}
