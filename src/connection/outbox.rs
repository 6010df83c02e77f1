//! Frames and offers on their way to the peer.

use std::collections::VecDeque;
use std::task::{Context, Poll, ready};

use super::stream_state::Held;
use crate::error::OpErrorKind;
use crate::memory::{Buf, BufMut, Gather, ReadOnlyRegion};
use crate::op::Send;

#[derive(Debug, Default)]
pub(super) struct Outbox {
    /// Frames in flight; after termination, an `Abort` that the driver awaits.
    pub(super) sends: VecDeque<Sent>,
    /// Bytes of a stream that wait for credits or for earlier frames; see `writing.rs`. All buffers
    /// but the last one are full.
    pub(super) held: VecDeque<Held>,
    pub(super) in_place: usize,
    pub(super) offers: VecDeque<ReadOnlyRegion>,
}

impl Outbox {
    #[inline]
    pub(super) fn push(&mut self, sent: Sent) {
        self.in_place += usize::from(sent.is_in_place());
        self.sends.push_back(sent);
    }

    #[inline]
    pub(super) fn last_in_place(&self) -> Option<usize> {
        if self.in_place == 0 { None } else { self.sends.iter().rposition(Sent::is_in_place) }
    }

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

    pub(super) fn is_posted_abort(&self) -> bool {
        matches!(self, Self::Abort(send) if !send.is_queued())
    }

    #[inline]
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

#[inline]
fn poll<B: Gather>(send: &mut Send<B>, context: &mut Context<'_>) -> Poll<Result<(), OpErrorKind>> {
    send.poll_unconstrained(context).map_ok(drop).map_err(|error| error.kind())
}
